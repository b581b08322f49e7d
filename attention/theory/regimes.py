"""Laws that hold in a limit of N or σ, and where a row freezes.

keys (N, from 2 to MAX_KEYS) and std (σ, from 0 to MAX_STD) are numbers or arrays that broadcast;
ValueError where one is out of range.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from attention.theory.arguments import keys_and_std, whole
from attention.theory.order_statistics import expected_maximum


class Regime(NamedTuple):
    """What an asymptotic law says of a row; fields broadcast over (keys, std)."""

    entropy: np.ndarray  # E H, nats
    jacobian_trace: np.ndarray  # E tr J
    jacobian_norm_squared: np.ndarray  # E ‖J‖_F²
    max_weight: np.ndarray  # E max p
    saturation: np.ndarray  # P(max p > 0.9)


def freezing_std(keys: ArrayLike):
    """σ_c = √(2 ln N): below, many keys share a row's weight; above, a few hold it.

    The freezing point of the random energy model (Derrida 1981,
    https://doi.org/10.1103/PhysRevB.24.2613; of attention at initialisation: Giorlandino & Goldt,
    https://arxiv.org/abs/2505.24333): N e^(σ²/2), the mean of Z, is made by logits near σ², and N
    iid logits reach σ² only while σ² < σ √(2 ln N).
    """
    return np.sqrt(2 * np.log(whole("keys", keys, 2)))[()]


def freezing_key_dim(keys: ArrayLike):
    """2 ln n: unscaled attention (σ ≈ √d_k) starts frozen when d_k is larger; scaled never does."""
    return freezing_std(keys) ** 2


def small_std(keys: ArrayLike, std: ArrayLike) -> Regime:
    """Laws for σ ≪ 1: p_i ≈ (1 + s_i - s̄)/N, to second order in σ (max p: to first).

    With V = E Σ(p - 1/N)² ≈ σ²(1 - 1/N)/N: Y2 = 1/N + V, H = ln N - NV/2,
    ‖J‖_F² = (1 - 1/N)/N + (1 - 4/N) V. H and tr J are within 1e-2 up to σ = 0.4.
    """
    n, std = keys_and_std(keys, std)
    v = std**2 * (1 - 1 / n) / n
    return Regime(
        entropy=np.log(n) - n * v / 2,
        jacobian_trace=1 - 1 / n - v,
        jacobian_norm_squared=(1 - 1 / n) / n + (1 - 4 / n) * v,
        max_weight=(1 + std * expected_maximum(n)) / n,
        saturation=np.zeros(np.broadcast_shapes(n.shape, std.shape)),
    )


def random_energy(keys: ArrayLike, std: ArrayLike) -> Regime:
    """Laws for N → ∞ at fixed σ/σ_c. Finite-N corrections are large near σ_c.

    Below σ_c each weight vanishes and H ≈ ln N - σ²/2. Above, the weights tend to
    Poisson–Dirichlet(m, 0) with m = σ_c/σ (Derrida 1981, https://doi.org/10.1103/PhysRevB.24.2613).
    """
    n, std = np.broadcast_arrays(*keys_and_std(keys, std))
    frozen = std > freezing_std(n)
    m = np.where(frozen, freezing_std(n) / np.where(frozen, std, 1), 0.5)
    shared = Regime(np.log(n) - std**2 / 2, *(np.asarray(x) for x in (1.0, 0.0, 0.0, 0.0)))
    return Regime(*map(np.where, [frozen] * 5, _poisson_dirichlet(m), shared))


def _poisson_dirichlet(m: np.ndarray) -> Regime:
    """Weights of the law PD(m, 0), 0 < m < 1 (Pitman & Yor 1997, doi 10.1214/aop/1024404422).

    Its frequency spectrum x^(-m-1) (1-x)^(m-1) / B(1-m, m) gives E Y2 = 1 - m,
    E Σp³ = (1-m)(2-m)/2, E H = digamma(1) - digamma(1-m) and P(max p > τ) =
    ((1-τ)/τ)^m sin(πm)/(πm) for τ ≥ 1/2; its partition probabilities give
    E Y2² = [(1-m)(2-m)(3-m) + m(1-m)²]/6.
    """
    collision = 1 - m
    cubes = (1 - m) * (2 - m) / 2
    collision_squared = ((1 - m) * (2 - m) * (3 - m) + m * (1 - m) ** 2) / 6
    return Regime(
        entropy=special.digamma(1) - special.digamma(1 - m),
        jacobian_trace=m,
        jacobian_norm_squared=collision - 2 * cubes + collision_squared,
        max_weight=_poisson_dirichlet_largest(m),
        saturation=9**-m * np.sinc(m),
    )


def _poisson_dirichlet_largest(m: np.ndarray) -> np.ndarray:
    """E max p of PD(m, 0): ∫ over λ of E exp(-λ/max p) = e^(-λ)/(e^(-λ) + λ^m Γ(1-m) P(1-m, λ)).

    P is the regularised lower incomplete gamma function. Source: Pitman & Yor 1997.
    """
    log_rate = np.linspace(-60, 4, 1281)
    rate = np.exp(log_rate)
    a = 1 - m[..., None]
    rest = rate ** (1 - a) * special.gamma(a) * special.gammainc(a, rate)
    step = log_rate[1] - log_rate[0]
    return np.sum(rate * np.exp(-rate) / (np.exp(-rate) + rest), axis=-1) * step


def large_std(keys: ArrayLike, std: ArrayLike) -> Regime:
    """Laws for σ ≫ μ_N, to first order in μ_N/σ (NaN at σ = 0).

    Only rows whose two largest logits nearly tie are not saturated. Their gap Δ has density μ_N/σ
    at zero (see `expected_maximum`), and p = 1/(1 + e^(-Δ)), so each statistic f(p) averages to
    f(1) + (μ_N/σ) ∫ [f(p) - f(1)] dΔ over Δ > 0: tr J = 2p(1-p) gives 1, ‖J‖_F² = 4p²(1-p)² gives
    1/3, H gives π²/6, 1 - p gives ln 2 and P(p < τ) gives ln(τ/(1-τ)).
    """
    n, std = np.broadcast_arrays(*keys_and_std(keys, std))
    ratio = expected_maximum(n) / np.where(std > 0, std, np.nan)
    return Regime(
        entropy=np.pi**2 / 6 * ratio,
        jacobian_trace=ratio,
        jacobian_norm_squared=ratio / 3,
        max_weight=1 - np.log(2) * ratio,
        saturation=1 - np.log(9) * ratio,
    )


def planted_weight(keys: ArrayLike, gap: ArrayLike, std: ArrayLike):
    """Weight of one key whose logit is `gap`, among n - 1 others with logits iid N(0, σ²).

    1/(1 + (n-1) e^(-gap + σ²/2)), holding for large n below the freezing point σ_c, where the sum
    over the others is near its mean (n-1) e^(σ²/2). It is about 1/2 at gap = ln n + σ²/2: a planted
    key needs a logit that grows as ln n.
    """
    n, std = keys_and_std(keys, std)
    return special.expit(np.asarray(gap, float) - std**2 / 2 - np.log(n - 1))[()]
