"""Dot-product attention, the whole of it on one page.

    logits  = scale · q·k + bias          scale is applied here and nowhere else
    weights = softmax over visible keys
    values  = weights @ value

after Vaswani et al. 2017, §3.2.1, with a scale that the caller chooses. Axes: B any leading axes,
T queries, S keys, H heads, G key/value heads (H a multiple of G), K = d_k, V value width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from attention.statistics import shifted, visible_logits


class AttentionOutput(NamedTuple):
    """What attention computed, and what it computed it from."""

    values: jax.Array  # [..., T, H, V], in value's dtype
    weights: jax.Array  # [..., H, T, S], float32 or better, before dropout
    logits: jax.Array  # [..., H, T, S], after scale and bias; hidden keys included (padding as 0)
    visible: jax.Array  # bool, broadcastable to weights: which keys each query may see


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float | jax.Array | None = None,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    causal: bool = False,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> AttentionOutput:
    """softmax(scale · q kᵀ + bias) v over the keys that each query may see.

    Args:
      query: [..., T, H, K].
      key: [..., S, G, K] with the same leading axes; H a multiple of G (head h reads key head
        h // (H / G), as in grouped-query attention).
      value: [..., S, G, V].
      scale: multiplies q·k only, never the bias. None is 1/√K; 1.0 is unscaled; 0.0 is uniform.
        A number, traced or not, of any sign, or one per head [H].
      bias: broadcastable to [..., H, T, S], added to the scaled logits; -inf hides a key.
      mask: boolean, True = attend, broadcastable to [..., H, T, S].
      causal: a query sees keys up to its own position; the last query is aligned with the last
        key when T != S.
      dropout_rate: in [0, 1), the fraction of weights set to zero (the others grow to make up).
      dropout_key: a PRNG key, needed when dropout_rate > 0.

    Returns:
      AttentionOutput. Softmax runs in float32 or better whatever comes in. A row that sees no key
      has zero weights, values and gradients. A query that sees no key, and a key or value that no
      query sees (padding), has no effect, forward or backward, whatever it holds.

    Raises:
      ValueError: shapes that do not fit, a mask that is not boolean, a dropout_rate out of range
        or without a key; names the argument, what was given, and what is expected.
    """
    check_arguments(query, key, value, scale, bias, mask, dropout_rate, dropout_key)
    num_queries, num_heads = query.shape[-3:-1]
    num_keys, num_key_heads = key.shape[-3:-1]
    visible = visibility(num_queries, num_keys, query.ndim, bias=bias, mask=mask, causal=causal)
    if mask is not None or bias is not None or num_queries > num_keys:
        query, key, value = _blank_padding(query, key, value, visible)

    logits = dot_product_logits(query, key, scale=scale, bias=bias)
    weights = masked_softmax(logits, visible)
    kept = weights
    if dropout_rate > 0 and dropout_key is not None:  # check_arguments wants both
        keep = jax.random.bernoulli(dropout_key, 1 - dropout_rate, weights.shape)
        kept = jnp.where(keep, weights / (1 - dropout_rate), 0)

    *leading, _, _, value_dim = value.shape
    grouped = (*leading, num_key_heads, num_heads // num_key_heads, num_queries, num_keys)
    values = jnp.einsum(
        "...grts,...sgv->...tgrv", kept.reshape(grouped), value.astype(kept.dtype)
    ).reshape(*leading, num_queries, num_heads, value_dim)
    return AttentionOutput(values.astype(value.dtype), weights, logits, visible)


def dot_product_logits(
    query: jax.Array,
    key: jax.Array,
    *,
    scale: float | jax.Array | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """scale · q kᵀ + bias: [..., T, H, K] and [..., S, G, K] to [..., H, T, S], float32 or better.

    The product is scaled, not the query: scaling the query would change the last bits.
    """
    num_queries, num_heads, key_dim = query.shape[-3:]
    num_keys, num_key_heads, _ = key.shape[-3:]
    dtype = jnp.promote_types(jnp.result_type(query, key), jnp.float32)
    leading = query.shape[:-3]
    query = query.reshape(*leading, num_queries, num_key_heads, num_heads // num_key_heads, key_dim)
    logits = jnp.einsum(
        "...tgrk,...sgk->...grts", query, key, preferred_element_type=dtype
    ).reshape(*leading, num_heads, num_queries, num_keys)
    scale = jnp.asarray(1 / math.sqrt(key_dim) if scale is None else scale, dtype)
    if scale.ndim:  # one per head
        scale = scale.reshape((1,) * len(leading) + (num_heads, 1, 1))
    logits = logits * scale
    return logits if bias is None else logits + _align(bias, logits.ndim).astype(dtype)


def visibility(
    num_queries: int,
    num_keys: int,
    ndim: int,
    *,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    causal: bool = False,
) -> jax.Array:
    """Which keys each query may see: boolean, with ndim axes, broadcastable to [..., H, T, S]."""
    visible = jnp.ones((1,) * ndim, bool) if mask is None else _align(mask, ndim)
    if bias is not None:
        visible = visible & (_align(bias, ndim) != -jnp.inf)
    if causal:
        last_seen = jnp.arange(num_queries)[:, None] + (num_keys - num_queries)
        visible = visible & _align(jnp.arange(num_keys)[None, :] <= last_seen, ndim)
    return visible


def masked_softmax(logits: jax.Array, visible: jax.Array) -> jax.Array:
    """Softmax over the last axis where visible; exactly 0 elsewhere, and in rows that see nothing.

    Hidden logits are left out before the exponential, so that no finite fill value can lose
    against a large logit, and no gradient passes through them.
    """
    logits, visible = visible_logits(logits, visible)
    difference, _ = shifted(logits, visible)
    exponential = jnp.where(visible, jnp.exp(difference), 0.0)
    total = jnp.sum(exponential, axis=-1, keepdims=True)
    # Zero only in rows that see no key. (maximum(total, 1) would do for values, but halves its
    # gradient where total is exactly 1, as in saturated rows and those with one key.)
    return exponential / jnp.where(total == 0, 1.0, total)


def _align(array: jax.Array, ndim: int) -> jax.Array:
    """Give array ndim axes by adding leading ones, as broadcasting would."""
    return array.reshape((1,) * (ndim - array.ndim) + array.shape)


def _blank_padding(
    query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Zeros for queries that see no key, and for keys and values that no query sees.

    A weight of zero is not enough: zero times NaN is NaN, forward and backward.
    """
    sees = jnp.swapaxes(jnp.any(visible, axis=-1, keepdims=True), -3, -2)  # [..., T, H or 1, 1]
    seen = jnp.any(visible, axis=-2)  # [..., H or 1, S or 1]
    *leading, heads, num_keys = seen.shape
    num_heads, num_key_heads = query.shape[-2], key.shape[-2]
    if heads == num_heads:
        groups = (num_key_heads, num_heads // num_key_heads)
        seen = jnp.any(seen.reshape(*leading, *groups, num_keys), axis=-2)
    seen = jnp.swapaxes(seen, -2, -1)[..., None]  # [..., S, G or 1, 1]
    return jnp.where(sees, query, 0), jnp.where(seen, key, 0), jnp.where(seen, value, 0)


def check_arguments(query, key, value, scale, bias, mask, dropout_rate, dropout_key) -> None:
    """Raise ValueError for arguments of dot_product_attention that do not fit together."""
    for name, array, axes in (
        ("query", query, "[..., T, H, K]"),
        ("key", key, "[..., S, G, K]"),
        ("value", value, "[..., S, G, V]"),
    ):
        if array.ndim < 3:
            raise ValueError(f"{name} has shape {array.shape}, expected {axes}")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {array.dtype}, expected a floating-point one")
    *leading, num_queries, num_heads, key_dim = query.shape
    num_keys, num_key_heads = key.shape[-3:-1]
    if key_dim == 0:
        raise ValueError(f"query has shape {query.shape}, expected K of at least 1")
    if num_key_heads == 0 or num_heads % num_key_heads:
        raise ValueError(
            f"query has {num_heads} heads and key has {num_key_heads}: "
            "the number of query heads must be a multiple of the number of key heads"
        )
    expected = (*leading, num_keys, num_key_heads, key_dim)
    if key.shape != expected:
        raise ValueError(f"key has shape {key.shape}, expected {expected} to fit query")
    if value.shape[:-1] != expected[:-1]:
        raise ValueError(
            f"value has shape {value.shape}, expected {(*expected[:-1], 'V')} to fit key"
        )
    if scale is not None and jnp.shape(scale) not in ((), (num_heads,)):
        raise ValueError(
            f"scale has shape {jnp.shape(scale)}, expected a number or one per head ({num_heads},)"
        )
    if mask is not None and mask.dtype != bool:
        raise ValueError(f"mask has dtype {mask.dtype}, expected bool (True = attend)")
    logits_shape = (*leading, num_heads, num_queries, num_keys)
    for name, array in (("bias", bias), ("mask", mask)):
        if array is not None and not _broadcasts(array.shape, logits_shape):
            raise ValueError(
                f"{name} has shape {array.shape}, expected one broadcastable to {logits_shape}"
            )
    if not 0 <= dropout_rate < 1:
        raise ValueError(f"dropout_rate is {dropout_rate}, expected a number in [0, 1)")
    if dropout_rate > 0 and dropout_key is None:
        raise ValueError(f"dropout_rate is {dropout_rate}, so dropout_key must be given")


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    return len(shape) <= len(target) and all(
        size in (1, wanted) for size, wanted in zip(shape[::-1], target[::-1], strict=False)
    )
