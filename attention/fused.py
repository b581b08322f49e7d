"""Attention by the accelerator's own fused kernel, in half precision, with the rows' entropy.

A fused kernel keeps the weights to itself, but H = logsumexp(s) - Σ p s, and for logits that are
s_j = q·k_j the sum is q·(Σ_j p_j k_j): attention once more, with the keys in place of the values.
Two calls of `jax.nn.dot_product_attention` therefore give values, logsumexp and entropy.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from attention.arguments import Array, checked_arrays
from attention.statistics import AttentionStatistics
from attention.streaming import StreamingOutput


def fused_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    scale: float | Array | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    causal: bool = False,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> StreamingOutput:
    """softmax(scale · q kᵀ) v by a fused kernel, with what statistics such a kernel can give.

    Only entropy, normalized_entropy and visible_keys are statistics that it has; every other field
    is NaN (saturated too, so it is a float here). They are for reading and pass no gradient;
    gradients reach query, key, value and scale through the values.

    The kernel wants its scale at compile time. So that arms with different scales share one
    program, the query is multiplied by it instead (here only), rounded to query's dtype: exact for
    powers of two, otherwise as precise as the query itself. The logsumexp comes back in query's
    dtype as well, so in bfloat16 the entropy is good to about 2^-9 of its size plus as much of
    Σ p s: a few hundredths of a nat for logits of ordinary size, nothing for unscaled ones in
    the hundreds. In float32 ("xla") the two terms still cancel: 2.5e-5 nats at σ = 64.

    Args:
      query: [..., T, H, K], float16 or bfloat16 for cudnn; K a multiple of 8 and at most 128
        (256 from Hopper on).
      key: [..., S, G, K], value: [..., S, G, K]: one dtype and one width for all three.
      scale: None (1/√K), a number, traced or not, or one per head [H].
      bias, mask: None. The kernel would turn either into a T × S array with finite fill values,
        which lose against large unscaled logits.
      causal: a query sees keys up to its own position; T must equal S, as the kernel aligns the
        first query with the first key.
      implementation: "cudnn" is the fused kernel, for NVIDIA GPUs (none is reached on TPUs from
        here); "xla" is the same computation unfused, T × S and all, to test against.

    Returns:
      StreamingOutput(values [..., T, H, V], statistics with fields [..., H, T]).

    Raises:
      ValueError: what `dot_product_attention` refuses, and whatever the kernel can't serve: names
        the argument, what was given, and what is expected.
    """
    query, key, value, bias, mask = checked_arrays(query, key, value, scale, bias, mask)
    _check_served(query, key, value, bias, mask, causal, implementation)
    *leading, num_queries, num_heads, key_dim = query.shape
    num_keys = key.shape[-3]
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    scale = jnp.asarray(1 / math.sqrt(key_dim) if scale is None else scale, dtype)
    scale = scale.reshape((1,) * (query.ndim - 2) + (-1, 1))  # a number, or one per head
    query = (query.astype(dtype) * scale).astype(query.dtype)

    attend = partial(
        jax.nn.dot_product_attention, scale=1.0, is_causal=causal, implementation=implementation
    )
    query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    values = attend(query, key, value).reshape(*leading, num_queries, num_heads, key_dim)
    query, key = jax.lax.stop_gradient((query, key))
    mean_key, logsumexp = attend(query, key, key, return_residual=True)
    mean_logit = jnp.sum(query.astype(dtype) * mean_key.astype(dtype), axis=-1)
    entropy = (logsumexp - mean_logit).reshape(*leading, num_queries, num_heads)
    entropy = jnp.swapaxes(entropy, -2, -1)

    visible_keys = jnp.arange(1, num_queries + 1) if causal else jnp.full(num_queries, num_keys)
    visible_keys = jnp.broadcast_to(visible_keys.astype(entropy.dtype), entropy.shape)
    largest = jnp.log(visible_keys)
    entropy = jnp.clip(entropy, 0, largest)  # what rounding adds beyond these is known to be wrong
    unknown = jnp.full_like(entropy, jnp.nan)
    statistics = AttentionStatistics(
        entropy=entropy,
        normalized_entropy=jnp.where(largest > 0, entropy / jnp.where(largest > 0, largest, 1), 0),
        max_weight=unknown,
        saturated=unknown,
        jacobian_trace=unknown,
        jacobian_norm=unknown,
        logit_std=unknown,
        logit_max=unknown,
        visible_keys=visible_keys,
    )
    return StreamingOutput(values, statistics)


def _check_served(query, key, value, bias, mask, causal, implementation) -> None:
    """Raise ValueError for what the fused kernel can't do, though attention could."""
    num_queries, num_keys = query.shape[-3], key.shape[-3]
    for name, array in (("bias", bias), ("mask", mask)):
        if array is not None:
            raise ValueError(
                f"{name} has shape {array.shape}, expected None: fused attention takes neither "
                "bias nor mask; use streaming or plain attention"
            )
    if key.dtype != query.dtype or value.dtype != query.dtype:
        raise ValueError(
            f"query, key and value have dtypes {query.dtype}, {key.dtype} and {value.dtype}, "
            "expected one and the same for fused attention"
        )
    if value.shape != key.shape:
        raise ValueError(
            f"value has shape {value.shape}, expected that of key, {key.shape}, for fused attention"
        )
    if num_queries == 0 or num_keys == 0:
        raise ValueError(f"query has {num_queries} positions and key {num_keys}, expected some")
    if causal and num_queries != num_keys:
        raise ValueError(
            f"query has {num_queries} positions and key {num_keys}, expected as many of both for "
            "causal fused attention; use streaming or plain attention"
        )
    if implementation == "cudnn":
        if query.dtype not in (jnp.float16, jnp.bfloat16):
            raise ValueError(
                f"query has dtype {query.dtype}, expected float16 or bfloat16 for fused attention; "
                "use streaming or plain attention for more precision"
            )
        if query.shape[-1] % 8:
            raise ValueError(
                f"query has K = {query.shape[-1]}, expected a multiple of 8 for fused attention"
            )
        if jax.default_backend() != "gpu":
            raise ValueError(
                f"the backend is {jax.default_backend()}, expected gpu for fused attention; use "
                "streaming or plain attention"
            )
    elif implementation != "xla":
        raise ValueError(f"implementation is {implementation!r}, expected 'cudnn' or 'xla'")
