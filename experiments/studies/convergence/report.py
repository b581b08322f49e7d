"""What the study `convergence` found, in words, tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from experiments.analysis.paired import clip_at_worst, paired_comparison
from experiments.analysis.sweeps import learning_rate_sensitivity
from experiments.analysis.tables import Table, number
from experiments.analysis.times import THRESHOLD, CensoredTimes, kaplan_meier
from experiments.studies.common import Findings
from experiments.studies.convergence import figures as figures
from experiments.studies.convergence.cells import Cell
from experiments.studies.convergence.outcomes import (
    CellResult,
    Comparison,
    choices,
    compare,
    outcome,
)
from experiments.studies.convergence.tuning import Tuning

README_TASK = ("recall", "adam")
README_D_K = 64


def report(
    results: Sequence[CellResult], not_run: Sequence[str], plane: figures.Plane | None, quick: bool
) -> Findings:
    """Tables, figures and what they say.

    Args:
      results: of the cells that have been run, at least one.
      not_run: names of those that have not.
      plane: the plane, if it has been run.
      quick: whether this is a quick run.
    """
    found = compare(results)
    drawn = {
        "steps_to_threshold": figures.paired_figure(results, found),
        "survival": figures.survival_figure(results),
        "effect": figures.effect_figure(results, found),
        "trajectories": figures.trajectory_figure(results),
        "dead_rows": figures.dead_row_figure(results),
    }
    tuned = [(result.cell, result.tuning) for result in results if result.tuning]
    tables = [_primary_table(results, found), _article_table(results)]
    if tuned:
        drawn["learning_rate"] = figures.learning_rate_figure(tuned)
        tables.append(tuning_table(tuned))
    readme = [r for r in results if (r.cell.config.task, r.cell.config.optimizer) == README_TASK]
    map_cells = [r.cell for r in readme if r.cell.config.d_k == README_D_K]
    if map_cells:
        drawn = {"readme": figures.readme_figure(readme, map_cells[0]), **drawn}
    if plane:
        drawn["plane"] = figures.plane_figure(plane)
    if quick:
        tables = [grid._replace(title=f"Quick run. {grid.title}") for grid in tables]
    first: Any = results[0]
    return Findings(
        title="Does scaling train faster, and why?",
        answer=_answer(results, found),
        tables=tuple(tables),
        figures=drawn,
        captions={name: CAPTIONS[name] for name in drawn},
        settings={
            "cells": ", ".join(result.cell.name for result in results),
            "cells not run": ", ".join(not_run) or "none",
            "cells run at the common rate only": ", ".join(
                result.cell.name for result in results if result.own is None
            )
            or "none",
            "test seeds": len(first.common["sqrt"].seed),
            "comparisons in Holm's family": len(found),
        },
        numbers=_numbers(results, found),
        notes=NOTES,
    )


CAPTIONS = {
    "readme": (
        "Same weights, same data, one number changed (`fold` and `hot` also change how large W_q "
        "and W_k start). Left: steps until 90 % held-out accuracy on recall; every seed a dot, "
        "lines through the medians, Adam at 1e-3. Right: the first layer's first head before "
        "training, on the first held-out sequence, d_k = 64."
    ),
    "steps_to_threshold": (
        "Steps to 90 % held-out accuracy; a line joins the arms of one seed. Above each arm the "
        "mean difference from sqrt with its 95 % interval, a seed that never got there counting "
        "as the budget. Below it the learning rate."
    ),
    "survival": (
        "Kaplan–Meier curves of the share of seeds still short of 90 %: solid at the common rate, "
        "dashed with each arm at its own best rate."
    ),
    "effect": (
        "Mean difference from sqrt in steps to 90 %, cut at the budget, with its 95 % interval: "
        "filled at the common rate, open with each arm at its own best rate. The grey band is the "
        "margin of equivalence."
    ),
    "trajectories": (
        "Attention entropy and the largest logit over training at the common rate; thin lines are "
        "seeds, thick ones their mean. Dotted: the least entropy that the logits' mean standard "
        "deviation allows (after Zhai et al. 2023). Grey line: uniform attention."
    ),
    "dead_rows": (
        "Does the dead-row fraction before training predict the slow-down? One point a cell and "
        "arm, with its d_k, at the common rate, means over seeds; open where some seed never got "
        "to 90 %, so that the true ratio is larger. One row in 16 of recall sees a single key and "
        "is always dead."
    ),
    "learning_rate": (
        "Loss area against learning rate on the tuning seeds; a dot a seed, the line their mean, a "
        "ring at the best rate. Dotted: the loss before training."
    ),
    "plane": (
        "What a scale changes: how large W_q and W_k start and how fast they learn, relative to "
        "sqrt. Each arm is a point of this plane (recall, Adam, d_k = 64, common rate)."
    ),
}


def _primary_table(results: Sequence[CellResult], found: Sequence[Comparison]) -> Table:
    rows = []
    compared = {(c.cell, c.choice, c.arm): c for c in found}
    for result in results:
        for choice, arms in choices(result).items():
            for arm, runs in arms.items():
                own = outcome(runs)
                c = compared.get((result.cell.name, choice, arm))
                rows.append(
                    (
                        result.cell.name,
                        choice,
                        arm,
                        f"{own.learning_rate:g}",
                        f"{np.count_nonzero(own.times.reached)}/{len(own.times.reached)}",
                        _median_time(own.times),
                        f"{own.times.time.mean():.0f}",
                        *(_versus(c) if c else ("",) * 6),
                    )
                )
    header = ("cell", "rate", "arm", "learning rate", "reached", "median", "mean, cut")
    versus = ("− sqrt [95 %]", "p", "Holm", "Wilcoxon", "log-rank", "P(faster)")
    title = f"Steps to {THRESHOLD:.0%} held-out accuracy"
    return Table(title, header + versus, rows)


def _versus(c: Comparison) -> tuple[str, ...]:
    t = c.times
    equivalent = " (equivalent)" * c.times_equivalence.equivalent
    return (
        f"{t.mean_difference:+.0f} [{t.low:+.0f}, {t.high:+.0f}]{equivalent}",
        number(t.p_value, 2),
        number(c.holm_p_value, 2),
        number(t.wilcoxon_p_value, 2),
        number(c.log_rank.p_value, 2),
        number(t.probability_better, 2),
    )


def _article_table(results: Sequence[CellResult]) -> Table:
    """What the article's table of benefits claims, measured: sqrt against none."""
    rows = []
    for result in results:
        if "none" not in result.common:
            continue
        for choice, arms in choices(result).items():
            scaled, unscaled = outcome(arms["sqrt"]), outcome(arms["none"])
            budget: Any = result.cell.config.steps
            accuracy = paired_comparison(
                100 * scaled.accuracy, 100 * unscaled.accuracy, better="higher"
            )
            time = 100 * (scaled.times.time.mean() / unscaled.times.time.mean() - 1)
            at_least = "" if unscaled.times.reached.all() else "at least "
            ends = scaled.entropy.mean(), unscaled.entropy.mean()
            rows.append(
                (
                    f"{result.cell.name}, {budget} steps",
                    choice,
                    f"{at_least}{time:+.0f} %",
                    f"{accuracy.mean_difference:+.1f} [{accuracy.low:+.1f}, {accuracy.high:+.1f}]",
                    f"{scaled.spikes.mean():.1f} / {unscaled.spikes.mean():.1f}",
                    f"{ends[0]:.2f} / {ends[1]:.2f} ({100 * (ends[0] / ends[1] - 1):+.0f} %)",
                    f"{scaled.diverged} / {unscaled.diverged}",
                )
            )
    rows.append(("the article", "", "-42 %", "+2.4", "-99 %", "+433 %", ""))
    header = (
        "sqrt against none",
        "rate",
        "steps to 90 %",
        "final accuracy (points)",
        "spikes per 1000 steps",
        "entropy at the end",
        "diverged",
    )
    return Table("The article's table of benefits, measured", header, rows)


def tuning_table(tuned: Sequence[tuple[Cell, Tuning]]) -> Table:
    """Each arm's best rate, and how much a wrong one costs (Wortsman et al. 2023)."""
    rows = []
    for cell, tuning in tuned:
        loss = clip_at_worst(
            tuning.loss.mean(-1), tuning.initial_loss.mean(-1)[:, None], better="lower"
        )
        sensitivity = learning_rate_sensitivity(loss, tuning.initial_loss.mean(-1))
        for i, arm in enumerate(tuning.arms):
            rows.append(
                (
                    cell.name,
                    arm,
                    f"{tuning.rates[0]:g} to {tuning.rates[-1]:g}",
                    f"{tuning.best[arm]:g}" + " (edge)" * (not tuning.interior[arm]),
                    number(tuning.area[i].mean(-1).min()),
                    number(float(sensitivity.sensitivity[i])),
                    number(float(sensitivity.best_loss[i])),
                )
            )
    header = ("cell", "arm", "grid", "best rate", "its loss area", "sensitivity", "ℓ*")
    return Table("Tuning: learning rates, and the final loss's sensitivity to them", header, rows)


def _answer(results: Sequence[CellResult], found: Sequence[Comparison]) -> str:
    """A sentence a comparison of sqrt with none, with what fold and hot say about why."""
    lines = []
    for result in results:
        config = result.cell.config
        for choice in choices(result):
            here = {c.arm: c for c in found if (c.cell, c.choice) == (result.cell.name, choice)}
            if "none" not in here:
                continue
            rates = {"common": "at the common rate", "own": "each arm at its own best rate"}
            reference = outcome(choices(result)[choice]["sqrt"]).times
            lines.append(
                f"- **{config.task}, {config.optimizer}, d_k = {config.d_k}**, {rates[choice]} "
                f"({config.steps} steps, {here['none'].times.pairs} seeds): scaled attention "
                f"reached {THRESHOLD:.0%} in {reference.time.mean():.0f} steps on average; "
                + "; ".join(_sentence(c) for c in here.values())
                + "."
            )
        lines += _badly_tuned(result)
    rho = dead_row_correlation(results)
    if rho is not None:
        lines.append(
            f"- Over cells and arms, the dead-row fraction before training and the slow-down at "
            f"the common rate have a rank correlation of {rho:.2f}."
        )
    return "\n".join(lines)


def _badly_tuned(result: CellResult) -> list[str]:
    """Where the rate chosen on the tuning seeds did worse than the common one on the test seeds."""
    lines = []
    for arm, runs in (result.own or {}).items():
        own, common = outcome(runs), outcome(result.common[arm])
        if own.times.time.mean() > common.times.time.mean():
            lines.append(
                f"  - There `{arm}`'s own rate, {own.learning_rate:g}, chosen on the tuning seeds, "
                f"did worse on the test seeds than {common.learning_rate:g}: "
                f"{own.times.time.mean():.0f} steps against {common.times.time.mean():.0f}. It "
                "stands as chosen, since choosing again would use the test seeds."
            )
    return lines


def dead_row_correlation(results: Sequence[CellResult]) -> float | None:
    """Spearman's ρ of dead rows at the start and slow-down, over cells and arms but sqrt."""
    points = []
    for result in results:
        reference = outcome(result.common["sqrt"]).times.time.mean()
        for arm, runs in result.common.items():
            if arm != "sqrt":
                own = outcome(runs)
                points.append((own.dead_rows.mean(), own.times.time.mean() / reference))
    x, y = np.array(points).T
    if len(points) < 5 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(stats.spearmanr(x, y).statistic)


def _sentence(c: Comparison) -> str:
    t = c.times
    sign = "≥ " if c.never else ""
    never = f", {c.never} of {t.pairs} seeds never" if c.never else ""
    return (
        f"`{c.arm}` {sign}{c.ratio:.2f} times as many ({t.mean_difference:+.0f} "
        f"[{t.low:+.0f}, {t.high:+.0f}], p = {number(t.p_value, 2)}, "
        f"Holm {number(c.holm_p_value, 2)}{never})"
    )


def _median_time(times: CensoredTimes) -> str:
    median = kaplan_meier(times).median
    return f"{median:.0f}" if np.isfinite(median) else f"> {times.time.max():.0f}"


def _numbers(results: Sequence[CellResult], found: Sequence[Comparison]) -> dict[str, Any]:
    """Everything of the tables, for summary.json."""
    cells: dict[str, Any] = {}
    for result in results:
        rates: dict[str, Any] = {}
        for choice, arms in choices(result).items():
            rates[choice] = {
                arm: own._asdict() | {"times": own.times._asdict()}
                for arm, own in ((arm, outcome(runs)) for arm, runs in arms.items())
            }
        tuning = result.tuning
        best = (
            {arm: [tuning.best[arm], tuning.interior[arm]] for arm in tuning.arms}
            if tuning
            else None
        )
        cells[result.cell.name] = {"best_rate_and_interior": best, **rates}
    return {"cells": cells, "against_sqrt": [_plain(c) for c in found]}


def _plain(c: Any) -> Any:
    """Named tuples, however deep, as dicts."""
    if hasattr(c, "_asdict"):
        return {name: _plain(value) for name, value in c._asdict().items()}
    return c


NOTES = """\
## What is not supported

- That gradients "explode" without scaling: see the spikes and the diverged lanes in the table.
- That scaling allows a larger batch: the scale is one number that multiplies the logits. It changes
  the shape of no array, so the memory of a step, and with it the largest batch, is the same to the
  byte, whatever the multiplier.
- That √d_k is optimal: `mup` and `fold` are other answers, and where they were run they are in the
  tables.
- Anything beyond these tasks, widths and budgets: every number holds at its budget only.

"Diversity" in the article's table is the entropy of the weights. It is shown as measured at the end
of training, where low entropy is what a sharp task asks for: more is not better.
"""
