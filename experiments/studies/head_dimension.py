"""What does d_k itself change? Attention weights, entropy and gradients, scaled and unscaled.

The article's table of §5 at its settings (n = 10 queries and keys, values as wide as keys), with
the statistics it mixes kept apart: the largest of all n² weights, and the largest of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from matplotlib.figure import Figure

from attention import score_rule, theory
from experiments.analysis.tables import Table, number
from experiments.figures import style
from experiments.studies import gradient_flow, saturation
from experiments.studies.common import (
    Findings,
    Request,
    spread,
    study_key,
    with_error,
    with_interval,
)
from experiments.studies.gradient_flow import RULES, GradientRows

KEY_DIMS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
LENGTH = 10


def measure(
    key: jax.Array, *, key_dims: Sequence[int] = KEY_DIMS, length: int = LENGTH, seeds: int
) -> dict[int, GradientRows]:
    """Rows of attention and their gradients for each d_k, value width d_k; independent draws."""
    return {
        d: gradient_flow.measure(
            jax.random.fold_in(key, d), length=length, key_dim=d, seeds=seeds, value_dim=d
        )
        for d in key_dims
    }


def largest_of_all(rows: GradientRows) -> np.ndarray:
    """The largest of the n² weights of a seed: [seeds, R]."""
    return rows.max_weight.max(-1)


def gradient_ratio(rows: GradientRows) -> np.ndarray:
    """Standard deviation of ∂/∂Q, unscaled over scaled: [seeds]."""
    return rows.query_std[:, 0] / rows.query_std[:, 1]


def draw(measured: dict[int, GradientRows]) -> Figure:
    """Largest weights, entropy and gradient ratio against d_k."""
    figure, axes = style.new_figure(2, 2, width=5.0, height=3.4)
    (all_weights, row_weights), (entropy, gradient) = axes
    d = np.array(list(measured), float)
    fine = np.unique(np.geomspace(d[0], d[-1], 40).round())

    def band(axis, values: np.ndarray, colour: str, label: str) -> None:
        low, median, high = np.quantile(values, (0.05, 0.5, 0.95), axis=-1)
        axis.fill_between(d, low, high, color=colour, alpha=0.15, lw=0)
        axis.plot(d, median, color=colour, marker="o", ms=4, lw=1, label=label)

    for r, rule in enumerate(RULES):
        colour, formula = style.arm_colour(rule), score_rule(rule, 1).formula
        scale = np.array([score_rule(rule, int(x)).multiplier for x in fine])
        band(all_weights, np.array([largest_of_all(m)[:, r] for m in measured.values()]),
             colour, formula)  # fmt: skip
        for axis, field, exact in (
            (row_weights, "max_weight", theory.expected_max_weight),
            (entropy, "entropy", theory.expected_entropy),
        ):
            means = np.array([getattr(m, field)[:, r].mean(-1) for m in measured.values()])
            error = means.std(-1, ddof=1) / np.sqrt(means.shape[-1])
            table = saturation.tabulated(exact, LENGTH, scale.min(), np.sqrt(d[-1]))
            axis.plot(fine, theory.averaged_over_queries(table, LENGTH, fine, scale),
                      color=colour, lw=1)  # fmt: skip
            axis.errorbar(d, means.mean(-1), 2 * error, fmt="o", ms=4, color=colour, label=formula)
    all_weights.set(title=f"Largest of all {LENGTH}² weights, median and 5–95 %", ylim=(0, 1.02))
    row_weights.set(title="Largest weight of a row, mean on exact curve", ylim=(0, 1.02))
    entropy.axhline(np.log(LENGTH), color=style.GREY, lw=0.8, ls="--")
    entropy.annotate("ln n", (300, np.log(LENGTH)), xytext=(0, -12), textcoords="offset points")
    entropy.set(title="Entropy of a row in nats, mean on exact curve", ylim=(0, 2.5))
    band(gradient, np.array([gradient_ratio(m) for m in measured.values()]), style.GREEN,
         "median and 5–95 % of seeds")  # fmt: skip
    exact_ratio = (
        theory.gradient_rms(LENGTH, fine[1:], 1, 1.0).query
        / theory.gradient_rms(LENGTH, fine[1:], 1, fine[1:] ** -0.5).query
    )
    gradient.plot(fine[1:], exact_ratio, color=style.GREY, lw=1, ls="--", label="exact RMS ratio")
    gradient.set(yscale="log", title="std of ∂/∂Q, unscaled / scaled")
    gradient.axhline(1, color=style.GREY, lw=0.6)
    for axis in axes.flat:
        axis.set(xscale="log", xlabel="d_k")
        axis.axvline(theory.freezing_key_dim(LENGTH), color=style.GREY, lw=0.8, ls=":")
        axis.legend(fontsize=8, frameon=False)
    return figure


def run(request: Request) -> Findings:
    """Measure and answer."""
    seeds = request.number_of_seeds(1000, 100)
    key_dims = KEY_DIMS[::2] if request.quick else KEY_DIMS
    measured = {}
    for d in key_dims:
        request.say(f"d_k = {d}")
        measured |= measure(study_key("head_dimension"), key_dims=[d], seeds=seeds)
    rows, numbers = [], []
    for d, m in measured.items():
        largest = [spread(v) for v in largest_of_all(m).T]
        entropy = [spread(v) for v in m.entropy.mean(-1).T]
        exact = [
            theory.averaged_over_queries(
                theory.expected_entropy, LENGTH, d, score_rule(rule, d).multiplier
            )
            for rule in RULES
        ]
        ratio = spread(gradient_ratio(m))
        rows.append(
            (
                str(d),
                *(with_interval(x) for x in largest),
                *(f"{with_error(x)} ({number(e)})" for x, e in zip(entropy, exact, strict=True)),
                with_interval(ratio, 2),
            )
        )
        numbers.append(
            {
                "key_dim": d,
                "largest_of_all": {r: x._asdict() for r, x in zip(RULES, largest, strict=True)},
                "entropy": {
                    r: {**x._asdict(), "exact": e}
                    for r, x, e in zip(RULES, entropy, exact, strict=True)
                },
                "gradient_ratio": ratio._asdict(),
            }
        )
    first, last = measured[key_dims[0]], measured[key_dims[-1]]
    scaled_change = [spread(largest_of_all(m)[:, 1]).median for m in (first, last)]
    header = (
        "d_k",
        "largest of all, ×1",
        "×1/√d_k",
        "entropy, ×1 (exact)",
        "×1/√d_k (exact)",
        "std ∂/∂Q, ratio",
    )
    return Findings(
        title="Head dimension",
        answer=(
            "Without scaling, widening the head sharpens attention: at n = "
            f"{LENGTH} the mean entropy falls from {number(first.entropy[:, 0].mean())} nats at "
            f"d_k = {key_dims[0]} to {number(last.entropy[:, 0].mean())} at d_k = {key_dims[-1]}. "
            "With ×1/√d_k it hardly depends on d_k "
            f"({number(first.entropy[:, 1].mean())} and {number(last.entropy[:, 1].mean())}; the "
            "rest is |q| varying less in wide heads), and neither does the largest weight "
            f"(median {number(scaled_change[0], 2)} and {number(scaled_change[1], 2)}), which is "
            f"nowhere near uniform: scaled attention over random keys still prefers some."
        ),
        tables=(Table("Median [5 %, 95 %] and mean ± standard error", header, rows),),
        figures={"head_dimension": draw(measured)},
        captions={
            "head_dimension": f"Attention over n = {LENGTH} random keys against d_k; lines in the "
            "panels of row statistics are exact, the dotted line is d_k = 2 ln n."
        },
        settings={"seeds": seeds, "length": LENGTH, "key_dims": list(key_dims)},
        numbers={"by_key_dim": numbers},
    )
