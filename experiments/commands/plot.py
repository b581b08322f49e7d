"""`python -m experiments plot RUN [RUN ...]`: several runs in one set of figures and tables."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from experiments.commands import console, startup
from experiments.commands.command import Command, ReadOptions, folders
from experiments.commands.flags import Parsed
from experiments.settings import PATH, setting

TOGETHER = Path("runs/plot")


@dataclasses.dataclass(frozen=True)
class PlotOptions(ReadOptions):
    """The flags of the command."""

    out: Path | None = setting(
        None, "folder for the figures", PATH, f"{TOGETHER}, or the run's own for a single run"
    )


def plot(parsed: Parsed) -> int:
    """Draw the runs' arms together and print their tables; returns the exit status."""
    from experiments.analysis.read import read_arms  # late: SciPy and Matplotlib take a while
    from experiments.analysis.report import terminal_tables
    from experiments.analysis.summary import summarize_arms
    from experiments.figures.draw import draw_figures

    runs, options = folders(parsed), parsed.pick(PlotOptions)
    out = options.out or (runs[0] / "figures" if len(runs) == 1 else TOGETHER)
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: {out} is a file, must be a folder")
    arms = read_arms(runs, accept_edits=options.accept_edits)
    for arm in arms:
        if not len(arm.steps):
            raise ValueError(f"{arm.folder} has no rows yet")
    startup.use_compilation_cache(console.say)
    drawn = draw_figures(arms, out, console.say)
    console.show(terminal_tables(summarize_arms(arms)))
    console.page(f"figures: {', '.join(map(str, drawn))}")
    return 0


COMMAND = Command(
    name="plot",
    typed="python -m experiments plot",
    words="RUN [RUN ...]",
    about="Figures and tables of one run or several, arm beside arm; labels say what differs. A "
    "RUN is a folder that train.py wrote.",
    options=(PlotOptions,),
    run=plot,
    examples=("python -m experiments plot runs/none runs/sqrt --out=runs/both",),
)
