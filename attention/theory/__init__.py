"""Closed forms and quadratures that measurements are held against, in float64.

Nothing here calls the code under test, or JAX. Setting: queries and keys with iid N(0, 1) entries,
as in footnote 4 of Vaswani et al. 2017 (https://arxiv.org/abs/1706.03762). Given q, the N logits of
a row are exactly iid N(0, σ²) with σ = scale·|q|, and |q|² ~ χ² with d_k degrees of freedom.
Notation: s logits, Z = Σ exp(s), p = softmax(s), J = diag(p) - p pᵀ, Y2 = Σ p².

  moments           the variance of q·k, and how well a sample knows it
  expectations      entropy, largest weight, Jacobian, ... of one row, from N and σ
  queries           the same, and the gradients, averaged over |q|: from N, d_k and scale
  regimes           laws for small σ, large σ and N → ∞; where a row freezes
  gumbel_max        the quadrature behind the expectations
  order_statistics  the largest of N normals
  arguments         what arguments must satisfy, and how they broadcast
"""

from attention.theory.arguments import MAX_KEYS, MAX_STD
from attention.theory.expectations import (
    expected_collision,
    expected_entropy,
    expected_jacobian_norm_squared,
    expected_jacobian_trace,
    expected_log_partition,
    expected_max_weight,
    saturation_probability,
)
from attention.theory.moments import (
    dot_product_excess_kurtosis,
    dot_product_variance,
    grid_variance_standard_error,
    variance_standard_error,
)
from attention.theory.order_statistics import expected_maximum
from attention.theory.queries import GradientRms, averaged_over_queries, gradient_rms
from attention.theory.regimes import (
    Regime,
    freezing_key_dim,
    freezing_std,
    large_std,
    planted_weight,
    random_energy,
    small_std,
)

__all__ = [
    "MAX_KEYS",
    "MAX_STD",
    "GradientRms",
    "Regime",
    "averaged_over_queries",
    "dot_product_excess_kurtosis",
    "dot_product_variance",
    "expected_collision",
    "expected_entropy",
    "expected_jacobian_norm_squared",
    "expected_jacobian_trace",
    "expected_log_partition",
    "expected_max_weight",
    "expected_maximum",
    "freezing_key_dim",
    "freezing_std",
    "gradient_rms",
    "grid_variance_standard_error",
    "large_std",
    "planted_weight",
    "random_energy",
    "saturation_probability",
    "small_std",
    "variance_standard_error",
]
