"""Faults of the libraries underneath that would silently change results."""

import jax
import jax.numpy as jnp
import numpy as np


def test_small_matmul_under_vmap():
    """jaxlib 0.10.2 on a CPU gives 1065369600 for the last row (jax-ml/jax#39103)."""
    rows = np.zeros((32769, 3), np.float32)
    rows[:, 0] = np.arange(32769)
    squares = jax.jit(jax.vmap(lambda r: jnp.sum((jnp.eye(3) @ r) ** 2)))(rows)
    np.testing.assert_array_equal(squares, rows[:, 0] ** 2)
    assert squares[-1] == 1073741824
