"""Dot-product attention, the whole of it on one page.

    logits  = scale · q·k + bias          scale is applied here and nowhere else
    weights = softmax over visible keys
    values  = weights @ value

after Vaswani et al. 2017, §3.2.1, arxiv.org/abs/1706.03762, with a scale that the caller chooses.
Axes: "..." any leading ones or none, T queries, S keys, H heads, G key/value heads (H a multiple of
G: each is read by H / G heads), K = d_k, V value width. In products g, r stand for G, H / G.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from attention.arguments import Array, check_dropout, checked_arrays
from attention.product import product
from attention.statistics import shifted, visible_logits


class AttentionOutput(NamedTuple):
    """What attention computed, and what it computed it from."""

    values: jax.Array  # [..., T, H, V], in value's dtype
    weights: jax.Array  # [..., H, T, S], float32 or better, before dropout
    logits: jax.Array  # [..., H, T, S], after scale and bias; hidden keys included (padding as 0)
    visible: jax.Array  # bool, broadcastable to weights: which keys each query may see


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    scale: float | Array | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    causal: bool = False,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> AttentionOutput:
    """softmax(scale · q kᵀ + bias) v over the keys that each query may see.

    Args:
      query: [..., T, H, K], floating point, of JAX or NumPy (as all arrays here).
      key: [..., S, G, K] with the same leading axes; H a multiple of G (head h reads key head
        h // (H / G), as in grouped-query attention, Ainslie et al. 2023, arxiv.org/abs/2305.13245).
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
      ValueError: what is no array, shapes that do not fit, a mask that is not boolean, a
        dropout_rate out of range or without a key; names the argument, what was given, and what
        is expected.
    """
    query, key, value, bias, mask = checked_arrays(query, key, value, scale, bias, mask)
    check_dropout(dropout_rate, dropout_key)
    num_queries, num_keys = query.shape[-3], key.shape[-3]
    visible = visibility(num_queries, num_keys, query.ndim, bias=bias, mask=mask, causal=causal)
    if mask is not None or bias is not None or num_queries > num_keys:
        query, key, value = blank_padding(query, key, value, visible)

    # A rule that turns q and k acts before this line, one that caps logits after it, and a sink
    # joins `total` in masked_softmax; streaming has the same three places in `_block` and RowSums.
    logits = dot_product_logits(query, key, scale=scale, bias=bias)
    weights = masked_softmax(logits, visible)
    kept = weights
    if dropout_rate > 0 and dropout_key is not None:  # check_dropout wants both
        keep = jax.random.bernoulli(dropout_key, 1 - dropout_rate, weights.shape)
        kept = jnp.where(keep, weights / (1 - dropout_rate), 0)

    values = product(
        "...sgv,...grts->...tgrv",
        value.astype(kept.dtype),
        split_heads(kept, key.shape[-2], axis=-3),
        kept.dtype,
    ).reshape(*query.shape[:-1], value.shape[-1])
    return AttentionOutput(values.astype(value.dtype), weights, logits, visible)


def dot_product_logits(
    query: jax.Array,
    key: jax.Array,
    *,
    scale: float | Array | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """scale · q kᵀ + bias: [..., T, H, K] and [..., S, G, K] to [..., H, T, S], float32 or better.

    The product is scaled, not the query: scaling the query would change the last bits.
    """
    *leading, num_queries, num_heads, key_dim = query.shape
    num_keys, num_key_heads = key.shape[-3:-1]
    dtype = jnp.promote_types(jnp.result_type(query, key), jnp.float32)
    grouped = split_heads(query, num_key_heads, axis=-2)
    logits = product("...sgk,...tgrk->...grts", key, grouped, dtype)
    logits = logits.reshape(*leading, num_heads, num_queries, num_keys)
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


def split_heads(array: jax.Array, num_key_heads: int, axis: int) -> jax.Array:
    """The axis (negative) of H heads as two axes, [G, H / G]: by the key head that they read."""
    before, heads, after = array.shape[:axis], array.shape[axis], array.shape[axis:][1:]
    return array.reshape(*before, num_key_heads, heads // num_key_heads, *after)


def blank_padding(
    query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Zeros for queries that see no key, and for keys and values that no query sees.

    A weight of zero is not enough: zero times NaN is NaN, forward and backward.
    """
    sees = jnp.swapaxes(jnp.any(visible, axis=-1, keepdims=True), -3, -2)  # [..., T, H or 1, 1]
    seen = jnp.any(visible, axis=-2)  # [..., H or 1, S or 1]
    if seen.shape[-2] == query.shape[-2]:
        seen = jnp.any(split_heads(seen, key.shape[-2], axis=-2), axis=-2)
    seen = jnp.swapaxes(seen, -2, -1)[..., None]  # [..., S, G or 1, 1]
    return jnp.where(sees, query, 0), jnp.where(seen, key, 0), jnp.where(seen, value, 0)


def _align(array: jax.Array, ndim: int) -> jax.Array:
    """Give array ndim axes by adding leading ones, as broadcasting would."""
    return array.reshape((1,) * (ndim - array.ndim) + array.shape)
