"""Statistics for comparing two arms seed by seed. Pure functions of NumPy arrays, in float64.

A lane that diverged is never dropped. The rule is the caller's and is stated in the open:
`clip_at_worst` gives its values the worst rank allowed (a loss its initial value, say); the tests
refuse non-finite values rather than guess; a time that was never reached is censored.
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

EXACT_PAIRS = 20  # 2^19 sign patterns up to a global flip: 4 MB and about 30 ms

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


class CensoredTimes(NamedTuple):
    """Times to an event that need not have happened."""

    time: NDArray[np.float64]  # [...], steps; the last step watched where not reached
    reached: NDArray[np.bool_]  # [...]


class KaplanMeier(NamedTuple):
    """A survival curve: a step function, constant from each time to the next."""

    time: NDArray[np.float64]  # [U + 1], steps; 0, then every distinct time, censored ones too
    survival: NDArray[np.float64]  # [U + 1], share of lanes still short of the threshold after it
    median: float  # steps; the first time with survival <= 1/2, inf if there is none


class RestrictedMean(NamedTuple):
    """Mean time, any time beyond the horizon counting as the horizon. All in steps."""

    mean: float
    standard_error: float  # Greenwood; inf for a single lane
    low: float  # normal interval, cut to [0, horizon]
    high: float


class LogRank(NamedTuple):
    """Log-rank test of equal survival curves."""

    statistic: float  # standard normal under the null; positive when A reaches sooner
    p_value: float  # two-sided


class LearningRateSensitivity(NamedTuple):
    """How much a wrong learning rate costs. It means nothing without the best loss beside it."""

    sensitivity: NDArray[np.float64]  # [...], units of the loss
    best_loss: NDArray[np.float64]  # [...], the loss at the best rate, at most the initial loss
    best_index: NDArray[np.intp]  # [...], its place on the axis of learning rates


class Equivalence(NamedTuple):
    """Two one-sided t tests that the mean difference A - B lies within the margin."""

    equivalent: bool  # p_value < alpha
    p_value: float  # the larger of the two one-sided ones
    mean_difference: float
    low: float  # two-sided interval of level 1 - 2 alpha: inside the margin iff equivalent
    high: float


class GradientSpikes(NamedTuple):
    """Spikes among the steps that have a whole window before them."""

    per_thousand: NDArray[np.float64]  # [...], spikes per 1000 judged steps
    spikes: NDArray[np.intp]  # [...]
    nonfinite: NDArray[np.intp]  # [...], how many of the spikes are NaN or infinite norms
    judged: int  # T - window


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
    is 2/2ᴺ; above, it draws them (`scipy.stats.permutation_test`) and counts the observed one in:
    (k + 1)/(resamples + 1), Phipson & Smyth 2010. Sums that differ by rounding alone count as
    equal, so p depends on neither the order of the seeds nor that of the arms. The Wilcoxon test is
    the same count on signed ranks, zeros left out: exact with ties, where `scipy.stats.wilcoxon`
    takes seconds or approximates.

    The interval is the bias-corrected and accelerated bootstrap (Efron 1987). When every
    difference is the same it is that point; for a single pair it is (-inf, inf).

    Args:
        a, b: [N], one finite value per seed, in the same order of seeds.
        better: "lower" or "higher", which values are the better ones.
        confidence: level of the interval.
        resamples: of the bootstrap, and of the sign flips where they are drawn.
        seed: of both.

    Raises:
        ValueError: shapes differ, nothing to compare, or a value is not finite.
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


def steps_to_threshold(
    steps: ArrayLike, values: ArrayLike, threshold: float, consecutive: int = 1
) -> CensoredTimes:
    """First step from which `consecutive` evaluations in a row are at or above the threshold.

    The time is the step of the first of them. A lane without such a run is censored at the budget,
    the last step. NaN and infinities are below every threshold, so a lane that diverges before it
    gets there is censored at the budget like one that is merely slow. For a loss, negate values
    and threshold.

    Args:
        steps: [E], strictly increasing steps of the evaluations.
        values: [..., E].
        threshold: finite.
        consecutive: at least 1.

    Raises:
        ValueError: an argument is not as above.
    """
    step, value = _series(steps, values, "values")
    if not np.isfinite(threshold):
        raise ValueError(f"threshold must be finite, got {threshold!r}")
    if consecutive < 1:
        raise ValueError(f"consecutive must be at least 1, got {consecutive!r}")
    if consecutive > step.size:
        lanes = value.shape[:-1]
        return CensoredTimes(np.full(lanes, step[-1]), np.zeros(lanes, np.bool_))
    above = np.isfinite(value) & (value >= threshold)
    runs = np.lib.stride_tricks.sliding_window_view(above, consecutive, axis=-1).all(axis=-1)
    reached = runs.any(axis=-1)
    time = np.where(reached, step[np.argmax(runs, axis=-1)], step[-1])
    return CensoredTimes(time, np.asarray(reached))


def steps_to_accuracy(
    steps: ArrayLike, accuracies: ArrayLike, share: float, consecutive: int = 1
) -> CensoredTimes:
    """`steps_to_threshold` for accuracies: float32, in which nine of ten is a little below 0.9."""
    return steps_to_threshold(steps, accuracies, float(np.float32(share)), consecutive)


def kaplan_meier(times: CensoredTimes) -> KaplanMeier:
    """Kaplan–Meier (1958) estimate of the share of lanes still short of the threshold.

    Args:
        times: fields of shape [N].

    Raises:
        ValueError: no lane, shapes differ, or a time is negative or not finite.
    """
    curve = stats.ecdf(_censored_data(times, "times")).sf
    time = np.concatenate(([0.0], curve.quantiles))
    survival = np.concatenate(([1.0], curve.probabilities))
    # The product of ratios may land a rounding above the half that it stands for.
    halved = survival <= 0.5 + 1e-12
    return KaplanMeier(time, survival, float(time[np.argmax(halved)]) if halved.any() else np.inf)


def restricted_mean(
    times: CensoredTimes, horizon: float, *, confidence: float = 0.95
) -> RestrictedMean:
    """Restricted mean time: the area under the Kaplan–Meier curve S up to the horizon τ.

    ∫₀^τ S(t) dt, with variance Σᵢ (∫_{tᵢ}^τ S)² dᵢ / (nᵢ(nᵢ - dᵢ)) over the times tᵢ at which dᵢ of
    the nᵢ lanes still watched arrive (Klein & Moeschberger 2003, section 4.5). When nobody is
    censored before τ it is the mean of min(tᵢ, τ), and its standard error is the standard
    deviation (divisor N) over √N: zero when no lane arrives, or all at one step.

    Args:
        times: fields of shape [N].
        horizon: steps, positive; at most the budget unless every lane arrives.
        confidence: level of the interval.

    Raises:
        ValueError: times as in `kaplan_meier`; the curve says nothing about such a horizon.
    """
    curve = kaplan_meier(times)
    if not 0 < horizon < np.inf or (horizon > curve.time[-1] and curve.survival[-1] > 0):
        raise ValueError(
            f"horizon must be positive and at most the {curve.time[-1]:g} steps watched, "
            f"got {horizon!r}"
        )
    area = curve.survival * np.diff(np.minimum(np.append(curve.time, horizon), horizon))
    mean = float(area.sum())
    if times.time.size == 1:
        error = np.inf  # one lane says nothing about the spread
    else:
        remaining = np.cumsum(area[::-1])[::-1][1:]
        at_risk = np.sum(times.time >= curve.time[1:, None], axis=1)
        arrived = np.sum((times.time == curve.time[1:, None]) & times.reached, axis=1)
        some_left = at_risk > arrived  # when none is left, the remaining area is 0
        terms = remaining**2 * arrived / (at_risk * np.where(some_left, at_risk - arrived, 1))
        error = float(np.sqrt(np.sum(terms[some_left])))
    reach = float(stats.norm.ppf((1 + confidence) / 2)) * error
    return RestrictedMean(mean, error, max(mean - reach, 0.0), min(mean + reach, float(horizon)))


def log_rank(a: CensoredTimes, b: CensoredTimes) -> LogRank:
    """Log-rank test (`scipy.stats.logrank`) of two arms; it knows nothing of the pairing.

    When the data cannot tell the arms apart (nobody arrives, or everybody at the same step) the
    statistic is 0 and p is 1.

    Args:
        a, b: fields of shapes [N] and [M].

    Raises:
        ValueError: as in `kaplan_meier`.
    """
    x, y = _censored_data(a, "a"), _censored_data(b, "b")
    with np.errstate(divide="ignore", invalid="ignore"):
        result = stats.logrank(x, y)
    if not np.isfinite(result.statistic):  # zero variance
        return LogRank(0.0, 1.0)
    return LogRank(float(result.statistic), float(result.pvalue))


def paired_times(
    a: CensoredTimes,
    b: CensoredTimes,
    horizon: float,
    *,
    confidence: float = 0.95,
    resamples: int = 9999,
    seed: int = 0,
) -> PairedComparison:
    """`paired_comparison` of times cut at the horizon, a lane that never arrives counting as it.

    The mean difference is then the difference of the restricted means. Lower is better.

    Args:
        a, b: fields of shape [N], in the same order of seeds.
        horizon: steps, positive; no lane was given up before it.
        confidence, resamples, seed: as in `paired_comparison`.

    Raises:
        ValueError: as in `kaplan_meier` and `paired_comparison`; a lane is censored before the
            horizon.
    """
    cut = []
    for name, times in (("a", a), ("b", b)):
        _censored_data(times, name)
        watched = np.min(times.time, where=~times.reached, initial=np.inf)
        if not 0 < horizon < np.inf or horizon > watched:
            raise ValueError(
                f"horizon must be positive, finite and at most the {watched:g} steps for which "
                f"every lane of {name} was watched, got {horizon!r}"
            )
        cut.append(np.minimum(times.time, horizon))
    return paired_comparison(
        *cut, better="lower", confidence=confidence, resamples=resamples, seed=seed
    )


def clipped_loss_area(
    steps: ArrayLike, losses: ArrayLike, initial_loss: ArrayLike
) -> NDArray[np.float64]:
    """Mean over the steps (trapezoid rule) of min(ℓ, ℓ₀); NaN and infinities count as ℓ₀.

    Args:
        steps: [E], strictly increasing, E at least 2.
        losses: [..., E].
        initial_loss: ℓ₀, finite, broadcastable to [...].

    Returns:
        [...], units of the loss.

    Raises:
        ValueError: an argument is not as above.
    """
    step, loss = _series(steps, losses, "losses")
    if step.size < 2:
        raise ValueError(f"steps must hold at least 2 steps to span an area, got {step.size}")
    clipped = clip_at_worst(loss, np.asarray(initial_loss)[..., None], better="lower")
    return np.asarray(np.trapezoid(clipped, step, axis=-1) / (step[-1] - step[0]))


def learning_rate_sensitivity(
    losses: ArrayLike, initial_loss: ArrayLike
) -> LearningRateSensitivity:
    """Learning-rate sensitivity E_η[min(ℓ(η), ℓ₀) - ℓ*] (Wortsman et al. 2023), with ℓ*.

    The mean is over the grid, so rates evenly spaced in log η weigh every factor alike. A rate that
    diverged (NaN, inf) or made things worse counts as ℓ₀. Hence an arm that no rate trains has
    sensitivity 0, and only ℓ* = ℓ₀ tells it from one that every rate trains.

    Args:
        losses: [..., R], final loss per learning rate.
        initial_loss: ℓ₀, finite, broadcastable to [...].

    Raises:
        ValueError: no learning rate, or initial_loss is not finite.
    """
    loss = np.asarray(losses, np.float64)
    if loss.ndim == 0 or loss.shape[-1] == 0:
        raise ValueError(f"losses must be [..., R] with R >= 1, got shape {loss.shape}")
    clipped = clip_at_worst(loss, np.asarray(initial_loss)[..., None], better="lower")
    best = clipped.min(axis=-1)
    return LearningRateSensitivity(
        np.asarray(np.mean(clipped - best[..., None], axis=-1)),
        np.asarray(best),
        np.asarray(np.argmin(clipped, axis=-1)),
    )


def equivalence_test(
    a: ArrayLike, b: ArrayLike, margin: float, *, alpha: float = 0.05
) -> Equivalence:
    """Two one-sided paired t tests (Schuirmann 1987) of |mean(A - B)| < margin.

    p = max(P(T > (d̄ + margin)/se), P(T < (d̄ - margin)/se)), T of Student's distribution with
    N - 1 degrees of freedom. Identical differences have se = 0, so p is 0 inside the margin and 1
    on it or outside. A single pair shows nothing: p is 1.

    Args:
        a, b: [N], one finite value per seed, in the same order of seeds.
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
    if np.ptp(difference) == 0:
        inside = bool(abs(difference[0]) < margin)
        return Equivalence(inside, 1.0 - inside, mean, mean, mean)
    student = stats.t(difference.size - 1)
    error = np.std(difference, ddof=1) / np.sqrt(difference.size)
    p_value = max(student.sf((mean + margin) / error), student.cdf((mean - margin) / error))
    reach = student.ppf(1 - alpha) * error
    return Equivalence(
        bool(p_value < alpha), float(p_value), mean, float(mean - reach), float(mean + reach)
    )


def gradient_spikes(
    grad_norm: ArrayLike, *, factor: float = 5.0, window: int = 50
) -> GradientSpikes:
    """Gradient spikes: norms above `factor` times the median of the `window` norms before them.

    The first `window` steps have no whole window before them and are not judged. A norm that is
    not finite is a spike wherever it is judged, and in a window it ranks above every finite one:
    a lane that diverges goes on counting, so it ranks worst.

    Args:
        grad_norm: [..., T], before clipping, one per step.
        factor: at least 1.
        window: at least 1, less than T.

    Raises:
        ValueError: an argument is not as above.
    """
    norm = np.asarray(grad_norm, np.float64)
    if not 1 <= factor < np.inf:
        raise ValueError(f"factor must be at least 1 and finite, got {factor!r}")
    if norm.ndim == 0 or not 1 <= window < norm.shape[-1]:
        raise ValueError(
            f"window must be at least 1 and less than the steps of grad_norm, shape {norm.shape}, "
            f"got {window!r}"
        )
    norm = np.where(np.isfinite(norm), norm, np.inf)
    before = np.lib.stride_tricks.sliding_window_view(norm[..., :-1], window, axis=-1)
    judged = norm[..., window:]
    infinite = np.isinf(judged)
    spikes = np.count_nonzero((judged > factor * np.median(before, axis=-1)) | infinite, axis=-1)
    return GradientSpikes(
        np.asarray(1000.0 * spikes / judged.shape[-1]),
        np.asarray(spikes),
        np.asarray(np.count_nonzero(infinite, axis=-1)),
        judged.shape[-1],
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
    return first - second


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
        sums = stats.permutation_test(
            (magnitude,),
            np.sum,
            permutation_type="samples",
            vectorized=True,
            n_resamples=resamples,
            rng=np.random.default_rng(seed),
        ).null_distribution
    observed = abs(differences.sum()) - 1e-12 * magnitude.sum()
    extreme = np.count_nonzero(np.abs(sums) >= observed)
    observed_too = 0 if exact else 1
    return float((extreme + observed_too) / (sums.size + observed_too)), exact


def _bca_interval(
    differences: NDArray[np.float64], confidence: float, resamples: int, seed: int
) -> tuple[float, float]:
    """BCa bootstrap interval of the mean."""
    if differences.size == 1:
        return -np.inf, np.inf
    centre, spread = np.mean(differences), np.ptp(differences)
    if spread == 0:
        return float(differences[0]), float(differences[0])
    # The interval moves with shift and scale, and at unit spread no rounding can blur it.
    interval = stats.bootstrap(
        ((differences - centre) / spread,),
        np.mean,
        confidence_level=confidence,
        n_resamples=resamples,
        method="BCa",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(centre + spread * interval.low), float(centre + spread * interval.high)


def _censored_data(times: CensoredTimes, name: str) -> stats.CensoredData:
    """Scipy's form of right-censored times, after checks."""
    time, reached = np.asarray(times.time, np.float64), np.asarray(times.reached)
    if time.shape != reached.shape or time.ndim != 1 or time.size == 0 or reached.dtype != np.bool_:
        raise ValueError(
            f"{name} must hold times and booleans, both of shape [N], N >= 1, "
            f"got shapes {time.shape} and {reached.shape}, dtype {reached.dtype}"
        )
    if not np.all((time >= 0) & (time < np.inf)):
        raise ValueError(f"{name} must hold finite times that are not negative, got {time}")
    return stats.CensoredData.right_censored(time, ~reached)


def _series(
    steps: ArrayLike, values: ArrayLike, name: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Steps [E] and values [..., E] in float64, after checks."""
    step, value = np.asarray(steps, np.float64), np.asarray(values, np.float64)
    if step.ndim != 1 or step.size == 0 or not np.all(np.diff(step) > 0):
        raise ValueError(f"steps must be [E], E >= 1, strictly increasing, got {steps!r}")
    if value.ndim == 0 or value.shape[-1] != step.size:
        raise ValueError(
            f"{name} must be [..., {step.size}], one value per step, got shape {value.shape}"
        )
    return step, value
