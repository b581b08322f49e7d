"""`python -m experiments plot RUN [RUN ...]`: several runs in one set of figures and tables."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.commands import startup
from experiments.commands.flags import fail, help_text, parse

if TYPE_CHECKING:
    from experiments.analysis.read import Arm

COMMAND = "python -m experiments plot"
USAGE = "RUN [RUN ...] [--out=DIR]"
ABOUT = "figures and tables of one run or several, arm beside arm"
TOGETHER = Path("runs/plot")


@dataclasses.dataclass(frozen=True)
class PlotOptions:
    """The flags of the command."""

    out: Path | None = dataclasses.field(
        default=None,
        metadata={
            "help": "folder for the figures",
            "default": f"{TOGETHER}, or the run's own for a single run",
        },
    )


def plot_command(argv: Sequence[str]) -> int:
    """Run the command line, argv[0] being "plot"; returns the exit status.

    Draws the runs' arms together and prints their tables; labels say what differs between them.
    """
    runs = [Path(word) for word in argv[1:] if not word.startswith("-")]
    try:
        parsed = parse([argv[0], *(word for word in argv[1:] if word.startswith("-"))], PlotOptions)
        if parsed is None:
            about = f"Draws {ABOUT}. A RUN is a folder that train.py wrote."
            print(help_text(f"{COMMAND} {USAGE}", about, {}, PlotOptions))
            return 0
        if not runs:
            raise ValueError(f"give at least one run folder: {COMMAND} {USAGE}")
    except ValueError as error:
        fail(COMMAND, error)
    out = parsed.values["out"] or (runs[0] / "figures" if len(runs) == 1 else TOGETHER)
    if out.exists() and not out.is_dir():
        fail(COMMAND, f"out: {out} is a file, must be a folder")
    startup.use_compilation_cache(startup.default_cache())
    from rich.console import Console

    from experiments.analysis import read, report, summary
    from experiments.runs import recording

    try:
        found = read.read_arms(runs)
        for arm in found:
            if not len(arm.steps):
                raise ValueError(f"{arm.folder} has no rows yet")
        drawn = draw_figures(found, out, lambda line: print(f"{COMMAND}: {line}", file=sys.stderr))
    except (ValueError, recording.RunFolderError) as error:
        fail(COMMAND, error)
    except OSError as error:
        fail(COMMAND, f"{error.filename}: {error.strerror}", status=1)
    console = Console(highlight=False)
    console.print(report.terminal_tables(summary.summarize_arms(found)))
    console.print(f"figures: {', '.join(str(path) for path in drawn)}", soft_wrap=True)
    return 0


def draw_figures(arms: Sequence[Arm], folder: Path, say: Callable[[str], None]) -> list[Path]:
    """Draw the curves of arms, and their attention maps where they can stand side by side.

    Args:
      arms: of one run or several.
      folder: where to; made if need be.
      say: called with one line for each thing that is wrong: no attention maps, and why.

    Returns:
      The PNGs; beside each is its SVG.
    """
    from experiments.figures import attention_maps, curves
    from experiments.runs.recording import RunFolderError

    with ThreadPoolExecutor(1) as beside:  # XLA compiles while matplotlib draws
        maps = beside.submit(attention_maps.read_maps, arms, say)
        drawn = [curves.draw_curves(arms, folder)]
    try:
        drawn.append(attention_maps.draw_maps(maps.result(), folder))
    except (ValueError, RunFolderError) as error:
        say(f"no attention maps: {error}")
    return drawn
