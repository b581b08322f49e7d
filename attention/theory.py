"""Closed forms and quadratures that measurements are held against, in float64.

Nothing here calls the code under test. Setting: queries and keys with iid N(0, 1) entries. Given
q, the N logits of a row are exactly iid N(0, σ²) with σ = scale·|q|, |q|² ~ χ² with d_k degrees of
freedom: `expected_...(keys, std)` takes N and σ, `averaged_over_queries` takes the mean over |q|.
Notation: s logits, Z = Σ exp(s), p = softmax(s), J = diag(p) - p pᵀ, Y2 = Σ p².

Every expectation here is one dimensional, by a race: add independent standard Gumbel noise G_i to
the logits and let the largest win. Given s, the winner is i with probability p_i, and the winning
score is u = ln Z + (a Gumbel variable). All runners are alike, so with

    h_k(y) = e^(-k y) exp(-e^(-y)),    φ_0(x) = E h_0(x - σg) = P(s + G < x),
    ψ_k(x) = E h_k(x - σg)             (ψ_1 is the density of s + G; g standard normal)

u has the distribution function φ_0^N, and 1/Z^K = ∫ e^(Kx) exp(-Z e^(-x)) ... dx / Γ(K) gives

    E Π p_i^(k_i) = ∫ Π ψ_(k_i)(x) φ_0(x)^(N - m) dx / Γ(Σ k_i)        for m different keys.

ψ_k is h_k convolved with a normal density: a product in Fourier space, exact at σ = 0 and cheap at
σ = 64. All integrands are analytic in a strip of width π, so that the plain sum over a grid of
spacing 1/8 is accurate to about 1e-9.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import fft, special

MAX_KEYS = 2**20
MAX_STD = 256.0

_STEP = 1 / 8  # grid spacing in x: h_4's spectrum is below 1e-14 at the grid's highest frequency
_QUERY_NODES = 32  # Gauss–Legendre nodes over |q|


# --- q·k and its sampling error -------------------------------------------------------------------


def dot_product_variance(key_dim: ArrayLike):
    """Var(q·k) = d: d independent products q_i k_i, each with mean 0 and variance 1·1."""
    return _whole("key_dim", key_dim, 1)[()]


def dot_product_excess_kurtosis(key_dim: ArrayLike):
    """6/d: one product has fourth moment 3·3 = 9, excess 6; sums of d divide it by d."""
    return (6 / _whole("key_dim", key_dim, 1))[()]


def variance_standard_error(key_dim: ArrayLike, pairs: ArrayLike):
    """Standard error of the sample variance of q·k over independent pairs: √((2d² + 6d)/pairs).

    Var of a sample variance is (μ_4 - μ_2²)/pairs, with μ_2 = d and μ_4 = (3 + 6/d) d².
    """
    d, pairs = _whole("key_dim", key_dim, 1), _whole("pairs", pairs, 2)
    return np.sqrt((2 * d**2 + 6 * d) / pairs)


def grid_variance_standard_error(key_dim: ArrayLike, length: ArrayLike, batch: ArrayLike = 1):
    """The same over batch grids of n × n logits: √((2d² + 6d + 4(n - 1)d)/(n² batch)).

    Logits of one row share q, those of one column share k. Cov((q·k)², (q·k')²) = Var(|q|²) = 2d
    for each of the 2n²(n - 1) such ordered pairs; logits that share neither are independent.
    """
    d, n = _whole("key_dim", key_dim, 1), _whole("length", length, 1)
    batch = _whole("batch", batch, 1)
    return np.sqrt((2 * d**2 + 6 * d + 4 * (n - 1) * d) / (n**2 * batch))


# --- Exact expectations over one row of N iid N(0, σ²) logits -------------------------------------


def expected_log_partition(keys: ArrayLike, std: ArrayLike):
    """E ln Z = E u - γ, nats, as u = ln Z + Gumbel noise and E G = γ.

    Args (the same for every expected_... function):
      keys: N, the number of keys, whole numbers from 2 to MAX_KEYS.
      std: σ, the standard deviation of the logits, from 0 to MAX_STD; broadcasts with keys.

    Raises:
      ValueError: N or σ out of range.
    """

    def value(n: float, race: _Race) -> float:
        return n * race.integral(race.x * race.psi[1], n - 1) - np.euler_gamma

    return _over_rows(value, keys, std)


def expected_entropy(keys: ArrayLike, std: ArrayLike):
    """E H = E[-Σ p ln p], nats: the expected noise of the race's winner, less γ.

    Given s, u = s_winner + G_winner, so E G_winner = E u - Σ p s = ln Z + γ - Σ p s = H + γ;
    E G_winner = N ∫ E[(x - σg) h_1(x - σg)] φ_0^(N-1) dx. Equal to E ln Z - σ²(1 - E Y2), which
    loses digits at large σ.
    """

    def value(n: float, race: _Race) -> float:
        return n * race.integral(race.noise, n - 1) - np.euler_gamma

    return _over_rows(value, keys, std)


def expected_collision(keys: ArrayLike, std: ArrayLike):
    """E Y2 = E Σ p² = N ∫ ψ_2 φ_0^(N-1) dx."""
    return _over_rows(lambda n, race: n * race.integral(race.psi[2], n - 1), keys, std)


def expected_jacobian_trace(keys: ArrayLike, std: ArrayLike):
    """E tr J = 1 - E Y2. By Stein's lemma also E[Σ p s]/σ²."""
    return 1 - expected_collision(keys, std)


def expected_jacobian_norm_squared(keys: ArrayLike, std: ArrayLike):
    """E ‖J‖_F² = E[Y2 - 2 Σp³ + Y2²].

    E Σp³ = (N/2) ∫ ψ_3 φ_0^(N-1) dx and
    E Y2² = (1/6) ∫ [N ψ_4 φ_0^(N-1) + N(N-1) ψ_2² φ_0^(N-2)] dx.
    """

    def value(n: float, race: _Race) -> float:
        psi = race.psi
        single = race.integral(psi[2] - psi[3] + psi[4] / 6, n - 1)
        return n * (single + (n - 1) / 6 * race.integral(psi[2] ** 2, n - 2))

    return _over_rows(value, keys, std)


def expected_max_weight(keys: ArrayLike, std: ArrayLike):
    """E max p: how often the largest logit also wins the race.

    With m the largest of N standard normals, 1/p_max = 1 + Σ' e^(σ(g - m)) over the N - 1 others,
    which are iid below m, and 1/a = ∫ e^(-at) dt:

        E max p = N ∫ n(m) ∫ e^(-t) c(t, m)^(N-1) dt dm,
        c(t, m) = ∫_(w>0) n(m - w) exp(-t e^(-σw)) dw,    n the standard normal density.
    """
    return _over_pairs(_max_weight, keys, std)


def saturation_probability(keys: ArrayLike, std: ArrayLike, threshold: float = 0.9):
    """P(max p > τ) for τ from 1/2 up to (not including) 1.

    At most one weight exceeds 1/2, so this is N·P(p_1 > τ) = N·P(ln Z' - s_1 < -ln(τ/(1 - τ))),
    Z' the sum over the N - 1 other keys. φ_0^(N-1) is the distribution function of ln Z' + Gumbel
    noise; dividing its Fourier transform by the noise's, Γ(1 + iω), leaves that of ln Z', and s_1
    multiplies it by exp(-σ²ω²/2), which keeps the division harmless for σ ≥ 1/4. For smaller σ (and
    N > 64, σ < 1/2) ln Z' is taken to be normal with mean ln(N - 1) + σ²(1 - 1/(N-1))/2 and
    variance σ²/(N - 1), which is exact for N = 2 and changes the answer by at most 5e-4.

    Raises:
      ValueError: N, σ or threshold out of range.
    """
    if not 0.5 <= threshold < 1:
        raise ValueError(f"threshold must be in [0.5, 1), got {threshold}")
    cut = -special.logit(threshold)
    return _over_pairs(lambda n, s: _saturation(n, s, cut), keys, std)


def averaged_over_queries(
    statistic: Callable, keys: ArrayLike, key_dim: ArrayLike, scale: ArrayLike
):
    """E statistic(keys, scale·|q|) over queries of d_k iid N(0, 1) entries.

    Gauss–Legendre over |q|, which follows the χ distribution with d_k degrees of freedom. Example:
    `averaged_over_queries(expected_entropy, 50, 64, 1.0)` is the mean entropy of unscaled
    attention over 50 keys of width 64.

    Args:
      statistic: any function of (keys, std) in this file, or one of your own.
      keys, key_dim, scale: numbers or arrays that broadcast; scale·|q| must stay below MAX_STD.
    """
    keys, d, scale = np.broadcast_arrays(keys, _whole("key_dim", key_dim, 1), scale)
    keys, d, scale = keys[..., None], d[..., None], np.abs(scale)[..., None]
    low = np.sqrt(2 * special.gammaincinv(d / 2, 1e-10))
    high = np.sqrt(2 * special.gammainccinv(d / 2, 1e-10))
    nodes, weights = _legendre(_QUERY_NODES)
    norm = low + (high - low) * (nodes + 1) / 2
    log_density = (d - 1) * np.log(norm) - norm**2 / 2  # of χ, but for a constant
    weights = weights * np.exp(log_density - log_density.max(axis=-1, keepdims=True))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return np.sum(weights * statistic(keys, scale * norm), axis=-1)[()]


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
    """
    norm_squared = averaged_over_queries(expected_jacobian_norm_squared, keys, key_dim, scale)
    d, d_v = np.asarray(key_dim, float), np.asarray(value_dim, float)
    logits = np.sqrt(d_v * norm_squared / np.asarray(keys, float))
    return GradientRms(logits, np.abs(scale) * np.sqrt((d - 1) / d * d_v * norm_squared))


# --- Regimes --------------------------------------------------------------------------------------


class Regime(NamedTuple):
    """What an asymptotic law says of a row; fields broadcast over (keys, std)."""

    entropy: np.ndarray  # E H, nats
    jacobian_trace: np.ndarray  # E tr J
    jacobian_norm_squared: np.ndarray  # E ‖J‖_F²
    max_weight: np.ndarray  # E max p
    saturation: np.ndarray  # P(max p > 0.9)


def expected_maximum(keys: ArrayLike):
    """μ_N = E max of N standard normals = N ∫ m n(m) Φ(m)^(N-1) dm.

    By parts, also N(N - 1) ∫ n² Φ^(N-2) dm: the density at zero of the gap between the two largest.
    """

    def value(n: float) -> float:
        m, weights = _largest(n)
        return float(np.sum(weights * m))

    return np.vectorize(value, otypes=[float])(_whole("keys", keys, 2, MAX_KEYS))[()]


def freezing_std(keys: ArrayLike):
    """σ_c = √(2 ln N): below, many keys share a row's weight; above, a few hold it.

    The freezing point of the random energy model (Derrida 1981): N e^(σ²/2), the mean of Z, is
    made by logits near σ², and N iid logits reach σ² only while σ² < σ √(2 ln N).
    """
    return np.sqrt(2 * np.log(_whole("keys", keys, 2)))[()]


def freezing_key_dim(keys: ArrayLike):
    """2 ln n: unscaled attention (σ ≈ √d_k) starts frozen when d_k is larger; scaled never does."""
    return freezing_std(keys) ** 2


def small_std(keys: ArrayLike, std: ArrayLike) -> Regime:
    """Laws for σ ≪ 1: p_i ≈ (1 + s_i - s̄)/N, to second order in σ (max p: to first).

    With V = E Σ(p - 1/N)² ≈ σ²(1 - 1/N)/N: Y2 = 1/N + V, H = ln N - NV/2,
    ‖J‖_F² = (1 - 1/N)/N + (1 - 4/N) V. H and tr J are within 1e-2 up to σ = 0.4.
    """
    n, std = _checked(keys, std)
    v = std**2 * (1 - 1 / n) / n
    return Regime(
        entropy=np.log(n) - n * v / 2,
        jacobian_trace=1 - 1 / n - v,
        jacobian_norm_squared=(1 - 1 / n) / n + (1 - 4 / n) * v,
        max_weight=(1 + std * expected_maximum(n)) / n,
        saturation=np.zeros(np.broadcast_shapes(n.shape, std.shape)),
    )


def random_energy(keys: ArrayLike, std: ArrayLike) -> Regime:
    """Laws for N → ∞ at fixed σ/σ_c (Derrida 1981). Finite-N corrections are large near σ_c.

    Below σ_c each weight vanishes and H ≈ ln N - σ²/2. Above, the weights tend to
    Poisson–Dirichlet(m, 0) with m = σ_c/σ (Pitman & Yor 1997), whose frequency spectrum
    x^(-m-1) (1-x)^(m-1) / B(1-m, m) gives E Y2 = 1 - m, E Σp³ = (1-m)(2-m)/2,
    E H = digamma(1) - digamma(1-m), P(max p > τ) = ((1-τ)/τ)^m sin(πm)/(πm) for τ ≥ 1/2,
    its partition probabilities E Y2² = [(1-m)(2-m)(3-m) + m(1-m)²]/6, and
    E exp(-λ/max p) = e^(-λ)/(e^(-λ) + λ^m Γ(1-m) P(1-m, λ)), integrated over λ, E max p
    (P the regularised lower incomplete gamma function).
    """
    n, std = np.broadcast_arrays(*_checked(keys, std))
    frozen = std > freezing_std(n)
    m = np.where(frozen, freezing_std(n) / np.where(frozen, std, 1), 0.5)
    collision = 1 - m
    cubes = (1 - m) * (2 - m) / 2
    collision_squared = ((1 - m) * (2 - m) * (3 - m) + m * (1 - m) ** 2) / 6
    log_rate = np.linspace(-60, 4, 1281)
    rate = np.exp(log_rate)
    a, r = 1 - m[..., None], rate
    rest = r ** (1 - a) * special.gamma(a) * special.gammainc(a, r)
    largest = np.sum(r * np.exp(-r) / (np.exp(-r) + rest), axis=-1) * (log_rate[1] - log_rate[0])
    return Regime(
        entropy=np.where(
            frozen, special.digamma(1) - special.digamma(1 - m), np.log(n) - std**2 / 2
        ),
        jacobian_trace=np.where(frozen, m, 1.0),
        jacobian_norm_squared=np.where(frozen, collision - 2 * cubes + collision_squared, 0.0),
        max_weight=np.where(frozen, largest, 0.0),
        saturation=np.where(frozen, 9**-m * np.sinc(m), 0.0),
    )


def large_std(keys: ArrayLike, std: ArrayLike) -> Regime:
    """Laws for σ ≫ μ_N, to first order in μ_N/σ (NaN at σ = 0).

    Only rows whose two largest logits nearly tie are not saturated. Their gap Δ has density μ_N/σ
    at zero (see `expected_maximum`), and p = 1/(1 + e^(-Δ)), so each statistic f(p) averages to
    f(1) + (μ_N/σ) ∫ [f(p) - f(1)] dΔ over Δ > 0: tr J = 2p(1-p) gives 1, ‖J‖_F² = 4p²(1-p)² gives
    1/3, H gives π²/6, 1 - p gives ln 2 and P(p < τ) gives ln(τ/(1-τ)).
    """
    n, std = np.broadcast_arrays(*_checked(keys, std))
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
    n, std = _checked(keys, std)
    return special.expit(np.asarray(gap, float) - std**2 / 2 - np.log(n - 1))[()]


# --- The race, and arguments ----------------------------------------------------------------------


class _Race(NamedTuple):
    """φ_0, ψ_k and E[y h_1(y)] on one grid, for one σ; arrays [x]."""

    x: np.ndarray
    frequency: np.ndarray  # of the grid's real Fourier transform, radians
    phi: np.ndarray  # φ_0
    psi: tuple[np.ndarray, ...]  # ψ_k at index k, 0 to 4 (ψ_0 is φ_0)
    noise: np.ndarray  # E[y h_1(y)] with y = x - σg

    def integral(self, f: np.ndarray, power: float) -> float:
        """∫ f φ_0^power dx."""
        return float(np.sum(f * self.phi**power) * _STEP)


@functools.lru_cache(maxsize=128)
def _race(std: float, reach: float = 8.0) -> _Race:
    # h_k is below 1e-15 outside (-5, 35); the normal density beyond `reach` standard deviations.
    low, high = -reach * std - 5, reach * std + 35
    size = fft.next_fast_len(int((high - low) / _STEP) + 1, real=True)
    x = low + _STEP * np.arange(size)
    frequency = 2 * np.pi * fft.rfftfreq(size, _STEP)
    damping = np.exp(-((std * frequency) ** 2) / 2)
    y = np.maximum(x, -20.0)  # h_k is 0 there, and e^(-y) stays finite
    h = np.exp(-np.arange(5)[:, None] * y[None, :] - np.exp(-y)[None, :])
    # h_0 is a step, not a bump: take the normal distribution function, whose convolution is
    # known, out of it before the (periodic) transform.
    h[0] -= special.ndtr(x)
    kernels = np.concatenate([h, (y * h[1])[None, :]])
    phi, *psi, noise = fft.irfft(fft.rfft(kernels, axis=-1) * damping[None, :], size, axis=-1)
    phi = np.clip(phi + special.ndtr(x / np.hypot(1, std)), 0, 1)
    return _Race(x, frequency, phi, (phi, *psi), noise)


def _normal_density(x: np.ndarray) -> np.ndarray:
    return np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)


@functools.lru_cache
def _legendre(nodes: int) -> tuple[np.ndarray, np.ndarray]:
    return special.roots_legendre(nodes)


def _saturation(n: float, std: float, cut: float) -> float:
    """N·P(ln Z' - s_1 < cut)."""
    if n == 2 or std < (0.25 if n <= 64 else 0.5):
        mean = np.log(n - 1) + std**2 * (1 - 1 / (n - 1)) / 2
        deviation = max(std, 1e-30) * np.sqrt(1 + 1 / (n - 1))
        return float(np.minimum(n * special.ndtr((cut - mean) / deviation), 1))
    race = _race(std, reach=12.0)  # wide: mass that wraps round the grid is multiplied by N
    density = (n - 1) * race.psi[1] * race.phi ** (n - 2)  # of ln Z' + noise
    noise = special.gamma(1 + 1j * race.frequency)
    spectrum = fft.rfft(density) * np.exp(-((std * race.frequency) ** 2) / 2) / noise
    # The integral from x[0] to cut of the trigonometric polynomial with this spectrum.
    omega = race.frequency[1:]
    span = cut - race.x[0]
    below = (np.exp(1j * omega * span) - 1) / (1j * omega)
    total = spectrum[0].real * span + 2 * np.sum((spectrum[1:] * below).real)
    return float(np.clip(n * total / race.x.size, 0, 1))


def _largest(n: float) -> tuple[np.ndarray, np.ndarray]:
    """Nodes m for the largest of n standard normals, and weights including its density."""
    nodes, weights = _legendre(64)
    low, high = special.ndtri(1e-12 ** (1 / n)), -special.ndtri(1e-12 / n)
    m = low + (high - low) * (nodes + 1) / 2
    density = n * _normal_density(m) * special.ndtr(m) ** (n - 1)
    return m, weights * (high - low) / 2 * density


def _max_weight(n: float, std: float) -> float:
    m, m_weights = _largest(n)
    x = np.arange(-4.5, 35, _STEP)  # t = e^(-x), so that e^(-t) dt = h_1(x) dx
    # Beyond w = 40/σ, exp(-t e^(-σw)) is 1: integrate its distance from 1 only.
    reach = min(m.max() + 8, 40 / max(std, 1e-9))
    nodes, weights = _legendre(96)
    w, w_weights = reach * (nodes + 1) / 2, weights * reach / 2
    missing = -np.expm1(-np.exp(-x[:, None] - std * w[None, :])) * w_weights[None, :]
    near = _normal_density(m[:, None] - w[None, :])
    # Divided by Φ(m): the probability given that the key is below m, whose density is in m_weights.
    survival = 1 - near @ missing.T / special.ndtr(m)[:, None]
    race = np.exp(-x - np.exp(-x)) * _STEP
    return float(m_weights @ (np.maximum(survival, 0) ** (n - 1)) @ race)


def _over_rows(value: Callable[[float, _Race], float], keys: ArrayLike, std: ArrayLike):
    return _over_pairs(lambda n, s: value(n, _race(s)), keys, std)


def _over_pairs(value: Callable[[float, float], float], keys: ArrayLike, std: ArrayLike):
    return np.vectorize(value, otypes=[float])(*_checked(keys, std))[()]


def _checked(keys: ArrayLike, std: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    n, std = _whole("keys", keys, 2, MAX_KEYS), np.asarray(std, float)
    if not np.all((std >= 0) & (std <= MAX_STD)):
        bad = std[~((std >= 0) & (std <= MAX_STD))].flat[0]
        raise ValueError(f"std must be in [0, {MAX_STD:g}], got {bad:g}")
    return n, std


def _whole(name: str, value: ArrayLike, least: int, most: float = np.inf) -> np.ndarray:
    array = np.asarray(value, float)
    fits = (array >= least) & (array <= most) & (array == np.floor(array))
    if not np.all(fits):
        bound = f"of at least {least}" if most == np.inf else f"from {least} to {most:g}"
        raise ValueError(f"{name} must be a whole number {bound}, got {array[~fits].flat[0]:g}")
    return array
