"""Expectations over a softmax row as one-dimensional integrals, by the Gumbel-max trick.

Perturb the logits with independent standard Gumbel noise G_i and take the largest. Given s, the
winner is i with probability p_i, and the winning perturbed logit is u = ln Z + (a Gumbel variable),
whoever wins. In t = e^(-x) it is an exponential race: arrival times e^(-s_i - G_i) are exponential
with rates e^(s_i), and the first to arrive wins. (Hazan et al. 2016,
https://arxiv.org/abs/1602.03571; Balog et al. 2017, https://arxiv.org/abs/1706.04161.)

For logits iid N(0, σ²), with g standard normal and

    h_k(y) = e^(-k y) exp(-e^(-y)),    φ_0(x) = E h_0(x - σg) = P(s + G < x),
    ψ_k(x) = E h_k(x - σg)             (ψ_1 is the density of s + G),

u has the distribution function φ_0^N, and as 1/Z^K = ∫ e^(-Kx) exp(-Z e^(-x)) dx / Γ(K),

    E Π p_i^(k_i) = ∫ Π ψ_(k_i)(x) φ_0(x)^(N - m) dx / Γ(Σ k_i)        for m different keys.

ψ_k is h_k convolved with a normal density: a product in Fourier space, exact at σ = 0 and cheap at
σ = 64. All integrands are analytic in a strip of width π, so that the plain sum over a grid of
spacing 1/8 is accurate to about 1e-9.
"""

import functools
from typing import NamedTuple

import numpy as np
from scipy import fft, special

STEP = 1 / 8  # grid spacing in x: h_4's spectrum is below 1e-14 at the grid's highest frequency


class PerturbedLogit(NamedTuple):
    """The law of s + G for s ~ N(0, σ²) and Gumbel noise G, on a grid; arrays [x]."""

    x: np.ndarray
    frequency: np.ndarray  # of the grid's real Fourier transform, radians
    phi: np.ndarray  # φ_0, its distribution function
    psi: tuple[np.ndarray, ...]  # ψ_k at index k, 0 to 4 (ψ_0 is φ_0)
    perturbation: np.ndarray  # E[y h_1(y)] with y = x - σg: density times the mean of G given x

    def integral(self, f: np.ndarray, power: float) -> float:
        """∫ f φ_0^power dx."""
        return float(np.sum(f * self.phi**power) * STEP)


@functools.lru_cache(maxsize=128)
def perturbed_logit(std: float, reach: float = 8.0) -> PerturbedLogit:
    """The law of s + G for one σ, kept for the next call.

    Args:
      std: σ, at least 0.
      reach: how many standard deviations of s the grid spans on either side.
    """
    x = _grid(std, reach)
    frequency = 2 * np.pi * fft.rfftfreq(x.size, STEP)
    damping = np.exp(-((std * frequency) ** 2) / 2)
    spectra = fft.rfft(_kernels(x), axis=-1) * damping[None, :]
    phi, *psi, perturbation = fft.irfft(spectra, x.size, axis=-1)
    phi = np.clip(phi + special.ndtr(x / np.hypot(1, std)), 0, 1)
    return PerturbedLogit(x, frequency, phi, (phi, *psi), perturbation)


def _grid(std: float, reach: float) -> np.ndarray:
    # h_k is below 1e-15 outside (-5, 35); the normal density beyond `reach` standard deviations.
    low, high = -reach * std - 5, reach * std + 35
    size = fft.next_fast_len(int((high - low) / STEP) + 1, real=True)
    return low + STEP * np.arange(size)


def _kernels(x: np.ndarray) -> np.ndarray:
    """h_0 less the normal distribution function, h_1 to h_4, and y h_1: [6, x].

    h_0 is a step, not a bump, and the transform is periodic: what is taken out of it here has a
    known convolution, Φ(x/√(1 + σ²)), which is added after the transform.
    """
    y = np.maximum(x, -20.0)  # h_k is 0 there, and e^(-y) stays finite
    h = np.exp(-np.arange(5)[:, None] * y[None, :] - np.exp(-y)[None, :])
    h[0] -= special.ndtr(x)
    return np.concatenate([h, (y * h[1])[None, :]])
