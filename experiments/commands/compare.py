"""`python -m experiments compare RUN_A RUN_B`: two runs that differ in the scale only, by seed."""

from __future__ import annotations

from experiments.commands import console
from experiments.commands.command import Command, ReadOptions, folders
from experiments.commands.flags import Parsed


def compare(parsed: Parsed) -> int:
    """Print a table for each pair of arms; returns the exit status."""
    from experiments.analysis.compare import compare_runs, tables  # SciPy takes a while

    options = parsed.pick(ReadOptions)
    for pair in compare_runs(*folders(parsed), say=console.say, **vars(options)):
        console.show(tables(pair))
    return 0


COMMAND = Command(
    name="compare",
    typed="python -m experiments compare",
    words="RUN_A RUN_B",
    about="Two runs that differ in nothing but the scale, paired by seed: held-out loss and "
    "accuracy at the last evaluation that both have, loss area, steps to 90 %. A RUN is a folder "
    "that train.py wrote.",
    options=(ReadOptions,),
    run=compare,
    examples=("python -m experiments compare runs/none runs/sqrt",),
)
