"""What the arguments of the theory must satisfy, and how they broadcast."""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

MAX_KEYS = 2**20
MAX_STD = 256.0


def over_pairs(value: Callable[[float, float], float], keys: ArrayLike, std: ArrayLike):
    """value(N, σ) for each pair of keys and std, which broadcast: float64, a number for numbers."""
    return np.vectorize(value, otypes=[float])(*keys_and_std(keys, std))[()]


def keys_and_std(keys: ArrayLike, std: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """N and σ as float64 arrays.

    Raises:
      ValueError: N isn't a whole number from 2 to MAX_KEYS, or σ not from 0 to MAX_STD.
    """
    n, std = whole("keys", keys, 2, MAX_KEYS), np.asarray(std, float)
    fits = (std >= 0) & (std <= MAX_STD)
    if not np.all(fits):
        raise ValueError(f"std must be in [0, {MAX_STD:g}], got {std[~fits].flat[0]:.12g}")
    return n, std


def whole(name: str, value: ArrayLike, least: int, most: float = np.inf) -> np.ndarray:
    """`value` as a float64 array of whole numbers.

    Raises:
      ValueError: one of them is not whole, or not from `least` to `most`; says `name` and which.
    """
    array = np.asarray(value, float)
    fits = (array >= least) & (array <= most) & (array == np.floor(array))
    if not np.all(fits):
        bound = f"of at least {least}" if most == np.inf else f"from {least} to {most:.12g}"
        raise ValueError(f"{name} must be a whole number {bound}, got {array[~fits].flat[0]:.12g}")
    return array
