"""The audit: every number that the article prints, against what its own settings give.

Each printed number is a `Claim`: how it is computed, at which settings, and its exact expectation
where there is one. The settings are drawn again with many seeds; a seed is one run of the code. The
rule, fixed beforehand:

    P = probability that one run prints a number at least as far out, two-sided, rounding allowed
    P ≥ 5 %     possible (a law, which has no scatter of its own: reproduced)
    P < 5 %     unlikely
    P < 1e-4    not from this code

With some 30 claims two or three true ones would fail at 5 %, none at 1e-4. P comes from counting
seeds, (1 + those as far out) / (1 + seeds) on either side, doubled. Means over thousands of rows
are normal, so their P is a normal tail; the extremes of a batch of independent grids have the P of
one grid to the power of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy import optimize, special, stats

from attention import theory
from experiments.analysis.tables import Table, number
from experiments.figures import style
from experiments.studies import head_dimension, saturation, score_variance
from experiments.studies.common import (
    Findings,
    Request,
    Spread,
    check_seeds,
    spread,
    study_key,
    with_interval,
)

POSSIBLE, NEVER = 0.05, 1e-4  # the two levels of the rule

COUNT, NORMAL, MAXIMUM, MINIMUM = "count", "normal", "maximum", "minimum"  # where P comes from

DIMS = (64, 128, 256, 512, 1024)  # of the article's §5


class Setting(NamedTuple):
    """One of the article's experiments, as the studies measure it."""

    text: str
    seeds: int  # in the full audit
    quick: int
    measure: Callable[[jax.Array, int], Any]  # (key, seeds)


class Claim(NamedTuple):
    """A printed number, and what is needed to settle it."""

    section: str
    quantity: str
    printed: str  # as printed: its last digit says how it was rounded
    setting: str = ""  # of SETTINGS; empty: nothing to measure
    read: Callable[[Any], np.ndarray] | None = None  # [seeds], [seeds, 2] for a ratio of the two
    theory: Callable[[], float] | None = None  # exact counterpart of the average
    average: str = "mean"  # what theory is an expectation of: mean, rms or median
    tail: str = COUNT
    law: bool = False  # a statement without scatter, such as Var = 64; its P allows no rounding
    logarithmic: bool = False  # spreads over decades
    sides_of_one: bool = False  # above or below 1 is what the number says
    contradicts: bool = False  # cannot be had from the numbers printed beside it
    exact_p: Callable[[], float] | None = None  # P where nothing needs drawing
    verdict: str = ""  # of what is not measured
    why: str = ""  # in plain words


class Audited(NamedTuple):
    """A claim with what was measured; None where there is nothing to measure."""

    claim: Claim
    sample: Spread | None  # over seeds, one run each
    average: float | None  # mean, rms or median over seeds, as the claim says
    exact: float | None
    probability: float | None
    verdict: str  # reproduced, possible, unlikely, not from this code, or the claim's own
    wrong_in: str  # size, direction, its own sums; empty where it is not wrong


def _scores(key: jax.Array, seeds: int) -> saturation.Rows:
    return saturation.measure(
        key, keys=50, key_dim=64, scales=(1.0,), queries=50, batch=32, seeds=seeds
    )


def _five(key: jax.Array, seeds: int) -> saturation.Rows:
    return saturation.measure(
        key, keys=5, key_dim=512, scales=(1.0, 512**-0.5), queries=5, seeds=seeds
    )


def _width(key_dim: int) -> Callable[[jax.Array, int], Any]:
    def measure(key: jax.Array, seeds: int) -> Any:
        return head_dimension.measure(key, key_dims=[key_dim], seeds=seeds)[key_dim]

    return measure


SETTINGS: dict[str, Setting] = {
    "scores": Setting("§2.1: 32 grids of 50 × 50 logits, d_k = 64, unscaled", 400, 40, _scores),
    "variance": Setting(
        "§3: 1000 independent pairs, d_k = 64",
        400,
        40,
        lambda key, seeds: score_variance.measure(key, key_dims=(64,), seeds=seeds),
    ),
    "five": Setting("§4.2: 5 queries, 5 keys, d_k = 512", 40_000, 400, _five),
    **{
        f"d{d}": Setting(f"§2.2 and §5: 10 queries, 10 keys, d_k = {d}", 24_000, 400, _width(d))
        for d in DIMS
    },
}


def _pooled_std(rows: saturation.Rows) -> np.ndarray:
    """Standard deviation over all logits of a seed, from the rows' own."""
    mean, std = rows.logit_mean[:, 0].astype(float), rows.logit_std[:, 0].astype(float)
    keys, rows_per_seed = 50, mean[0].size
    total = (std**2 + (mean - mean.mean((1, 2), keepdims=True)) ** 2).sum((1, 2)) * keys
    return np.sqrt(total / (rows_per_seed * keys - 1))


def _averaged(statistic: Callable, keys: int, key_dim: int, scale: float) -> float:
    return float(theory.averaged_over_queries(statistic, keys, key_dim, scale))


def _median_extreme(draws: int, key_dim: int) -> float:
    """Median of the largest of independent draws of q·k, given |q| normal."""

    def excess(x: float) -> float:
        above = theory.averaged_over_queries(lambda _, s: special.ndtr(-x / s), 2, key_dim, 1.0)
        return draws * float(above) - np.log(2)

    return optimize.root_scalar(excess, bracket=(0.0, 20 * np.sqrt(key_dim))).root


def _query_rms(key_dim: int, scale: float) -> float:
    return float(theory.gradient_rms(10, key_dim, key_dim, scale).query)


def _rms_ratio(key_dim: int) -> float:
    return _query_rms(key_dim, 1.0) / _query_rms(key_dim, key_dim**-0.5)


# The five rows of §6.2: loss and accuracy at epochs 1, 5, 9, 13, 17, scaled and unscaled, the line
# each was drawn from (at 0, 4, ... 16) and the standard deviation of the noise that was added.
_CURVES = (
    ((1.927, 1.567, 1.208, 0.848, 0.489), 2.0, -0.09, 0.02),
    ((1.967, 1.732, 1.492, 1.257, 1.017), 2.0, -0.06, 0.05),
    ((0.232, 0.369, 0.507, 0.644, 0.782), 0.2, 0.035, 0.01),
    ((0.224, 0.322, 0.412, 0.507, 0.602), 0.2, 0.025, 0.02),
)


def _curve_probability() -> float:
    """P that normal noise about the four lines leaves residuals as large: a χ² tail."""
    epochs = np.arange(0, 20, 4)
    residuals = [
        (np.array(printed) - start - slope * epochs) / noise
        for printed, start, slope, noise in _CURVES
    ]
    return float(stats.chi2.sf(np.sum(np.square(residuals)), 20))


def _section_5() -> tuple[Claim, ...]:
    printed = {
        64: ("0.831", "0.213", "8.2"),
        128: ("0.912", "0.208", "15.7"),
        256: ("0.956", "0.205", "28.3"),
        512: ("0.978", "0.203", "42.6"),
        1024: ("0.989", "0.201", "67.9"),
    }
    claims = []
    for column, name in enumerate(("unscaled", "scaled")):
        why = (
            "the largest of all 100 weights is 1 to three digits: one saturated row is enough"
            if column == 0
            else "tends to 1/5 with 10 keys; σ = 1 at every d_k, so there is no trend to print"
        )
        claims += [
            Claim(
                "5",
                f"largest of all, {name}, d_k {d}",
                values[column],
                f"d{d}",
                lambda rows, column=column: head_dimension.largest_of_all(rows)[:, column],
                why=why,
            )
            for d, values in printed.items()
        ]
    claims += [
        Claim(
            "5",
            f"∂/∂Q, unscaled/scaled, d_k {d}",
            values[2],
            f"d{d}",
            lambda rows: rows.query_std,
            lambda d=d: _rms_ratio(d),
            average="rms",
            logarithmic=True,
            sides_of_one=True,
            why="grows as d^¼, not as d^¾; called stability, but above 1 means exploding",
        )
        for d, values in printed.items()
    ]
    return tuple(claims)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "2.1",
        "smallest logit",
        "-25.3",
        "scores",
        lambda rows: rows.logit_min[:, 0].min(-1),
        lambda: -_median_extreme(32 * 50 * 50, 64),
        average="median",
        tail=MINIMUM,
        why="80,000 draws with standard deviation 8 reach further",
    ),
    Claim(
        "2.1",
        "largest logit",
        "24.1",
        "scores",
        lambda rows: rows.logit_max[:, 0].max(-1),
        lambda: _median_extreme(32 * 50 * 50, 64),
        average="median",
        tail=MAXIMUM,
        why="80,000 draws with standard deviation 8 reach further",
    ),
    Claim(
        "2.1",
        "standard deviation of the logits",
        "7.89",
        "scores",
        _pooled_std,
        lambda: 8.0,
        tail=NORMAL,
        why="right in size, some 3 standard errors low",
    ),
    Claim(
        "2.1",
        "mean largest weight",
        "0.832",
        "scores",
        lambda rows: rows.max_weight[:, 0].mean((1, 2)),
        lambda: _averaged(theory.expected_max_weight, 50, 64, 1.0),
        tail=NORMAL,
        why="1600 rows pin the mean down to ± .005",
    ),
    Claim(
        "2.1",
        "mean entropy",
        "0.671",
        "scores",
        lambda rows: rows.entropy[:, 0].mean((1, 2)),
        lambda: _averaged(theory.expected_entropy, 50, 64, 1.0),
        tail=NORMAL,
        why="too spread out, while the largest weight is too concentrated",
    ),
    Claim(
        "2.1",
        "rows with largest weight > 0.9",
        "0.285",
        "scores",
        lambda rows: rows.saturated[:, 0].mean((1, 2)),
        lambda: _averaged(theory.saturation_probability, 50, 64, 1.0),
        tail=NORMAL,
        why="fits no σ that the other numbers fit",
    ),
    Claim(
        "2.2",
        "std of ∂/∂Q, unscaled",
        "0.000003",
        "d512",
        lambda rows: rows.query_std[:, 0],
        lambda: _query_rms(512, 1.0),
        average="rms",
        logarithmic=True,
        why="a million times too small",
    ),
    Claim(
        "2.2",
        "std of ∂/∂Q, scaled",
        "0.000127",
        "d512",
        lambda rows: rows.query_std[:, 1],
        lambda: _query_rms(512, 512**-0.5),
        average="rms",
        logarithmic=True,
        why="thousands of times too small",
    ),
    Claim(
        "2.2",
        "unscaled / scaled, from those two",
        "0.024",
        "d512",
        lambda rows: rows.query_std,
        lambda: _rms_ratio(512),
        average="rms",
        logarithmic=True,
        sides_of_one=True,
        why="∂/∂Q is larger without scaling: the chain rule puts the scale in front",
    ),
    Claim(
        "2.2",
        "unscaled / scaled, as printed",
        "42.3",
        "d512",
        lambda rows: rows.query_std,
        lambda: _rms_ratio(512),
        average="rms",
        logarithmic=True,
        sides_of_one=True,
        contradicts=True,
        why="the two numbers above it give 0.024, and its formula would print 0.0",
    ),
    Claim(
        "3",
        "Var(q·k) at d_k = 64",
        "64",
        "variance",
        lambda result: result.variance[0, 0],
        lambda: 64.0,
        tail=NORMAL,
        law=True,
        why="exact: d_k independent products of variance 1",
    ),
    Claim(
        "3",
        "Var(q·k/√d_k)",
        "1",
        "variance",
        lambda result: result.variance[0, 1],
        lambda: 1.0,
        tail=NORMAL,
        law=True,
        why="exact, at any d_k",
    ),
    Claim(
        "4.2",
        "largest weight of row 0, unscaled",
        "0.945",
        "five",
        lambda rows: rows.max_weight[:, 0, 0, 0],
        lambda: _averaged(theory.expected_max_weight, 5, 512, 1.0),
        why="one row can do that; its four other weights can not, see below",
    ),
    Claim(
        "4.2",
        "spread of its other four logits",
        "0.14",
        "five",
        lambda rows: (rows.logit_second - rows.logit_min)[:, 0, 0, 0],
        logarithmic=True,
        why="weights .013 to .015 need four logits within .15 of each other, with σ = 22.6",
    ),
    Claim(
        "4.2",
        "largest weight of row 0, scaled",
        "0.213",
        "five",
        lambda rows: rows.max_weight[:, 1, 0, 0],
        lambda: _averaged(theory.expected_max_weight, 5, 512, 512**-0.5),
        why="needs logits with σ ≈ .06, where §3 derives 1",
    ),
    Claim(
        "4.2",
        "mean entropy, unscaled",
        "0.324",
        "five",
        lambda rows: rows.entropy[:, 0, 0].mean(-1),
        lambda: _averaged(theory.expected_entropy, 5, 512, 1.0),
        why="in the tail",
    ),
    Claim(
        "4.2",
        "mean entropy, scaled",
        "1.601",
        "five",
        lambda rows: rows.entropy[:, 1, 0].mean(-1),
        lambda: _averaged(theory.expected_entropy, 5, 512, 512**-0.5),
        why="99.5 % of ln 5: all but uniform, which σ = 1 is not",
    ),
    Claim(
        "4.2",
        "entropy, scaled / unscaled",
        "4.9",
        "five",
        lambda rows: np.stack([rows.entropy[:, s, 0].mean(-1) for s in (1, 0)], axis=-1),
        lambda: (
            _averaged(theory.expected_entropy, 5, 512, 512**-0.5)
            / _averaged(theory.expected_entropy, 5, 512, 1.0)
        ),
        logarithmic=True,
        why="not well posed: the ratio grows without bound in σ; its parts are not possible",
    ),
    *_section_5(),
    *(
        Claim("6.1", quantity, printed, verdict="not measurable", why=why)
        for quantity, printed, why in (
            ("training time", "-42 %", "no code, no data; measured by the study convergence"),
            ("accuracy", "+2.4 %", "no code, no data; measured by the study convergence"),
            ("gradient explosions", "-99 %", "no definition, no data"),
            ("largest batch", "+100 %", "a multiplication by a number changes no memory"),
            ("attention diversity", "+433 %", "from rounded .3 and 1.6; §4.2 gives +394 %"),
        )
    ),
    Claim(
        "6.2",
        "loss and accuracy curves",
        "20 numbers",
        exact_p=_curve_probability,
        why="a straight line plus noise, no training; and not even that line and noise",
    ),
    *(
        Claim("7.3, summary", quantity, printed, verdict=f"inherits §{source}", why=why)
        for quantity, printed, source, why in (
            ("stability", "42×", "2.2", "scaled over unscaled: vanishing"),
            ("stability", "42.6×", "5", "unscaled over scaled: exploding, under the same name"),
            ("diversity", "4.9×", "4.2", "an entropy ratio of 25 weights"),
            ("largest weight", ".978 against .203", "5", "neither can be had"),
        )
    ),
)


def measure(
    key: jax.Array,
    *,
    seeds: int | None = None,
    quick: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run every setting of the article with many seeds; independent draws.

    Args:
      key: typed PRNG key.
      seeds: of every setting; default: each setting's own number.
      quick: the setting's smaller number.
      say: progress.
    """
    measured = {}
    for i, (name, setting) in enumerate(SETTINGS.items()):
        own = setting.quick if quick else setting.seeds
        count = check_seeds(own if seeds is None else seeds)
        say(f"{setting.text}: {count} seeds ({i + 1} of {len(SETTINGS)})")
        measured[name] = setting.measure(jax.random.fold_in(key, i), count)
    return measured


def audit(measured: dict[str, Any], claims: tuple[Claim, ...] = CLAIMS) -> list[Audited]:
    """Settle every claim by the rule at the top of this file."""
    return [_settle(claim, measured) for claim in claims]


def _settle(claim: Claim, measured: dict[str, Any]) -> Audited:
    if claim.read is None:
        if claim.exact_p is None:
            return Audited(claim, None, None, None, None, claim.verdict, "")
        p = claim.exact_p()
        return Audited(claim, None, None, None, p, level(claim, p), "")
    values = np.asarray(claim.read(measured[claim.setting]), float)
    average = {"mean": np.mean, "median": np.median, "rms": _rms}[claim.average]
    if claim.tail in (MAXIMUM, MINIMUM):
        runs = values.max(-1) if claim.tail == MAXIMUM else values.min(-1)
        pooled = average(runs)
    elif values.ndim == 2:
        # A row that is exactly saturated has no gradient at all in float32; the ratio is inf.
        runs = values[:, 0] / np.maximum(values[:, 1], np.finfo(np.float32).tiny)
        pooled = average(values[:, 0]) / average(values[:, 1])
    else:
        runs, pooled = values, average(values)
    sample = spread(runs)
    p = probability(claim, values, runs)
    exact = claim.theory() if claim.theory else None
    wrong_in = _wrong_in(claim, p, sample.median)
    return Audited(claim, sample, float(pooled), exact, p, level(claim, p), wrong_in)


def probability(claim: Claim, values: np.ndarray, runs: np.ndarray) -> float:
    """P that one run prints a number at least as far out, two-sided.

    Args:
      claim: says what was printed and where P comes from.
      values: as read; [seeds, batch] for extremes.
      runs: [seeds], what a run would print.
    """
    low, high = rounding(claim)
    if claim.tail == NORMAL:
        z = max(low - runs.mean(), runs.mean() - high, 0) / runs.std(ddof=1)
        return float(2 * stats.norm.sf(z))
    batch = 1
    if claim.tail in (MAXIMUM, MINIMUM):
        batch, runs = values.shape[-1], values.ravel()
    # The largest of a batch is below x when every grid's is: that side is a power.
    below = (1 + np.sum(runs <= high)) / (1 + runs.size)
    above = (1 + np.sum(runs >= low)) / (1 + runs.size)
    if claim.tail == MAXIMUM:
        below, above = below**batch, 1 - (1 - min(above, 1)) ** batch
    if claim.tail == MINIMUM:
        below, above = 1 - (1 - min(below, 1)) ** batch, above**batch
    return float(min(1, 2 * min(below, above)))


def rounding(claim: Claim) -> tuple[float, float]:
    """The numbers that would have been printed as this one; a law stands for itself alone."""
    value = float(claim.printed)
    decimals = len(claim.printed.partition(".")[2])
    half = 0.0 if claim.law else 0.5 * 10.0**-decimals
    return value - half, value + half


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


def level(claim: Claim, p: float) -> str:
    """The verdict that the rule gives."""
    if p >= POSSIBLE:
        return "reproduced" if claim.law else "possible"
    return "unlikely" if p >= NEVER else "not from this code"


def _wrong_in(claim: Claim, p: float, median: float) -> str:
    if claim.contradicts:
        return "its own sums"
    if p >= POSSIBLE:
        return ""
    if claim.sides_of_one and (float(claim.printed) > 1) != (median > 1):
        return "direction"
    return "size" if p < NEVER else ""


# --- The report -----------------------------------------------------------------------------------


def implied_std(statistic: Callable, keys: int, key_dim: int, value: float) -> float:
    """The σ = scale·√d_k at which a row statistic would average to a printed value."""

    low, high = 0.02, 30.0
    table = saturation.tabulated(statistic, keys, low, high)

    def excess(std: float) -> float:
        return _averaged(table, keys, key_dim, std / np.sqrt(key_dim)) - value

    return optimize.root_scalar(excess, bracket=(low, high)).root


def implied_stds() -> dict[str, dict[str, float]]:
    """The σ that each number of §2.1 and §4.2 would need."""
    unit_extreme = _median_extreme(32 * 50 * 50, 64) / 8
    return {
        "2.1": {
            "standard deviation": 7.89,
            "largest weight": implied_std(theory.expected_max_weight, 50, 64, 0.832),
            "entropy": implied_std(theory.expected_entropy, 50, 64, 0.671),
            "saturated rows": implied_std(theory.saturation_probability, 50, 64, 0.285),
            "range": (25.3 + 24.1) / 2 / unit_extreme,
        },
        "4.2 scaled": {
            "largest weight": implied_std(theory.expected_max_weight, 5, 512, 0.213),
            "entropy": implied_std(theory.expected_entropy, 5, 512, 1.601),
        },
    }


def contradictions(stds: dict[str, dict[str, float]]) -> list[str]:
    """What the article's numbers say of each other, in plain words."""
    first, second = stds["2.1"], stds["4.2 scaled"]
    five = ", ".join(f"{value:.1f} ({name})" for name, value in first.items())
    two = " and ".join(f"{value:.3f} ({name})" for name, value in second.items())
    return [
        f"§2.1 prints five statistics of one draw. They need five different spreads: {five}. "
        "The settings give 8.",
        f"§4.2, scaled, needs {two}; §3 derives 1.",
        "§2.2's 42.3 is the scaled over the unscaled gradient (unscaled vanishes), §5's 42.6 the "
        "unscaled over the scaled (unscaled explodes). Both are called stability.",
        "§2.2's 42.3 cannot be had from the two numbers above it, which give 0.024.",
        "At d_k = 512 the largest unscaled weight is .945 in §4.2 and .978 in §5: one row's of "
        "five keys, and the largest of 100 weights over ten. Different statistics under one name.",
        "Diversity grows by 394 % in §4.2 (1.601/.324) and by 433 % in §6.1 (1.6/.3).",
        "§5's scaled column tends to 1/5; with ten keys nothing but 1/10 is uniform.",
    ]


TRAPS = (
    "Which gradient decides the answer. The loss is the sum of the outputs and the gradient that "
    "of Q, so the scaled one carries a factor 1/√d_k from the chain rule: it is smaller, although "
    "scaled attention saturates less. The study `gradient_flow` takes the gradients apart.",
    "A pooled standard deviation hides a heavy tail: without scaling a few rows carry all of the "
    "gradient. Quantiles over rows and seeds show it.",
    "One draw is no measurement: most of these numbers scatter by tens of per cent from seed to "
    "seed. Print an interval.",
    "The article's 512 is a model width used as if it were one head. In the paper d_k is 64, so "
    "the relevant σ is 8, not 22.6.",
    "A finite fill such as -1e9 for hidden keys becomes -inf in half precision, and a row that "
    "sees nothing then attends uniformly, or gives NaN.",
    "Dropout is applied before the weights are returned: they no longer sum to one, and their "
    "entropy is not that of the attention.",
    "A logarithm with 1e-8 inside is no entropy: it is off where weights are small.",
    "That scaling is what made 96 layers possible was never ablated.",
)

_COLOURS = {
    "reproduced": style.GREEN,
    "possible": style.BLUE,
    "unlikely": style.ORANGE,
    "not from this code": style.VERMILLION,
}


def draw(audited: list[Audited]) -> Figure:
    """A forest plot: where each printed number lies, in units of the measured interval."""
    shown = [a for a in audited if a.sample is not None]
    figure, ((axis,),) = style.new_figure(1, 1, width=11.5, height=0.27 * len(shown) + 1.2)
    for row, found in enumerate(shown):
        low, position, high = _positions(found)
        colour = _COLOURS[found.verdict]
        axis.plot((low, high), (row, row), color=style.GREY, lw=5, alpha=0.45,
                  solid_capstyle="butt")  # fmt: skip
        axis.plot(0, row, "|", color="black", ms=8)
        axis.plot(position, row, "D", color=colour, ms=5.5, clip_on=False)
        sample = found.sample
        assert sample is not None
        axis.annotate(
            f"{found.claim.printed}   |   {with_interval(sample)}",
            (1.01, row), xycoords=("axes fraction", "data"), va="center", fontsize=8,
        )  # fmt: skip
    axis.annotate("printed   |   measured [5 %, 95 %]", (1.01, -1),
                  xycoords=("axes fraction", "data"), va="center", fontsize=8, weight="bold",
                  annotation_clip=False)  # fmt: skip
    axis.set_xscale("symlog", linthresh=2, linscale=1.2)
    axis.set(
        ylim=(len(shown) - 0.4, -0.6),
        xlabel="distance of the printed number from the measured median, in half-widths of the "
        "5–95 % interval over seeds",
        title="The article's numbers against many runs of its own settings",
    )
    axis.set_yticks(
        range(len(shown)), [f"§{a.claim.section}  {a.claim.quantity}" for a in shown], fontsize=8
    )
    axis.set_xticks([-100, -10, -2, -1, 0, 1, 2, 10, 100],
                    ["-100", "-10", "-2", "-1", "0", "1", "2", "10", "100"])  # fmt: skip
    axis.minorticks_off()
    axis.grid(axis="y", visible=False)
    handles = [
        Line2D([], [], color=colour, marker="D", ls="", ms=5.5, label=name)
        for name, colour in _COLOURS.items()
    ]
    handles.append(Line2D([], [], color=style.GREY, lw=5, alpha=0.45, label="5–95 % of seeds"))
    axis.legend(handles=handles, fontsize=8, loc="lower left", framealpha=0.9)
    return figure


def _positions(found: Audited) -> tuple[float, float, float]:
    """Interval ends and the printed number, in half-widths from the median."""
    claim, sample = found.claim, found.sample
    assert sample is not None
    low, high = rounding(claim)
    # On a logarithmic scale, a sample that touches zero is cut there.
    floor = 1e-6
    scale = (lambda x: np.log(max(x, floor))) if claim.logarithmic else (lambda x: x)
    ends = scale(sample.low), scale(sample.median), scale(sample.high)
    half = max((ends[2] - ends[0]) / 2, 0.0 if claim.logarithmic else (high - low) / 2, 1e-9)
    return tuple((x - ends[1]) / half for x in (ends[0], scale(float(claim.printed)), ends[2]))


def table(audited: list[Audited]) -> Table:
    """The claims as a table."""
    rows = [
        (
            f"§{a.claim.section} {a.claim.quantity}",
            a.claim.printed,
            with_interval(a.sample) if a.sample else "–",
            "–" if a.exact is None else number(a.exact),
            "–" if a.probability is None else _probability_text(a.probability),
            a.verdict,
            a.wrong_in or "–",
        )
        for a in audited
    ]
    header = ("claim", "printed", "median [5 %, 95 %]", "exact", "P", "verdict", "wrong in")
    return Table("What the article prints, and what its settings give", header, rows)


def averages_table(audited: list[Audited]) -> Table:
    """Measured averages beside the exact ones: whether the measurement itself can be trusted."""
    rows = [
        (
            f"§{a.claim.section} {a.claim.quantity}",
            a.claim.average,
            number(a.average, 4),
            number(a.exact, 4),
            f"{a.average / a.exact - 1:+.2%}",
        )
        for a in audited
        if a.average is not None and a.exact is not None
    ]
    header = ("claim", "average", "measured", "exact", "apart")
    return Table("Averages over seeds against exact theory", header, rows)


def _probability_text(p: float) -> str:
    if p < 1e-12:
        return "< 1e-12"
    return f"{p:.0e}".replace("e-0", "e-") if p < 1e-3 else f"{p:.2g}"


def tally(audited: list[Audited]) -> dict[str, int]:
    """How many claims got each verdict."""
    counts: dict[str, int] = {}
    for a in audited:
        verdict = "inherited" if a.verdict.startswith("inherits") else a.verdict
        counts[verdict] = counts.get(verdict, 0) + 1
    return counts


def run(request: Request) -> Findings:
    """Measure, settle, explain."""
    if request.seeds is not None:
        check_seeds(request.seeds)
    measured = measure(
        study_key("article"), seeds=request.seeds, quick=request.quick, say=request.say
    )
    audited = audit(measured)
    counts = tally(audited)
    stds = implied_stds()
    seeds = {
        name: request.seeds or (setting.quick if request.quick else setting.seeds)
        for name, setting in SETTINGS.items()
    }
    tallied = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    answer = (
        "The derivation stands: Var(q·k) = d_k, so dividing by √d_k keeps the logits' spread at 1 "
        "whatever the width, and attention out of the frozen regime that begins at "
        f"σ = √(2 ln n). Most of the numbers around it do not: of {len(audited)}, {tallied}."
    )
    why = [f"- §{a.claim.section} {a.claim.quantity} ({a.claim.printed}): {a.claim.why}."
           for a in audited]  # fmt: skip
    notes = "\n\n".join(
        [
            "## How verdicts are reached",
            "P is the probability that one run of the code prints a number at least as far out, "
            "two-sided, with rounding allowed. P ≥ 5 %: possible (laws: reproduced). P < 5 %: "
            "unlikely. P < 1e-4: not from this code. Among some 30 true claims two would be called "
            "unlikely, and none impossible. Counting cannot show a P below 2/(seeds + 1). Exact "
            "values are of the average named beside them; the "
            "exact RMS of ∂/∂Q leaves out the direction along q, one part in d_k.",
            "## Claim by claim",
            "\n".join(why),
            "## Where the article contradicts itself",
            "\n".join(f"- {line}" for line in contradictions(stds)),
            "## Traps in its code",
            "\n".join(f"- {line}" for line in TRAPS),
        ]
    )
    return Findings(
        title="The article, number by number",
        answer=answer,
        tables=(table(audited), averages_table(audited)),
        figures={"article": draw(audited)},
        captions={
            "article": "Each printed number (diamond) against the 5–95 % interval over seeds "
            "(bar) of the quantity its code computes; distances in half-widths of the interval, "
            "on a logarithmic scale for gradients and ratios."
        },
        settings={"seeds": seeds, **{name: s.text for name, s in SETTINGS.items()}},
        numbers={
            "claims": [
                {
                    "section": a.claim.section,
                    "quantity": a.claim.quantity,
                    "printed": a.claim.printed,
                    "measured": a.sample._asdict() if a.sample else None,
                    "average_kind": a.claim.average if a.sample else None,
                    "average": a.average,
                    "exact": a.exact,
                    "probability": a.probability,
                    "verdict": a.verdict,
                    "wrong_in": a.wrong_in,
                    "why": a.claim.why,
                }
                for a in audited
            ],
            "tally": counts,
            "implied_std": stds,
        },
        notes=notes,
    )
