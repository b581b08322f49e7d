"""Statistics on data whose answers are known: closed form, by hand, or by a second route."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy import stats

from experiments.analysis import paired

# No deadline: the machine may be busy.
quick = settings(deadline=None, max_examples=40)
VALUE = st.floats(-1e6, 1e6, allow_subnormal=False).map(lambda x: round(x, 3))


def pairs(min_size=1, max_size=10):
    return st.lists(st.tuples(VALUE, VALUE), min_size=min_size, max_size=max_size).map(
        lambda rows: np.array(rows).T
    )


def compare(differences, **options):
    differences = np.asarray(differences)
    return paired.paired_comparison(
        differences, np.zeros(differences.shape), better="lower", **options
    )


def integer_sign_flip_p(differences):
    """Distribution of Σ ±dᵢ as the product of the polynomials (x^|dᵢ| + x^-|dᵢ|) / 2."""
    probability = np.ones(1)
    for d in np.abs(differences):
        factor = np.zeros(2 * d + 1)
        factor[0] += 0.5
        factor[-1] += 0.5
        probability = np.convolve(probability, factor)
    total = np.sum(np.abs(differences))
    return probability[np.abs(np.arange(-total, total + 1)) >= abs(np.sum(differences))].sum()


class TestClipAtWorst:
    def test_ranks_diverged_and_worse_values_alike(self):
        loss = [1.0, 9.0, np.nan, np.inf, -np.inf]
        np.testing.assert_array_equal(
            paired.clip_at_worst(loss, 4.0, better="lower"), [1, 4, 4, 4, 4]
        )
        np.testing.assert_array_equal(
            paired.clip_at_worst([0.7, np.nan, -1.0], 0.0, better="higher"), [0.7, 0, 0]
        )

    def test_worst_may_differ_by_lane(self):
        values = np.full((2, 3), np.nan)
        clipped = paired.clip_at_worst(values, np.array([[1.0], [2.0]]), better="lower")
        np.testing.assert_array_equal(clipped, [[1, 1, 1], [2, 2, 2]])

    def test_refuses_a_worst_that_is_not_finite_and_an_unknown_direction(self):
        with pytest.raises(ValueError, match="worst must be finite, got nan"):
            paired.clip_at_worst([1.0], np.nan, better="lower")
        with pytest.raises(ValueError, match="better must be 'lower' or 'higher', got 'less'"):
            paired.clip_at_worst([1.0], 2.0, better="less")  # pyrefly: ignore[bad-argument-type]


class TestPairedComparison:
    @pytest.mark.parametrize(
        ("differences", "p_value"),
        [
            ([1, 2, 3], 2 / 8),
            ([3, 1, -1], 6 / 8),  # |±3 ±1 ±1| is 5, 3, 3, 1
            ([1, 2, -3], 1.0),
            ([0.1, 0.2, -0.3], 1.0),  # the float sum is 5.6e-17; in exact arithmetic it is 0
            ([1e8, -1e8, 1.0], 1.0),
            ([0.0, 5.0, 0.0], 1.0),
            ([-2.5], 1.0),
            ([0.1] * 12, 2 / 4096),
            ([-0.1] * 20, 2 / 2**20),
        ],
    )
    def test_exact_p_values_counted_by_hand(self, differences, p_value):
        result = compare(differences)
        assert result.exact
        assert result.p_value == p_value

    @pytest.mark.parametrize("n", [2, 7, 11])
    def test_exact_p_value_is_scipys(self, n):
        d = np.random.default_rng(n).normal(0.3, 1.0, n)
        expected = stats.permutation_test(
            (d,), np.mean, permutation_type="samples", n_resamples=2**n
        ).pvalue
        assert compare(d).p_value == pytest.approx(expected, abs=1e-15)

    def test_exact_p_value_of_twenty_integers(self):
        d = np.random.default_rng(3).integers(-9, 13, 20)
        result = compare(d)
        assert result.exact
        assert result.p_value == pytest.approx(integer_sign_flip_p(d), rel=1e-9)

    def test_monte_carlo_agrees_with_the_exact_distribution(self):
        d = np.random.default_rng(0).integers(1, 10, 40) * np.where(np.arange(40) % 3, 1, -1)
        expected = integer_sign_flip_p(d)
        result = compare(d)
        assert not result.exact
        assert 0.01 < expected < 0.2
        assert abs(result.p_value - expected) < 4 * np.sqrt(expected * (1 - expected) / 9999)
        assert compare(d) == result
        assert compare(d, seed=1).p_value != result.p_value

    def test_monte_carlo_p_value_is_never_zero(self):
        result = compare(np.ones(40), resamples=999)
        assert (result.p_value, result.exact) == (1 / 1000, False)

    def test_zeros_do_not_count_towards_the_exact_limit(self):
        result = compare([0.0] * 30 + [1.0, 2.0, 3.0])
        assert (result.p_value, result.exact) == (0.25, True)

    def test_effect_sizes_by_hand(self):
        a, b = [1.0, 2.0, 5.0, 4.0], [2.0, 2.0, 1.0, 7.0]  # differences -1, 0, 4, -3
        result = paired.paired_comparison(a, b, better="lower")
        assert result.pairs == 4
        assert result.mean_difference == 0.0
        assert result.median_difference == -0.5
        assert result.probability_better == 2.5 / 4
        assert paired.paired_comparison(a, b, better="higher").probability_better == 1.5 / 4

    @pytest.mark.parametrize(
        ("differences", "p_value"),
        [
            ([1.0, 2.0, 3.0], 2 / 8),
            ([4.0, 100.0, 5.0, -1.0], 4 / 16),  # rank sum 10 - 2: 2 patterns reach 10, 2 reach 8
            ([1.0, 1.0, -1.0], 1.0),  # tied ranks 2, 2, 2: every sum is at least 2
            ([2.0, 2.0, 2.0, 0.0], 2 / 8),
            ([0.0, 0.0], 1.0),
        ],
    )
    def test_wilcoxon_by_hand(self, differences, p_value):
        assert compare(differences).wilcoxon_p_value == p_value

    @pytest.mark.parametrize(
        "differences",
        [
            np.random.default_rng(1).normal(0.5, 1, 12),
            np.random.default_rng(2).normal(0.5, 1, 20),
            np.array([1, 1, -2, 0, 3, 3, 2, -1]),  # ties and a zero: scipy enumerates too
        ],
    )
    def test_wilcoxon_is_scipys(self, differences):
        expected = stats.wilcoxon(differences).pvalue
        assert compare(differences).wilcoxon_p_value == pytest.approx(expected, rel=1e-12)

    def test_interval_is_scipys_bca(self):
        d = np.random.default_rng(5).exponential(1.0, 15)
        expected = stats.bootstrap(
            (d,), np.mean, confidence_level=0.9, rng=np.random.default_rng(0)
        ).confidence_interval
        result = compare(d, confidence=0.9)
        np.testing.assert_allclose([result.low, result.high], expected, rtol=1e-9)

    def test_interval_of_many_pairs_is_the_normal_one(self):
        d = np.random.default_rng(6).normal(2.0, 1.0, 400)
        reach = 1.96 * np.std(d) / np.sqrt(d.size)
        result = compare(d)
        np.testing.assert_allclose([d.mean() - reach, d.mean() + reach], result[2:4], atol=8e-3)

    @pytest.mark.parametrize("value", [0.0, 0.1, -3.0])
    def test_identical_differences_give_a_point_interval(self, value):
        result = compare([value] * 7)
        assert (result.low, result.high) == (value, value)
        assert result.p_value == (1.0 if value == 0 else 2 / 2**7)

    def test_differences_equal_up_to_rounding_give_a_finite_interval(self):
        result = compare([0.1, 0.1, np.nextafter(0.1, 1), 0.1])
        assert 0.1 <= result.low <= result.high <= np.nextafter(0.1, 1)

    def test_one_pair_shows_nothing(self):
        result = compare([3.0])
        assert (result.low, result.high, result.p_value) == (-np.inf, np.inf, 1.0)

    def test_float32_is_subtracted_in_float64(self):
        a = np.array([1.0, 1.0], np.float32)
        b = np.array([1e-8, 1e-8], np.float32)
        assert paired.paired_comparison(a, b, better="lower").mean_difference < 1.0

    @quick
    @given(pairs())
    @example(np.array([[0.1, 0.2, 0.0], [0.0, 0.0, 0.3]]))
    def test_swapping_the_arms_mirrors_the_result(self, ab):
        a, b = ab
        there = paired.paired_comparison(a, b, better="lower", resamples=99)
        back = paired.paired_comparison(b, a, better="lower", resamples=99)
        assert back.mean_difference == -there.mean_difference
        assert back.median_difference == -there.median_difference
        assert back.probability_better == pytest.approx(1 - there.probability_better, abs=1e-12)
        assert back.p_value == there.p_value
        assert back.wilcoxon_p_value == there.wilcoxon_p_value
        scale = np.abs(a - b).max() + 1e-12
        assert back.low == pytest.approx(-there.high, abs=1e-9 * scale)
        assert back.high == pytest.approx(-there.low, abs=1e-9 * scale)

    @quick
    @given(pairs(), st.randoms(use_true_random=False))
    def test_p_values_do_not_depend_on_the_order_of_the_seeds(self, ab, random):
        order = list(range(ab.shape[1]))
        random.shuffle(order)
        first = paired.paired_comparison(*ab, better="lower", resamples=99)
        second = paired.paired_comparison(*ab[:, order], better="lower", resamples=99)
        assert first.p_value == second.p_value
        assert first.wilcoxon_p_value == second.wilcoxon_p_value
        assert first.probability_better == second.probability_better

    def test_monte_carlo_p_value_depends_on_neither_order_nor_arms(self):
        d = np.random.default_rng(8).normal(0.2, 1.0, 30)
        expected = compare(d).p_value
        assert compare(d[::-1]).p_value == expected
        assert compare(-d).p_value == expected

    @quick
    @given(pairs())
    def test_interval_is_finite_and_within_the_data(self, ab):
        assume(ab.shape[1] > 1)
        d = ab[0] - ab[1]
        result = paired.paired_comparison(*ab, better="lower", resamples=199)
        slack = 1e-9 * np.abs(d).max()
        assert d.min() - slack <= result.low <= result.high <= d.max() + slack

    @pytest.mark.parametrize("size", [2.0**-664, 2.0**490])
    def test_any_size_gives_the_same_verdict(self, size):
        whole = [3.0, 1.0, -2.0, 5.0, 4.0, 4.0]
        expected, result = compare(whole)._asdict(), compare(np.array(whole) * size)._asdict()
        for name in ("mean_difference", "low", "high", "median_difference"):
            expected[name] *= size
        assert result == expected

    def test_the_least_differences_there_are(self):
        result = compare(np.array([3.0, 1.0, -2.0, 5.0]) * 2.0**-1074)
        assert (result.p_value, result.wilcoxon_p_value) == (6 / 16, 6 / 16)
        assert -(2.0**-1073) <= result.low <= result.high <= 5 * 2.0**-1074

    def test_sizes_whose_squares_overflow_are_refused(self):
        for values in ([1e308, 1e308], [1e308, -1e308], [0.0, 1e151]):
            with pytest.raises(ValueError, match=r"must be at most 1e\+150 in size, got 1e"):
                compare(values)
            with pytest.raises(ValueError, match=r"b must be at most 1e\+150 in size, got 1e"):
                paired.equivalence_test([0.0, 0.0], values, 1.0)

    def test_many_pairs_take_little_memory(self):
        # 2000 pairs without batches are 9999 * 2000 values of each of several arrays: 160 MB each.
        d = np.random.default_rng(9).normal(0.02, 1.0, 2000)
        tracemalloc.start()
        compare(d)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100e6

    def test_batches_change_nothing(self, monkeypatch):
        d = np.random.default_rng(9).normal(0.02, 1.0, 30)
        expected = compare(d)
        monkeypatch.setattr(paired, "_AT_ONCE", 97 * d.size)
        assert compare(d) == expected

    def test_refuses_what_it_cannot_pair(self):
        with pytest.raises(ValueError, match=r"shapes \(2,\) and \(3,\)"):
            paired.paired_comparison([1, 2], [1, 2, 3], better="lower")
        with pytest.raises(ValueError, match=r"N >= 1, got shapes \(0,\)"):
            paired.paired_comparison([], [], better="lower")
        with pytest.raises(ValueError, match=r"b must be finite, got 2 diverged .* of 3.*clip_at"):
            paired.paired_comparison([1, 2, 3], [np.nan, np.inf, 1], better="lower")


class TestHolm:
    def test_by_hand(self):
        adjusted = paired.holm([0.01, 0.04, 0.03, 0.005])
        np.testing.assert_allclose(adjusted, [0.03, 0.06, 0.06, 0.02], rtol=1e-12)

    def test_keeps_shape_and_stops_at_one(self):
        np.testing.assert_array_equal(paired.holm([[0.9, 0.6], [0.25, 1.0]]), np.ones((2, 2)))
        assert paired.holm([]).shape == (0,)

    @quick
    @given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
    def test_rejects_exactly_what_the_step_down_procedure_rejects(self, p):
        adjusted, level, m = paired.holm(p), 0.3, len(p)
        rejected = np.zeros(m, bool)
        for step, cell in enumerate(np.argsort(p, kind="stable")):
            if (m - step) * p[cell] > level:
                break
            rejected[cell] = True
        np.testing.assert_array_equal(adjusted <= level, rejected)
        assert np.all((adjusted >= p) & (adjusted <= np.minimum(1, m * np.array(p)).max()))

    @pytest.mark.parametrize("bad", [np.nan, -0.1, 1.1])
    def test_refuses_what_is_no_p_value(self, bad):
        with pytest.raises(ValueError, match=r"p_values must be in \[0, 1\]"):
            paired.holm([0.5, bad])


class TestEquivalence:
    def test_two_pairs_in_closed_form(self):
        # Differences -1 and 1: se = 1, and one degree of freedom is Cauchy's distribution.
        result = paired.equivalence_test([-1.0, 1.0], [0.0, 0.0], 8.0)
        assert result.p_value == pytest.approx(0.5 - np.arctan(8.0) / np.pi, rel=1e-9)
        assert result.equivalent
        assert result.high == pytest.approx(np.tan(0.45 * np.pi), rel=1e-9)
        assert result.low == -result.high

    def test_is_the_larger_of_scipys_two_one_sided_tests(self):
        rng = np.random.default_rng(4)
        a = rng.normal(size=14)
        b = a + rng.normal(0.1, 0.3, 14)
        expected = max(
            stats.ttest_1samp(a - b, -0.25, alternative="greater").pvalue,
            stats.ttest_1samp(a - b, 0.25, alternative="less").pvalue,
        )
        assert paired.equivalence_test(a, b, 0.25).p_value == pytest.approx(expected, rel=1e-9)

    @pytest.mark.parametrize(
        ("difference", "p_value", "equivalent"),
        [(0.0, 0.0, True), (0.25, 0.0, True), (0.5, 1.0, False), (-0.75, 1.0, False)],
    )
    def test_identical_differences(self, difference, p_value, equivalent):
        result = paired.equivalence_test([difference] * 6, [0.0] * 6, 0.5)
        assert result == (equivalent, p_value, difference, difference, difference)

    def test_a_spread_whose_square_underflows(self):
        result = paired.equivalence_test([1e-200, -1e-200, 3e-200], [0.0] * 3, 2e-200)
        larger = paired.equivalence_test([1.0, -1.0, 3.0], [0.0] * 3, 2.0)
        assert result.p_value == pytest.approx(larger.p_value)

    def test_one_pair_shows_nothing(self):
        result = paired.equivalence_test([0.0], [0.0], 1.0)
        assert result == (False, 1.0, 0.0, -np.inf, np.inf)

    @quick
    @given(pairs(2), st.floats(1e-3, 1e6), st.floats(0.01, 0.2))
    def test_equivalent_exactly_when_the_interval_is_inside_the_margin(self, ab, margin, alpha):
        a, b = ab
        result = paired.equivalence_test(a, b, margin, alpha=alpha)
        assume(abs(result.p_value - alpha) > 1e-9)
        assert result.equivalent == (-margin < result.low and result.high < margin)
        back = paired.equivalence_test(b, a, margin, alpha=alpha)
        assert back.p_value == pytest.approx(result.p_value, abs=1e-12)
        assert back.mean_difference == -result.mean_difference

    def test_refuses_margins_and_levels_out_of_range(self):
        with pytest.raises(ValueError, match="margin must be positive and finite, got 0"):
            paired.equivalence_test([1, 2], [1, 2], 0)
        with pytest.raises(ValueError, match=r"alpha must be between 0 and 0\.5, got 0\.5"):
            paired.equivalence_test([1, 2], [1, 2], 1, alpha=0.5)
        with pytest.raises(ValueError, match="a must be finite, got 1 diverged"):
            paired.equivalence_test([np.nan, 2], [1, 2], 1)
