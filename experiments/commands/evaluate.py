"""`python -m experiments evaluate RUN`: what a run has learned, also on shorter sequences."""

from __future__ import annotations

import dataclasses

from experiments.commands import console, startup
from experiments.commands.command import Command, folders
from experiments.commands.flags import Parsed
from experiments.config import setting


@dataclasses.dataclass(frozen=True)
class EvaluateOptions:
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
    startup.use_compilation_cache()
    from experiments.runs.evaluate import evaluate_run, table

    evaluated = evaluate_run(run, options.sequence_length, say=console.say)
    console.show(table(run, evaluated))
    return 0


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
