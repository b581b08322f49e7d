"""How every figure of the project looks, and how it is saved.

One style, colours that colour-blind readers can tell apart, and byte-identical files: the same
data gives the same PNG and the same SVG on every run (fixed SVG salt, no dates), whatever the
user's matplotlibrc says. Figures are files: no window, and the process's backend stays as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.arms import BLACK as BLACK
from experiments.arms import BLUE as BLUE
from experiments.arms import GREEN as GREEN
from experiments.arms import GREY as GREY
from experiments.arms import ORANGE as ORANGE
from experiments.arms import PURPLE as PURPLE
from experiments.arms import SKY as SKY
from experiments.arms import VERMILLION as VERMILLION
from experiments.arms import arm_colour as arm_colour
from experiments.runs.folder import partial

_STYLE = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "figure.dpi": 100,
    "font.size": 10,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "savefig.dpi": 150,
    "svg.fonttype": "path",
    "svg.hashsalt": "why-sqrt-dk",
}


# With this a "$" in what a user named is itself; tick labels must then be plain, too.
VERBATIM = {"text.parse_math": False}


@contextlib.contextmanager
def house(changes: Mapping[str, Any] | None = None) -> Generator[None]:
    """Draw in the house style alone, but for some changes; the user's own is back afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**_STYLE, **(changes or {})})
        yield


def new_figure(
    rows: int = 1, columns: int = 1, *, width: float = 6.0, height: float = 3.6, **kw: Any
) -> tuple[Figure, Any]:
    """A figure of rows × columns axes in the house style; returns (figure, axes[rows, columns]).

    width and height are those of one panel, in inches; `kw` goes to `Figure.subplots`.
    """
    with house():
        figure = Figure(figsize=(width * columns, height * rows))
        FigureCanvasAgg(figure)
        return figure, figure.subplots(rows, columns, squeeze=False, **kw)


def save(figure: Figure, path: Path) -> tuple[Path, Path]:
    """Write path.png and path.svg, each in one piece, and return both paths.

    The files hold no date, so that the same data gives the same bytes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    png, svg = (path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg"))
    with house():
        _write(figure, png, {"Software": None})
        figure.set_layout_engine("none")  # laid out by now; a second time would take as long again
        _write(figure, svg, {"Date": None})
    return png, svg


def _write(figure: Figure, path: Path, metadata: dict[str, None]) -> None:
    figure.savefig(partial(path), format=path.suffix[1:], metadata=metadata)
    partial(path).replace(path)
