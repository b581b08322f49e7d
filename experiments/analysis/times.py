"""Times to a threshold that need not have been reached: censored, never dropped, never guessed."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from experiments.analysis.paired import PairedComparison, paired_comparison

THRESHOLD = 0.9  # held-out accuracy
CONSECUTIVE = 3  # evaluations in a row at or above it


class CensoredTimes(NamedTuple):
    """Times to an event that need not have happened."""

    time: NDArray[np.float64]  # [...], steps; the last step watched where not reached
    reached: NDArray[np.bool_]  # [...]


class KaplanMeier(NamedTuple):
    """A survival curve: a step function, constant from each time to the next."""

    time: NDArray[np.float64]  # [U + 1], steps; 0, then every distinct time, censored ones too
    survival: NDArray[np.float64]  # [U + 1], share of lanes still short of the threshold after it
    median: float  # steps; the first time with survival <= 1/2, inf if there is none


class LogRank(NamedTuple):
    """Log-rank test of equal survival curves."""

    statistic: float  # standard normal under the null; positive when A reaches sooner
    p_value: float  # two-sided


def steps_to_threshold(
    steps: ArrayLike,
    accuracies: ArrayLike,
    threshold: float = THRESHOLD,
    consecutive: int = CONSECUTIVE,
) -> CensoredTimes:
    """The one rule for "reached": the first of `consecutive` evaluations at or above the threshold.

    A lane is censored at the last step where it has no such run of evaluations. So is one that got
    there with fewer evaluations left: it may fall back, as a lane that was lucky once does, and
    nobody saw that it stayed. If it would have, its time is late by less than `consecutive`
    evaluations, and never early. NaN and infinities are below every threshold: a lane that
    diverges before it gets there is censored like one that is merely slow.

    Accuracies are float32, in which nine of ten is a little below 0.9, and so they are compared.

    Args:
      steps: [E], strictly increasing steps of the evaluations.
      accuracies: [..., E].
      threshold: finite.
      consecutive: at least 1.

    Raises:
      ValueError: an argument is not as above.
    """
    step, value = series(steps, accuracies, "accuracies")
    if not np.isfinite(threshold):
        raise ValueError(f"threshold must be finite, got {threshold!r}")
    if consecutive < 1:
        raise ValueError(f"consecutive must be at least 1, got {consecutive!r}")
    above = np.isfinite(value) & (value.astype(np.float32) >= np.float32(threshold))
    short = np.zeros((*value.shape[:-1], consecutive - 1), np.bool_)
    above = np.concatenate([above, short], axis=-1)
    runs = np.lib.stride_tricks.sliding_window_view(above, consecutive, axis=-1).all(axis=-1)
    reached = np.asarray(runs.any(axis=-1))
    return CensoredTimes(np.where(reached, step[np.argmax(runs, axis=-1)], step[-1]), reached)


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


def paired_times(a: CensoredTimes, b: CensoredTimes, horizon: float) -> PairedComparison:
    """`paired_comparison` of times cut at the horizon, a lane that never arrives counting as it.

    The mean difference is then the difference of the restricted means. Lower is better.

    Args:
      a, b: fields of shape [N], in the same order of seeds.
      horizon: steps, positive; no lane was given up before it.

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
    return paired_comparison(*cut, better="lower")


def series(
    steps: ArrayLike, values: ArrayLike, name: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Steps [E] and values [..., E] in float64.

    Raises:
      ValueError: their shapes don't fit, or the steps don't increase; names the values.
    """
    step, value = np.asarray(steps, np.float64), np.asarray(values, np.float64)
    if step.ndim != 1 or step.size == 0 or not np.all(np.diff(step) > 0):
        raise ValueError(f"steps must be [E], E >= 1, strictly increasing, got {steps!r}")
    if value.ndim == 0 or value.shape[-1] != step.size:
        raise ValueError(
            f"{name} must be [..., {step.size}], one value per step, got shape {value.shape}"
        )
    return step, value


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
