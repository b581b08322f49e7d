"""What runs did, step by step: loss, accuracy, entropy, gradients, logits, arm beside arm.

Panels follow the one list of metrics: a new one is a line in PANELS.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.ticker import LogLocator, NullFormatter
from numpy.typing import NDArray

from attention.head_statistics import fields_of
from experiments.analysis.read import MEASURES, ArmRun
from experiments.arms import COLOURS, OTHER_COLOURS, arm_colour
from experiments.figures import style
from experiments.metrics import HEAD_STATISTICS, STEP_SCALARS, Evaluation

MOST_POINTS = 240  # of a thin line; more are not visible, and make the SVG large
MOST_BLOCKS = 120  # of a median line: each is the median over seeds and over a block of rows
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
LABEL_SIZE = 8  # points
COLUMNS = 3

UNITS = {name: how.unit for name, how in (STEP_SCALARS | HEAD_STATISTICS).items()}
HELD_OUT = {name: how.unit for name, how in fields_of(Evaluation).items()}


class Panel(NamedTuple):
    """One quantity against the step."""

    name: str  # a measure of the rows, or a field of Evaluation
    held_out: bool = False
    logarithmic: bool = False
    bottom: float | None = None
    top: float | None = None

    @property
    def title(self) -> str:
        """The quantity for people."""
        of = "held-out " if self.held_out else "training " if self.name in HELD_OUT else ""
        return of + self.name.replace("_", " ")

    @property
    def unit(self) -> str:
        """Of the vertical axis; an arm's own parameter has its own."""
        return (HELD_OUT if self.held_out else UNITS).get(self.name, "mean over heads")


PANELS = (
    Panel("loss", bottom=0),
    Panel("accuracy", held_out=True, bottom=0, top=1.02),
    Panel("normalized_entropy", bottom=0, top=1.02),
    Panel("grad_norm", logarithmic=True),
    Panel("grad_norm_logits", logarithmic=True),
    Panel("logit_std", bottom=0),
)


class Line(NamedTuple):
    """How an arm is drawn."""

    colour: str
    dash: Any  # matplotlib's line style


def draw_curves(arms: Sequence[ArmRun], folder: Path) -> Path:
    """Draw the panels from the arms of one or several runs; returns the PNG.

    Thin lines are seeds; thick ones their median, drawn while half of the seeds are left; a cross
    ends a seed that diverged.
    """
    panels = panels_of(arms)
    with style.house(style.VERBATIM):
        rows = -(-len(panels) // COLUMNS)
        figure, axes = style.new_figure(rows, COLUMNS, width=5.0, height=3.2)
        lines = arm_lines(arms)
        for panel, ax in zip(panels, axes.flat, strict=False):
            has = [panel.held_out or panel.name in arm.measures for arm in arms]
            shown = list(itertools.compress(arms, has))
            _draw_panel(ax, panel, shown, list(itertools.compress(lines, has)))
        for ax in axes.flat[len(panels) :]:
            ax.remove()
        figure.supxlabel(_caption(arms), fontsize=LABEL_SIZE, color=style.GREY)
        return style.save(figure, folder / "curves")[0]


def panels_of(arms: Sequence[ArmRun]) -> list[Panel]:
    """PANELS, and one for each parameter that an arm has of its own."""
    own = dict.fromkeys(name for arm in arms for name in arm.measures if name not in MEASURES)
    return [*PANELS, *map(Panel, own)]


def arm_lines(arms: Sequence[ArmRun]) -> list[Line]:
    """A colour for each name, the same in every figure, and a dash for what else differs.

    Where all have one name, they differ in colour.
    """
    names = list(dict.fromkeys(arm.arm.name for arm in arms))
    if len(names) == 1:
        first = arm_colour(names[0])
        colours = [first, *(c for c in (*COLOURS.values(), *OTHER_COLOURS) if c != first)]
        return [
            Line(colours[i % len(colours)], DASHES[i // len(colours) % len(DASHES)])
            for i in range(len(arms))
        ]
    unnamed = [name for name in names if name not in COLOURS]
    lines, seen = [], dict.fromkeys(names, 0)
    for name in (arm.arm.name for arm in arms):
        position = unnamed.index(name) if name in unnamed else 0
        lines.append(Line(arm_colour(name, position), DASHES[seen[name] % len(DASHES)]))
        seen[name] += 1
    return lines


def _caption(arms: Sequence[ArmRun]) -> str:
    tasks = ", ".join(dict.fromkeys(arm.config.task for arm in arms))
    counts = sorted({len(arm.seeds) for arm in arms})
    seeds = "–".join(map(str, dict.fromkeys([counts[0], counts[-1]])))
    if counts == [1]:
        return f"task: {tasks}; one seed, thick: median over neighbouring steps"
    return f"task: {tasks}; thin: each of {seeds} seeds, thick: their median"


def _draw_panel(ax: Axes, panel: Panel, arms: Sequence[ArmRun], lines: Sequence[Line]) -> None:
    drawn = [
        _draw_arm(ax, *_series(arm, panel), line) for arm, line in zip(arms, lines, strict=True)
    ]
    ends = [arm.end for arm in drawn]
    crosses = [cross for arm in drawn for cross in arm.crosses]
    length = max(max([*arm.steps[-1:], *arm.evaluation_steps[-1:]], default=1) for arm in arms)
    ax.set(title=panel.title, xlabel="step", ylabel=panel.unit, xlim=(0, max(length, 1)))
    if panel.logarithmic and np.any(np.array(ends) > 0):
        _log_axis(ax)
    values = np.concatenate([_draw_chance(ax, panel, arms), *(arm.steady for arm in drawn)])
    if crosses and values.size:
        # A lane on its way to infinity must not flatten the others: it leaves through the top.
        low, high = values.min(), values.max()
        ax.set_ylim((low / 1.5, high * 1.5) if panel.logarithmic else (low, high * 1.1))
    if not panel.logarithmic:
        ax.set_ylim(panel.bottom, panel.top)
    for step, value, colour in crosses:
        ax.plot(step, np.clip(value, *ax.get_ylim()), "x", color=colour, clip_on=False, zorder=4)
    if np.isfinite(ends).any():
        _label(ax, arms, lines, ends)
    elif length > 1:  # streaming and fused attention hold no logits
        ax.text(0.5, 0.5, "not measured", transform=ax.transAxes, ha="center", color=style.GREY)
        ax.set_yticks([])


class Drawn(NamedTuple):
    """What of an arm is in a panel."""

    end: float  # where its median line ends; NaN if there is none
    steady: NDArray[np.float64]  # all the values of lanes that did not diverge
    crosses: list[tuple[float, float, str]]  # step, value, colour: where the others end


def _draw_arm(
    ax: Axes,
    steps: NDArray[np.int_],
    lanes: NDArray[np.float64],
    diverged: NDArray[np.bool_],
    line: Line,
) -> Drawn:
    kept = [extremes(lane) for lane in lanes]
    thin = [np.column_stack([steps[k], lane[k]]) for lane, k in zip(lanes, kept, strict=True)]
    ax.add_collection(LineCollection(thin, colors=line.colour, linewidths=0.6, alpha=0.35))
    ax.autoscale_view()
    crosses = []
    for lane in lanes[diverged]:
        finite = np.flatnonzero(np.isfinite(lane))
        crosses += [(steps[last], lane[last], line.colour) for last in finite[-1:]]
    middle_steps, middle = medians(steps, lanes)
    ax.plot(middle_steps, middle, color=line.colour, linestyle=line.dash, linewidth=2, zorder=3)
    finite = middle[np.isfinite(middle)]
    steady = lanes[~diverged]
    return Drawn(finite[-1] if finite.size else np.nan, steady[np.isfinite(steady)], crosses)


def _log_axis(ax: Axes) -> None:
    """A logarithmic vertical axis whose ticks read 0.5, 1, 2: no powers of ten for one decade."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    subs = (1.0, 2.0, 5.0) if high < 300 * low else (1.0,)
    ax.yaxis.set_major_locator(LogLocator(subs=subs))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())


def _series(
    arm: ArmRun, panel: Panel
) -> tuple[NDArray[np.int_], NDArray[np.float64], NDArray[np.bool_]]:
    """Steps [T], values [N, T], NaN where there is nothing to draw, and who diverged [N]."""
    diverged = arm.diverged_at() >= 0
    if panel.held_out:
        values = np.where(arm.after_divergence(), np.nan, getattr(arm, panel.name))
        return arm.evaluation_steps, values, diverged
    values = arm.measures[panel.name]
    drawable = (values > 0) if panel.logarithmic else np.isfinite(values)
    return arm.steps, np.where(drawable, values, np.nan), diverged


def extremes(lane: NDArray[np.float64]) -> NDArray[np.int_]:
    """Which points of a long line to draw: both ends, the least and the largest of each block.

    A short line is drawn whole. Values that are not finite stay where a block has nothing else.
    """
    if len(lane) <= MOST_POINTS:
        return np.arange(len(lane))
    block = -(-2 * len(lane) // MOST_POINTS)
    starts = np.arange(0, len(lane), block)
    padded = np.full((len(starts), block), np.nan)
    padded.flat[: len(lane)] = lane
    low = np.argmin(np.where(np.isfinite(padded), padded, np.inf), axis=1)
    high = np.argmax(np.where(np.isfinite(padded), padded, -np.inf), axis=1)
    return np.unique([0, *(starts + low), *(starts + high), len(lane) - 1])


def medians(
    steps: NDArray[np.int_], lanes: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Median over the lanes and over blocks of rows, the first row by itself.

    NaN where fewer than half of the values are left.
    """
    block = max(1, -(-len(steps) // MOST_BLOCKS))
    cuts = [slice(0, 1), *(slice(i, i + block) for i in range(1, len(steps), block))]
    at, middle = [], []
    for rows in cuts if len(steps) else []:
        values = lanes[:, rows]
        finite = values[np.isfinite(values)]
        at.append(np.mean(steps[rows]))
        middle.append(np.median(finite) if 2 * finite.size >= values.size else np.nan)
    return np.array(at), np.array(middle)


def _draw_chance(ax: Axes, panel: Panel, arms: Sequence[ArmRun]) -> list[float]:
    """Draw what the best guess without attention gets, if it is the same for all arms."""
    tasks = {(a.config.task, a.config.sequence_length, a.config.vocab_size) for a in arms}
    if panel.name not in HELD_OUT or len(tasks) > 1:
        return []
    chance = getattr(arms[0].config.make_task(), f"chance_{panel.name}")
    ax.axhline(chance, color=style.GREY, linewidth=1, linestyle=":", zorder=1)
    ax.annotate(
        "best without attention",
        (1, chance),
        xycoords=("axes fraction", "data"),
        xytext=(-3, 2),
        textcoords="offset points",
        ha="right",
        color=style.GREY,
        fontsize=7,
    )
    return [chance]


def _label(ax: Axes, arms: Sequence[ArmRun], lines: Sequence[Line], ends: Sequence[float]) -> None:
    """Write each arm's name beside the end of its median line, none over another."""
    texts, heights, wanted = [], [], []
    axes_height = 2.3 * 72  # points, about
    for arm, end in zip(arms, ends, strict=True):
        diverged = int(np.sum(arm.diverged_at() >= 0))
        text = textwrap.fill(arm.label, 24)
        if diverged:
            text += f"\n{diverged} of {len(arm.seeds)} diverged"
        texts.append(text)
        heights.append((text.count("\n") + 1) * 1.3 * LABEL_SIZE / axes_height)
        at = ax.transLimits.transform(ax.transScale.transform((0, end)))[1]
        wanted.append(float(at) if np.isfinite(at) else 0.0)
    sample = len({str(line.dash) for line in lines}) > 1
    for text, line, y in zip(texts, lines, apart(wanted, heights), strict=True):
        if sample:
            ax.plot(
                [1.01, 1.08],
                [y, y],
                transform=ax.transAxes,
                color=line.colour,
                linestyle=line.dash,
                linewidth=1.5,
                clip_on=False,
            )
        ax.text(
            1.1 if sample else 1.02,
            y,
            text,
            transform=ax.transAxes,
            color=line.colour,
            fontsize=LABEL_SIZE,
            va="center",
        )


def apart(wanted: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Centres near the wanted ones, in their order, whose boxes of these heights don't overlap.

    They stay within 0 and 1 if there is room.
    """
    order = np.argsort(wanted, kind="stable")
    centres = np.clip(wanted, np.array(heights) / 2, 1.0)
    gaps = [(heights[a] + heights[b]) / 2 for a, b in itertools.pairwise(order)]
    for (low, high), gap in zip(itertools.pairwise(order), gaps, strict=True):
        centres[high] = max(centres[high], centres[low] + gap)
    if len(order):
        centres[order[-1]] = min(centres[order[-1]], 1.0)
    for (low, high), gap in reversed(list(zip(itertools.pairwise(order), gaps, strict=True))):
        centres[low] = min(centres[low], centres[high] - gap)
    return centres.tolist()
