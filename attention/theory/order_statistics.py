"""The largest of N standard normals."""

import functools

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from attention.theory.arguments import MAX_KEYS, whole


def expected_maximum(keys: ArrayLike):
    """μ_N = E max of N standard normals = N ∫ m n(m) Φ(m)^(N-1) dm.

    By parts, also N(N - 1) ∫ n² Φ^(N-2) dm: the density at zero of the gap between the two largest.

    Args:
      keys: N, whole numbers from 2 to MAX_KEYS, of any shape.

    Raises:
      ValueError: N out of range.
    """

    def value(n: float) -> float:
        m, weights = largest_normal(n)
        return float(np.sum(weights * m))

    return np.vectorize(value, otypes=[float])(whole("keys", keys, 2, MAX_KEYS))[()]


def largest_normal(n: float) -> tuple[np.ndarray, np.ndarray]:
    """Nodes m for the largest of n standard normals, and weights including its density: [64]."""
    nodes, weights = legendre(64)
    low, high = special.ndtri(1e-12 ** (1 / n)), -special.ndtri(1e-12 / n)
    m = low + (high - low) * (nodes + 1) / 2
    density = n * normal_density(m) * special.ndtr(m) ** (n - 1)
    return m, weights * (high - low) / 2 * density


def normal_density(x: np.ndarray) -> np.ndarray:
    """n(x) = e^(-x²/2)/√(2π)."""
    return np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)


@functools.lru_cache
def legendre(nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Gauss–Legendre nodes and weights on (-1, 1): [nodes] each."""
    return special.roots_legendre(nodes)
