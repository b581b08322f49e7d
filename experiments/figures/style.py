"""How every figure of the project looks, and how it is saved.

One style, colours that colour-blind readers can tell apart, and byte-identical files: the same
data gives the same PNG and the same SVG on every run (fixed SVG salt, no dates).
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # figures are files; no display is ever opened

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

# Okabe & Ito (2008), "Color Universal Design": distinguishable with every common colour vision.
BLUE, VERMILLION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, YELLOW, GREY = "#E69F00", "#56B4E9", "#F0E442", "#666666"
BLACK = "#000000"

ARM_COLOURS = {
    "sqrt": BLUE,
    "none": VERMILLION,
    "mup": GREEN,
    "fold": SKY,
    "hot": PURPLE,
}
_OTHER_COLOURS = (ORANGE, GREY, BLACK)  # not yellow: too light for a line

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


def arm_colour(arm: str, position: int = 0) -> str:
    """The colour of an arm, the same in every figure; `position` picks one for unnamed arms."""
    return ARM_COLOURS.get(arm, _OTHER_COLOURS[position % len(_OTHER_COLOURS)])


def new_figure(rows: int = 1, columns: int = 1, *, width: float = 6.0, height: float = 3.6, **kw):
    """A figure of rows × columns axes in the house style; returns (figure, axes[rows, columns]).

    width and height are those of one panel, in inches; `kw` goes to `plt.subplots`.
    """
    with plt.rc_context(_STYLE):
        return plt.subplots(
            rows, columns, figsize=(width * columns, height * rows), squeeze=False, **kw
        )


def save(figure: Figure, path: Path) -> tuple[Path, Path]:
    """Write path.png and path.svg, close the figure, and return both paths.

    The files hold no date, so that the same data gives the same bytes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    png, svg = path.with_suffix(".png"), path.with_suffix(".svg")
    with plt.rc_context(_STYLE):
        figure.savefig(png, metadata={"Software": None})
        figure.set_layout_engine("none")  # laid out by now; a second time would take as long again
        figure.savefig(svg, metadata={"Date": None})
    plt.close(figure)
    return png, svg
