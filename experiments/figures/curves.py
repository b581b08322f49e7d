"""What runs did, step by step: loss, accuracy, entropy, gradients, logits, arm beside arm."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter
from numpy.typing import NDArray

from experiments.analysis.read import Arm
from experiments.figures import style
from experiments.tasks import make_task

MOST_POINTS = 240  # of a thin line; more are not visible, and make the SVG large
MOST_BLOCKS = 120  # of a median line: each is the median over seeds and over a block of rows
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
LABEL_SIZE = 8  # points


class Panel(NamedTuple):
    """One quantity against the step."""

    title: str
    unit: str  # of the vertical axis, for people
    name: str  # a measure of the rows, or "held_out_accuracy"
    logarithmic: bool = False
    bottom: float | None = None
    top: float | None = None


LOSS = Panel("Training loss", "nats per answer", "loss", bottom=0)
ACCURACY = Panel("Held-out accuracy", "share of answers", "held_out_accuracy", bottom=0, top=1.02)
ENTROPY = Panel("Entropy of attention", "entropy / ln n", "normalized_entropy", bottom=0, top=1.02)
GRADIENT = Panel("Gradient norm, all parameters", "‖∂loss/∂θ‖", "grad_norm", logarithmic=True)
LOGIT_GRADIENT = Panel(
    "Gradient norm, attention logits", "‖∂loss/∂logits‖", "grad_norm_logits", logarithmic=True
)
LOGIT_STD = Panel("Spread of attention logits", "std within a row", "logit_std", bottom=0)

PANELS = (LOSS, ACCURACY, ENTROPY, GRADIENT, LOGIT_GRADIENT, LOGIT_STD)
COLUMNS = 3


class Line(NamedTuple):
    """How an arm is drawn."""

    colour: str
    dash: Any  # matplotlib's line style


def draw_curves(arms: Sequence[Arm], folder: Path) -> Path:
    """Draw the PANELS from the arms of one or several runs; returns the PNG.

    Thin lines are seeds; thick ones their median, drawn while half of the seeds are left; a cross
    ends a seed that diverged.
    """
    figure, axes = style.new_figure(len(PANELS) // COLUMNS, COLUMNS, width=5.0, height=3.2)
    lines = arm_lines(arms)
    for panel, ax in zip(PANELS, axes.flat, strict=True):
        _draw_panel(ax, panel, arms, lines)
    figure.supxlabel(_caption(arms), fontsize=LABEL_SIZE, color=style.GREY)
    return style.save(figure, folder / "curves")[0]


def arm_lines(arms: Sequence[Arm]) -> list[Line]:
    """A colour for each rule, the same in every figure, and a dash for what else differs.

    Arms of a single rule differ in colour.
    """
    rules = list(dict.fromkeys(arm.rule.name for arm in arms))
    if len(rules) == 1:
        first = style.arm_colour(rules[0])
        colours = [first, *(c for c in style.ARM_COLOURS.values() if c != first)]
        return [
            Line(colours[i % len(colours)], DASHES[i // len(colours) % len(DASHES)])
            for i in range(len(arms))
        ]
    unnamed = [rule for rule in rules if rule not in style.ARM_COLOURS]
    lines, seen = [], dict.fromkeys(rules, 0)
    for rule in (arm.rule.name for arm in arms):
        position = unnamed.index(rule) if rule in unnamed else 0
        lines.append(Line(style.arm_colour(rule, position), DASHES[seen[rule] % len(DASHES)]))
        seen[rule] += 1
    return lines


def _caption(arms: Sequence[Arm]) -> str:
    tasks = ", ".join(dict.fromkeys(arm.config.task for arm in arms))
    counts = sorted({len(arm.seeds) for arm in arms})
    seeds = "–".join(map(str, dict.fromkeys([counts[0], counts[-1]])))
    if counts == [1]:
        return f"task: {tasks}; one seed, thick: median over neighbouring steps"
    return f"task: {tasks}; thin: each of {seeds} seeds, thick: their median"


def _draw_panel(ax: Axes, panel: Panel, arms: Sequence[Arm], lines: Sequence[Line]) -> None:
    ends, steady, crosses = [], [], []
    for arm, line in zip(arms, lines, strict=True):
        steps, lanes = _series(arm, panel)
        for lane, diverged in zip(lanes, arm.diverged_at() >= 0, strict=True):
            kept = extremes(lane)
            ax.plot(steps[kept], lane[kept], color=line.colour, linewidth=0.6, alpha=0.35)
            finite = np.flatnonzero(np.isfinite(lane))
            if not diverged:
                steady.append(lane[finite])
            elif finite.size:
                crosses.append((steps[finite[-1]], lane[finite[-1]], line.colour))
        middle_steps, middle = medians(steps, lanes)
        ax.plot(middle_steps, middle, color=line.colour, linestyle=line.dash, linewidth=2, zorder=3)
        finite = middle[np.isfinite(middle)]
        ends.append(finite[-1] if finite.size else np.nan)
    length = max(max([*arm.steps[-1:], *arm.evaluation_steps[-1:]], default=1) for arm in arms)
    ax.set(title=panel.title, xlabel="step", ylabel=panel.unit, xlim=(0, max(length, 1)))
    if panel.logarithmic and np.any(np.array(ends) > 0):
        _log_axis(ax)
    values = np.concatenate([_draw_chance(ax, panel, arms), *steady])
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


def _log_axis(ax: Axes) -> None:
    """A logarithmic vertical axis whose ticks read 0.5, 1, 2: no powers of ten for one decade."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    subs = (1.0, 2.0, 5.0) if high < 300 * low else (1.0,)
    ax.yaxis.set_major_locator(LogLocator(subs=subs))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())


def _series(arm: Arm, panel: Panel) -> tuple[NDArray[np.int_], NDArray[np.float64]]:
    """Steps [T] and values [N, T], NaN where there is nothing to draw."""
    if panel.name == "held_out_accuracy":
        diverged = arm.diverged_at()[:, None]
        frozen = (diverged >= 0) & (arm.evaluation_steps[None] > diverged)
        return arm.evaluation_steps, np.where(frozen, np.nan, arm.accuracy)
    values = arm.measures[panel.name]
    drawable = (values > 0) if panel.logarithmic else np.isfinite(values)
    return arm.steps, np.where(drawable, values, np.nan)


def extremes(lane: NDArray[np.float64]) -> NDArray[np.int_]:
    """Which points of a long line to draw: the least and the largest of each block, no spike lost.

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
    return np.unique([starts + low, starts + high, np.full_like(starts, len(lane) - 1)])


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


def _draw_chance(ax: Axes, panel: Panel, arms: Sequence[Arm]) -> list[float]:
    """Draw what the best guess without attention gets, if it is the same for all arms."""
    name = {LOSS: "chance_loss", ACCURACY: "chance_accuracy"}.get(panel)
    sizes = {(a.config.task, a.config.sequence_length, a.config.vocab_size) for a in arms}
    if name is None or len(sizes) > 1:
        return []
    [(task, length, vocab)] = sizes
    chance = getattr(make_task(task, sequence_length=length, vocab_size=vocab), name)
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


def _label(ax: Axes, arms: Sequence[Arm], lines: Sequence[Line], ends: Sequence[float]) -> None:
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
