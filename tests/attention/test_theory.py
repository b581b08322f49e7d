"""The theory against Monte Carlo, one-dimensional integrals, closed forms and exact identities."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special

from attention import theory

ROOT = Path(__file__).parents[2]
EXPECTATIONS = (
    theory.expected_log_partition,
    theory.expected_entropy,
    theory.expected_collision,
    theory.expected_jacobian_trace,
    theory.expected_jacobian_norm_squared,
    theory.expected_max_weight,
    theory.saturation_probability,
)


def row_statistics(logits):
    """The statistics of EXPECTATIONS by their definitions, [7, rows]."""
    largest = logits.max(-1, keepdims=True)
    log_z = special.logsumexp(logits, axis=-1, keepdims=True)
    p = np.exp(logits - log_z)
    y2 = (p**2).sum(-1)
    return np.stack(
        [
            log_z[..., 0],
            log_z[..., 0] - largest[..., 0] - (p * (logits - largest)).sum(-1),
            y2,
            1 - y2,
            y2 - 2 * (p**3).sum(-1) + y2**2,
            p.max(-1),
            p.max(-1) > 0.9,
        ]
    )


@pytest.mark.parametrize("keys", [2, 3, 10, 300])
def test_expectations_agree_with_monte_carlo(keys):
    rng = np.random.default_rng(keys)
    unit = rng.standard_normal((600_000 // keys if keys > 10 else 30_000, keys))
    for std in (0.1, 0.3, 1.0, 2.5, 8.0, 30.0, 64.0):
        sampled = row_statistics(std * unit)
        error = sampled.std(-1) / np.sqrt(sampled.shape[-1])
        exact = np.array([f(keys, std) for f in EXPECTATIONS])
        np.testing.assert_array_less(np.abs(exact - sampled.mean(-1)), 5 * error + 1e-4)


def test_many_keys_agree_with_monte_carlo():
    unit = np.random.default_rng(0).standard_normal((400, 4096))
    for std in (0.5, 4.0, 64.0):
        sampled = row_statistics(std * unit)
        error = sampled.std(-1) / np.sqrt(400)
        exact = np.array([f(4096, std) for f in EXPECTATIONS])
        np.testing.assert_array_less(np.abs(exact - sampled.mean(-1)), 5 * error + 1e-4)


@pytest.mark.parametrize(
    "keys, std, entropy, trace, norm_squared",
    [
        (10, 1, 1.924, 0.805, 0.1213),
        (10, 22.6, 0.116, 0.068, 0.0216),
        (50, 1, 3.444, 0.951, 0.0417),
        (50, 8, 0.546, 0.277, 0.0713),
        (512, 3, 2.981, 0.828, 0.0708),
    ],
)
def test_known_values(keys, std, entropy, trace, norm_squared):
    assert theory.expected_entropy(keys, std) == pytest.approx(entropy, abs=6e-4)
    assert theory.expected_jacobian_trace(keys, std) == pytest.approx(trace, abs=6e-4)
    norm = theory.expected_jacobian_norm_squared(keys, std)
    assert norm == pytest.approx(norm_squared, abs=6e-5)


@pytest.mark.parametrize("std", [1e-3, 0.2, 1.0, 5.0, 64.0])
def test_two_keys_are_one_integral(std):
    # With two keys all follows from the gap of the logits, which is N(0, 2σ²).
    def mean(f):
        def integrand(z):
            return f(special.expit(np.sqrt(2) * std * z)) * np.exp(-(z**2) / 2)

        width = min(8.0, 40 / std)
        return 2 * integrate.quad(integrand, 0, width, limit=200)[0] / np.sqrt(2 * np.pi) + f(
            1.0
        ) * 2 * special.ndtr(-width)

    cases = {
        theory.expected_entropy: lambda p: special.entr(p) + special.entr(1 - p),
        theory.expected_jacobian_trace: lambda p: 2 * p * (1 - p),
        theory.expected_jacobian_norm_squared: lambda p: 4 * p**2 * (1 - p) ** 2,
        theory.expected_max_weight: lambda p: p,
    }
    for exact, f in cases.items():
        assert exact(2, std) == pytest.approx(mean(f), abs=1e-8)
    expected = 2 * special.ndtr(-np.log(9) / (np.sqrt(2) * std))
    assert theory.saturation_probability(2, std) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("std", [0.2, 0.24, 0.26, 0.5, 3.0])
@pytest.mark.parametrize("threshold", [0.5, 0.9])
def test_saturation_of_three_keys_is_a_double_integral(std, threshold):
    z, step = np.linspace(-8, 8, 801, retstep=True)
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi) * step
    others = np.logaddexp(std * z[:, None], std * z[None, :]) + special.logit(threshold)
    expected = 3 * density @ special.ndtr(-others / std) @ density
    assert theory.saturation_probability(3, std, threshold) == pytest.approx(expected, abs=6e-4)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 4096), st.floats(0.01, 64))
def test_exact_identities(keys, std):
    log_z, trace = (
        f(keys, std) for f in (theory.expected_log_partition, theory.expected_jacobian_trace)
    )
    # Two quadratures that share no integrand: E H = E ln Z - σ²(1 - E Y2).
    assert theory.expected_entropy(keys, std) == pytest.approx(log_z - std**2 * trace, abs=1e-6)
    # Stein: d E ln Z/dσ = E[Σ p s]/σ = σ tr J.
    step = 1e-3
    slope = np.diff(theory.expected_log_partition(keys, [std - step, std + step])) / (2 * step)
    assert slope[0] == pytest.approx(std * trace, abs=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 4096), st.floats(0, 64))
def test_bounds_that_every_row_obeys(keys, std):
    entropy, trace, norm, largest, saturated = (
        f(keys, std) for f in (*EXPECTATIONS[1:2], *EXPECTATIONS[3:])
    )
    assert 0 <= entropy <= np.log(keys) + 1e-9
    assert norm <= trace / 2 + 1e-9  # ‖J‖_F² ≤ λ_max tr J, λ_max ≤ 1/2
    assert 1 - trace <= largest + 1e-9  # Σp² ≤ max p
    assert 1 / keys - 1e-9 <= largest <= 1 + 1e-9
    assert 0 <= saturated <= (largest / 0.9) + 1e-4  # Markov


def test_equal_logits():
    keys = np.array([2, 50, 4096])
    np.testing.assert_allclose(theory.expected_entropy(keys, 0.0), np.log(keys), atol=1e-9)
    np.testing.assert_allclose(theory.expected_log_partition(keys, 0.0), np.log(keys), atol=1e-9)
    np.testing.assert_allclose(theory.expected_collision(keys, 0.0), 1 / keys, rtol=1e-7)
    np.testing.assert_allclose(
        theory.expected_jacobian_norm_squared(keys, 0.0), (1 - 1 / keys) / keys, rtol=1e-6
    )
    np.testing.assert_allclose(theory.expected_max_weight(keys, 0.0), 1 / keys, rtol=1e-6)
    np.testing.assert_array_equal(theory.saturation_probability(keys, 0.0), 0)


def test_floats_give_floats_and_arrays_broadcast():
    for exact in EXPECTATIONS:
        assert isinstance(exact(10, 1.0), float)
        table = exact(np.array([[5], [10]]), np.array([0.5, 1.0, 2.0]))
        assert table.shape == (2, 3)
        assert table[1, 2] == exact(10, 2.0)


def test_averages_over_queries():
    # |q|² has mean d and |q|⁴ has d(d + 2).
    for power, expected in ((2, [1, 4, 64, 1024]), (4, [3, 24, 64 * 66, 1024 * 1026])):
        average = theory.averaged_over_queries(
            lambda keys, std, power=power: std**power, 10, np.array([1, 4, 64, 1024]), 1.0
        )
        np.testing.assert_allclose(average, expected, rtol=1e-6)
    # Against attention itself: 300 grids of 20 x 20 logits.
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((300, 20, 4)) @ rng.standard_normal((300, 20, 4)).swapaxes(1, 2)
    sampled = row_statistics(logits).mean(-1)
    exact = [theory.averaged_over_queries(f, 20, 4, 1.0) for f in EXPECTATIONS]
    error = sampled.std(-1) / np.sqrt(300)
    np.testing.assert_array_less(np.abs(exact - sampled.mean(-1)), 5 * error)


def test_gradient_rms_against_sampled_gradients():
    rng, (n, d, d_v, scale) = np.random.default_rng(1), (6, 32, 5, 0.4)
    q, k = rng.standard_normal((4000, d)), rng.standard_normal((4000, n, d))
    g = rng.standard_normal((4000, n, d_v)).sum(-1)
    p = special.softmax(scale * np.einsum("rd,rnd->rn", q, k), axis=-1)
    to_logits = p * (g - (p * g).sum(-1, keepdims=True))
    to_query = scale * np.einsum("rn,rnd->rd", to_logits, k)
    rms = theory.gradient_rms(n, d, d_v, scale)
    assert np.sqrt((to_logits**2).mean()) == pytest.approx(rms.logits, rel=0.03)
    assert np.sqrt((to_query**2).mean()) == pytest.approx(rms.query, rel=0.05)


def test_variance_and_its_standard_errors():
    rng, d = np.random.default_rng(2), 8
    assert theory.dot_product_variance(d) == 8
    products = (rng.standard_normal((3000, 100, d)) * rng.standard_normal((3000, 100, d))).sum(-1)
    variances = products.var(-1)
    assert variances.std() == pytest.approx(theory.variance_standard_error(d, 100), rel=0.06)
    assert variances.mean() == pytest.approx(d * 99 / 100, rel=0.01)
    kurtosis = (products**4).mean() / (products**2).mean() ** 2 - 3
    assert kurtosis == pytest.approx(theory.dot_product_excess_kurtosis(d), abs=0.05)
    q, k = rng.standard_normal((2, 3000, 12, d))
    grids = ((q @ k.swapaxes(1, 2)) ** 2).mean((1, 2))
    assert grids.std() == pytest.approx(theory.grid_variance_standard_error(d, 12), rel=0.06)
    assert theory.grid_variance_standard_error(64, 50, 32) == pytest.approx(0.032 * 16, rel=0.02)


def test_expected_maximum():
    np.testing.assert_allclose(
        theory.expected_maximum([2, 3, 5, 10, 50, 512]),
        [np.pi**-0.5, 1.5 * np.pi**-0.5, 1.1630, 1.5388, 2.2491, 3.0439],
        atol=5e-5,
    )


def test_freezing_point():
    assert theory.freezing_key_dim(50) == pytest.approx(7.824, abs=1e-3)
    assert theory.freezing_std(512) == pytest.approx(np.sqrt(2 * np.log(512)))


def exact_regime(keys, std):
    return theory.Regime(*(EXPECTATIONS[i](keys, std) for i in (1, 3, 4, 5, 6)))


def test_small_std_laws():
    for keys in (3, 50, 4096):
        exact, law = exact_regime(keys, 0.1), theory.small_std(keys, 0.1)
        np.testing.assert_allclose(law[:3], exact[:3], atol=1e-4)
        np.testing.assert_allclose(law.max_weight, exact.max_weight, rtol=0.05)
        exact, law = exact_regime(keys, 0.4), theory.small_std(keys, 0.4)
        np.testing.assert_allclose(law[:2], exact[:2], atol=1e-2)


def test_large_std_laws():
    for keys in (2, 10, 4096):
        law, exact = theory.large_std(keys, 200.0), exact_regime(keys, 200.0)
        np.testing.assert_allclose(law[:3], exact[:3], rtol=0.1)
        np.testing.assert_allclose(law[3:], exact[3:], atol=3e-3)
    assert np.isnan(theory.large_std(10, 0.0).entropy)


def test_random_energy_laws():
    keys = 2**20
    warm = theory.freezing_std(keys) / 3
    law = theory.random_energy(keys, warm)
    assert law.entropy == pytest.approx(theory.expected_entropy(keys, warm), rel=1e-3)
    assert law.jacobian_trace == pytest.approx(theory.expected_jacobian_trace(keys, warm), rel=1e-3)
    # The limit's own statistics, by stick-breaking: PD(m, 0) has sticks Beta(1 - m, i m).
    rng, m = np.random.default_rng(3), 0.4
    sticks = rng.beta(1 - m, m * np.arange(1, 1001), size=(1000, 1000))
    weights = (
        sticks * np.cumprod(np.pad(1 - sticks, ((0, 0), (1, 0)), constant_values=1), 1)[:, :-1]
    )
    y2 = (weights**2).sum(-1)
    law = theory.random_energy(keys, theory.freezing_std(keys) / m)
    assert law.jacobian_trace == pytest.approx(1 - y2.mean(), abs=0.03)
    assert law.jacobian_norm_squared == pytest.approx(
        (y2 - 2 * (weights**3).sum(-1) + y2**2).mean(), abs=0.004
    )
    assert law.max_weight == pytest.approx(weights.max(-1).mean(), abs=0.03)
    assert law.saturation == pytest.approx((weights.max(-1) > 0.9).mean(), abs=0.05)
    assert law.entropy == pytest.approx(special.entr(weights).sum(-1).mean(), abs=0.06)
    # At finite N the law is approached slowly: exact entropy at (50, 8) is .546, the law's .79.
    assert theory.random_energy(50, 8.0).entropy == pytest.approx(0.79, abs=0.01)


def test_regimes_meet_deep_in_the_frozen_phase():
    # μ_N and σ_c differ by little in the largest N; Poisson–Dirichlet at m → 0 is the law of ties.
    law, limit = theory.random_energy(1000, 256.0), theory.large_std(1000, 256.0)
    ratio = theory.freezing_std(1000) / theory.expected_maximum(1000)
    np.testing.assert_allclose(law.entropy / limit.entropy, ratio, rtol=0.03)
    np.testing.assert_allclose((1 - law.max_weight) / (1 - limit.max_weight), ratio, rtol=0.03)
    np.testing.assert_allclose((1 - law.saturation) / (1 - limit.saturation), ratio, rtol=0.03)


def test_planted_weight():
    assert theory.planted_weight(101, np.log(100), 0.0) == pytest.approx(0.5)
    rng = np.random.default_rng(4)
    others = 1.5 * rng.standard_normal((50, 9999))
    weight = 1 / (1 + np.exp(others).sum(-1) * np.exp(-10.0))
    assert theory.planted_weight(10_000, 10.0, 1.5) == pytest.approx(weight.mean(), abs=0.01)


@pytest.mark.parametrize(
    "keys, shown",
    [(1, "1"), (0, "0"), (-3, "-3"), (2.5, "2.5"), (2**21, "2097152"), (np.nan, "nan")],
)
def test_keys_out_of_range(keys, shown):
    message = f"keys must be a whole number from 2 to 1048576, got {shown}"
    for f in (*EXPECTATIONS, theory.small_std, theory.random_energy, theory.large_std):
        with pytest.raises(ValueError, match=f"^{message}$"):
            f([10, keys], 1.0)


@pytest.mark.parametrize(
    "std, shown",
    [(-0.1, "-0.1"), (257.0, "257"), (np.nan, "nan"), (np.inf, "inf"), ([1.0, -2.0], "-2")],
)
def test_std_out_of_range(std, shown):
    for f in (*EXPECTATIONS, theory.small_std, theory.random_energy, theory.large_std):
        with pytest.raises(ValueError, match=rf"^std must be in \[0, 256\], got {shown}$"):
            f(10, std)


def test_other_arguments_out_of_range():
    with pytest.raises(ValueError, match=r"threshold must be in \[0.5, 1\), got 0.4"):
        theory.saturation_probability(10, 1.0, 0.4)
    with pytest.raises(ValueError, match="key_dim must be a whole number of at least 1, got 0"):
        theory.averaged_over_queries(theory.expected_entropy, 10, 0, 1.0)
    with pytest.raises(ValueError, match="pairs must be a whole number of at least 2, got 1"):
        theory.variance_standard_error(4, 1)


def test_theory_needs_no_jax():
    script = (
        "import sys; from attention.theory import *; assert expected_entropy(2, 0.0) > 0.69; "
        "loaded = {'jax', 'flax'} & set(sys.modules); assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
