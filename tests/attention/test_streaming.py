"""Streaming attention against the plain path, its memory, and the merging of row sums."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from attention.dot_product import dot_product_attention
from attention.statistics import (
    attention_statistics,
    merge_row_sums,
    row_sums,
    statistics_from_sums,
    visible_logits,
)
from attention.streaming import streaming_attention


@partial(jax.jit, static_argnames="causal")
def plain(*args, **kwargs):
    output = dot_product_attention(*args, **kwargs)
    return output.values, attention_statistics(output.logits, where=output.visible)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def inputs(leading, num_queries, num_keys, heads, groups, key_dim=4, value_dim=3):
    return (
        normal(1, *leading, num_queries, heads, key_dim),
        normal(2, *leading, num_keys, groups, key_dim),
        normal(3, *leading, num_keys, groups, value_dim),
    )


def coin(seed, *shape):
    return np.random.default_rng(seed).random(shape) < 0.6


# shapes (leading, T, S, H, G) and the keyword arguments of both paths
CASES = {
    "ragged, grouped, scale and bias per head": (
        ((2,), 9, 13, 4, 2),
        {"scale": jnp.array([0.0, 1.0, -2.0, 3.0]), "bias": normal(7, 4, 9, 1)},
    ),
    "causal, fewer queries, multi-query, any mask": (
        ((2, 3), 6, 13, 3, 1),
        {"causal": True, "mask": coin(4, 2, 3, 3, 6, 13), "bias": normal(8, 6, 13), "scale": 0.0},
    ),
    "causal, more queries, padding, integer bias": (
        ((2,), 17, 6, 2, 2),
        {"causal": True, "mask": coin(5, 2, 1, 1, 6), "bias": -jnp.arange(6), "scale": -0.7},
    ),
    "hidden by bias and by query": (
        ((2,), 9, 13, 2, 1),
        {"bias": jnp.where(coin(6, 2, 2, 9, 13), 0.5, -jnp.inf), "mask": coin(11, 2, 9, 1)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_plain_path_forward_and_backward(case):
    shapes, options = CASES[case]
    arrays_ = inputs(*shapes)
    upstream = normal(12, *shapes[0], shapes[1], shapes[3], 3)
    learned = {
        name: option
        for name, option in options.items()
        if name == "scale" or (name == "bias" and "integer" not in case)
    }
    fixed = {name: option for name, option in options.items() if name not in learned}

    def run(attention):
        def loss(arrays_, learned):
            values, statistics = attention(*arrays_, **learned, **fixed)
            return jnp.sum(values * upstream), (values, statistics)

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(arrays_, learned)

    actual = run(lambda *args, **kwargs: streaming_attention(*args, **kwargs, block_size=5))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, run(plain)
    )


def test_padding_never_matters_and_rows_that_see_nothing_are_zero():
    identity = jnp.eye(2)[:, None, :]
    value = jnp.array([[[1.0, 10.0]], [[jnp.nan, jnp.nan]]])
    key = identity.at[1].set(jnp.nan)
    query = identity.at[1].set(jnp.inf)
    mask = jnp.array([[True, False], [False, False]])

    def loss(query, key, value):
        values, statistics = streaming_attention(query, key, value, mask=mask, block_size=1)
        return jnp.sum(values), (values, statistics)

    gradients, (values, statistics) = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(
        query, key, value
    )
    np.testing.assert_array_equal(values[:, 0], [[1, 10], [0, 0]])
    np.testing.assert_array_equal(statistics.entropy, [[0, 0]])
    np.testing.assert_array_equal(statistics.max_weight, [[1, 0]])
    np.testing.assert_array_equal(statistics.visible_keys, [[1, 0]])
    d_query, d_key, d_value = gradients
    assert not np.any(d_query) and not np.any(d_key)
    np.testing.assert_array_equal(d_value[:, 0], [[1, 1], [0, 0]])


@pytest.mark.parametrize("scale", [1e-3, 30.0, 1e4])
def test_statistics_hold_from_uniform_to_saturated(scale):
    query, key, value = inputs((), 16, 40, 1, 1)
    actual = streaming_attention(query, key, value, scale=scale, block_size=8)
    expected = plain(query, key, value, scale=scale)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), tuple(actual), expected
    )


def test_gradients_of_saturated_rows_keep_their_digits():
    """Unscaled, d_k = 1024: half of the rows pass back less than float32's error in the values."""
    query, key, value = (normal(i, n, 1, 1024) for i, n in ((1, 200), (2, 10), (3, 10)))
    upstream = normal(4, 200, 1, 1024)

    def loss(query):
        return jnp.sum(streaming_attention(query, key, value, scale=1.0).values * upstream)

    q, k, v, g = (np.asarray(x, np.float64)[:, 0] for x in (query, key, value, upstream))
    logits = q @ k.T
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    d_weights = g @ v.T
    d_logits = weights * (d_weights - (weights * d_weights).sum(axis=1, keepdims=True))
    expected = d_logits @ k
    error = np.linalg.norm(np.asarray(jax.grad(loss)(query))[:, 0] - expected, axis=1)
    assert np.median(error / np.linalg.norm(expected, axis=1)) < 1e-3


def test_what_is_broken_is_seen_to_be_broken():
    query, key, value = inputs((), 12, 12, 1, 1)
    output = streaming_attention(query, key.at[5].set(jnp.nan), value, causal=True, block_size=4)
    broken = np.arange(12) >= 5
    np.testing.assert_array_equal(np.isnan(output.values).any(axis=(1, 2)), broken)
    for name in ("entropy", "max_weight", "jacobian_norm", "logit_std", "logit_max"):
        np.testing.assert_array_equal(np.isnan(getattr(output.statistics, name))[0], broken)


def test_half_precision_in_half_precision_out_statistics_in_float32():
    arrays_ = [x.astype(jnp.bfloat16) for x in inputs((), 9, 12, 2, 1)]
    values, statistics = streaming_attention(*arrays_, block_size=5)
    expected_values, expected_statistics = plain(*arrays_)
    assert values.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        values.astype(float), expected_values.astype(float), rtol=2**-7, atol=1e-6
    )
    assert statistics.entropy.dtype == jnp.float32
    np.testing.assert_allclose(statistics.entropy, expected_statistics.entropy, rtol=1e-5)
    gradients = jax.grad(
        lambda *args: jnp.sum(streaming_attention(*args).values.astype(float)), argnums=(0, 1, 2)
    )(*arrays_)
    assert [gradient.dtype for gradient in gradients] == [jnp.bfloat16] * 3


def test_numpy_arrays_of_any_precision_are_taken_as_they_are():
    arrays_ = [np.asarray(x, np.float64) for x in inputs((), 9, 12, 2, 1)]
    options = {"scale": np.array([0.5, -1.0]), "bias": np.arange(12.0), "mask": coin(4, 9, 12)}
    actual = streaming_attention(*arrays_, **options, block_size=5)
    expected = plain(*arrays_, **options)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), tuple(actual), expected)
    assert actual.values.dtype == jnp.float32


@pytest.mark.parametrize(("num_queries", "num_keys"), [(0, 3), (3, 0)])
def test_empty_axes(num_queries, num_keys):
    output = streaming_attention(*inputs((2,), num_queries, num_keys, 2, 1), causal=True)
    assert output.values.shape == (2, num_queries, 2, 3)
    assert output.statistics.entropy.shape == (2, 2, num_queries)
    assert not np.any(output.values) and not np.any(output.statistics.visible_keys)


def test_maps_over_a_lane_axis_whatever_the_block():
    arrays_ = inputs((3,), 7, 9, 2, 1)
    mapped = jax.vmap(lambda *args: streaming_attention(*args, causal=True, block_size=4))(*arrays_)
    whole = streaming_attention(*arrays_, causal=True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), mapped, whole)


def test_statistics_pass_no_gradient():
    query, key, value = inputs((), 7, 9, 2, 1)
    gradient = jax.grad(
        lambda query: jnp.sum(streaming_attention(query, key, value).statistics.entropy)
    )(query)
    assert not np.any(gradient)


def temporary_bytes(attention, length, **options):
    """Bytes that the compiled forward and backward passes hold beside arguments and results."""
    shape = jax.ShapeDtypeStruct((length, 1, 8), jnp.float32)

    def loss(query, key, value):
        values, statistics = attention(query, key, value, **options)
        return jnp.sum(values), statistics

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
    analysis = gradient.lower(shape, shape, shape).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def test_memory_grows_linearly():
    options = {"mask": jnp.arange(4096) < 4000, "bias": jnp.ones((4096, 1)), "causal": True}
    assert temporary_bytes(plain, 4096, **options) > 4 * 4096**2
    assert temporary_bytes(streaming_attention, 4096, **options) < 4096**2 / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size is 0, expected an integer of at least 1"),
        ({"block_size": 64.0}, "block_size is 64.0, expected an integer of at least 1"),
        ({"mask": [[True] * 4] * 3}, "mask is of type list, expected a JAX or NumPy array"),
        ({"scale": "none"}, "scale is of type str, expected a JAX or NumPy array"),
        ({"mask": jnp.ones((3, 4))}, "mask has dtype float32, expected bool"),
        ({"bias": jnp.ones((2, 4))}, r"bias has shape \(2, 4\)"),
    ],
)
def test_errors_name_the_argument(options, message):
    with pytest.raises(ValueError, match=message):
        streaming_attention(*inputs((), 3, 4, 1, 1), **options)


@jax.jit
def merged_and_whole(logits, visible, left):
    parts = [row_sums(*visible_logits(logits, visible & part)) for part in (left, ~left)]
    sums = merge_row_sums(*parts), row_sums(*visible_logits(logits, visible))
    return [(each, statistics_from_sums(each)) for each in sums]


@given(
    arrays(np.float32, (2, 8), elements=st.floats(-100, 100, width=32)),
    arrays(np.bool_, (2, 8)),
    arrays(np.bool_, (2, 8)),
)
@settings(max_examples=200)
def test_merged_sums_are_the_sums_of_the_whole(logits, visible, left):
    merged, whole = merged_and_whole(logits, visible, left)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), merged, whole)


def test_merging_keeps_the_digits_of_a_saturated_row():
    """Float64 by hand: a tail of e^-30 beside a maximum that comes last."""
    logits, everything = np.array([[0.0, -1.0, 30.0]], np.float32), np.ones((1, 3), bool)
    (_, statistics), _ = merged_and_whole(logits, everything, np.array([[True, True, False]]))
    tail = np.exp([-30.0, -31.0])
    z = 1 + tail.sum()
    expected_entropy = np.log1p(tail.sum()) - (tail * [-30.0, -31.0]).sum() / z
    np.testing.assert_allclose(statistics.entropy, [expected_entropy], rtol=1e-6)
    np.testing.assert_allclose(statistics.jacobian_trace, [2 * tail.sum()], rtol=1e-6)
