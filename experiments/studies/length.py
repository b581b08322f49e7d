"""Finding one key among n: does a constant scale last as the context grows?

A needle is a key whose scaled logit is GAP, above n - 1 random keys whose logits have standard
deviation 1. A scale that grows with n multiplies both; three are compared, equal at n = REFERENCE:

    none  1              √log  √(ln n / ln n₀)              log  ln n / ln n₀

Random logits keep their regime when σ grows as √ln n; a needle keeps its weight only when its logit
grows as ln n (Chiang & Cholak 2022; Nakanishi 2025 learns the factor).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

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

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
KEY_DIM = 64
QUERIES = 4
GAP = 6.0
REFERENCE = 64
GROWTHS = {
    "none": lambda n: 1.0 + 0 * np.log(n),
    "√log": lambda n: np.sqrt(np.log(n) / np.log(REFERENCE)),
    "log": lambda n: np.log(n) / np.log(REFERENCE),
}
COLOURS = (style.BLUE, style.GREEN, style.ORANGE)


class Needle(NamedTuple):
    """One n; axes [seeds, growths], means over queries."""

    weight: np.ndarray  # of the needle
    found: np.ndarray  # fraction of queries where no weight is larger
    entropy: np.ndarray  # nats, of the row with the needle
    haystack_entropy: np.ndarray  # nats, of the n random keys alone


def measure(
    key: jax.Array, *, length: int, seeds: int, key_dim: int = KEY_DIM, queries: int = QUERIES
) -> Needle:
    """Attend to one needle and n - 1 random keys, under each growth of the scale.

    Args:
      key: typed PRNG key.
      length: n.
      seeds: how many.
      key_dim: d_k.
      queries: per seed, each with keys and a needle of its own.
    """
    growths = jnp.array([growth(length) for growth in GROWTHS.values()], jnp.float32)

    def one(seed_key: jax.Array) -> dict[str, jax.Array]:
        q = normal(seed_key, "query", (queries, 1, 1, key_dim))
        k = normal(seed_key, "key", (queries, length, 1, key_dim))
        # Along q, so that q·needle/√d_k is GAP; across q, a random key like any other.
        across = normal(seed_key, "needle", (queries, 1, 1, key_dim))
        along = (GAP * np.sqrt(key_dim) - jnp.sum(across * q, -1, keepdims=True)) / jnp.sum(
            q**2, -1, keepdims=True
        )
        with_needle = k.at[:, :1].set(across + along * q)

        def per_growth(growth: jax.Array) -> dict[str, jax.Array]:
            scale = growth / np.sqrt(key_dim)
            seen = dot_product_attention(q, with_needle, k[..., :1], scale=scale)
            hay = dot_product_attention(q, k, k[..., :1], scale=scale)
            weight = seen.weights[..., 0]
            largest = seen.weights.max(-1)
            return {
                "weight": weight.mean(),
                "found": jnp.mean(weight == largest),
                "entropy": attention_statistics(seen.logits).entropy.mean(),
                "haystack_entropy": attention_statistics(hay.logits).entropy.mean(),
            }

        return jax.vmap(per_growth)(growths)

    chunk = max(1, 4_000_000 // (queries * length * key_dim))
    return Needle(**over_seeds(one, jax.random.fold_in(key, length), seeds, chunk))


def needle_law(length: ArrayLike, growth: ArrayLike) -> np.ndarray:
    """The weight that theory gives the needle, averaged over |q| (its logit does not vary)."""

    def weight(keys: np.ndarray, std: np.ndarray) -> np.ndarray:
        return theory.planted_weight(keys, GAP * np.asarray(growth)[..., None], std)

    return theory.averaged_over_queries(weight, length, KEY_DIM, growth / np.sqrt(KEY_DIM))


def draw(measured: dict[int, Needle]) -> Figure:
    """The needle's weight and the haystack's entropy against n."""
    figure, ((left, right),) = style.new_figure(1, 2, width=5.2, height=3.8)
    n = np.array(list(measured), float)
    fine = np.unique(np.geomspace(n[0], n[-1], 25).round())
    for g, ((name, growth), colour) in enumerate(zip(GROWTHS.items(), COLOURS, strict=True)):
        factor = growth(fine)
        weight = np.array([m.weight[:, g] for m in measured.values()])
        entropy = np.array([m.haystack_entropy[:, g] for m in measured.values()])
        for axis, values, unit, exact in (
            (left, weight, np.ones_like(n), needle_law(fine, factor)),
            (right, entropy, np.log(n), theory.averaged_over_queries(
                theory.expected_entropy, fine, KEY_DIM, factor / np.sqrt(KEY_DIM)) / np.log(fine)),
        ):  # fmt: skip
            error = 2 * values.std(-1, ddof=1) / np.sqrt(values.shape[-1]) / unit
            axis.plot(fine, exact, color=colour, lw=1)
            axis.errorbar(n, values.mean(-1) / unit, error, fmt="o", ms=4, color=colour,
                          label=f"scale × {_formula(name)}")  # fmt: skip
    left.set(xscale="log", xlabel="n", ylabel="weight of the needle", ylim=(0, 1),
             title="One key to find: log keeps it")  # fmt: skip
    right.set(xscale="log", xlabel="n", ylabel="entropy / ln n", ylim=(0, 1),
              title="Random keys alone: √log keeps the regime")  # fmt: skip
    left.legend(frameon=False, fontsize=8)
    return figure


def _formula(name: str) -> str:
    return {"none": "1", "√log": "√(ln n / ln n₀)", "log": "ln n / ln n₀"}[name]


def run(request: Request) -> Findings:
    """Measure and answer."""
    seeds = request.number_of_seeds(100, 20)
    lengths: Sequence[int] = LENGTHS[:7:2] if request.quick else LENGTHS
    measured = {}
    for n in lengths:
        request.say(f"n = {n}")
        measured[n] = measure(study_key("length"), length=n, seeds=seeds)
    rows, numbers = [], []
    for n, m in measured.items():
        weight = [spread(v) for v in m.weight.T]
        normalized = [spread(v / np.log(n)) for v in m.haystack_entropy.T]
        law = [needle_law(n, g(n)) for g in GROWTHS.values()]
        rows.append(
            (
                str(n),
                *(f"{with_error(w)} ({number(x)})" for w, x in zip(weight, law, strict=True)),
                *(f"{e.mean:.3f}" for e in normalized),
            )
        )
        numbers.append(
            {
                "length": n,
                **{
                    name: {
                        "needle_weight": {**weight[g]._asdict(), "law": law[g]},
                        "found": spread(m.found[:, g])._asdict(),
                        "entropy_with_needle": spread(m.entropy[:, g])._asdict(),
                        "haystack_entropy_over_ln_n": normalized[g]._asdict(),
                    }
                    for g, name in enumerate(GROWTHS)
                },
            }
        )
    first, last = measured[lengths[0]], measured[lengths[-1]]
    header = ("n", *(f"needle, {g} (law)" for g in GROWTHS), *(f"entropy, {g}" for g in GROWTHS))
    return Findings(
        title="Length",
        answer=(
            f"1/√d_k settles the width of the head, not the length of the context. A needle with "
            f"weight {number(first.weight.mean())} among {lengths[0]} keys keeps "
            f"{number(last.weight[:, 0].mean(), 2)} among {lengths[-1]} under the constant scale, "
            f"{number(last.weight[:, 1].mean(), 2)} when the scale grows as √ln n, and "
            f"{number(last.weight[:, 2].mean(), 2)} when it grows as ln n. Random keys alone keep "
            "their entropy relative to ln n under √ln n: which growth is right depends on whether "
            "there is something to find."
        ),
        tables=(
            Table(
                "Weight of the needle, mean ± standard error, and entropy / ln n of random keys",
                header,
                rows,
            ),
        ),
        figures={"length": draw(measured)},
        captions={
            "length": f"Left: weight of a key whose logit is {GAP:g} at n₀ = {REFERENCE}, against "
            "the number of keys (lines: the law for n large and σ < σ_c). Right: entropy of random "
            "keys without a needle (lines: exact)."
        },
        settings={
            "seeds": seeds,
            "queries": QUERIES,
            "key_dim": KEY_DIM,
            "gap": GAP,
            "reference": REFERENCE,
            "lengths": list(lengths),
        },
        numbers={"by_length": numbers},
    )
