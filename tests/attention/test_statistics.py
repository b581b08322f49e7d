"""Row statistics against float64 and the Jacobian written out, and what autodiff makes of them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import AttentionStatistics, attention_statistics, entropy, head_means
from attention.head_statistics import HEAD_STATISTICS

SEEDS = st.integers(0, 2**32 - 1)
ROWS, KEYS = 6, 5  # one shape for most tests: every other one compiles anew

statistics_of = jax.jit(lambda logits, where: attention_statistics(logits, where=where))


@jax.jit
def entropies_and_slopes(logits, where):
    """Per-row entropy of logits [R, S], and its gradient."""
    return jax.vmap(jax.value_and_grad(lambda s, seen: entropy(s, where=seen)))(logits, where)


def reference(logits, where) -> dict[str, np.ndarray]:
    """Every statistic of logits [R, S] in float64 from its definition, row by row."""
    rows = []
    for row, seen in zip(np.asarray(logits, np.float64), np.asarray(where), strict=True):
        s = row[seen & (row > -np.inf)]
        if s.size == 0:
            rows.append(dict.fromkeys(AttentionStatistics._fields, 0.0))
            continue
        p = np.exp(s - s.max())
        p /= p.sum()
        jacobian = np.diag(p) - np.outer(p, p)
        h = -sum(x * math.log(x) for x in p if x > 0)
        rows.append(
            {
                "entropy": h,
                "normalized_entropy": h / math.log(s.size) if s.size > 1 else 0.0,
                "max_weight": p.max(),
                "saturated": p.max() > 0.9,
                "jacobian_trace": np.trace(jacobian),
                "jacobian_norm": float(np.linalg.norm(jacobian)),
                "logit_std": s.std(),
                "logit_max": s.max(),
                "visible_keys": s.size,
            }
        )
    return {name: np.array([row[name] for row in rows]) for name in AttentionStatistics._fields}


def entropy_slopes(logits, where) -> np.ndarray:
    """-p_i (ln p_i + H) in float64; 0 where p_i is."""
    s = np.where(where, np.asarray(logits, np.float64), -np.inf)
    m = np.max(s, axis=-1, keepdims=True, initial=-1e300)
    p = np.exp(s - m)
    p /= np.maximum(p.sum(-1, keepdims=True), 1e-300)
    log_p = np.log(np.where(p > 0, p, 1))
    return -p * (log_p - (p * log_p).sum(-1, keepdims=True))


def assert_statistics(logits, where, atol=4e-7):
    actual, expected = statistics_of(logits, where), reference(logits, where)
    for name, value in actual._asdict().items():
        # The spread is as large as the logits; the others are of order one.
        rtol = 1e-6 if name == "logit_std" else 1e-7
        np.testing.assert_allclose(value, expected[name], rtol=rtol, atol=atol, err_msg=name)
        if name != "logit_max":
            assert np.all(np.asarray(value) >= 0), name
    assert np.all(np.asarray(actual.jacobian_norm) <= 0.5 + 1e-7)
    np.testing.assert_array_less(actual.normalized_entropy, 1 + 2e-7)


@settings(max_examples=60)
@given(
    SEEDS,
    st.sampled_from([0.0, 0.01, 1.0, 8.0, 22.6, 1e3]),
    st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    st.sampled_from(["any", "ties", "-inf"]),
)
def test_equal_their_definitions(seed, sigma, density, kind):
    rng = np.random.default_rng(seed)
    logits = (sigma * rng.normal(size=(ROWS, KEYS))).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "-inf":
        logits[rng.random(logits.shape) < 0.4] = -np.inf
    where = rng.random(logits.shape) < density
    assert_statistics(logits, where)
    values, slopes = entropies_and_slopes(logits, where)
    np.testing.assert_array_equal(values, statistics_of(logits, where).entropy)
    expected = entropy_slopes(logits, where)
    np.testing.assert_allclose(slopes, expected, rtol=0, atol=4e-7)
    assert np.all(np.asarray(slopes)[expected == 0] == 0)


@pytest.mark.parametrize("num_keys", [10, 50])
def test_saturated_rows_lose_no_digits(num_keys):
    """σ = √512: what unscaled logits of d_k = 512 look like; textbook forms are 3e-4 off here."""
    logits = np.random.default_rng(0).normal(scale=22.6, size=(400, num_keys)).astype(np.float32)
    where = np.ones(logits.shape, bool)
    assert_statistics(logits, where)
    # Nor relative ones, far below one rounding of 1 (checked while float64's 1 - p has digits).
    actual, expected = statistics_of(logits, where), reference(logits, where)
    for name in ("entropy", "jacobian_trace", "jacobian_norm"):
        readable = expected[name] > 1e-9
        np.testing.assert_allclose(
            getattr(actual, name)[readable], expected[name][readable], rtol=1e-5, err_msg=name
        )


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([-jnp.inf, 0.0, 0.0], math.log(2)),
        ([-jnp.inf, -jnp.inf, 0.0], 0.0),  # weights [0, 0, 1]
        ([-jnp.inf, -jnp.inf, -jnp.inf], 0.0),
        ([3e38, -3e38, -3e38], 0.0),
        ([0.0, -200.0, -200.0], 0.0),
    ],
)
def test_entropy_is_exact_with_zero_gradient_where_a_weight_is_zero(logits, expected):
    rows = np.array([logits], np.float32)
    value, slope = entropies_and_slopes(rows, np.ones(rows.shape, bool))
    np.testing.assert_allclose(value, [expected], rtol=1e-7)
    np.testing.assert_array_equal(slope, np.zeros(rows.shape))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_entropy_at_the_extremes_of_narrow_floats(dtype):
    largest = jnp.finfo(dtype).max
    value, slope = jax.jit(jax.value_and_grad(entropy))(jnp.array([largest, -largest], dtype))
    assert (value, value.dtype) == (0, jnp.float32)
    assert slope.dtype == dtype
    np.testing.assert_array_equal(slope.astype(jnp.float32), [0, 0])


@pytest.mark.parametrize("ties", [1, 2, 5])
def test_ties_at_the_maximum(ties):
    """r equal maxima far above the rest: p = 1/r, so H = ln r, tr J = 1 - 1/r, ‖J‖² = (r-1)/r²."""
    logits = np.array([[100.0] * ties + [-100.0] * (KEYS - ties)], np.float32)
    statistics = statistics_of(logits, np.ones(logits.shape, bool))
    np.testing.assert_allclose(statistics.entropy, [math.log(ties)], rtol=1e-7)
    np.testing.assert_allclose(statistics.max_weight, [1 / ties], rtol=1e-7)
    np.testing.assert_allclose(statistics.jacobian_trace, [1 - 1 / ties], rtol=2e-7)
    np.testing.assert_allclose(statistics.jacobian_norm, [math.sqrt(ties - 1) / ties], rtol=2e-7)


def test_what_is_hidden_does_not_matter_and_what_is_broken_shows():
    logits = np.array([[0.0, 1.0, 2.0, np.nan, np.inf], [0.0, 1.0, 2.0, np.nan, 0.0]], np.float32)
    where = np.array([[True, True, True, False, False], [True, True, True, True, True]])
    clean = np.where(where, logits, 0).astype(np.float32)
    values, slopes = entropies_and_slopes(logits, where)
    clean_values, clean_slopes = entropies_and_slopes(clean, where)
    np.testing.assert_array_equal(values[0], clean_values[0])
    np.testing.assert_array_equal(slopes[0], clean_slopes[0])
    tangents = np.where(where & np.isfinite(logits), 1, np.nan).astype(np.float32)
    _, forward = jax.jit(
        lambda s, t: jax.jvp(lambda s: entropy(s, where=jnp.asarray(where)), (s,), (t,))
    )(logits, tangents)
    np.testing.assert_allclose(forward[0], 0, atol=1e-6)  # a shift of every logit
    statistics = statistics_of(logits, where)
    assert float(statistics.logit_max[0]) == 2.0
    broken = (values, slopes, forward, *statistics[:3], statistics.logit_max)
    assert all(np.all(np.isnan(field[1])) for field in broken)


def test_where_broadcasts_and_no_keys_give_zeros():
    logits = np.zeros((2, 3, 4), np.float32)
    counts = statistics_of(logits, np.array([True, False, True, True])).visible_keys
    np.testing.assert_array_equal(counts, np.full((2, 3), 3))
    for field in statistics_of(logits[..., :0], None):
        np.testing.assert_array_equal(field, np.zeros((2, 3)))


# Autodiff


def test_entropy_composes_with_transformations():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(4, 3)), jnp.float32)
    where = jnp.array([True, True, True])

    def total(x):
        return jnp.sum(jax.vmap(entropy)(x)) + jnp.sum(entropy(x))  # the second use of one function

    def everything(x, tangent):
        value, slope = jax.value_and_grad(total)(x)
        _, along = jax.jvp(total, (x,), (tangent,))
        return value, slope, along, jax.vmap(jax.hessian(entropy))(x)

    tangent = jnp.ones_like(logits).at[0].set(-2.0)
    value, slope, along, hessian = jax.jit(everything)(logits, tangent)
    expected = reference(logits, np.ones(logits.shape, bool))["entropy"].sum()
    np.testing.assert_allclose(value, 2 * expected, rtol=1e-6)
    slopes = 2 * entropy_slopes(logits, where)
    np.testing.assert_allclose(slope, slopes, atol=1e-6)
    np.testing.assert_allclose(along, np.sum(slopes * np.asarray(tangent)), atol=2e-6)

    step = 1e-5 * np.eye(3)  # central differences of the closed-form gradient in float64
    rows = np.asarray(logits, np.float64)[:, None, :]
    differences = (entropy_slopes(rows + step, True) - entropy_slopes(rows - step, True)) / 2e-5
    np.testing.assert_allclose(hessian, differences, atol=1e-6)


def test_statistics_pass_no_gradient():
    def total(logits):
        statistics = attention_statistics(logits)
        return sum(jnp.sum(field) for field in statistics if field.dtype != bool)

    slopes = jax.jit(jax.grad(total))(jnp.array([[0.0, 1.0, 2.0]]))
    np.testing.assert_array_equal(slopes, np.zeros((1, 3)))


# Means over rows

means_of = jax.jit(lambda logits, where: head_means(attention_statistics(logits, where=where)))


def test_head_means_leave_out_rows_with_nothing_to_tell():
    """Two heads, two examples, three rows of two keys; the second head sees nothing anywhere."""
    log3 = math.log(3)  # weights 3/4, 1/4
    logits = np.zeros((2, 2, 3, 2), np.float32)
    logits[0, 0] = [[0, 0], [0, log3], [7, 7]]
    logits[1, 0] = [[5, 0], [-60, 40], [9, 9]]
    where = np.zeros(logits.shape, bool)
    where[0, 0] = [[True, True], [True, True], [False, False]]
    where[1, 0] = [[True, False], [True, True], [False, False]]
    means = means_of(logits, where)

    h = 2 * math.log(2) - 0.75 * log3
    expected = {  # rows that count: uniform, (1/4, 3/4), one key, frozen
        "entropy": (math.log(2) + h) / 4,
        "normalized_entropy": (1 + h / math.log(2)) / 3,
        "max_weight": (0.5 + 0.75 + 1 + 1) / 4,
        "saturation": 2 / 4,
        "jacobian_trace": (0.5 + 0.375) / 4,
        "dead_row_fraction": 2 / 4,
        "logit_std": (log3 / 2 + 50) / 4,
        "logit_max": 40,
    }
    assert expected.keys() == HEAD_STATISTICS.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(means, name)[0], value, rtol=1e-6, err_msg=name)
        assert np.isnan(getattr(means, name)[1]), name


def test_head_means_show_what_is_broken():
    logits = np.zeros((2, 2, 3, 2), np.float32)
    logits[1, 0, 1, 0] = np.nan
    means = means_of(logits, np.ones(logits.shape, bool))
    np.testing.assert_array_equal(np.isnan(np.stack(means)), [[True, False]] * len(means))
