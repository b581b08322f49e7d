"""Attention and its row statistics in memory O(T + S): the weights are never held.

Queries and keys are taken in blocks. For a block of queries the blocks of keys pass by, and what
is kept of each row is its running sums (`RowSums`: rescaled whenever the maximum moves) and the
weighted sum of values under the same maximum. The way back recomputes each block's weights from
the row's maximum and largest weight 1/Z (after Dao et al. 2022, FlashAttention,
arxiv.org/abs/2205.14135), twice:

    ∂L/∂s = p ∘ (∂L/∂p - Σ p ∘ ∂L/∂p)    for logits s = scale · q·k + bias

needs the sum first. The usual shortcut for it, values · ∂L/∂values, rounds differently from
∂L/∂p; where a row is saturated, which is what we are here to see, only that difference is left.

Axes as in `attention.dot_product`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention.arguments import Array, checked_arrays
from attention.dot_product import blank_padding, dot_product_logits, split_heads
from attention.product import product
from attention.statistics import (
    AttentionStatistics,
    RowSums,
    merge_row_sums,
    row_sums,
    share_of_whole,
    shifted,
    statistics_from_sums,
    visible_logits,
)

# As many logits as may be held at once by default: a few such arrays of float32 fit the level-two
# cache of a core; four times as many ran up to eight times slower.
BLOCK_LOGITS = 2**16


class StreamingOutput(NamedTuple):
    """Values, and what the softmax rows tell."""

    values: jax.Array  # [..., T, H, V], in value's dtype
    statistics: AttentionStatistics  # each field [..., H, T]


class _Grid(NamedTuple):
    """How [T, S] is cut into blocks; the last blocks are padded."""

    num_queries: int
    num_keys: int
    block_size: int  # at most this many queries and keys to a block
    causal: bool

    @property
    def query_blocks(self) -> int:
        return max(1, -(-self.num_queries // self.block_size))

    @property
    def key_blocks(self) -> int:
        return max(1, -(-self.num_keys // self.block_size))

    @property
    def query_block(self) -> int:
        return max(1, -(-self.num_queries // self.query_blocks))

    @property
    def key_block(self) -> int:
        return max(1, -(-self.num_keys // self.key_blocks))

    def queries(self, i: jax.Array) -> tuple[jax.Array, int]:
        return i * self.query_block, self.query_block

    def keys(self, j: jax.Array) -> tuple[jax.Array, int]:
        return j * self.key_block, self.key_block

    def visible_key_blocks(self, i: jax.Array) -> int | jax.Array:
        """How many blocks of keys, from the first on, the query block i has to look at."""
        if not self.causal:
            return self.key_blocks
        end = (i + 1) * self.query_block + self.num_keys - self.num_queries
        return jnp.clip(-(-end // self.key_block), 0, self.key_blocks)


def streaming_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    scale: float | Array | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    causal: bool = False,
    block_size: int | None = None,
) -> StreamingOutput:
    """softmax(scale · q kᵀ + bias) v and the statistics of its rows, without the weights.

    The same function as `dot_product_attention` followed by `attention_statistics`, rounding
    aside: the same arguments, scales, rules for hidden keys, padding and rows that see nothing.
    Memory grows as T + S, unless a mask or bias is given that is itself T × S; one that broadcasts
    is never expanded. Causal blocks that are hidden entirely cost nothing.

    Reverse mode, first order: gradients reach query, key, value, scale and bias through the
    values. The statistics are for reading and pass none, as in `attention_statistics`. There is
    no dropout, and no gradient with respect to the logits to look at: they are never held.

    Args:
      query: [..., T, H, K], floating point, of JAX or NumPy (as all arrays here).
      key: [..., S, G, K] with the same leading axes; H a multiple of G.
      value: [..., S, G, V].
      scale: multiplies q·k only: None (1/√K), a number, traced or not, or one per head [H].
      bias: broadcastable to [..., H, T, S], added to the scaled logits; -inf hides a key.
      mask: boolean, True = attend, broadcastable to [..., H, T, S].
      causal: a query sees keys up to its own position; the last query is aligned with the last
        key when T != S.
      block_size: how many queries, and keys, are taken at a time, of all leading axes and heads
        together. The default keeps a block of logits in the cache of a CPU's core; on an
        accelerator, more is faster.

    Returns:
      StreamingOutput(values [..., T, H, V], statistics with fields [..., H, T]).

    Raises:
      ValueError: what `dot_product_attention` refuses, or a block_size below 1.
    """
    query, key, value, bias, mask = checked_arrays(query, key, value, scale, bias, mask)
    *leading, num_queries, num_heads, key_dim = query.shape
    if block_size is None:
        rows = math.prod(leading) * num_heads
        block_size = max(64, math.isqrt(BLOCK_LOGITS // max(rows, 1)))
    if not isinstance(block_size, int | np.integer) or block_size < 1:
        raise ValueError(f"block_size is {block_size!r}, expected an integer of at least 1")
    grid = _Grid(num_queries, key.shape[-3], block_size, causal)
    dtype = jnp.promote_types(jnp.result_type(query, key), jnp.float32)
    scale = jnp.asarray(1 / math.sqrt(key_dim) if scale is None else scale, dtype)
    return _whole_blocks(query, key, value, scale, bias, mask, grid)


@partial(jax.jit, static_argnames="grid")
def _whole_blocks(query, key, value, scale, bias, mask, grid) -> StreamingOutput:
    """Pad to whole blocks, stream, cut off what was padded."""
    values, statistics = _streaming(
        _pad(query, {-3: grid.query_blocks * grid.query_block}),
        _pad(key, {-3: grid.key_blocks * grid.key_block}),
        _pad(value, {-3: grid.key_blocks * grid.key_block}),
        scale,
        _pad_tiles(bias, query.ndim, grid),
        _pad_tiles(mask, query.ndim, grid),
        grid,
    )
    return StreamingOutput(
        values[..., : grid.num_queries, :, :],
        AttentionStatistics(*(field[..., : grid.num_queries] for field in statistics)),
    )


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _streaming(query, key, value, scale, bias, mask, grid):
    """Values and statistics of padded arrays; see _forward."""
    return _forward(query, key, value, scale, bias, mask, grid)[0]


def _forward(query, key, value, scale, bias, mask, grid):
    """((values, statistics), residuals for _backward)."""
    *leading, _, num_heads, _ = query.shape
    num_key_heads, value_dim = value.shape[-2:]
    rows = jnp.zeros((*leading, num_heads, grid.query_block), scale.dtype)
    mixed = jnp.zeros((*rows.shape, value_dim), scale.dtype)
    nothing = RowSums(*(rows for _ in RowSums._fields)), mixed

    def query_block(i):
        def add_key_block(j, carry):
            sums, mixed = carry
            block = _block(query, key, value, scale, bias, mask, grid, i, j)
            part = row_sums(block.logits, block.visible)
            difference, _ = shifted(block.logits, block.visible)
            exponential = jnp.where(block.visible, jnp.exp(difference), 0.0)
            grouped = split_heads(exponential, num_key_heads, axis=-3)
            part_mixed = product("...grts,...sgv->...grtv", grouped, block.value, scale.dtype)
            whole = merge_row_sums(sums, part)
            mixed = mixed * share_of_whole(sums, whole)[..., None] + (
                part_mixed.reshape(mixed.shape) * share_of_whole(part, whole)[..., None]
            )
            return whole, mixed

        count = grid.visible_key_blocks(i)
        sums, mixed = jax.lax.fori_loop(0, count, add_key_block, nothing)
        return mixed / (1 + sums.tail_1)[..., None], statistics_from_sums(sums)

    values, statistics = jax.lax.map(query_block, jnp.arange(grid.query_blocks))
    # [blocks, ..., H, t, V] to [..., T, H, V], and [blocks, ..., H, t] to [..., H, T]
    values = jnp.moveaxis(values, (0, -2), (-4, -3)).reshape(*leading, -1, num_heads, value_dim)
    statistics = AttentionStatistics(
        *(jnp.moveaxis(field, 0, -2).reshape(*leading, num_heads, -1) for field in statistics)
    )
    residuals = (query, key, value, scale, bias, mask, statistics)
    return (values.astype(value.dtype), statistics), residuals


def _backward(grid, residuals, cotangents):
    """Cotangents of query, key, value, scale, bias and mask."""
    query, key, value, scale, bias, mask, statistics = residuals
    block_at = partial(_block, query, key, value, scale, bias, mask, grid)
    dtype = scale.dtype
    d_values = cotangents[0].astype(dtype)
    per_head = scale.reshape((1,) * (query.ndim - 2) + (-1, 1))
    learned_bias = bias is not None and jnp.issubdtype(bias.dtype, jnp.floating)

    def query_block(carry, i):
        rows = _rows(d_values, statistics, key.shape[-2], grid.queries(i))

        def add_mean(j, mean):
            weights, d_weights = _weights(block_at(i, j), rows)
            return mean + jnp.sum(weights * d_weights, axis=-1, keepdims=True)

        def add_key_block(j, carry):
            d_query_i, d_key, d_value, d_bias = carry
            block = block_at(i, j)
            weights, d_weights = _weights(block, rows)
            d_logits = weights * (d_weights - mean)
            if learned_bias:
                d_bias = _add(d_bias, d_logits, {-2: grid.queries(i), -1: grid.keys(j)})
            d_query_ij, d_key_j, d_value_j = _products_back(
                block, rows, weights, d_logits, per_head
            )
            d_key = _add(d_key, d_key_j, {-3: grid.keys(j)})
            d_value = _add(d_value, d_value_j, {-3: grid.keys(j)})
            return d_query_i + d_query_ij, d_key, d_value, d_bias

        count = grid.visible_key_blocks(i)
        mean = jax.lax.fori_loop(0, count, add_mean, jnp.zeros_like(rows.maximum))
        start = jnp.zeros((*rows.d_values.shape[:-1], query.shape[-1]), dtype), *carry
        d_query_i, *carry = jax.lax.fori_loop(0, count, add_key_block, start)
        return tuple(carry), d_query_i

    start = (
        jnp.zeros(key.shape, dtype),
        jnp.zeros(value.shape, dtype),
        jnp.zeros(bias.shape, dtype) if learned_bias else None,
    )
    (d_key, d_value, d_bias), d_query = jax.lax.scan(
        query_block, start, jnp.arange(grid.query_blocks)
    )
    # [blocks, ..., t, G, H / G, K] to [..., T, H, K], not scaled yet
    d_query = jnp.moveaxis(d_query, 0, -5).reshape(query.shape)
    # Σ_s ∂L/∂s · q·k = q · Σ_s ∂L/∂s k: the scale's gradient needs no pass of its own. A query
    # that sees nothing has no part in it, even if it is NaN.
    d_scale = jnp.sum(
        jnp.where(d_query == 0, 0, query * d_query), axis=(*range(query.ndim - 2), -1)
    )
    return (
        (d_query * per_head).astype(query.dtype),
        d_key.astype(key.dtype),
        d_value.astype(value.dtype),
        d_scale if scale.ndim else jnp.sum(d_scale),
        d_bias.astype(bias.dtype) if learned_bias else None,
        None,
    )


_streaming.defvjp(_forward, _backward)


class _Block(NamedTuple):
    """One block of queries against one of keys, hidden ones as zeros; float32 or better."""

    query: jax.Array  # [..., t, H, K]
    key: jax.Array  # [..., s, G, K]
    value: jax.Array  # [..., s, G, V]
    logits: jax.Array  # [..., H, t, s]
    visible: jax.Array  # bool, of the same shape


def _block(query, key, value, scale, bias, mask, grid, i, j) -> _Block:
    """Cut block i, j out of the padded arrays and compute its logits."""
    query = _read(query, {-3: grid.queries(i)})
    key, value = (_read(x, {-3: grid.keys(j)}) for x in (key, value))
    tile = {-2: grid.queries(i), -1: grid.keys(j)}
    bias, mask = (None if x is None else _read(x, tile) for x in (bias, mask))

    keys = j * grid.key_block + jnp.arange(grid.key_block)[None, :]
    visible = jnp.ones((1, 1), bool)
    if grid.key_blocks * grid.key_block > grid.num_keys:  # padded
        visible = keys < grid.num_keys
    if grid.causal:
        queries = i * grid.query_block + jnp.arange(grid.query_block)[:, None]
        visible = visible & (keys <= queries + (grid.num_keys - grid.num_queries))
    visible = visible.reshape((1,) * (query.ndim - 2) + visible.shape)
    if mask is not None:
        visible = visible & mask
    if bias is not None:
        visible = visible & (bias != -jnp.inf)
    if mask is not None or bias is not None or grid.num_queries > grid.num_keys:
        query, key, value = blank_padding(query, key, value, visible)
    logits, visible = visible_logits(
        dot_product_logits(query, key, scale=scale, bias=bias), visible
    )
    query, key, value = (x.astype(logits.dtype) for x in (query, key, value))
    return _Block(query, key, value, logits, visible)


class _Rows(NamedTuple):
    """What the way back has to know of a block of queries."""

    d_values: jax.Array  # ∂L/∂values [..., t, G, H / G, V]
    maximum: jax.Array  # [..., H, t, 1]
    largest: jax.Array  # the largest weight, 1/Z [..., H, t, 1]


def _rows(d_values, statistics, num_key_heads, window) -> _Rows:
    """Cut the block in window, (start, size), out of all rows."""
    maximum, largest = (
        _read(x, {-1: window})[..., None] for x in (statistics.logit_max, statistics.max_weight)
    )
    return _Rows(split_heads(_read(d_values, {-3: window}), num_key_heads, -2), maximum, largest)


def _weights(block: _Block, rows: _Rows) -> tuple[jax.Array, jax.Array]:
    """The block's weights p, made again, and ∂L/∂p; both [..., H, t, s]."""
    weights = jnp.where(block.visible, jnp.exp(block.logits - rows.maximum), 0.0) * rows.largest
    d_weights = product("...sgv,...tgrv->...grts", block.value, rows.d_values, weights.dtype)
    return weights, d_weights.reshape(weights.shape)


def _products_back(block: _Block, rows: _Rows, weights, d_logits, per_head):
    """The block's share of ∂L/∂query, before scale, [..., t, G, H / G, K], ∂L/∂key, ∂L/∂value."""
    dtype, num_key_heads = weights.dtype, block.key.shape[-2]
    weights, d_logits = (split_heads(x, num_key_heads, -3) for x in (weights, d_logits))
    scaled = split_heads(block.query * per_head, num_key_heads, -2)
    return (
        product("...sgk,...grts->...tgrk", block.key, d_logits, dtype),
        product("...tgrk,...grts->...sgk", scaled, d_logits, dtype),
        product("...tgrv,...grts->...sgv", rows.d_values, weights, dtype),
    )


def _starts(array: jax.Array, windows: dict[int, tuple[jax.Array, int]]) -> list[jax.Array | int]:
    """Where the windows, axis: (start, size), begin; an axis of one entry broadcasts, so at 0."""
    starts: list[jax.Array | int] = [0] * array.ndim
    for axis, (start, _) in windows.items():
        starts[axis] = start if array.shape[axis] > 1 else 0
    return starts


def _read(array: jax.Array, windows: dict[int, tuple[jax.Array, int]]) -> jax.Array:
    """The block of array in the windows, axis: (start, size)."""
    sizes = list(array.shape)
    for axis, (_, size) in windows.items():
        sizes[axis] = min(size, array.shape[axis])
    return jax.lax.dynamic_slice(array, _starts(array, windows), sizes)


def _add(array: jax.Array, update: jax.Array, windows: dict[int, tuple[jax.Array, int]]):
    """array with update, summed over the axes that array broadcasts, added in the windows."""
    broadcast = [axis for axis in range(array.ndim) if array.shape[axis] == 1]
    update = jnp.sum(update, axis=broadcast, keepdims=True)
    updated = _read(array, windows) + update
    return jax.lax.dynamic_update_slice(array, updated, _starts(array, windows))


def _pad(array: jax.Array, sizes: dict[int, int]) -> jax.Array:
    """Zeros at the end of the axes of sizes, up to these sizes."""
    widths = [(0, 0)] * array.ndim
    for axis, size in sizes.items():
        widths[axis] = (0, size - array.shape[axis])
    return jnp.pad(array, widths)


def _pad_tiles(array: jax.Array | None, ndim: int, grid: _Grid) -> jax.Array | None:
    """A mask or bias with ndim axes, padded to whole blocks where it does not broadcast."""
    if array is None:
        return None
    array = array.reshape((1,) * (ndim - array.ndim) + array.shape)
    wholes = {-2: grid.query_blocks * grid.query_block, -1: grid.key_blocks * grid.key_block}
    return _pad(array, {axis: size for axis, size in wholes.items() if array.shape[axis] != 1})
