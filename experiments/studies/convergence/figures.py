"""The figures of the studies `learning_rate` and `convergence`; see there for what they measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter
from numpy.typing import ArrayLike, NDArray

from experiments import tasks
from experiments.analysis.times import THRESHOLD, kaplan_meier
from experiments.arms import make_arm
from experiments.engine import training
from experiments.engine.lanes import make_lane
from experiments.figures import attention_maps
from experiments.figures.style import GREY, arm_colour, new_figure
from experiments.studies.convergence.cells import ARMS, Cell, CellRuns
from experiments.studies.convergence.outcomes import (
    TIME_MARGIN,
    CellResult,
    Comparison,
    choices,
    outcome,
)
from experiments.studies.convergence.tuning import Tuning

LABELS = {
    "sqrt": "sqrt (×1/√d_k)",
    "none": "none (×1)",
    "mup": "mup (×1/d_k)",
    "fold": "fold (×1, starts as sqrt)",
    "hot": "hot (×1/√d_k, starts as none)",
}


def learning_rate_figure(cells: Sequence[tuple[Cell, Tuning]]) -> Figure:
    """Loss area against learning rate, one panel a cell, every seed a dot."""
    figure, axes = new_figure(*_rows_and_columns(len(cells)), width=4.2, height=3.4)
    for ax, (cell, tuning) in zip(axes.flat, cells, strict=False):
        for arm, area in zip(tuning.arms, tuning.area, strict=True):
            colour = arm_colour(arm)
            mean = area.mean(axis=-1)
            ax.plot(tuning.rates, mean, color=colour, label=LABELS[arm])
            for seed in area.T:
                ax.plot(tuning.rates, seed, ".", color=colour, alpha=0.5)
            best = tuning.rates.index(tuning.best[arm])
            ax.plot(tuning.rates[best], mean[best], "o", ms=9, mfc="none", mec=colour)
        ax.axhline(tuning.initial_loss.mean(), color=GREY, ls=":", lw=1)
        ax.set(xscale="log", title=_title(cell), xlabel="learning rate", ylabel="loss area (nats)")
        ax.set_title(_title(cell), fontsize=10)
    _legend_below(figure, axes, len(cells))
    return figure


def paired_figure(results: Sequence[CellResult], found: Sequence[Comparison]) -> Figure:
    """Steps to the threshold, a line a seed across the arms; one row a choice of rate."""
    shown = list(results)
    rows = [c for c in ("common", "own") if any(c in choices(r) for r in shown)]
    figure, axes = new_figure(len(rows), len(shown), width=4.4, height=3.3)
    for (row, choice), result in _grid(rows, shown):
        ax = axes[row, shown.index(result)]
        arms = choices(result).get(choice)
        if arms is None:
            ax.set_axis_off()
            ax.text(0.5, 0.5, "not run", ha="center", color=GREY, transform=ax.transAxes)
            continue
        budget: Any = result.cell.config.steps
        heights = np.stack([_drawn_times(runs, budget) for runs in arms.values()])
        ax.plot(range(len(arms)), heights, color=GREY, lw=0.6, alpha=0.6)
        for place, (arm, column) in enumerate(zip(arms, heights, strict=True)):
            ax.plot(np.full(len(column), place), column, "o", ms=4, color=arm_colour(arm))
        _never_line(ax, budget, heights.min())
        rates = [f"{outcome(runs).learning_rate:g}" for runs in arms.values()]
        ax.set_xticks(range(len(arms)), [f"{a}\n{r}" for a, r in zip(arms, rates, strict=True)])
        for c in found:
            if (c.cell, c.choice) == (result.cell.name, choice):
                text = f"{c.times.mean_difference:+.0f}\n[{c.times.low:+.0f}, {c.times.high:+.0f}]"
                place = list(arms).index(c.arm)
                ax.annotate(
                    text, (place, 1.01), xycoords=("data", "axes fraction"), ha="center", fontsize=7
                )
        ax.set_xlim(-0.4, len(arms) - 0.6)
        ax.set_ylabel(f"steps to {THRESHOLD:.0%} held-out")
        name = {"common": "common rate", "own": "each arm's best rate"}[choice]
        ax.set_title(f"{_title(result.cell)}, {name}", fontsize=9, pad=24)
    return figure


def survival_figure(results: Sequence[CellResult]) -> Figure:
    """Kaplan–Meier curves at the common rate (solid) and at each arm's own best (dashed)."""
    figure, axes = new_figure(*_rows_and_columns(len(results)), width=4.2, height=3.0)
    for ax, result in zip(axes.flat, results, strict=False):
        budget: Any = result.cell.config.steps
        for choice, style in (("common", "-"), ("own", "--")):
            for arm, runs in choices(result).get(choice, {}).items():
                curve = kaplan_meier(outcome(runs).times)
                ax.step(
                    np.append(curve.time, budget),
                    np.append(curve.survival, curve.survival[-1]),
                    where="post",
                    ls=style,
                    color=arm_colour(arm),
                    label=LABELS[arm] if choice == "common" else None,
                )
        ax.set(xlim=(0, budget), ylim=(-0.03, 1.03), xlabel="steps")
        ax.set_ylabel(f"share short of {THRESHOLD:.0%}")
        ax.set_title(_title(result.cell), fontsize=10)
    _legend_below(figure, axes, len(results))
    return figure


def effect_figure(results: Sequence[CellResult], found: Sequence[Comparison]) -> Figure:
    """Mean steps lost against sqrt, with interval, against d_k; one panel a task."""
    configs = {result.cell.name: result.cell.config for result in results}
    panels = list(dict.fromkeys((c.task, c.optimizer) for c in configs.values()))
    figure, axes = new_figure(*_rows_and_columns(len(panels)), width=4.6, height=3.4)
    for ax, panel in zip(axes.flat, panels, strict=False):
        budget = 0
        for place, arm in enumerate(arm for arm in ARMS if arm != "sqrt"):
            for choice, face in (("common", arm_colour(arm)), ("own", "white")):
                own = [
                    c
                    for c in found
                    if (c.arm, c.choice) == (arm, choice)
                    and (configs[c.cell].task, configs[c.cell].optimizer) == panel
                ]
                if not own:
                    continue
                budget = own[0].budget
                d_k = np.array([configs[c.cell].d_k for c in own])
                shift = 1.08 ** (2 * place + (choice == "own") - 3)
                means = np.array([c.times.mean_difference for c in own])
                reach = np.array([[c.times.low, c.times.high] for c in own]).T
                ax.errorbar(
                    d_k * shift,
                    means,
                    np.abs(reach - means),
                    fmt="o",
                    ms=5,
                    mfc=face,
                    color=arm_colour(arm),
                    label=LABELS[arm] if choice == "common" else None,
                )
        margin = TIME_MARGIN * budget
        ax.axhspan(-margin, margin, color=GREY, alpha=0.12, lw=0)
        ax.axhline(0, color=arm_colour("sqrt"), lw=1)
        _d_k_axis(ax, sorted({c.d_k for c in configs.values()}))
        ax.set_ylabel("steps to 90 %, minus sqrt's")
        ax.set_title(f"{panel[0]}, {panel[1]}, {budget} steps", fontsize=10)
    _legend_below(figure, axes, len(panels))
    return figure


def trajectory_figure(results: Sequence[CellResult]) -> Figure:
    """Entropy with its lower bound, and the largest logit, over training at the common rate."""
    figure, axes = new_figure(2, len(results), width=3.8, height=2.8)
    for (entropy_ax, logit_ax), result in zip(axes.T, results, strict=True):
        visible = _visible_keys(result.cell)
        for arm, runs in result.common.items():
            colour, steps = arm_colour(arm), np.minimum(runs.steps, runs.steps[-1] - 1)
            entropy_ax.plot(steps, runs.entropy.T, color=colour, lw=0.4, alpha=0.4)
            entropy_ax.plot(steps, runs.entropy.mean(axis=0), color=colour, label=LABELS[arm])
            floor = entropy_floor(runs.logit_std, visible).mean(axis=0)
            entropy_ax.plot(steps, floor, color=colour, ls=":")
            logit_ax.plot(steps, runs.logit_max.T, color=colour, lw=0.4, alpha=0.4)
            logit_ax.plot(steps, runs.logit_max.mean(axis=0), color=colour)
        entropy_ax.axhline(np.log(visible).mean(), color=GREY, lw=1)
        entropy_ax.set_title(_title(result.cell), fontsize=10)
        entropy_ax.set_ylabel("entropy (nats)")
        entropy_ax.set_ylim(bottom=0)
        logit_ax.set(yscale="log", xlabel="steps", ylabel="largest logit")
        _plain_log(logit_ax)
    _legend_below(figure, axes, len(results))
    return figure


def entropy_floor(std: ArrayLike, visible_keys: ArrayLike) -> NDArray[np.float64]:
    """The least mean entropy of softmax rows whose logits have this standard deviation on average.

    A row of N logits with standard deviation s has at least the entropy of the row with one logit
    Δ = sN/√(N - 1) above the others (Zhai et al. 2023, theorem 3.1):

        H ≥ ln(1 + (N - 1) e^-Δ) + Δ (N - 1) e^-Δ / (1 + (N - 1) e^-Δ).

    Of the rows, only the mean of s is given here; the bound is the least that any spread of s over
    them allows: the infimal convolution of the rows' convex hulls, by conjugates.

    Args:
      std: [...], mean over the rows.
      visible_keys: N of each row.

    Returns:
      [...], nats; NaN where std is.
    """
    grid = np.concatenate([[0.0], np.geomspace(1e-3, 1e4, 1500)])
    slopes = -np.concatenate([[0.0], np.geomspace(1e-8, 50, 800)])
    counts, rows = np.unique(visible_keys, return_counts=True)
    conjugate = np.zeros(slopes.size)
    for n, weight in zip(counts, rows / rows.sum(), strict=True):
        if n > 1:  # a row of one key has no spread and no entropy: its conjugate is 0
            gap = grid * n / np.sqrt(n - 1)
            rest = (n - 1) * np.exp(-gap)
            least = np.log1p(rest) + gap * rest / (1 + rest)
            conjugate += weight * np.max(slopes[:, None] * grid - least, axis=1)
    return np.max(slopes * np.asarray(std, float)[..., None] - conjugate, axis=-1)


class Plane(NamedTuple):
    """Lanes around one cell: initial scale × learning rate of W_q and W_k × seed."""

    runs: CellRuns  # [P · P · S], in this order
    powers: tuple[float, ...]  # of d_k, the same P on both axes
    points: Mapping[str, tuple[float, float]]  # where each arm lies


def plane_figure(plane: Plane) -> Figure:
    """Heat map of mean steps to the threshold over initial scale and learning rate of W_q, W_k."""
    figure, axes = new_figure(width=5.6, height=4.4)
    ax = axes[0, 0]
    powers, budget = plane.powers, plane.runs.steps[-1]
    times = outcome(plane.runs).times
    shape = (len(powers), len(powers), -1)  # initial scale, learning rate, seeds
    steps, reached = times.time.reshape(shape), times.reached.reshape(shape)
    mean = steps.mean(axis=-1).T
    ax.grid(False)
    image = ax.imshow(mean, origin="lower", cmap="viridis_r", aspect="auto")
    figure.colorbar(image, ax=ax, label=f"steps to 90 %, cut at {budget} (mean of seeds)")
    names = {point: name for name, point in plane.points.items() if set(point) <= set(powers)}
    for row, rate in enumerate(powers):
        for column, init in enumerate(powers):
            short = np.count_nonzero(~reached[column, row])
            text = f"{mean[row, column]:.0f}" + f"\n{short} never" * bool(short)
            name = names.get((init, rate))
            dark = mean[row, column] > (mean.min() + mean.max()) / 2
            ax.text(
                column,
                row,
                text if name is None else f"{name}\n{text}",
                ha="center",
                va="center",
                fontsize=8,
                fontweight="bold" if name else None,
                color="white" if dark else "black",
            )
    ticks = [_power(p) for p in powers]
    ax.set_xticks(range(len(powers)), ticks)
    ax.set_yticks(range(len(powers)), ticks)
    ax.set_xlabel("W_q and W_k start times this power of d_k")
    ax.set_ylabel("learning rate of W_q and W_k, likewise")
    return figure


def dead_row_figure(results: Sequence[CellResult]) -> Figure:
    """Slow-down at the common rate against the dead-row fraction before training, over cells."""
    panels: dict[tuple[str, str], list[CellResult]] = {}
    for result in results:
        config = result.cell.config
        panels.setdefault((config.task, config.optimizer), []).append(result)
    figure, axes = new_figure(1, len(panels), width=3.6, height=3.4, sharex=True, sharey=True)
    for ax, (panel, cells) in zip(axes.flat, panels.items(), strict=True):
        for result, arm in ((cell, arm) for cell in cells for arm in cell.common if arm != "sqrt"):
            own, reference = (outcome(result.common[name]) for name in (arm, "sqrt"))
            x, y = own.dead_rows.mean(), own.times.time.mean() / reference.times.time.mean()
            fill = {} if own.times.reached.all() else {"mfc": "none"}
            ax.plot(x, y, "o", ms=7, color=arm_colour(arm), **fill)
            ax.plot([], [], "o", color=arm_colour(arm), label=LABELS[arm])
            ax.annotate(
                str(result.cell.config.d_k),
                (x, y),
                (-6 if arm == "hot" else 6, 0),  # it lies near none
                textcoords="offset points",
                ha="right" if arm == "hot" else "left",
                va="center",
                fontsize=7,
            )
        ax.axhline(1, color=arm_colour("sqrt"), lw=1)
        ax.set(yscale="log", xlabel="dead rows before training")
        ax.set_title(", ".join(panel), fontsize=10)
        ax.margins(x=0.15)
        _plain_log(ax)
    axes[0, 0].set_ylabel("steps to 90 %, over sqrt's")
    _legend_below(figure, axes, len(panels))
    return figure


def readme_figure(results: Sequence[CellResult], map_cell: Cell) -> Figure:
    """Left: steps to 90 % against d_k, each seed a dot. Right: attention before training."""
    figure, axes = new_figure(1, 3, width=4.2, height=4.0, width_ratios=[2.2, 1, 1])
    ax = axes[0, 0]
    shown = sorted(results, key=lambda result: result.cell.config.d_k)
    budget: Any = shown[0].cell.config.steps
    fastest = np.inf
    for place, arm in enumerate(ARMS):
        centres, medians = [], []
        for result in shown:
            if arm not in result.common:
                continue
            times = _drawn_times(result.common[arm], budget)
            d_k = result.cell.config.d_k * 1.12 ** (place - 1.5)
            spread = 1.05 ** np.linspace(-0.5, 0.5, len(times))
            ax.plot(d_k * spread, times, ".", color=arm_colour(arm), alpha=0.7)
            centres.append(d_k)
            medians.append(np.median(times))
            fastest = min(fastest, times.min())
        if centres:
            ax.plot(centres, medians, color=arm_colour(arm), lw=1.2, label=LABELS[arm])
    _never_line(ax, budget, fastest)
    _d_k_axis(ax, [result.cell.config.d_k for result in shown])
    ax.set_ylabel("steps to 90 % held-out accuracy")
    ax.legend(fontsize=8, loc="lower left")
    config, seeds = shown[0].cell.config, len(shown[0].common["sqrt"].seed)
    rate = outcome(shown[0].common["sqrt"]).learning_rate
    ax.set_title(
        f"{config.task}, {config.num_layers} layers, {config.optimizer} at {rate:g}, {seeds} seeds",
        fontsize=10,
    )
    for ax, arm in zip(axes[0, 1:], ("sqrt", "none"), strict=True):
        made = make_arm(arm, map_cell.config.d_k)
        program = training.lane_program(map_cell.config, made)
        lane = make_lane(made, 1e-3, 0)
        params = training.initialize(program, lane).params
        example = jax.tree.map(np.asarray, attention_maps.attend(program, lane, params))
        ax.grid(False)
        weights_TS = example.weights_LHTS[0, 0]
        if program.model.causal:  # what no query may see is left white
            weights_TS = np.where(np.tri(len(weights_TS), dtype=bool), weights_TS, np.nan)
        ax.imshow(weights_TS, cmap="magma_r", vmin=0, vmax=1)
        ax.set_title(f"{LABELS[arm]}, before training", fontsize=10)
        ax.set_xlabel("key position")
        ax.set_ylabel("query position")
    figure.colorbar(axes[0, 1].images[0], ax=axes[0, 1:], label="attention weight", shrink=0.7)
    return figure


def _drawn_times(runs: CellRuns, budget: int) -> NDArray[np.float64]:
    """[N]: steps to the threshold; those that never got there lie on the "never" line."""
    times = outcome(runs).times
    return np.where(times.reached, times.time, _never(budget))


def _never(budget: int) -> float:
    return 1.35 * budget


def _never_line(ax: Axes, budget: int, fastest: float) -> None:
    """A logarithmic axis of steps that ends in the budget and, above it, "never"."""
    ax.set_yscale("log")
    ax.axhline(_never(budget), color=GREY, ls=":", lw=1)
    ticks = [t for t in (10, 20, 50, 100, 200, 500, 1000, 2000, 4000) if fastest / 2 < t <= budget]
    ax.set_yticks([*ticks, _never(budget)], [*map(str, ticks), f"never\n({budget})"])
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_ylim(fastest / 1.3, 1.2 * _never(budget))


def _plain_log(ax: Axes) -> None:
    """Plain numbers on a logarithmic axis."""
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(ScalarFormatter())
    ax.yaxis.set_minor_locator(NullLocator())


def _d_k_axis(ax: Axes, values: Sequence[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(values, [str(v) for v in values])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("d_k")


def _visible_keys(cell: Cell) -> list[int]:
    """How many keys each row of the cell's task sees."""
    config = cell.config
    task = tasks.make_task(
        config.task, sequence_length=config.sequence_length, vocab_size=config.vocab_size
    )
    length = task.sequence_length
    return list(range(1, length + 1)) if task.causal else [length] * length


def _power(power: float) -> str:
    """An exponent as people write it."""
    text = str(Fraction(abs(power)))
    return text if power >= 0 else f"−{text}"


def _title(cell: Cell) -> str:
    c = cell.config
    return f"{c.task}, {c.optimizer}, d_k = {c.d_k}"


def _rows_and_columns(panels: int) -> tuple[int, int]:
    columns = min(panels, 3)
    return -(-panels // columns), columns


def _grid(rows: Sequence[str], results: Sequence[CellResult]):
    return [(row, result) for row in enumerate(rows) for result in results]


def _legend_below(figure: Figure, axes: NDArray, used: int) -> None:
    """One legend for all panels, and no empty panel."""
    for ax in axes.flat[used:] if axes.shape[0] != 2 or used > axes.shape[1] else ():
        ax.set_axis_off()
    handles: dict[str, Any] = {}
    for ax in axes.flat:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=min(2, used), fontsize=8
    )
