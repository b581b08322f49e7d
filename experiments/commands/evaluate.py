"""`python -m experiments evaluate RUN`: what a run has learned, also on shorter sequences."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.commands import startup
from experiments.commands.flags import disk_error, fail, help_text, parse, terminal_width

if TYPE_CHECKING:
    import numpy as np
    from rich.console import RenderableType

    from experiments.config import TrainConfig
    from experiments.engine.lanes import LaneName

COMMAND = "python -m experiments evaluate"
USAGE = "RUN [--sequence_length=N]"
ABOUT = "held-out loss and accuracy of a run's newest checkpoint"


@dataclasses.dataclass(frozen=True)
class EvaluateOptions:
    """The flags of the command."""

    sequence_length: int | None = dataclasses.field(
        default=None,
        metadata={
            "help": "tokens per sequence, at most those that the run was trained on",
            "default": "the run's own",
        },
    )


class Evaluated(NamedTuple):
    """The newest good checkpoint of a run on the held-out set of one length."""

    config: TrainConfig  # resolved, of the run
    step: int  # updates taken before the checkpoint
    sequence_length: int
    chance_loss: float  # nats, without attention that selects, at this length
    chance_accuracy: float
    names: tuple[LaneName, ...]
    diverged_at: np.ndarray  # [lanes]: -1 where it did not
    loss: np.ndarray  # [lanes], nats
    accuracy: np.ndarray  # [lanes]


def evaluate_command(argv: Sequence[str]) -> int:
    """Run the command line, argv[0] being "evaluate"; returns the exit status."""
    runs = [Path(word) for word in argv[1:] if not word.startswith("-")]
    flags = [word for word in argv[1:] if word.startswith("-")]
    try:
        parsed = parse([argv[0], *flags], EvaluateOptions)
        if parsed is None:
            about = (
                f"Prints {ABOUT}, also on shorter sequences.\nRUN is a folder that train.py wrote."
            )
            print(help_text(f"{COMMAND} {USAGE}", about, {}, EvaluateOptions))
            return 0
        if len(runs) != 1:
            raise ValueError(f"give one run folder: {COMMAND} {USAGE}")
    except ValueError as error:
        fail(COMMAND, error)
    startup.use_compilation_cache(startup.default_cache())
    from rich.console import Console

    from experiments.runs.recording import RunFolderError

    try:
        evaluated = evaluate_run(
            runs[0],
            parsed.values["sequence_length"],
            say=lambda line: print(f"{COMMAND}: {line}", file=sys.stderr),
        )
    except (ValueError, RunFolderError) as error:
        fail(COMMAND, error)
    except OSError as error:
        fail(COMMAND, disk_error(error), status=1)
    Console(highlight=False, width=terminal_width()).print(tables(runs[0], evaluated))
    return 0


def evaluate_run(
    folder: Path, sequence_length: int | None, *, say: Callable[[str], None]
) -> Evaluated:
    """Evaluate every lane of a run, as it is in the newest good checkpoint; changes no file.

    Args:
      folder: of the run.
      sequence_length: of the held-out sequences; None is the run's own.
      say: called with one line for each bad checkpoint that was passed over.

    Raises:
      ValueError: the model has no positions for such a length, or the task no such sequences.
      RunFolderError: no run, a damaged one, or one without a good checkpoint.
    """
    import jax
    import numpy as np

    from experiments import tasks
    from experiments.engine import lanes, training
    from experiments.runs import run

    config: Any = run.stored_config(folder)
    length = config.sequence_length if sequence_length is None else sequence_length
    if length > config.sequence_length:
        raise ValueError(
            f"sequence_length: {length}, must be at most {config.sequence_length}: the run "
            "learned an embedding for each position that it saw, and none beyond"
        )
    task = tasks.make_task(config.task, sequence_length=length, vocab_size=config.vocab_size)
    program, _ = run.prepare(config)
    step, states = run.read_states(folder, config, program, say)

    def as_left(state):  # a diverged lane as it was frozen
        return state._replace(diverged_at=np.int32(-1))

    # The model keeps its own length: it has positions, and perhaps outputs, to spare.
    shorter = program._replace(sequence_length=length, batch_shards=1)
    found = [
        jax.tree.map(np.asarray, training.evaluate(shorter, lane, as_left(state)))
        for lane, state in zip(lanes.lanes_of(config), states, strict=True)
    ]
    return Evaluated(
        config=config,
        step=step,
        sequence_length=length,
        chance_loss=task.chance_loss,
        chance_accuracy=task.chance_accuracy,
        names=lanes.lane_names(config),
        diverged_at=np.array([int(state.diverged_at) for state in states]),
        loss=np.array([one.loss for one in found]),
        accuracy=np.array([one.accuracy for one in found]),
    )


def tables(folder: Path, evaluated: Evaluated) -> RenderableType:
    """A row for each arm: medians and ranges over its seeds."""
    import numpy as np
    from rich import box
    from rich.console import Group
    from rich.table import Table

    from experiments.analysis.read import rule_text

    e, c = evaluated, evaluated.config
    trained = "" if e.sequence_length == c.sequence_length else f", trained on {c.sequence_length}"
    title = (
        f"{folder}: {c.task} at step {e.step}, {c.eval_size} held-out sequences of "
        f"{e.sequence_length} tokens{trained}"
    )
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("median (range)")
    for column in ("seeds", "diverged", "accuracy %", "loss"):
        table.add_column(column, justify="right")
    rules = {rule.name: rule_text(rule) for rule in c.rules()}
    several = len({name.learning_rate for name in e.names}) > 1
    for scale, rate in dict.fromkeys((name.scale, name.learning_rate) for name in e.names):
        lanes = [i for i, name in enumerate(e.names) if name[:2] == (scale, rate)]
        table.add_row(
            rules[scale] + f", learning rate {rate:g}" * several,
            str(len(lanes)),
            str(np.sum(e.diverged_at[lanes] >= 0)),
            _with_range(100 * e.accuracy[lanes], ".1f"),
            _with_range(e.loss[lanes], "#.3g"),
        )
    table.add_row("chance", "", "", f"{100 * e.chance_accuracy:.1f}", f"{e.chance_loss:#.3g}")
    return Group(title, "", table, "", "Chance: the best without attention that selects.")


def _with_range(values: np.ndarray, form: str) -> str:
    import numpy as np

    median = f"{np.median(values):{form}}"
    spread = f" ({values.min():{form}}–{values.max():{form}})"
    return median + spread * (len(values) > 1)
