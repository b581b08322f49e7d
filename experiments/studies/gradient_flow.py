"""Do gradients vanish or explode without scaling? It depends on which, and on how they are pooled.

Loss: the sum of attention's outputs, as in the article, with values iid N(0, 1). Measured per row:
the norm of ∂/∂logits (after scale) and of ∂/∂q = scale·Kᵀ(∂/∂logits). The second carries the factor
that the chain rule puts in front, so it tells of the function that q enters, not of its softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from attention import attention_statistics, dot_product_attention, score_rule, theory
from attention.head_statistics import DEAD_BELOW
from experiments.analysis.tables import Table, number
from experiments.figures import style
from experiments.studies.common import Findings, Request, normal, over_seeds, study_key

RULES = ("none", "sqrt")
KEY_DIMS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
LENGTH = 10


class GradientRows(NamedTuple):
    """Rows of attention with their gradients; axes [seeds, R of RULES, T rows] unless stated."""

    logits_norm: np.ndarray  # ‖∂/∂logits‖ of the row
    query_norm: np.ndarray  # ‖∂/∂q‖ of the row
    query_std: np.ndarray  # [seeds, R]: standard deviation over all entries of ∂/∂Q
    jacobian_norm: np.ndarray  # ‖J‖_F
    max_weight: np.ndarray
    entropy: np.ndarray  # nats


def measure(
    key: jax.Array, *, length: int, key_dim: int, seeds: int, value_dim: int = 1
) -> GradientRows:
    """Attend from n random queries to n random keys, and differentiate the sum of the outputs.

    Args:
      key: typed PRNG key.
      length: n.
      key_dim: d_k.
      seeds: how many.
      value_dim: d_v. Values enter through their row sums only, which are drawn directly.
    """
    scales = jnp.array([score_rule(rule, key_dim).multiplier for rule in RULES])

    def one(seed_key: jax.Array) -> dict[str, jax.Array]:
        q = normal(seed_key, "query", (length, 1, key_dim))
        k = normal(seed_key, "key", (length, 1, key_dim))
        sums = np.sqrt(value_dim) * normal(seed_key, "value", (length, 1, 1))
        return jax.vmap(lambda scale: _rows(q, k, sums, scale))(scales)

    chunk = max(1, 1_000_000 // (length * key_dim))
    return GradientRows(**over_seeds(one, key, seeds, chunk))


def _rows(
    query: jax.Array, key: jax.Array, sums: jax.Array, scale: jax.Array
) -> dict[str, jax.Array]:
    def loss(query: jax.Array, shift: jax.Array):
        # A zero bias is added to the scaled logits, so its gradient is theirs.
        attended = dot_product_attention(query, key, sums, scale=scale, bias=shift)
        return attended.values.sum(), attended.logits

    length = query.shape[0]
    zero = jnp.zeros((1, length, length))
    (to_query, to_logits), logits = jax.grad(loss, argnums=(0, 1), has_aux=True)(query, zero)
    row = attention_statistics(logits[0])
    return {
        "logits_norm": jnp.linalg.norm(to_logits[0], axis=-1),
        "query_norm": jnp.linalg.norm(to_query[:, 0], axis=-1),
        "query_std": jnp.std(to_query, ddof=1),
        "jacobian_norm": row.jacobian_norm,
        "max_weight": row.max_weight,
        "entropy": row.entropy,
    }


class Ratio(NamedTuple):
    """Unscaled over scaled, with a 95 % bootstrap interval over seeds."""

    value: float
    low: float
    high: float


class Flow(NamedTuple):
    """One d_k: gradients unscaled over scaled, pooled in two ways, and dead rows."""

    key_dim: int
    rms_query: Ratio  # root mean square over rows and seeds
    rms_logits: Ratio
    typical_query: Ratio  # median over seeds of the median row
    typical_logits: Ratio
    dead_rows: tuple[float, float]  # per RULES: fraction with ‖J‖_F < DEAD_BELOW
    query_quantiles: np.ndarray  # [R, 3]: 5, 50 and 95 % of ‖∂/∂q‖ over all rows
    rms_query_of: tuple[float, float]  # per RULES: of the entries of ∂/∂q


def flow(rows: GradientRows, key_dim: int) -> Flow:
    """Pool the rows of one d_k."""
    rng = np.random.default_rng(key_dim)

    def ratio(norm: np.ndarray, pool_rows, pool_seeds) -> Ratio:
        unscaled, scaled = np.moveaxis(pool_rows(norm), 1, 0)  # [seeds] each, paired

        def statistic(a, b, axis=-1):
            return pool_seeds(a, axis=axis) / pool_seeds(b, axis=axis)

        interval = stats.bootstrap(
            (unscaled, scaled), statistic, paired=True, vectorized=True, n_resamples=1000,
            batch=100, method="percentile", rng=rng,
        ).confidence_interval  # fmt: skip
        return Ratio(float(statistic(unscaled, scaled)), interval.low, interval.high)

    def rms(squares: np.ndarray, axis: int) -> np.ndarray:
        return np.sqrt(np.mean(squares, axis=axis))

    def mean_square(norm: np.ndarray) -> np.ndarray:
        return np.mean(norm.astype(float) ** 2, axis=-1)

    def median_row(norm: np.ndarray) -> np.ndarray:
        return np.median(norm.astype(float), axis=-1)

    dead = np.mean(rows.jacobian_norm < DEAD_BELOW, axis=(0, 2))
    entries = np.sqrt(np.mean(rows.query_norm.astype(float) ** 2, axis=(0, 2)) / key_dim)
    quantiles = np.quantile(np.moveaxis(rows.query_norm, 1, 0).reshape(len(RULES), -1),
                            (0.05, 0.5, 0.95), axis=-1).T  # fmt: skip
    return Flow(
        key_dim=key_dim,
        rms_query=ratio(rows.query_norm, mean_square, rms),
        rms_logits=ratio(rows.logits_norm, mean_square, rms),
        typical_query=ratio(rows.query_norm, median_row, np.median),
        typical_logits=ratio(rows.logits_norm, median_row, np.median),
        dead_rows=(float(dead[0]), float(dead[1])),
        query_quantiles=quantiles,
        rms_query_of=(float(entries[0]), float(entries[1])),
    )


def draw(flows: Sequence[Flow], length: int) -> Figure:
    """Ratios with the two laws, the gradients themselves, and the dead rows."""
    figure, ((left, middle, right),) = style.new_figure(1, 3, width=4.6, height=4.0)
    d = np.array([f.key_dim for f in flows], float)
    fine = np.geomspace(d[0], d[-1], 60)
    whole = np.unique(fine.round())
    unscaled = theory.gradient_rms(length, whole, 1, 1.0)
    scaled = theory.gradient_rms(length, whole, 1, whole**-0.5)
    for name, label, colour, marker in (
        ("rms_query", "∂/∂Q, RMS", style.PURPLE, "o"),
        ("rms_logits", "∂/∂logits, RMS", style.GREEN, "o"),
        ("typical_query", "∂/∂Q, median row", style.PURPLE, "s"),
        ("typical_logits", "∂/∂logits, median row", style.GREEN, "s"),
    ):
        ratios = [getattr(f, name) for f in flows]
        value = np.array([r.value for r in ratios])
        error = np.array([(r.value - r.low, r.high - r.value) for r in ratios]).T
        filled = colour if marker == "o" else "white"
        left.errorbar(d, value, np.maximum(error, 0), fmt=marker, ms=5, color=colour,
                      mfc=filled, label=label)  # fmt: skip
    left.plot(whole, unscaled.query / scaled.query, color=style.PURPLE, lw=1)
    left.plot(whole, unscaled.logits / scaled.logits, color=style.GREEN, lw=1)
    for power, at in ((0.25, unscaled.query / scaled.query),
                      (-0.25, unscaled.logits / scaled.logits)):  # fmt: skip
        left.plot(fine, at[-1] * (fine / d[-1]) ** power, color=style.GREY, lw=1, ls="--")
    left.annotate("$d^{1/4}$", (d[-2], 10), xytext=(0, 8), textcoords="offset points", fontsize=9)
    left.annotate("$d^{-1/4}$", (d[-2], 0.4), xytext=(0, 6), textcoords="offset points", fontsize=9)
    left.axhline(1, color=style.GREY, lw=0.6)
    left.set(xscale="log", yscale="log", xlabel="d_k", ylabel="unscaled / scaled",
             title="One softmax, four answers")  # fmt: skip
    left.legend(fontsize=8, frameon=False, loc="lower left")

    for r, rule in enumerate(RULES):
        colour, formula = style.arm_colour(rule), score_rule(rule, 1).formula
        low, median, high = np.array([f.query_quantiles[r] for f in flows]).T
        middle.fill_between(d, low, high, color=colour, alpha=0.15, lw=0)
        middle.plot(d, median, color=colour, marker="s", mfc="white", ms=5, lw=1,
                    label=f"{formula}: median row, 5–95 % shaded")  # fmt: skip
        rms = np.array([f.rms_query_of[r] for f in flows]) * np.sqrt(d)
        middle.plot(d, rms, color=colour, marker="o", ms=5, lw=1, label=f"{formula}: RMS")
    middle.set(xscale="log", yscale="log", xlabel="d_k", ylabel="‖∂/∂q‖ of a row",
               ylim=(1e-9, None), title="A few rows carry the unscaled gradient")  # fmt: skip
    middle.legend(fontsize=8, frameon=False, loc="lower left")

    for r, rule in enumerate(RULES):
        right.plot(d, [f.dead_rows[r] for f in flows], color=style.arm_colour(rule), marker="o",
                   ms=5, lw=1, label=score_rule(rule, 1).formula)  # fmt: skip
    right.axvline(theory.freezing_key_dim(length), color=style.GREY, lw=1, ls="--")
    right.annotate("d_k = 2 ln n", (theory.freezing_key_dim(length), 0.55), xytext=(4, 0),
                   textcoords="offset points", fontsize=9)  # fmt: skip
    right.set(xscale="log", xlabel="d_k", ylabel=f"fraction of rows with ‖J‖ < {DEAD_BELOW:g}",
              ylim=(-0.02, 1), title="Dead rows")  # fmt: skip
    right.legend(frameon=False)
    return figure


def run(request: Request) -> Findings:
    """Measure and answer."""
    seeds = request.number_of_seeds(2000, 200)
    flows = []
    for key_dim in KEY_DIMS[::2] if request.quick else KEY_DIMS:
        request.say(f"d_k = {key_dim}")
        key = jax.random.fold_in(study_key("gradient_flow"), key_dim)
        rows = measure(key, length=LENGTH, key_dim=key_dim, seeds=seeds)
        flows.append(flow(rows, key_dim))
    names = ("rms_query", "rms_logits", "typical_query", "typical_logits")

    def text(ratio: Ratio) -> str:
        return f"{number(ratio.value, 2)} [{number(ratio.low, 2)}, {number(ratio.high, 2)}]"

    table = [
        (str(f.key_dim), *(text(getattr(f, name)) for name in names),
         *(f"{dead:.1%}" for dead in f.dead_rows))
        for f in flows
    ]  # fmt: skip
    last = flows[-1]
    d = np.array([f.key_dim for f in flows], float)
    exact_unscaled = theory.gradient_rms(LENGTH, d, 1, 1.0)
    exact_scaled = theory.gradient_rms(LENGTH, d, 1, d**-0.5)
    header = ("d_k", "∂/∂Q, RMS", "∂/∂logits, RMS", "∂/∂Q, median row", "∂/∂logits, median row",
              "dead rows ×1", "dead rows ×1/√d_k")  # fmt: skip
    return Findings(
        title="Gradients through attention",
        answer=(
            f"Both stories are true, of different gradients. At d_k = {last.key_dim}, n = "
            f"{LENGTH}, the root mean square of ∂/∂Q is {number(last.rms_query.value, 2)} times "
            "*larger* without scaling (it grows as d^¼), that of ∂/∂logits "
            f"{number(1 / last.rms_logits.value, 2)} times smaller (d^-¼), and the typical row has "
            f"next to none of either: its ∂/∂logits is {number(last.typical_logits.value, 1)} of "
            f"the scaled one, and {last.dead_rows[0]:.0%} of the rows are dead (‖J‖ below "
            f"{DEAD_BELOW:g}; scaled: {last.dead_rows[1]:.0%}). What scaling changes is "
            "not how large the gradient is, but that every row has one."
        ),
        tables=(Table("Unscaled / scaled [95 % interval]", header, table),),
        figures={"gradient_flow": draw(flows, LENGTH)},
        captions={
            "gradient_flow": "Left: gradients without scaling over those with it, pooled in two "
            "ways (95 % bootstrap intervals; solid lines exact, dashed the laws). Middle: the norm "
            "of ∂/∂q itself, upstream gradients of unit variance. Right: rows that pass nothing "
            "back."
        },
        settings={
            "seeds": seeds,
            "length": LENGTH,
            "value_dim": 1,
            "key_dims": [int(x) for x in d],
        },
        numbers={
            "unscaled_over_scaled": [
                {"key_dim": f.key_dim, **{name: getattr(f, name)._asdict() for name in names}}
                for f in flows
            ],
            "exact_rms_query": exact_unscaled.query / exact_scaled.query,
            "exact_rms_logits": exact_unscaled.logits / exact_scaled.logits,
            "dead_rows": {r: [f.dead_rows[i] for f in flows] for i, r in enumerate(RULES)},
        },
    )
