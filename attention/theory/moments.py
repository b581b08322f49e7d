"""The moments of q·k with iid N(0, 1) entries, and the standard error of a measured variance.

All take whole numbers or arrays that broadcast, return float64, and raise ValueError for numbers
out of range.
"""

import numpy as np
from numpy.typing import ArrayLike

from attention.theory.arguments import whole


def dot_product_variance(key_dim: ArrayLike):
    """Var(q·k) = d: d independent products q_i k_i, each with mean 0 and variance 1·1.

    Source: Vaswani et al. 2017, footnote 4, https://arxiv.org/abs/1706.03762.
    """
    return whole("key_dim", key_dim, 1)[()]


def dot_product_excess_kurtosis(key_dim: ArrayLike):
    """6/d: one product has fourth moment 3·3 = 9, excess 6; sums of d divide it by d."""
    return (6 / whole("key_dim", key_dim, 1))[()]


def variance_standard_error(key_dim: ArrayLike, pairs: ArrayLike):
    """Standard error of the sample variance of q·k over independent pairs: √((2d² + 6d)/pairs).

    Var of a sample variance is (μ_4 - μ_2²)/pairs, with μ_2 = d and μ_4 = (3 + 6/d) d².
    """
    d, pairs = whole("key_dim", key_dim, 1), whole("pairs", pairs, 2)
    return np.sqrt((2 * d**2 + 6 * d) / pairs)


def grid_variance_standard_error(key_dim: ArrayLike, length: ArrayLike, batch: ArrayLike = 1):
    """The same over batch grids of n × n logits: √((2d² + 6d + 4(n - 1)d)/(n² batch)).

    Logits of one row share q, those of one column share k. Cov((q·k)², (q·k')²) = Var(|q|²) = 2d
    for each of the 2n²(n - 1) such ordered pairs; logits that share neither are independent.
    """
    d, n = whole("key_dim", key_dim, 1), whole("length", length, 1)
    batch = whole("batch", batch, 1)
    return np.sqrt((2 * d**2 + 6 * d + 4 * (n - 1) * d) / (n**2 * batch))
