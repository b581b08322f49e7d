"""Exact expectations over one row of N iid N(0, σ²) logits.

Every function here takes

  keys: N, the number of keys, whole numbers from 2 to MAX_KEYS;
  std: σ, the standard deviation of the logits, from 0 to MAX_STD;

as numbers or arrays that broadcast, returns float64 of the shape they broadcast to (a number for
numbers), and raises ValueError where one is out of range. φ_0, ψ_k and u are `gumbel_max`'s.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike
from scipy import fft, special

from attention.theory.arguments import over_pairs
from attention.theory.gumbel_max import STEP, PerturbedLogit, perturbed_logit
from attention.theory.order_statistics import largest_normal, legendre, normal_density


def expected_log_partition(keys: ArrayLike, std: ArrayLike):
    """E ln Z = E u - γ, nats, as u = ln Z + Gumbel noise, whose mean is γ."""

    def value(n: float, law: PerturbedLogit) -> float:
        return n * law.integral(law.x * law.psi[1], n - 1) - np.euler_gamma

    return _over_rows(value, keys, std)


def expected_entropy(keys: ArrayLike, std: ArrayLike):
    """E H = E[-Σ p ln p], nats: the expected perturbation of the winner, less γ.

    Given s, u = s_winner + G_winner, so E G_winner = E u - Σ p s = ln Z + γ - Σ p s = H + γ;
    E G_winner = N ∫ E[(x - σg) h_1(x - σg)] φ_0^(N-1) dx. Equal to E ln Z - σ²(1 - E Y2), which
    loses digits at large σ. Source: https://arxiv.org/abs/1602.03571 (entropy and perturbations).
    """

    def value(n: float, law: PerturbedLogit) -> float:
        return n * law.integral(law.perturbation, n - 1) - np.euler_gamma

    return _over_rows(value, keys, std)


def expected_collision(keys: ArrayLike, std: ArrayLike):
    """E Y2 = E Σ p² = N ∫ ψ_2 φ_0^(N-1) dx: the chance that two draws from p are the same key."""
    return _over_rows(lambda n, law: n * law.integral(law.psi[2], n - 1), keys, std)


def expected_jacobian_trace(keys: ArrayLike, std: ArrayLike):
    """E tr J = 1 - E Y2. By Stein's lemma also E[Σ p s]/σ²."""
    return 1 - expected_collision(keys, std)


def expected_jacobian_norm_squared(keys: ArrayLike, std: ArrayLike):
    """E ‖J‖_F² = E[Y2 - 2 Σp³ + Y2²].

    E Σp³ = (N/2) ∫ ψ_3 φ_0^(N-1) dx and
    E Y2² = (1/6) ∫ [N ψ_4 φ_0^(N-1) + N(N-1) ψ_2² φ_0^(N-2)] dx.
    """

    def value(n: float, law: PerturbedLogit) -> float:
        psi = law.psi
        single = law.integral(psi[2] - psi[3] + psi[4] / 6, n - 1)
        return n * (single + (n - 1) / 6 * law.integral(psi[2] ** 2, n - 2))

    return _over_rows(value, keys, std)


def expected_max_weight(keys: ArrayLike, std: ArrayLike):
    """E max p: how often the perturbation leaves the largest logit the largest.

    With m the largest of N standard normals, 1/p_max = 1 + Σ' e^(σ(g - m)) over the N - 1 others,
    which are iid below m, and 1/a = ∫ e^(-at) dt:

        E max p = N ∫ n(m) ∫ e^(-t) c(t, m)^(N-1) dt dm,
        c(t, m) = ∫_(w>0) n(m - w) exp(-t e^(-σw)) dw,    n the standard normal density.
    """
    return over_pairs(_max_weight, keys, std)


def saturation_probability(keys: ArrayLike, std: ArrayLike, threshold: float = 0.9):
    """P(max p > τ) for τ from 1/2 up to (not including) 1.

    At most one weight exceeds 1/2, so this is N·P(p_1 > τ) = N·P(ln Z' - s_1 < -ln(τ/(1 - τ))),
    Z' the sum over the N - 1 other keys. For σ < 1/4 (N > 64: σ < 1/2) ln Z' is taken to be normal
    with mean ln(N - 1) + σ²(1 - 1/(N-1))/2 and variance σ²/(N - 1), which is exact for N = 2 and
    changes the answer by at most 5e-4. Elsewhere it is exact: the perturbation is divided out of
    ln Z' + G in Fourier space.

    Raises:
      ValueError: also when threshold is out of range.
    """
    if not 0.5 <= threshold < 1:
        raise ValueError(f"threshold must be in [0.5, 1), got {threshold}")
    cut = -special.logit(threshold)
    return over_pairs(lambda n, s: _saturation(n, s, cut), keys, std)


def _over_rows(value: Callable[[float, PerturbedLogit], float], keys: ArrayLike, std: ArrayLike):
    return over_pairs(lambda n, s: value(n, perturbed_logit(s)), keys, std)


def _max_weight(n: float, std: float) -> float:
    m, m_weights = largest_normal(n)
    x = np.arange(-4.5, 35, STEP)  # t = e^(-x), so that e^(-t) dt = h_1(x) dx
    arrivals = np.exp(-x - np.exp(-x)) * STEP
    others_later = _one_other_later(m, x, std) ** (n - 1)
    return float(m_weights @ others_later @ arrivals)


def _one_other_later(m: np.ndarray, x: np.ndarray, std: float) -> np.ndarray:
    """c(t, m)/Φ(m), t = e^(-x): that a key known to be below m has not arrived by t; [m, x]."""
    # Beyond w = 40/σ, exp(-t e^(-σw)) is 1: integrate its distance from 1 only.
    reach = min(m.max() + 8, 40 / max(std, 1e-9))
    nodes, weights = legendre(96)
    w, w_weights = reach * (nodes + 1) / 2, weights * reach / 2
    missing = -np.expm1(-np.exp(-x[:, None] - std * w[None, :])) * w_weights[None, :]
    near = normal_density(m[:, None] - w[None, :])
    return np.maximum(1 - near @ missing.T / special.ndtr(m)[:, None], 0)


def _saturation(n: float, std: float, cut: float) -> float:
    """N·P(ln Z' - s_1 < cut)."""
    nearly_normal = n == 2 or std < (0.25 if n <= 64 else 0.5)
    expected = _winners_if_normal(n, std, cut) if nearly_normal else _winners(n, std, cut)
    return float(np.clip(expected, 0, 1))


def _winners_if_normal(n: float, std: float, cut: float) -> float:
    mean = np.log(n - 1) + std**2 * (1 - 1 / (n - 1)) / 2
    deviation = max(std, 1e-30) * np.sqrt(1 + 1 / (n - 1))
    return n * special.ndtr((cut - mean) / deviation)


def _winners(n: float, std: float, cut: float) -> float:
    """N·P(ln Z' - s_1 < cut) from the law of ln Z' + G, whose distribution function is φ_0^(N-1).

    Dividing its Fourier transform by the perturbation's, Γ(1 + iω), leaves that of ln Z', and s_1
    multiplies it by exp(-σ²ω²/2), which keeps the division harmless for σ ≥ 1/4.
    """
    law = perturbed_logit(std, reach=12.0)  # wide: mass that wraps round the grid is times N
    density = (n - 1) * law.psi[1] * law.phi ** (n - 2)
    gumbel = special.gamma(1 + 1j * law.frequency)
    spectrum = fft.rfft(density) * np.exp(-((std * law.frequency) ** 2) / 2) / gumbel
    # The integral from x[0] to cut of the trigonometric polynomial with this spectrum.
    omega = law.frequency[1:]
    span = cut - law.x[0]
    below = (np.exp(1j * omega * span) - 1) / (1j * omega)
    total = spectrum[0].real * span + 2 * np.sum((spectrum[1:] * below).real)
    return n * total / law.x.size
