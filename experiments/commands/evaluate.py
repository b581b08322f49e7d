"""`python -m experiments evaluate RUN`: what a run has learned, also on shorter sequences."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.commands import console, startup
from experiments.commands.command import Command, ReadOptions, folders
from experiments.commands.flags import Parsed
from experiments.settings import setting

if TYPE_CHECKING:
    from experiments.analysis.tables import Table
    from experiments.runs.evaluate import Evaluated


@dataclasses.dataclass(frozen=True)
class EvaluateOptions(ReadOptions):
    """The flags of the command."""

    sequence_length: int | None = setting(
        None,
        "tokens per sequence, at most those that the run was trained on",
        default_text="the run's own",
        bounds=(1, 2**16),
    )


def evaluate(parsed: Parsed) -> int:
    """Print a row for each arm; returns the exit status."""
    (run,), options = folders(parsed), parsed.pick(EvaluateOptions)
    startup.use_compilation_cache(console.say)
    import jax

    from experiments.analysis.tables import on_terminal
    from experiments.runs.evaluate import evaluate_run

    startup.check_machine(jax.devices)
    evaluated = evaluate_run(run, say=console.say, **vars(options))
    console.show(on_terminal(table(run, evaluated)))
    return 0


def table(run: Path, evaluated: Evaluated) -> Table:
    """A row for each arm: medians and ranges over its seeds."""
    from experiments.analysis.tables import Table, number, percent, with_range

    config, task = evaluated.config, evaluated.task
    shorter = task.sequence_length < config.sequence_length
    labels = {arm.name: arm.label for arm in config.arms()}
    several = len(config.learning_rate) > 1
    lanes: dict[str, list[int]] = {}
    for i, name in enumerate(config.lane_names()):
        rate = f", learning rate {name.learning_rate}" * several
        lanes.setdefault(labels[name.scale] + rate, []).append(i)
    rows = [
        (
            label,
            str(len(own)),
            str((evaluated.diverged_at[own] >= 0).sum()),
            with_range(evaluated.accuracy[own], percent),
            with_range(evaluated.loss[own], number),
        )
        for label, own in lanes.items()
    ]
    chance = ("chance", "", "", percent(task.chance_accuracy), number(task.chance_loss))
    return Table(
        f"{run}: {config.task} at step {evaluated.step}, {config.eval_size} held-out sequences of "
        f"{task.sequence_length} tokens" + f", trained on {config.sequence_length}" * shorter,
        ("median (range)", "seeds", "diverged", "accuracy %", "loss"),
        [*rows, chance],
        ["Chance: the best without attention that selects."],
    )


COMMAND = Command(
    name="evaluate",
    typed="python -m experiments evaluate",
    words="RUN",
    about="Held-out loss and accuracy of a run's newest checkpoint, also on shorter sequences. RUN "
    "is a folder that train.py wrote.",
    options=(EvaluateOptions,),
    run=evaluate,
    examples=("python -m experiments evaluate runs/sqrt --sequence_length=8",),
)
