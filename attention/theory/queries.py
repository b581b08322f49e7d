"""Rows of attention itself: a statistic of N and σ, averaged over queries q with σ = scale·|q|."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from attention.theory.arguments import whole
from attention.theory.expectations import expected_jacobian_norm_squared
from attention.theory.order_statistics import legendre

_NODES = 32  # Gauss–Legendre nodes over |q|


def averaged_over_queries(
    statistic: Callable, keys: ArrayLike, key_dim: ArrayLike, scale: ArrayLike
):
    """E statistic(keys, scale·|q|) over queries of d_k iid N(0, 1) entries.

    Example: `averaged_over_queries(expected_entropy, 50, 64, 1.0)` is the mean entropy, in nats, of
    unscaled attention over 50 keys of width 64.

    Args:
      statistic: any function of (keys, std) in this package, or one of your own.
      keys, key_dim, scale: numbers or arrays that broadcast; scale·|q| must stay below MAX_STD.

    Returns:
      float64 of the shape that they broadcast to, in the statistic's unit.

    Raises:
      ValueError: key_dim is not a whole number of at least 1, or what the statistic raises.
    """
    keys, d, scale = np.broadcast_arrays(keys, whole("key_dim", key_dim, 1), scale)
    norm, weights = _query_norm(d)
    return np.sum(weights * statistic(keys[..., None], np.abs(scale)[..., None] * norm), axis=-1)[
        ()
    ]


def _query_norm(key_dim: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights for |q|, which follows the χ distribution with d_k degrees: [..., node]."""
    d = key_dim[..., None]
    low = np.sqrt(2 * special.gammaincinv(d / 2, 1e-10))
    high = np.sqrt(2 * special.gammainccinv(d / 2, 1e-10))
    nodes, weights = legendre(_NODES)
    norm = low + (high - low) * (nodes + 1) / 2
    log_density = (d - 1) * np.log(norm) - norm**2 / 2  # of χ, but for a constant
    weights = weights * np.exp(log_density - log_density.max(axis=-1, keepdims=True))
    return norm, weights / weights.sum(axis=-1, keepdims=True)


class GradientRms(NamedTuple):
    """Root mean squares over entries of the gradient of the sum of attention's outputs."""

    logits: np.ndarray  # of ∂/∂logits (after scale)
    query: np.ndarray  # of ∂/∂q


def gradient_rms(
    keys: ArrayLike, key_dim: ArrayLike, value_dim: ArrayLike, scale: ArrayLike
) -> GradientRms:
    """RMS of ∂/∂logits and ∂/∂q for the loss that sums all outputs, values iid N(0, 1).

    The loss sends g_j = Σ_c v_jc ~ N(0, d_v) to weight j; ∂/∂logits = J g, whose mean square norm
    is d_v E‖J‖_F². ∂/∂q = scale Kᵀ J g: given the weights, the d - 1 directions orthogonal to q
    are fresh, and add scale²(d - 1)‖Jg‖². The direction along q is left out (one in d).

    Args:
      keys, key_dim, value_dim, scale: N, d_k, d_v and the multiplier of q·k; they broadcast.

    Returns:
      Both root mean squares, float64 of the shape that the arguments broadcast to.

    Raises:
      ValueError: as `averaged_over_queries`.
    """
    norm_squared = averaged_over_queries(expected_jacobian_norm_squared, keys, key_dim, scale)
    d, d_v = np.asarray(key_dim, float), np.asarray(value_dim, float)
    logits = np.sqrt(d_v * norm_squared / np.asarray(keys, float))
    return GradientRms(logits, np.abs(scale) * np.sqrt((d - 1) / d * d_v * norm_squared))
