"""Comparing two arms seed by seed: differences, tests, equivalence. NumPy arrays, in float64.

A lane that diverged is never dropped. The rule is the caller's and is stated in the open:
`clip_at_worst` gives its values the worst rank allowed (a loss its initial value, say); the tests
refuse non-finite values rather than guess.
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

EXACT_PAIRS = 20  # 2^19 sign patterns up to a global flip: 4 MB and about 30 ms
LARGEST = 1e150  # in size; the squares of larger values are no float64
_AT_ONCE = 2**21  # resampled values: some 100 MB

Better = Literal["lower", "higher"]


class PairedComparison(NamedTuple):
    """Arm A against arm B over N seeds; differences are A - B, in the units of the metric."""

    pairs: int  # N
    mean_difference: float
    low: float  # BCa bootstrap interval of the mean difference
    high: float
    median_difference: float
    probability_better: float  # share of seeds on which A is better than B, a tie counting half
    p_value: float  # two-sided sign-flip test of the mean difference
    exact: bool  # every sign pattern was counted; otherwise seeded Monte Carlo
    wilcoxon_p_value: float  # two-sided signed-rank test, the second opinion


class Equivalence(NamedTuple):
    """Two one-sided t tests that the mean difference A - B lies within the margin."""

    equivalent: bool  # p_value < alpha
    p_value: float  # the larger of the two one-sided ones
    mean_difference: float
    low: float  # two-sided interval of level 1 - 2 alpha: inside the margin iff equivalent
    high: float


def clip_at_worst(values: ArrayLike, worst: ArrayLike, *, better: Better) -> NDArray[np.float64]:
    """Give diverged lanes the worst rank: values no worse than `worst`, and it where not finite.

    Args:
      values: any shape, NaN and infinities allowed.
      worst: finite, broadcastable to values: the initial loss for a loss, 0 for an accuracy.
      better: "lower" or "higher", which values are the better ones.

    Raises:
      ValueError: worst is not finite, or better is neither word.
    """
    value, limit = np.asarray(values, np.float64), np.asarray(worst, np.float64)
    if not np.all(np.isfinite(limit)):
        raise ValueError(f"worst must be finite, got {worst!r}")
    clip = np.minimum if _lower_is_better(better) else np.maximum
    return np.where(np.isfinite(value), clip(value, limit), limit)


def paired_comparison(
    a: ArrayLike,
    b: ArrayLike,
    *,
    better: Better,
    confidence: float = 0.95,
    resamples: int = 9999,
    seed: int = 0,
) -> PairedComparison:
    """Compare two arms on the same seeds.

    The sign-flip test asks how often |Σ ±dᵢ| reaches |Σ dᵢ| when each difference may as well have
    had the other sign. Up to 20 non-zero differences it counts all 2ᴺ patterns, so the smallest p
    is 2/2ᴺ; above, it draws them and counts the observed one in: (k + 1)/(resamples + 1), Phipson &
    Smyth 2010. Sums that differ by rounding alone count as
    equal, so p depends on neither the order of the seeds nor that of the arms. The Wilcoxon test is
    the same count on signed ranks, zeros left out: exact with ties, where `scipy.stats.wilcoxon`
    takes seconds or approximates.

    The interval is the bias-corrected and accelerated bootstrap (Efron 1987). When every
    difference is the same it is that point; for a single pair it is (-inf, inf).

    Args:
      a, b: [N], one value per seed, in the same order of seeds; finite, at most LARGEST in size.
      better: "lower" or "higher", which values are the better ones.
      confidence: level of the interval.
      resamples: of the bootstrap, and of the sign flips where they are drawn.
      seed: of both.

    Raises:
      ValueError: shapes differ, nothing to compare, or a value out of range.
    """
    difference = _differences(a, b)
    sign = -1.0 if _lower_is_better(better) else 1.0
    low, high = _bca_interval(difference, confidence, resamples, seed)
    p_value, exact = _sign_flip_p_value(difference, resamples, seed)
    nonzero = difference[difference != 0]
    signed_ranks = np.sign(nonzero) * stats.rankdata(np.abs(nonzero))
    return PairedComparison(
        pairs=difference.size,
        mean_difference=float(np.mean(difference)),
        low=low,
        high=high,
        median_difference=float(np.median(difference)),
        probability_better=float(np.mean((1.0 + np.sign(sign * difference)) / 2.0)),
        p_value=p_value,
        exact=exact,
        wilcoxon_p_value=_sign_flip_p_value(signed_ranks, resamples, seed)[0],
    )


def holm(p_values: ArrayLike) -> NDArray[np.float64]:
    """Holm's (1979) step-down correction: p values that control the family-wise error.

    p̃₍ᵢ₎ = max_{j ≤ i} min(1, (m - j + 1) p₍ⱼ₎), returned in the order and shape of the input.

    Raises:
      ValueError: a p value is not in [0, 1]; NaN is none.
    """
    p = np.asarray(p_values, np.float64)
    if not np.all((p >= 0) & (p <= 1)):
        raise ValueError(f"p_values must be in [0, 1], got {p_values!r}")
    order = np.argsort(p, axis=None, kind="stable")
    adjusted = np.empty(p.size)
    stepped = np.arange(p.size, 0, -1) * p.ravel()[order]
    adjusted[order] = np.minimum(np.maximum.accumulate(stepped), 1.0)
    return adjusted.reshape(p.shape)


def equivalence_test(
    a: ArrayLike, b: ArrayLike, margin: float, *, alpha: float = 0.05
) -> Equivalence:
    """Two one-sided paired t tests (Schuirmann 1987) of |mean(A - B)| < margin.

    p = max(P(T > (d̄ + margin)/se), P(T < (d̄ - margin)/se)), T of Student's distribution with
    N - 1 degrees of freedom. Identical differences have se = 0, so p is 0 inside the margin and 1
    on it or outside. A single pair shows nothing: p is 1.

    Args:
      a, b: as in `paired_comparison`.
      margin: positive, in the units of the metric, fixed before the data were seen.
      alpha: level of the verdict.

    Raises:
      ValueError: as in `paired_comparison`; margin or alpha out of range.
    """
    if not 0 < margin < np.inf:
        raise ValueError(f"margin must be positive and finite, got {margin!r}")
    if not 0 < alpha < 0.5:
        raise ValueError(f"alpha must be between 0 and 0.5, got {alpha!r}")
    difference = _differences(a, b)
    mean = float(np.mean(difference))
    if difference.size == 1:
        return Equivalence(False, 1.0, mean, -np.inf, np.inf)
    centre, spread, standardised = _standardised(difference)
    if spread == 0:
        inside = bool(abs(centre) < margin)
        return Equivalence(inside, 1.0 - inside, mean, mean, mean)
    student = stats.t(difference.size - 1)
    error = spread * np.std(standardised, ddof=1) / np.sqrt(difference.size)
    with np.errstate(divide="ignore", over="ignore"):  # of an error next to nothing
        least, largest = (mean + margin) / error, (mean - margin) / error
    p_value = max(student.sf(least), student.cdf(largest))
    reach = student.ppf(1 - alpha) * error
    return Equivalence(
        bool(p_value < alpha), float(p_value), mean, float(mean - reach), float(mean + reach)
    )


def _lower_is_better(better: Better) -> bool:
    if better not in ("lower", "higher"):
        raise ValueError(f"better must be 'lower' or 'higher', got {better!r}")
    return better == "lower"


def _differences(a: ArrayLike, b: ArrayLike) -> NDArray[np.float64]:
    """A - B in float64, [N], after the checks that every paired test shares."""
    first, second = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if first.shape != second.shape or first.ndim != 1 or first.size == 0:
        raise ValueError(
            "a and b must hold one value per seed in the same order, both of shape [N], N >= 1, "
            f"got shapes {first.shape} and {second.shape}"
        )
    for name, values in (("a", first), ("b", second)):
        if not np.all(np.isfinite(values)):
            raise ValueError(
                f"{name} must be finite, got {np.count_nonzero(~np.isfinite(values))} diverged "
                f"value(s) of {values.size}: rank them with clip_at_worst first"
            )
        if np.any(np.abs(values) > LARGEST):
            raise ValueError(
                f"{name} must be at most {LARGEST:g} in size, got {np.abs(values).max():g}"
            )
    return first - second


def _standardised(
    differences: NDArray[np.float64],
) -> tuple[float, float, NDArray[np.float64]]:
    """Centre, range and the differences at centre 0 and range 1, where no rounding can blur them.

    All the same, they have the range 0, and their centre is exactly their value.
    """
    spread = float(np.ptp(differences))
    if spread == 0:
        return float(differences[0]), 0.0, np.zeros_like(differences)
    centre = float(np.mean(differences))
    return centre, spread, (differences - centre) / spread


def _sign_flip_p_value(
    differences: NDArray[np.float64], resamples: int, seed: int
) -> tuple[float, bool]:
    """Two-sided p value of the sum under independent sign flips, and whether it is exact."""
    # Zeros keep their sign either way; sorted magnitudes make the draws blind to order and arms.
    magnitude = np.sort(np.abs(differences[differences != 0]))
    if magnitude.size == 0:
        return 1.0, True
    exact = magnitude.size <= EXACT_PAIRS
    if exact:
        # Not permutation_test: it takes 2.6 s for 18 pairs. Flipping every sign keeps |sum|, so
        # the first one stays positive.
        sums = magnitude[:1]
        for value in magnitude[1:]:
            sums = np.concatenate((sums + value, sums - value))
    else:
        sums = _drawn_sums(magnitude, resamples, seed)
    observed = abs(differences.sum()) - 1e-12 * magnitude.sum()
    extreme = np.count_nonzero(np.abs(sums) >= observed)
    observed_too = 0 if exact else 1
    return float((extreme + observed_too) / (sums.size + observed_too)), exact


def _drawn_sums(magnitude: NDArray[np.float64], draws: int, seed: int) -> NDArray[np.float64]:
    """[draws]: Σ ±dᵢ under random signs. permutation_test would sort its draws: a hundred times."""
    rng, batch = np.random.default_rng(seed), _batch(magnitude)
    sizes = [min(batch, draws - start) for start in range(0, draws, batch)]
    return np.concatenate(
        [rng.choice((-1.0, 1.0), (size, magnitude.size)) @ magnitude for size in sizes]
    )


def _bca_interval(
    differences: NDArray[np.float64], confidence: float, resamples: int, seed: int
) -> tuple[float, float]:
    """BCa bootstrap interval of the mean."""
    if differences.size == 1:
        return -np.inf, np.inf
    centre, spread, standardised = _standardised(differences)
    if spread == 0:
        return centre, centre
    interval = stats.bootstrap(
        (standardised,),
        np.mean,
        confidence_level=confidence,
        n_resamples=resamples,
        batch=_batch(differences),
        method="BCa",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(centre + spread * interval.low), float(centre + spread * interval.high)


def _batch(values: NDArray[np.float64]) -> int:
    """How many resamples to hold at once."""
    return max(1, _AT_ONCE // values.size)
