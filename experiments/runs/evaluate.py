"""What a run has learned: its newest good checkpoint on held-out sequences, also shorter ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from experiments import tasks
from experiments.config import RunConfig
from experiments.engine import training
from experiments.engine.devices import start_places
from experiments.engine.lanes import plan_lanes
from experiments.runs.folder import stored_config
from experiments.runs.resume import read_states
from experiments.runs.seal import check_seal


class Evaluated(NamedTuple):
    """The newest good checkpoint of a run on the held-out set of one length."""

    config: RunConfig  # of the run
    step: int  # updates taken before the checkpoint
    task: tasks.Task  # at the length of the held-out sequences; knows what guessing earns
    diverged_at: np.ndarray  # [lanes]: -1 where it did not
    loss: np.ndarray  # [lanes], nats
    accuracy: np.ndarray  # [lanes]


def evaluate_run(
    folder: Path,
    sequence_length: int | None = None,
    *,
    say: Callable[[str], None],
    accept_edits: bool = False,
) -> Evaluated:
    """Evaluate every lane of a run, as it is in the newest good checkpoint; changes no file.

    Args:
      folder: of the run.
      sequence_length: of the held-out sequences; None is the run's own.
      say: called with one line for each bad checkpoint that was passed over, and for what was
        changed since it was written.
      accept_edits: evaluate a run that was changed since it was written, too.

    Raises:
      ValueError: the model has no positions for such a length, the task no such sequences, or
        this machine's devices can't serve.
      RunFolderError: no run, one that is damaged or was changed, or one without a good checkpoint.
    """
    config = stored_config(folder)
    if changed := check_seal(folder, accept_edits=accept_edits):
        say(f"{folder}: {changed}")
    length = config.sequence_length if sequence_length is None else sequence_length
    if length > config.sequence_length:
        raise ValueError(
            f"sequence_length: {length}, must be at most {config.sequence_length}: the run "
            "learned an embedding for each position that it saw, and none beyond"
        )
    task = tasks.make_task(config.task, sequence_length=length, vocab_size=config.vocab_size)
    start_places(1, attention=config.attention)
    planned = plan_lanes(config)
    step, states = read_states(folder, config, planned, say)
    found = [
        # The model keeps its own length: it has positions, and perhaps outputs, to spare. A
        # diverged lane is evaluated as it was frozen.
        training.evaluate(
            program._replace(task=task, batch_shards=1),
            lane,
            state._replace(diverged_at=jnp.int32(-1)),
        )
        for (program, lane), state in zip(planned, states, strict=True)
    ]
    return Evaluated(
        config=config,
        step=step,
        task=task,
        diverged_at=np.array([int(state.diverged_at) for state in states]),
        loss=np.array([one.loss for one in found]),
        accuracy=np.array([one.accuracy for one in found]),
    )
