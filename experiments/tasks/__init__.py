"""Toy sequence tasks: what is asked, what guessing earns, and how batches are drawn."""

from experiments.tasks.toy import (
    DEFAULT_SEQUENCE_LENGTH,
    DEFAULT_VOCAB_SIZE,
    TASKS,
    Batch,
    Task,
    make_task,
)

__all__ = [
    "DEFAULT_SEQUENCE_LENGTH",
    "DEFAULT_VOCAB_SIZE",
    "TASKS",
    "Batch",
    "Task",
    "make_task",
]
