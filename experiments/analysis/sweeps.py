"""What a whole run or a whole sweep comes to in one number. NumPy arrays, in float64."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from experiments.analysis.paired import clip_at_worst
from experiments.analysis.times import series


class LearningRateSensitivity(NamedTuple):
    """How much a wrong learning rate costs. It means nothing without the best loss beside it."""

    sensitivity: NDArray[np.float64]  # [...], units of the loss
    best_loss: NDArray[np.float64]  # [...], the loss at the best rate, at most the initial loss


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
    step, loss = series(steps, losses, "losses")
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
        np.asarray(np.mean(clipped - best[..., None], axis=-1)), np.asarray(best)
    )


def spikes_per_thousand(
    grad_norm: ArrayLike, *, factor: float = 5.0, window: int = 50
) -> NDArray[np.float64]:
    """Gradient spikes per 1000 steps: norms above `factor` times the median of the `window` before.

    The first `window` steps have no whole window before them and are not judged. A norm that is
    not finite is a spike wherever it is judged, and in a window it ranks above every finite one:
    a lane that diverges goes on counting, so it ranks worst.

    Args:
      grad_norm: [..., T], before clipping, one per step.
      factor: at least 1.
      window: at least 1, less than T.

    Returns:
      [...].

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
    spikes = (judged > factor * np.median(before, axis=-1)) | np.isinf(judged)
    return np.asarray(1000.0 * np.count_nonzero(spikes, axis=-1) / judged.shape[-1])
