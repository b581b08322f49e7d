"""dot_product_attention against float64 NumPy, two libraries, and cases worked out by hand."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import attention_statistics, dot_product_attention, head_means
from attention.dot_product import dot_product_logits, masked_softmax, visibility


class Case(NamedTuple):
    """Shapes and settings that need a compilation of their own."""

    leading: tuple[int, ...]
    T: int
    S: int
    H: int
    G: int
    K: int
    V: int
    dtype: str
    causal: bool
    scale: tuple[int, ...]
    mask: tuple[int, ...]
    bias: tuple[int, ...]


CASES = {
    "no leading axis, causal": Case(
        (), 3, 3, 1, 1, 4, 4, "float32", True, (), mask=(3, 3), bias=(3, 3)
    ),
    "fewer queries, grouped, scale per head": Case(
        (2,), 2, 5, 4, 2, 3, 6, "float32", True, (4,), mask=(4, 2, 5), bias=(2, 4, 2, 5)
    ),
    "more queries, multi-query, two leading axes": Case(
        (2, 3), 5, 2, 2, 1, 2, 1, "float32", True, (), mask=(3, 1, 1, 2), bias=(5, 1)
    ),
    "bidirectional, grouped": Case(
        (2,), 4, 6, 4, 2, 8, 8, "float32", False, (), mask=(2, 1, 1, 6), bias=(4, 1, 6)
    ),
    "bfloat16": Case((2,), 3, 5, 4, 2, 8, 8, "bfloat16", True, (), mask=(2, 4, 3, 5), bias=(3, 5)),
    "float16": Case((2,), 4, 4, 2, 1, 8, 8, "float16", False, (), mask=(4, 4), bias=(2, 1, 1, 4)),
}
LIBRARY_CASES = [CASES[name] for name in ("bidirectional, grouped", "bfloat16", "float16")]
BY_NAME = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
SEEDS = st.integers(0, 2**32 - 1)
SCALES = st.sampled_from([0.0, -1.5, 0.35, 1.0, 8.0])
DENSITIES = st.sampled_from([0.0, 0.3, 0.8, 1.0])


class Inputs(NamedTuple):
    query: jax.Array
    key: jax.Array
    value: jax.Array
    scale: jax.Array
    bias: jax.Array
    mask: jax.Array
    cotangent: jax.Array


def draw(case: Case, seed: int, scale: float = 1.0, density: float = 1.0) -> Inputs:
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=(*case.leading, *shape)), case.dtype)

    per_head = np.linspace(1.0, -0.5, math.prod(case.scale)).reshape(case.scale)
    return Inputs(
        query=normal(case.T, case.H, case.K),
        key=normal(case.S, case.G, case.K),
        value=normal(case.S, case.G, case.V),
        scale=jnp.asarray(scale * per_head, jnp.float32),
        bias=jnp.asarray(rng.normal(size=case.bias), jnp.float32),
        mask=jnp.asarray(rng.random(case.mask) < density),
        cotangent=normal(case.T, case.H, case.V),
    )


attend = jax.jit(dot_product_attention, static_argnames=("causal", "dropout_rate"))


@functools.partial(jax.jit, static_argnames="causal")
def run(inputs: Inputs, causal: bool):
    """The output, and the gradients of Σ cotangent · values for every differentiable input."""

    def values(query, key, value, scale, bias):
        output = dot_product_attention(
            query, key, value, scale=scale, bias=bias, mask=inputs.mask, causal=causal
        )
        return output.values, output

    _, pull_back, output = jax.vjp(values, *inputs[:5], has_aux=True)
    return output, dict(zip(Inputs._fields, pull_back(inputs.cotangent), strict=False))


def reference(inputs: Inputs, causal: bool):
    """The same in float64 NumPy, head by head, with the gradients written out."""
    query, key, value, scale, bias, _, cotangent = (np.asarray(x, np.float64) for x in inputs)
    *leading, T, H, _ = query.shape
    S, G = key.shape[-3:-1]
    shape = (*leading, H, T, S)
    every_bias = np.broadcast_to(bias, shape)
    visible = np.broadcast_to(inputs.mask, shape)
    if causal:
        visible = visible & np.tri(T, S, S - T, dtype=bool)
    every_scale = np.broadcast_to(scale, H)
    weights, d_scores, d_scale = np.zeros(shape), np.zeros(shape), np.zeros(H)
    values = np.zeros(cotangent.shape)
    d_query, d_key, d_value = np.zeros(query.shape), np.zeros(key.shape), np.zeros(value.shape)
    for head in np.ndindex(*leading, H):
        *at, h = head
        own = (*at, slice(None), h)  # [T or S, ...] of this head's queries
        shared = (*at, slice(None), h // (H // G))  # of the key head it reads
        product = query[own] @ key[shared].T
        for t in range(T):
            seen = visible[head][t]
            if not seen.any():
                continue
            scores = every_scale[h] * product[t, seen] + every_bias[head][t, seen]
            power = np.exp(scores - scores.max())
            weights[(*head, t, seen)] = power / power.sum()
        p = weights[head]
        values[own] = p @ value[shared]
        d_weights = cotangent[own] @ value[shared].T
        d_scores[head] = p * (d_weights - (p * d_weights).sum(-1, keepdims=True))
        d_query[own] += every_scale[h] * d_scores[head] @ key[shared]
        d_key[shared] += every_scale[h] * d_scores[head].T @ query[own]
        d_value[shared] += p.T @ cotangent[own]
        d_scale[h] += (d_scores[head] * product).sum()
    gradients = {
        "query": d_query,
        "key": d_key,
        "value": d_value,
        "scale": sum_to(d_scale, scale.shape),
        "bias": sum_to(d_scores, bias.shape),
    }
    return values, weights, gradients


def sum_to(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Transpose of broadcasting from shape."""
    array = array.sum(axis=tuple(range(array.ndim - len(shape))))
    return array.sum(axis=tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True)


def assert_close(actual, expected, tolerance):
    """Within tolerance of the largest entry (inputs are of order one)."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    largest = max(1.0, np.max(np.abs(expected), initial=0.0))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * largest)


def tolerance(case: Case, logits: jax.Array) -> float:
    """One rounding to the dtype that goes out, and float32 logits rounded before exp."""
    rounding = float(jnp.finfo(case.dtype).eps) if case.dtype != "float32" else 0.0
    return rounding + 5e-7 * (1 + float(jnp.max(jnp.abs(logits))))


# Against other implementations


@BY_NAME
@settings(max_examples=25)
@given(SEEDS, SCALES, DENSITIES)
def test_equals_float64_numpy(case, seed, scale, density):
    inputs = draw(case, seed, scale, density)
    output, gradients = run(inputs, case.causal)
    values, weights, expected = reference(inputs, case.causal)

    assert output.values.dtype == inputs.value.dtype
    assert output.weights.dtype == output.logits.dtype == jnp.float32
    assert output.weights.shape == output.logits.shape == weights.shape
    assert np.broadcast_shapes(output.visible.shape, weights.shape) == weights.shape
    within = tolerance(case, output.logits)
    assert_close(output.values, values, within)
    assert_close(output.weights, weights, within)
    assert np.all(np.asarray(output.weights)[weights == 0] == 0)
    for name, gradient in gradients.items():
        assert gradient.dtype == getattr(inputs, name).dtype
        terms = 4 if name in ("scale", "bias") else 1  # long sums of terms that cancel
        assert_close(gradient, expected[name], within * terms * max(1, abs(scale)))


def test_float64_stays_float64():
    case = CASES["fewer queries, grouped, scale per head"]
    with jax.enable_x64(True):
        inputs = draw(case._replace(dtype="float64"), seed=0, density=0.8)
        output, gradients = run(inputs, case.causal)
        values, weights, expected = reference(inputs, case.causal)
        assert output.values.dtype == output.weights.dtype == jnp.float64
        assert_close(output.values, values, 1e-14)
        assert_close(output.weights, weights, 1e-14)
        for name in ("query", "key", "value"):
            assert_close(gradients[name], expected[name], 1e-14)


@pytest.mark.parametrize("case", LIBRARY_CASES, ids=lambda case: case.dtype)
@settings(max_examples=10)
@given(SEEDS, SCALES, DENSITIES)
def test_equals_jax_nn(case, seed, scale, density):
    inputs = draw_seen(case, seed, scale, density)
    output, gradients = run(inputs, case.causal)
    visible = np.broadcast_to(output.visible, output.weights.shape)
    # On a CPU it refuses float16, so it gets the same numbers as float32.
    given = jax.tree.map(lambda x: x.astype("float32") if x.dtype == "float16" else x, inputs)
    values, expected = run_jax_nn(given, visible)
    # It rounds the weights and every intermediate gradient to the inputs' dtype; we do not.
    within = 4 * float(jnp.finfo(case.dtype).eps) + tolerance(case, output.logits)
    assert_close(output.values, values, within)
    for name, gradient in expected.items():
        assert_close(gradients[name], gradient, within * max(1, abs(scale)))


@jax.jit
def run_jax_nn(inputs, visible):
    def values(query, key, value, scale, bias):
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
        return jax.nn.dot_product_attention(
            query, key, value, bias=bias, mask=visible, scale=scale, implementation="xla"
        )

    out, pull_back = jax.vjp(values, *inputs[:5])
    return out, dict(zip(Inputs._fields, pull_back(inputs.cotangent), strict=False))


@pytest.mark.parametrize("case", LIBRARY_CASES, ids=lambda case: case.dtype)
@settings(max_examples=10)
@given(SEEDS, SCALES, DENSITIES)
def test_equals_pytorch(case, seed, scale, density):
    torch = pytest.importorskip("torch")
    inputs = draw_seen(case, seed, scale, density)
    # PyTorch takes the bias in the query's dtype.
    inputs = inputs._replace(bias=inputs.bias.astype(case.dtype).astype(jnp.float32))
    output, gradients = run(inputs, case.causal)

    def to_torch(array):  # [B, T, H, K] to [B, H, T, K]
        tensor = torch.from_numpy(np.asarray(array, np.float32).swapaxes(1, 2).copy())
        return tensor.to(getattr(torch, case.dtype)).requires_grad_()

    def from_torch(tensor):
        return tensor.detach().float().numpy().swapaxes(1, 2)

    query, key, value = (to_torch(x) for x in inputs[:3])
    hidden = ~torch.from_numpy(np.broadcast_to(output.visible, output.weights.shape).copy())
    bias = torch.from_numpy(np.array(inputs.bias)).to(query.dtype)
    values = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=bias.expand(hidden.shape).masked_fill(hidden, -torch.inf),
        scale=scale,
        enable_gqa=True,
    )
    values.backward(to_torch(inputs.cotangent).detach())
    within = 4 * float(jnp.finfo(case.dtype).eps) + tolerance(case, output.logits)
    assert_close(output.values, from_torch(values), within)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        assert_close(gradients[name], from_torch(tensor.grad), within * max(1, abs(scale)))


def draw_seen(case, seed, scale, density):
    """Every query sees the first key: libraries disagree about rows that see none."""
    inputs = draw(case, seed, scale, density)
    first = np.broadcast_to(np.arange(case.S) == 0, case.mask)
    return inputs._replace(mask=inputs.mask | first)


# Scale


def test_scale_none_is_one_over_root_k_to_the_bit():
    query, key = normals((3, 2, 8), (3, 2, 8))
    told = dot_product_logits(query, key, scale=1 / math.sqrt(8))
    np.testing.assert_array_equal(dot_product_logits(query, key), told)


def test_scale_multiplies_the_product_to_the_bit():
    query, key = normals((3, 2, 8), (3, 2, 8))
    scale = jnp.array([0.3, -0.7])
    product = dot_product_logits(query, key, scale=1.0)
    scaled = dot_product_logits(query, key, scale=scale)
    np.testing.assert_array_equal(scaled, product * scale[:, None, None])


def test_scale_zero_is_uniform_and_none_is_the_default():
    zero = attend(*FIXTURE, scale=0.0, mask=np.ones((2, 2), bool))
    np.testing.assert_array_equal(zero.values[:, 0], [[2, 20], [2, 20]])
    default = attend(*FIXTURE)
    np.testing.assert_allclose(default.values[0, 0], [1.660477, 16.60477], rtol=1e-6)


# Hidden keys

# Two tokens, one head, [T, H, K]: q = k = I, values [1, 10] and [3, 30].
FIXTURE = tuple(
    np.array(x, np.float32)[:, None] for x in (np.eye(2), np.eye(2), [[1, 10], [3, 30]])
)


def normals(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize("poisoned", [1, 2], ids=["key", "value"])
def test_a_key_no_query_sees_is_never_multiplied_in(poisoned):
    inputs = [x.copy() for x in FIXTURE]
    inputs[poisoned][1] = np.nan
    output = attend(*inputs, scale=1.0, mask=np.array([[True, False], [True, False]]))
    np.testing.assert_array_equal(output.values[:, 0], [[1, 10], [1, 10]])


PADDED = Case((2,), 3, 5, 4, 2, 3, 3, "float32", False, (), mask=(2, 4, 3, 5), bias=(2, 4, 3, 5))


@pytest.mark.parametrize("mask_shape", [(2, 4, 3, 5), (2, 1, 1, 5)], ids=["per head", "padding"])
@settings(max_examples=20)
@given(SEEDS, st.sampled_from([np.nan, np.inf, -np.inf]), st.sampled_from(["mask", "bias", "both"]))
def test_padding_has_no_effect_forward_or_backward(mask_shape, seed, poison, hide_by):
    rng = np.random.default_rng(seed)
    hidden = rng.random(mask_shape) < 0.6
    by_mask = {"mask": 1.0, "bias": 0.0, "both": 0.5}[hide_by] > rng.random(mask_shape)
    visible = np.broadcast_to(~hidden, PADDED.mask)
    # Queries that see no key [B, T, H, 1]; keys that no query of their group sees [B, S, G, 1].
    blind = ~np.swapaxes(np.any(visible, axis=-1), 1, 2)[..., None]
    padding = ~np.swapaxes(np.any(visible.reshape(2, 2, 2, 3, 5), axis=(2, 3)), 1, 2)[..., None]
    inputs = draw(PADDED, seed)
    inputs = inputs._replace(
        mask=jnp.asarray(~(hidden & by_mask)),
        bias=jnp.asarray(np.where(hidden & ~by_mask, -np.inf, inputs.bias)),
    )

    def fill(number):
        filled = inputs._replace(
            query=jnp.asarray(np.where(blind, number, inputs.query)),
            key=jnp.asarray(np.where(padding, number, inputs.key)),
            value=jnp.asarray(np.where(padding, number, inputs.value)),
        )
        return run(filled, causal=False)

    (output, gradients), (expected_output, expected_gradients) = fill(poison), fill(0)
    np.testing.assert_array_equal(np.broadcast_to(output.visible, visible.shape), visible)
    np.testing.assert_array_equal(output.values, expected_output.values)
    np.testing.assert_array_equal(output.weights, expected_output.weights)
    for name, gradient in gradients.items():
        assert np.all(np.isfinite(gradient)), name
        np.testing.assert_array_equal(gradient, expected_gradients[name], err_msg=name)


@jax.jit
def statistics_and_means(output):
    statistics = attention_statistics(output.logits, where=output.visible)
    return statistics, head_means(statistics)


def test_a_row_that_sees_no_key_is_zero_and_left_out_of_means():
    output = attend(*FIXTURE, scale=1.0, mask=jnp.array([[True, False], [False, False]]))
    np.testing.assert_array_equal(output.values[:, 0], [[1, 10], [0, 0]])
    np.testing.assert_array_equal(output.weights[0], [[1, 0], [0, 0]])
    statistics, means = statistics_and_means(output)
    np.testing.assert_array_equal(statistics.entropy, [[0, 0]])
    np.testing.assert_array_equal(means.max_weight, [1])


def test_a_row_that_sees_no_key_passes_no_gradient():
    mask = jnp.array([[True, False], [False, False]])

    def loss(kernel):
        x = (jnp.eye(2) @ kernel)[:, None]
        return jnp.sum(dot_product_attention(x, x, x, scale=1.0, mask=mask).values[0])

    gradient = jax.jit(jax.grad(loss))(jnp.array([[1.0, 2.0], [0.0, 1.0]]))
    np.testing.assert_array_equal(gradient, [[1, 1], [0, 0]])


@pytest.mark.parametrize(("T", "S"), [(2, 0), (0, 2)])
def test_no_keys_or_no_queries(T, S):
    inputs = np.ones((T, 2, 3)), np.ones((S, 1, 3)), np.ones((S, 1, 4))

    def loss(query, key, value):
        output = dot_product_attention(query, key, value, causal=True)
        return jnp.sum(output.values), (output, attention_statistics(output.logits))

    grad = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
    gradients, (output, statistics) = grad(*(x.astype(np.float32) for x in inputs))
    np.testing.assert_array_equal(output.values, np.zeros((T, 2, 4)))
    assert output.weights.shape == output.logits.shape == (2, T, S)
    np.testing.assert_array_equal(statistics.entropy, np.zeros((2, T)))
    for x, gradient in zip(inputs, gradients, strict=True):
        np.testing.assert_array_equal(gradient, np.zeros(x.shape))


@jax.jit
def softmax_and_slope(logits, visible):
    return masked_softmax(logits, visible), jax.grad(lambda x: masked_softmax(x, visible)[0, 0])(
        logits
    )


@pytest.mark.parametrize("large", [2e4, 1e9, 3e38, np.inf, np.nan])
def test_a_hidden_logit_never_wins(large):
    weights, slope = softmax_and_slope(jnp.array([[0, large]]), jnp.array([[True, False]]))
    np.testing.assert_array_equal(weights, [[1, 0]])
    np.testing.assert_array_equal(slope, [[0, 0]])


def test_float16_with_padding_and_causal_masks():
    x = np.full((2, 1, 1), math.sqrt(20), np.float16)
    value = np.array([3, 5], np.float16).reshape(2, 1, 1)

    def loss(query, key, value):  # raw scores -20; the first token is padding
        output = dot_product_attention(
            query, key, value, scale=1.0, mask=jnp.array([False, True]), causal=True
        )
        return jnp.sum(output.values), output

    gradients, output = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(x, -x, value)
    np.testing.assert_allclose(output.logits[0, 1, 1], -20, rtol=1e-3)
    np.testing.assert_array_equal(output.weights, [[[0, 0], [0, 1]]])
    np.testing.assert_array_equal(output.values[:, 0, 0], [0, 5])
    for gradient, expected in zip(gradients, ([0, 0], [0, 0], [0, 1]), strict=True):
        np.testing.assert_array_equal(gradient[:, 0, 0], expected)


def test_softmax_jacobian_in_saturated_and_single_key_rows():
    logits = jnp.array([[0.0, 1, -1], [200, 0, 0], [3, 3, 3]])
    visible = jnp.array([[True, True, True], [True, True, True], [False, True, False]])
    jacobians = jax.jit(jax.vmap(jax.jacobian(masked_softmax)))(logits, visible)
    p = np.array([np.exp([0, 1, -1]) / np.exp([0, 1, -1]).sum(), [1, 0, 0], [0, 1, 0]])
    expected = [np.diag(row) - np.outer(row, row) for row in p]
    np.testing.assert_allclose(jacobians, expected, atol=1e-7)
    np.testing.assert_array_equal(jacobians[1:], np.zeros((2, 3, 3)))


# Causality


@pytest.mark.parametrize(("T", "expected"), [(1, [3]), (2, [2, 3])])
def test_causal_aligns_the_last_query_with_the_last_key(T, expected):
    value = np.array([1, 2, 3, 6], np.float32).reshape(4, 1, 1)
    output = attend(np.zeros((T, 1, 1), np.float32), np.zeros_like(value), value, causal=True)
    np.testing.assert_allclose(output.values[:, 0, 0], expected, rtol=1e-6)


def test_causal_queries_before_the_first_key_have_no_effect():
    def loss(query, key):
        return jnp.sum(dot_product_attention(query, key, key, causal=True).values)

    key = jnp.array([1.0, 2.0]).reshape(2, 1, 1)
    query = jnp.array([jnp.nan, jnp.nan, 1.0, 1.0]).reshape(4, 1, 1)
    gradients = jax.jit(jax.grad(loss, (0, 1)))(query, key)
    expected = jax.jit(jax.grad(loss, (0, 1)))(query[2:], key)
    np.testing.assert_array_equal(gradients[0][:2], np.zeros((2, 1, 1)))
    np.testing.assert_allclose(gradients[0][2:], expected[0], rtol=1e-6)
    np.testing.assert_allclose(gradients[1], expected[1], rtol=1e-6)


@pytest.mark.parametrize(("T", "S"), [(1, 4), (3, 4), (4, 4), (4, 2)])
def test_causal_visibility(T, S):
    visible = visibility(T, S, 3, causal=True)
    np.testing.assert_array_equal(visible, np.tri(T, S, S - T, dtype=bool)[None])


CAUSAL = {name: case for name, case in CASES.items() if case.causal and case.dtype == "float32"}


@pytest.mark.parametrize("case", CAUSAL.values(), ids=CAUSAL)
def test_no_gradient_flows_to_later_keys(case):
    inputs = draw(case, seed=1, scale=0.5, density=1.0)
    for t in range(case.T):
        cotangent = jnp.asarray(
            np.zeros(inputs.cotangent.shape) + (np.arange(case.T) == t)[:, None, None], jnp.float32
        )
        _, gradients = run(inputs._replace(cotangent=cotangent), case.causal)
        seen = np.arange(case.S) <= t + case.S - case.T
        for name in ("key", "value"):
            reached = np.any(np.asarray(gradients[name]), axis=(-1, -2))  # [..., S]
            assert not np.any(reached[..., ~seen])
            if name == "value" or seen.sum() > 1:  # a single weight is 1, whatever the key
                assert np.all(reached[..., seen])


# Dropout


def test_reported_weights_and_entropy_are_before_dropout():
    x = np.ones((1, 1, 2), np.float32)
    outputs = [
        attend(x, x, x, dropout_rate=0.2, dropout_key=jax.random.key(seed)) for seed in range(20)
    ]
    assert {float(output.values[0, 0, 0]) for output in outputs} == {0.0, 1.25}
    for output in outputs:
        np.testing.assert_array_equal(output.weights, [[[1]]])
        np.testing.assert_array_equal(statistics_and_means(output)[0].entropy, [[0]])


@jax.jit
def drop(seed):
    """Weights [H, T, S] before and after dropout, and the gradient of Σ values[0] for values."""
    query, key = normals((32, 2, 4), (32, 2, 4))
    one_hot = jnp.broadcast_to(jnp.eye(32)[:, None], (32, 2, 32))

    def loss(value):
        output = dot_product_attention(
            query, key, value, dropout_rate=0.25, dropout_key=jax.random.key(seed)
        )
        return jnp.sum(output.values[0]), output

    gradient, output = jax.grad(loss, has_aux=True)(one_hot)
    return output.weights, jnp.swapaxes(output.values, 0, 1), gradient


def test_dropout_keeps_the_expectation_and_follows_its_key():
    weights, kept, gradient = (np.asarray(x) for x in drop(0))
    survives = kept > 0
    np.testing.assert_allclose(kept[survives], weights[survives] / 0.75, rtol=1e-6)
    standard_error = math.sqrt(0.25 * 0.75 / kept.size)
    assert abs(survives.mean() - 0.75) < 4 * standard_error
    np.testing.assert_allclose(
        gradient, np.broadcast_to(kept[:, 0].T[..., None], gradient.shape), rtol=1e-6
    )

    np.testing.assert_array_equal(kept, drop(0)[1])
    weights_1, kept_1, _ = drop(1)
    np.testing.assert_array_equal(weights_1, weights)
    assert np.any((kept_1 > 0) != survives)


# Arguments


def test_strict_dtype_promotion():
    def run(x, key):
        output = dot_product_attention(
            x,
            x,
            x,
            scale=0.5,
            bias=jnp.zeros((3, 3)),
            mask=jnp.ones((3, 3), bool),
            causal=True,
            dropout_rate=0.1,
            dropout_key=key,
        )
        return statistics_and_means(output)[1]

    with jax.numpy_dtype_promotion("strict"):
        means = jax.eval_shape(run, jnp.ones((3, 2, 4)), jax.random.key(0))
    assert means.entropy.shape == (2,)


def test_numpy_arrays_of_any_precision_are_taken_as_they_are():
    rng = np.random.default_rng(0)  # float64, and a warning is an error here
    arrays = [rng.normal(size=(2, 3, 2, 4)) for _ in range(3)]
    scale, bias, mask = np.array([0.5, -1.0]), rng.normal(size=(3, 3)), np.tri(3, dtype=bool)
    actual = dot_product_attention(*arrays, scale=scale, bias=bias, mask=mask)
    narrow = [x.astype(np.float32) for x in (*arrays, scale, bias)]
    expected = dot_product_attention(*narrow[:3], scale=narrow[3], bias=narrow[4], mask=mask)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert actual.values.dtype == jnp.float32
    number = dot_product_attention(*arrays, scale=np.float64(0.5), bias=np.array(1.0), causal=True)
    same = dot_product_attention(*arrays, scale=0.5, causal=True)
    np.testing.assert_allclose(number.values, same.values, rtol=1e-5)


GOOD = {"query": (2, 5, 4, 8), "key": (2, 7, 2, 8), "value": (2, 7, 2, 3)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": (5, 8)}, "query has shape (5, 8), expected [..., T, H, K]"),
        ({"key": (5, 8)}, "key has shape (5, 8), expected [..., S, G, K]"),
        ({"value": (8,)}, "value has shape (8,), expected [..., S, G, V]"),
        ({"query": np.ones((2, 5, 4, 8), int)}, "query has dtype int64, expected a floating-point"),
        (
            {"query": [[[1.0]]]},
            "query is of type list, expected a JAX or NumPy array [..., T, H, K]",
        ),
        ({"key": None}, "key is of type NoneType, expected a JAX or NumPy array [..., S, G, K]"),
        ({"value": np.ones((2, 7, 2, 3), object)}, "value has dtype object, expected a floating"),
        ({"value": np.ones((2, 7, 2, 3), np.longdouble)}, "expected one of at most 64 bits"),
        ({"query": (2, 5, 4, 0)}, "query has shape (2, 5, 4, 0), expected K of at least 1"),
        ({"query": (2, 5, 3, 8)}, "query has 3 heads and key has 2: the number of query heads"),
        ({"key": (2, 7, 2, 6)}, "key has shape (2, 7, 2, 6), expected (2, 7, 2, 8)"),
        ({"key": (3, 7, 2, 8)}, "key has shape (3, 7, 2, 8), expected (2, 7, 2, 8)"),
        ({"key": (7, 2, 8)}, "key has shape (7, 2, 8), expected (2, 7, 2, 8)"),
        ({"value": (2, 6, 2, 3)}, "value has shape (2, 6, 2, 3), expected (2, 7, 2, 'V')"),
        ({"value": (2, 7, 4, 3)}, "value has shape (2, 7, 4, 3), expected (2, 7, 2, 'V')"),
        ({"scale": (2,)}, "scale has shape (2,), expected a number or one per head (4,)"),
        (
            {"scale": [0.1] * 4},
            "scale is of type list, expected a JAX or NumPy array of one number",
        ),
        (
            {"scale": "none"},
            "scale is of type str, expected a JAX or NumPy array of one number per",
        ),
        ({"scale": np.complex64(1)}, "scale has dtype complex64, expected a real one"),
        (
            {"mask": [[True] * 7] * 5},
            "mask is of type list, expected a JAX or NumPy array broadcast",
        ),
        ({"mask": (5, 7)}, "mask has dtype float32, expected bool (True = attend)"),
        (
            {"mask": np.ones((7, 5), bool)},
            "mask has shape (7, 5), expected one broadcastable to (2,",
        ),
        ({"bias": [0.0] * 7}, "bias is of type list, expected a JAX or NumPy array broadcastable"),
        ({"bias": np.ones((5, 7), bool)}, "bias has dtype bool, expected a real one (a mask is"),
        (
            {"bias": (1, 2, 4, 5, 7)},
            "bias has shape (1, 2, 4, 5, 7), expected one broadcastable to",
        ),
        ({"dropout_rate": 1.0}, "dropout_rate is 1.0, expected a number in [0, 1)"),
        ({"dropout_rate": -0.1}, "dropout_rate is -0.1, expected a number in [0, 1)"),
        ({"dropout_rate": "0.1"}, "dropout_rate is '0.1', expected a number in [0, 1)"),
        ({"dropout_rate": math.nan}, "dropout_rate is nan, expected a number in [0, 1)"),
        ({"dropout_rate": 0.1}, "dropout_rate is 0.1, so dropout_key must be given"),
    ],
)
def test_errors_name_the_argument_what_was_given_and_what_is_right(change, message):
    arguments: dict[str, Any] = {
        name: np.ones(x, np.float32) if isinstance(x, tuple) else x
        for name, x in (GOOD | change).items()
    }
    with pytest.raises(ValueError) as error:
        dot_product_attention(**arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
