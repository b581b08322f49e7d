"""How wide are the scores? Variance and excess kurtosis of q·k against d_k.

For each d_k, `pairs` independent pairs of q and k with iid N(0, 1) entries; every seed gives one
sample variance and kurtosis, so that their scatter over seeds can be held against the exact
standard error too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from attention import dot_product_attention, score_rule, theory
from experiments.analysis.tables import Table, number
from experiments.figures import style
from experiments.studies.common import (
    Findings,
    Request,
    normal,
    over_seeds,
    spread,
    study_key,
    with_error,
)

RULES = ("none", "sqrt")
KEY_DIMS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
PAIRS = 1000


class ScoreVariance(NamedTuple):
    """Sample moments of scale·q·k; axes: D of key_dims, R of RULES, seeds."""

    key_dims: tuple[int, ...]
    variance: np.ndarray  # [D, R, seeds], dimensionless
    excess_kurtosis: np.ndarray  # [D, R, seeds]


def measure(
    key: jax.Array, *, key_dims: Sequence[int] = KEY_DIMS, pairs: int = PAIRS, seeds: int
) -> ScoreVariance:
    """Draw pairs and take the moments of their logits.

    Args:
      key: typed PRNG key.
      key_dims: each a d_k.
      pairs: independent (q, k) per seed.
      seeds: how many.
    """
    moments = []
    for key_dim in key_dims:
        scales = jnp.array([score_rule(rule, key_dim).multiplier for rule in RULES])

        def one(seed_key: jax.Array, key_dim: int = key_dim, scales: jax.Array = scales):
            shape = (pairs, 1, 1, key_dim)  # one query, one key, one head: a batch of pairs
            q, k = normal(seed_key, "query", shape), normal(seed_key, "key", shape)

            def per_scale(scale: jax.Array):
                score = dot_product_attention(q, k, k[..., :1], scale=scale).logits.ravel()
                centred = score - score.mean()
                variance = jnp.sum(centred**2) / (pairs - 1)
                return variance, jnp.mean(centred**4) / jnp.mean(centred**2) ** 2 - 3

            return jax.vmap(per_scale)(scales)

        chunk = max(1, 4_000_000 // (pairs * key_dim))
        moments.append(over_seeds(one, jax.random.fold_in(key, key_dim), seeds, chunk))
    variance, kurtosis = (np.moveaxis(np.array(m), 1, 2) for m in zip(*moments, strict=True))
    return ScoreVariance(tuple(key_dims), variance, kurtosis)


def slopes(result: ScoreVariance) -> np.ndarray:
    """Least-squares slope of ln variance against ln d_k: [R, seeds]."""
    x = np.log(np.array(result.key_dims, float))
    x = (x - x.mean())[:, None, None]
    return np.sum(x * np.log(result.variance), axis=0) / np.sum(x**2)


def draw(result: ScoreVariance, pairs: int) -> Figure:
    """Variance, its relative error against the exact standard error, and excess kurtosis."""
    d = np.array(result.key_dims, float)
    figure, ((left, middle, right),) = style.new_figure(1, 3, width=4.4, height=3.6)
    for r, (rule, exact) in enumerate(zip(RULES, (d, np.ones_like(d)), strict=True)):
        colour = style.arm_colour(rule)
        formula = score_rule(rule, 1).formula
        low, centre, high = np.quantile(result.variance[:, r], (0.05, 0.5, 0.95), axis=-1)
        left.plot(d, exact, color=colour, lw=1)
        left.errorbar(d, centre, (centre - low, high - centre), fmt="o", ms=4, color=colour)
        left.annotate(formula, (16, exact[d >= 16][0]), xytext=(0, 10), color=colour,
                      textcoords="offset points", ha="right")  # fmt: skip
    left.set(xscale="log", yscale="log", xlabel="d_k", ylabel="variance of the logits",
             title="Var(q·k) = d_k")  # fmt: skip

    relative = result.variance[:, 0] / d[:, None]
    low, centre, high = np.quantile(relative, (0.05, 0.5, 0.95), axis=-1)
    band = 1.645 * theory.variance_standard_error(d, pairs) / d
    middle.fill_between(d, 1 - band, 1 + band, color=style.GREY, alpha=0.2, lw=0,
                        label="exact, 5–95 %")  # fmt: skip
    middle.errorbar(d, centre, (centre - low, high - centre), fmt="o", ms=4,
                    color=style.arm_colour("none"), label="seeds, 5–95 %")  # fmt: skip
    middle.axhline(1, color=style.GREY, lw=1)
    middle.set(xscale="log", xlabel="d_k", ylabel="sample variance / d_k",
               title=f"Sampling error of {pairs} pairs")  # fmt: skip
    middle.legend(frameon=False)

    mean = result.excess_kurtosis[:, 0].mean(-1)
    error = 2 * result.excess_kurtosis[:, 0].std(-1, ddof=1) / np.sqrt(relative.shape[-1])
    whole = np.arange(d[0], d[-1] + 1)
    right.plot(whole, theory.dot_product_excess_kurtosis(whole), color=style.GREY, lw=1,
               label="6/d_k")  # fmt: skip
    right.errorbar(d, mean, error, fmt="o", ms=4, color=style.arm_colour("none"),
                   label="mean ± 2 s.e.")  # fmt: skip
    right.set(xscale="log", xlabel="d_k", ylabel="excess kurtosis",
              title="Nearly normal from d_k ≈ 16")  # fmt: skip
    right.legend(frameon=False)
    return figure


def run(request: Request) -> Findings:
    """Measure and answer."""
    seeds = request.number_of_seeds(200, 40)
    key_dims = KEY_DIMS[::2] if request.quick else KEY_DIMS
    result = measure(study_key("score_variance"), key_dims=key_dims, seeds=seeds)
    rows = [
        (
            str(d),
            with_error(spread(result.variance[i, 0]), 4),
            number(result.variance[i, 0].std(ddof=1)),
            number(theory.variance_standard_error(d, PAIRS)),
            with_error(spread(result.variance[i, 1]), 4),
            with_error(spread(result.excess_kurtosis[i, 0])),
            number(theory.dot_product_excess_kurtosis(d)),
        )
        for i, d in enumerate(key_dims)
    ]
    header = ("d_k", "Var(q·k)", "its sd", "exact", "Var(q·k/√d_k)", "kurtosis − 3", "6/d_k")
    slope = [spread(values) for values in slopes(result)]
    return Findings(
        title="Variance of the scores",
        answer=(
            "With entries of unit variance, q·k has variance d_k: the slope of ln variance against "
            f"ln d_k is {with_error(slope[0], 4)} without scaling and {with_error(slope[1], 2)} "
            "with ×1/√d_k. So scores grow as √d_k, and dividing by √d_k is the one power of d_k "
            "that undoes it. The excess kurtosis is 6/d_k: from d_k ≈ 16 on, scores are nearly "
            "normal."
        ),
        tables=(Table(f"Moments of the scores, {PAIRS} pairs a seed", header, rows),),
        figures={"score_variance": draw(result, PAIRS)},
        captions={
            "score_variance": "Left: variance of the logits against d_k, median and 5–95 % over "
            "seeds, on the exact lines d_k and 1. Middle: the same over d_k, against the exact "
            "sampling error. Right: excess kurtosis against 6/d_k."
        },
        settings={"seeds": seeds, "pairs": PAIRS, "key_dims": list(key_dims)},
        numbers={
            "key_dims": result.key_dims,
            "variance": {
                rule: [spread(v)._asdict() for v in result.variance[:, r]]
                for r, rule in enumerate(RULES)
            },
            "excess_kurtosis": [spread(k)._asdict() for k in result.excess_kurtosis[:, 0]],
            "slope": {rule: slope[r]._asdict() for r, rule in enumerate(RULES)},
        },
    )
