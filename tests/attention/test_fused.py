"""Fused attention through the XLA implementation, against the plain path; what it refuses."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.dot_product import dot_product_attention
from attention.fused import fused_attention
from attention.statistics import attention_statistics, head_means

UNKNOWN = (
    "max_weight",
    "saturated",
    "jacobian_trace",
    "jacobian_norm",
    "logit_std",
    "logit_max",
)


@partial(jax.jit, static_argnames="causal")
def plain(*args, **kwargs):
    output = dot_product_attention(*args, **kwargs)
    return output.values, attention_statistics(output.logits, where=output.visible)


def inputs(leading=(2,), num_queries=7, num_keys=7, heads=4, groups=2, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = ((num_queries, heads), (num_keys, groups), (num_keys, groups))
    return tuple(
        jnp.asarray(rng.standard_normal((*leading, *shape, 8), np.float32), dtype)
        for shape in shapes
    )


@pytest.mark.parametrize(
    ("arrays", "options"),
    [
        (inputs(), {}),
        (inputs((), 5, 9, 1, 1), {"scale": 1.0}),
        (inputs((2, 3), groups=4), {"causal": True, "scale": 0.0}),
        (inputs(groups=1), {"causal": True, "scale": jnp.array([0.1, -1.0, 0.0, 4.0])}),
    ],
)
def test_equals_the_plain_path(arrays, options):
    def run(attention):
        def loss(arrays, scale):
            values, statistics = attention(*arrays, **{**options, "scale": scale})
            return jnp.sum(jnp.sin(values)), (values, statistics)

        scale = options.get("scale", 8**-0.5)
        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(arrays, scale)

    gradients, (values, statistics) = run(
        lambda *args, **kwargs: fused_attention(*args, **kwargs, implementation="xla")
    )
    expected_gradients, (expected_values, expected) = run(plain)
    np.testing.assert_allclose(values, expected_values, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        gradients,
        expected_gradients,
    )
    for name in ("entropy", "normalized_entropy", "visible_keys"):
        np.testing.assert_allclose(
            getattr(statistics, name), getattr(expected, name), atol=1e-5, err_msg=name
        )
    for name in UNKNOWN:
        assert getattr(statistics, name).shape == expected.entropy.shape
        assert np.isnan(getattr(statistics, name)).all(), name


def test_half_precision():
    arrays = inputs((), 16, 256, 2, 2, jnp.bfloat16)
    output = jax.jit(partial(fused_attention, implementation="xla"))(*arrays)
    exact, statistics = plain(*(x.astype(jnp.float32) for x in arrays))
    assert output.values.dtype == jnp.bfloat16
    assert output.statistics.entropy.dtype == jnp.float32
    np.testing.assert_allclose(output.values.astype(jnp.float32), exact, atol=0.01)
    np.testing.assert_allclose(output.statistics.entropy, statistics.entropy, atol=0.05)


def test_numpy_arrays_of_any_precision_are_taken_as_they_are():
    arrays = [np.asarray(x, np.float64) for x in inputs()]
    scale = np.array([0.1, -1.0, 0.0, 4.0])
    actual = fused_attention(*arrays, scale=scale, implementation="xla")
    values, statistics = plain(*arrays, scale=scale)
    np.testing.assert_allclose(actual.values, values, atol=1e-5)
    np.testing.assert_allclose(actual.statistics.entropy, statistics.entropy, atol=1e-5)


def test_means_of_what_is_unknown_are_unknown():
    means = jax.jit(lambda *x: head_means(fused_attention(*x, implementation="xla").statistics))(
        *inputs()
    )
    assert np.isfinite(means.entropy).all() and np.isfinite(means.normalized_entropy).all()
    for name in ("max_weight", "saturation", "jacobian_trace", "dead_row_fraction", "logit_max"):
        assert np.isnan(getattr(means, name)).all(), name


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        (inputs(), {"scale": jnp.ones(2)}, r"scale has shape \(2,\), expected .* per head \(4,\)"),
        ([inputs()[0].tolist(), *inputs()[1:]], {}, "query is of type list, expected a JAX or"),
        (inputs(), {"bias": jnp.ones((7, 7))}, "bias .* takes neither"),
        (inputs(), {"mask": jnp.ones((7, 7), bool)}, "mask .* takes neither"),
        (inputs(num_keys=9), {"causal": True}, "7 positions and key 9"),
        (inputs(num_keys=0), {}, "key 0, expected some"),
        (inputs(), {"implementation": "cudnn"}, "float32, expected float16 or bfloat16"),
        (inputs(dtype=jnp.float16), {"implementation": "cudnn"}, "backend is cpu, expected gpu"),
        (
            [x[..., :6].astype(jnp.bfloat16) for x in inputs()],
            {"implementation": "cudnn"},
            "K = 6, expected a multiple of 8",
        ),
        ([*inputs()[:2], inputs()[2][..., :4]], {}, "value has shape .* expected that of key"),
        ([*inputs()[:2], inputs(dtype=jnp.float16)[2]], {}, "float32 and float16"),
        (inputs(), {"implementation": "flash"}, "implementation is 'flash'"),
    ],
)
def test_what_it_cannot_serve_is_an_error(arrays, options, message):
    settings: dict[str, Any] = {"implementation": "xla", **options}
    with pytest.raises(ValueError, match=message):
        fused_attention(*arrays, **settings)
