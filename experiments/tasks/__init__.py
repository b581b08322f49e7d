"""Tasks: what is asked and what guessing earns (table, chance: no JAX), how batches are drawn.

A new task is a builder and its entry in table.py, and a sampler and its entry in samplers.py.
"""

from experiments.tasks.table import (
    DEFAULT_SEQUENCE_LENGTH,
    DEFAULT_VOCAB_SIZE,
    TASKS,
    Task,
    make_task,
)

__all__ = ["DEFAULT_SEQUENCE_LENGTH", "DEFAULT_VOCAB_SIZE", "TASKS", "Task", "make_task"]
