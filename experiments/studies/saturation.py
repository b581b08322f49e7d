"""When does attention saturate? Row statistics against the spread σ of the logits.

Logits of random queries and keys are scaled so that their standard deviation sweeps through the
freezing point σ_c = √(2 ln N) of N keys (`theory.freezing_std`). Measured points stand on exact
curves; unscaled attention is the point σ = √d_k, scaled attention σ = 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from scipy.interpolate import CubicSpline

from attention import attention_statistics, dot_product_attention, theory
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

KEYS = (10, 50, 512, 4096)
KEY_DIM = 64
QUERIES = 32
RATIOS = tuple(2.0 ** (i / 2) for i in range(-6, 9))  # σ/σ_c from 1/8 to 16


class Rows(NamedTuple):
    """Statistics of single attention rows; axes [seeds, scales, batch, queries]."""

    entropy: np.ndarray  # nats
    max_weight: np.ndarray
    saturated: np.ndarray  # bool: largest weight > 0.9
    jacobian_trace: np.ndarray
    jacobian_norm_squared: np.ndarray
    logit_mean: np.ndarray  # over the row's keys
    logit_std: np.ndarray  # over the row's keys (divisor: their number)
    logit_min: np.ndarray
    logit_max: np.ndarray
    logit_second: np.ndarray  # the second largest


class Quantity(NamedTuple):
    """A row statistic and its exact expectation."""

    field: str  # of Rows and theory.Regime
    label: str
    exact: Callable  # of (keys, std)


QUANTITIES = (
    Quantity("entropy", "entropy / ln n", theory.expected_entropy),
    Quantity("max_weight", "largest weight", theory.expected_max_weight),
    Quantity("saturation", "rows with largest weight > 0.9", theory.saturation_probability),
    Quantity("jacobian_trace", "tr J", theory.expected_jacobian_trace),
    Quantity("jacobian_norm_squared", "‖J‖²", theory.expected_jacobian_norm_squared),
)


def measure(
    key: jax.Array,
    *,
    keys: int,
    key_dim: int,
    scales: Sequence[float],
    queries: int,
    seeds: int,
    batch: int = 1,
) -> Rows:
    """Attend from random queries to random keys, iid N(0, 1) entries, at several scales.

    Args:
      key: typed PRNG key.
      keys: N, per grid.
      key_dim: d_k.
      scales: q·k is multiplied by each; all share their draws.
      queries: per grid; they share its keys.
      seeds: how many.
      batch: independent grids per seed.
    """

    def one(seed_key: jax.Array) -> dict[str, jax.Array]:
        q = normal(seed_key, "query", (batch, queries, 1, key_dim))
        k = normal(seed_key, "key", (batch, keys, 1, key_dim))
        return jax.vmap(lambda scale: _rows(q, k, scale))(jnp.array(scales, jnp.float32))

    chunk = max(1, 4_000_000 // (batch * (keys * queries * len(scales) + keys * key_dim)))
    return Rows(**over_seeds(one, key, seeds, chunk))


def _rows(query: jax.Array, key: jax.Array, scale: jax.Array) -> dict[str, jax.Array]:
    logits = dot_product_attention(query, key, key[..., :1], scale=scale).logits[:, 0]
    row = attention_statistics(logits)
    below = logits < row.logit_max[..., None]
    return {
        "entropy": row.entropy,
        "max_weight": row.max_weight,
        "saturated": row.saturated,
        "jacobian_trace": row.jacobian_trace,
        "jacobian_norm_squared": row.jacobian_norm**2,
        "logit_mean": logits.mean(-1),
        "logit_std": row.logit_std,
        "logit_min": logits.min(-1),
        "logit_max": row.logit_max,
        "logit_second": jnp.max(logits, -1, where=below, initial=-jnp.inf),
    }


class Curve(NamedTuple):
    """One N: measured means over seeds, and exact expectations; lists over QUANTITIES."""

    keys: int
    std: np.ndarray  # [scales]: σ
    mean: list[np.ndarray]  # [scales] each
    error: list[np.ndarray]  # standard errors, likewise
    fine_std: np.ndarray  # [points]: σ of the exact curve
    exact: list[np.ndarray]  # [points] each
    exact_at_std: list[np.ndarray]  # [scales] each


def curve(key: jax.Array, keys: int, *, seeds: int, ratios: Sequence[float] = RATIOS) -> Curve:
    """Measure one N at σ = ratio·σ_c for every ratio."""
    std = np.array(ratios) * theory.freezing_std(keys)
    rows = measure(
        jax.random.fold_in(key, keys),
        keys=keys,
        key_dim=KEY_DIM,
        scales=std / np.sqrt(KEY_DIM),
        queries=QUERIES,
        seeds=seeds,
    )
    values = rows._asdict() | {"saturation": rows.saturated.astype(float)}
    by_seed = [values[quantity.field].mean((2, 3)) for quantity in QUANTITIES]  # [seeds, scales]
    fine = np.geomspace(std[0], std[-1], 60)

    def exact(quantity: Quantity, at: np.ndarray) -> np.ndarray:
        table = tabulated(quantity.exact, keys, std[0], std[-1])
        return theory.averaged_over_queries(table, keys, KEY_DIM, at / np.sqrt(KEY_DIM))

    return Curve(
        keys=keys,
        std=std,
        mean=[v.mean(0) for v in by_seed],
        error=[v.std(0, ddof=1) / np.sqrt(seeds) for v in by_seed],
        fine_std=fine,
        exact=[exact(quantity, fine) for quantity in QUANTITIES],
        exact_at_std=[exact(quantity, std) for quantity in QUANTITIES],
    )


def tabulated(statistic: Callable, keys: int, low: float, high: float) -> Callable:
    """An expectation of theory.py for one N, as a spline in ln σ through 80 quadratures.

    For averages over queries along whole curves, which need it at thousands of σ.

    Args:
      statistic: a function of (keys, std).
      keys: N.
      low, high: σ from where to where; averages reach some way beyond, see the margins below.

    Returns:
      A function of (keys, std) that ignores keys.
    """
    knots = np.geomspace(max(low / 100, 1e-4), min(high * 4, theory.MAX_STD), 80)
    spline = CubicSpline(np.log(knots), statistic(keys, knots))
    return lambda _, std: spline(np.log(std))


def draw(curves: Sequence[Curve]) -> Figure:
    """A panel per statistic against σ/σ_c, and where unscaled attention lies."""
    figure, axes = style.new_figure(2, 3, width=4.4, height=3.3)
    colours = (style.SKY, style.BLUE, style.GREEN, style.PURPLE)
    for panel, (axis, quantity) in enumerate(zip(axes.flat, QUANTITIES, strict=False)):
        for found, colour in zip(curves, colours, strict=False):
            freezing = theory.freezing_std(found.keys)
            unit = np.log(found.keys) if quantity.field == "entropy" else 1.0
            axis.plot(found.fine_std / freezing, found.exact[panel] / unit, color=colour, lw=1.2,
                      label=f"n = {found.keys}")  # fmt: skip
            axis.errorbar(found.std / freezing, found.mean[panel] / unit,
                          2 * found.error[panel] / unit, fmt="o", ms=3, color=colour)  # fmt: skip
            frozen = found.fine_std[found.fine_std > 4 * freezing]
            law = getattr(theory.large_std(found.keys, frozen), quantity.field)
            axis.plot(frozen / freezing, law / unit, color=colour, lw=1, ls=":")
        ratio = np.geomspace(RATIOS[0], RATIOS[-1], 400)
        many = theory.random_energy(theory.MAX_KEYS, ratio * theory.freezing_std(theory.MAX_KEYS))
        limit = getattr(many, quantity.field)
        if quantity.field == "entropy":
            limit = np.maximum(1 - ratio**2, 0)
        axis.plot(ratio, limit, color=style.GREY, lw=1, ls="--", label="n → ∞")
        axis.set(xscale="log", xlabel="σ / σ_c", title=quantity.label)
        axis.axvline(1, color=style.GREY, lw=0.6)
    axes[0, 0].legend(fontsize=8, frameon=False)

    last = axes[1, 2]
    d = np.geomspace(1, 1024, 50)
    for found, colour in zip(curves, colours, strict=False):
        last.plot(d, np.sqrt(d) / theory.freezing_std(found.keys), color=colour, lw=1.2)
        last.axhline(1 / theory.freezing_std(found.keys), color=colour, lw=1.2, ls="--")
        last.plot(theory.freezing_key_dim(found.keys), 1, "o", ms=4, color=colour)
    last.axhline(1, color=style.GREY, lw=0.6)
    last.annotate("×1: frozen from d_k = 2 ln n on", (1.2, 6), fontsize=8)
    last.annotate("×1/√d_k (dashed): never", (40, 0.15), fontsize=8)
    last.set(xscale="log", yscale="log", xlabel="d_k", ylim=(0.12, 20),
             title="σ / σ_c of random attention")  # fmt: skip
    return figure


def run(request: Request) -> Findings:
    """Measure and answer."""
    seeds = request.number_of_seeds(100, 20)
    keys = KEYS[:3] if request.quick else KEYS
    ratios = RATIOS[::2] if request.quick else RATIOS
    curves = []
    for n in keys:
        request.say(f"n = {n}")
        curves.append(curve(study_key("saturation"), n, seeds=seeds, ratios=ratios))
    at = [int(np.argmin(np.abs(np.log(np.array(ratios) / r)))) for r in (0.25, 1.0, 4.0)]
    rows = []
    for found in curves:
        for i in at:
            measured = [
                f"{found.mean[q][i]:.3f} ({found.exact_at_std[q][i]:.3f})"
                for q in range(len(QUANTITIES))
            ]
            rows.append((str(found.keys), number(ratios[i], 2), number(found.std[i]), *measured))
    distance = [
        np.abs(m - e) / np.maximum(s, 1 / (seeds * QUERIES))  # of rare rows none may be drawn
        for found in curves
        for m, s, e in zip(found.mean, found.error, found.exact_at_std, strict=True)
    ]
    worst, within = np.max(distance), np.mean(np.array(distance) < 2)
    unscaled = spread(
        measure(
            study_key("saturation"), keys=50, key_dim=64, scales=(1.0,), queries=QUERIES,
            seeds=seeds,
        ).entropy.mean((1, 2, 3))
    )  # fmt: skip
    exact = theory.averaged_over_queries(theory.expected_entropy, 50, 64, 1.0)
    header = ("n", "σ/σ_c", "σ", "entropy, nats", "largest weight", "saturated", "tr J", "‖J‖²")
    return Findings(
        title="Saturation",
        answer=(
            "A row of n random logits keeps its weight spread over many keys while their standard "
            "deviation σ is below about σ_c = √(2 ln n), and freezes onto a few above it. Unscaled "
            "attention has σ = √d_k, so it starts frozen when d_k > 2 ln n "
            f"(n = 50: d_k ≥ {np.ceil(theory.freezing_key_dim(50)):.0f}); scaled attention has "
            "σ = 1 and never does. At n = 50, d_k = 64 the mean entropy without scaling is "
            f"{with_error(unscaled)} nats (exact: {number(exact)}) of {number(np.log(50))}. "
            f"{within:.0%} of the measured means are within 2 standard errors of exact theory, "
            f"the furthest at {worst:.1f}."
        ),
        tables=(Table("Measured mean (exact)", header, rows),),
        figures={"saturation": draw(curves)},
        captions={
            "saturation": "Row statistics against σ/σ_c. Points: measured means ± 2 s.e.; lines: "
            "exact; dashed: the limit of many keys (random energy model); dotted: the law for "
            "σ ≫ σ_c. Last panel: where random attention lies."
        },
        settings={"seeds": seeds, "key_dim": KEY_DIM, "queries": QUERIES, "keys": list(keys)},
        numbers={
            "curves": [
                {
                    "keys": found.keys,
                    "std": found.std,
                    **{
                        quantity.field: {
                            "mean": found.mean[q],
                            "standard_error": found.error[q],
                            "exact": found.exact_at_std[q],
                        }
                        for q, quantity in enumerate(QUANTITIES)
                    },
                }
                for found in curves
            ],
            "unscaled_entropy_50_keys": {**unscaled._asdict(), "exact": exact},
        },
    )
