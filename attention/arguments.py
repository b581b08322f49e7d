"""What the three paths of attention take, checked and made JAX arrays of, once."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray | np.generic
REAL = (jnp.floating, jnp.integer)


class Expected(NamedTuple):
    """What an argument has to be."""

    shape: str
    kinds: tuple[type, ...]
    dtype: str  # kinds in words


EXPECTED = {
    "query": Expected("[..., T, H, K]", (jnp.floating,), "a floating-point one"),
    "key": Expected("[..., S, G, K]", (jnp.floating,), "a floating-point one"),
    "value": Expected("[..., S, G, V]", (jnp.floating,), "a floating-point one"),
    "scale": Expected("of one number per head [H], or a number", REAL, "a real one"),
    "bias": Expected("broadcastable to [..., H, T, S]", REAL, "a real one (a mask is boolean)"),
    "mask": Expected("broadcastable to [..., H, T, S]", (np.bool_,), "bool (True = attend)"),
}


def checked_arrays(
    query: Array,
    key: Array,
    value: Array,
    scale: float | Array | None,
    bias: Array | None,
    mask: Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Query, key, value, bias and mask as JAX arrays.

    Raises:
      ValueError: what is no array, or of another kind, or doesn't fit the others; names the
        argument, what was given, and what is expected.
    """
    given = dict(zip(EXPECTED, (query, key, value, scale, bias, mask), strict=True))
    for name, argument in given.items():
        _check_kind(name, argument)
    _check_shapes(query.shape, key.shape, value.shape)
    *leading, num_queries, num_heads, _ = query.shape
    if scale is not None and np.shape(scale) not in ((), (num_heads,)):
        raise ValueError(
            f"scale has shape {np.shape(scale)}, expected a number or one per head ({num_heads},)"
        )
    logits_shape = (*leading, num_heads, num_queries, key.shape[-3])
    for name, array in (("bias", bias), ("mask", mask)):
        if array is not None and not _broadcasts(array.shape, logits_shape):
            raise ValueError(
                f"{name} has shape {array.shape}, expected one broadcastable to {logits_shape}"
            )
    return (
        jnp.asarray(query),
        jnp.asarray(key),
        jnp.asarray(value),
        None if bias is None else jnp.asarray(bias),
        None if mask is None else jnp.asarray(mask),
    )


def check_dropout(rate: float, key: jax.Array | None) -> None:
    """Raise ValueError for a rate outside [0, 1), or one without a key."""
    if not (isinstance(rate, int | float) or _is_array(rate)) or not 0 <= rate < 1:
        raise ValueError(f"dropout_rate is {rate!r}, expected a number in [0, 1)")
    if rate > 0 and key is None:
        raise ValueError(f"dropout_rate is {rate}, so dropout_key must be given")


def _is_array(argument: Any) -> bool:
    return isinstance(argument, Array) or hasattr(argument, "__jax_array__")


def _check_kind(name: str, argument: Any) -> None:
    """An array of the kind expected; None too unless it is query, key or value."""
    expected = EXPECTED[name]
    if argument is None and name not in ("query", "key", "value"):
        return
    if name == "scale" and isinstance(argument, int | float):
        return
    if not _is_array(argument):
        raise ValueError(
            f"{name} is of type {type(argument).__name__}, "
            f"expected a JAX or NumPy array {expected.shape}"
        )
    if not any(jnp.issubdtype(argument.dtype, kind) for kind in expected.kinds):
        raise ValueError(f"{name} has dtype {argument.dtype}, expected {expected.dtype}")
    if argument.dtype.itemsize > 8:
        raise ValueError(f"{name} has dtype {argument.dtype}, expected one of at most 64 bits")


def _check_shapes(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> None:
    for name, shape in (("query", query), ("key", key), ("value", value)):
        if len(shape) < 3:
            raise ValueError(f"{name} has shape {shape}, expected {EXPECTED[name].shape}")
    *leading, _, num_heads, key_dim = query
    num_keys, num_key_heads = key[-3:-1]
    if key_dim == 0:
        raise ValueError(f"query has shape {query}, expected K of at least 1")
    if num_key_heads == 0 or num_heads % num_key_heads:
        raise ValueError(
            f"query has {num_heads} heads and key has {num_key_heads}: "
            "the number of query heads must be a multiple of the number of key heads"
        )
    expected = (*leading, num_keys, num_key_heads, key_dim)
    if key != expected:
        raise ValueError(f"key has shape {key}, expected {expected} to fit query")
    if value[:-1] != expected[:-1]:
        raise ValueError(f"value has shape {value}, expected {(*expected[:-1], 'V')} to fit key")


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    return len(shape) <= len(target) and all(
        size in (1, wanted) for size, wanted in zip(shape[::-1], target[::-1], strict=False)
    )
