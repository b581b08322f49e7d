"""Statistics on data whose answers are known: closed form, by hand, or by a second route."""

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy import stats

from experiments.analysis import comparison
from experiments.analysis.comparison import CensoredTimes

# No deadline: the machine may be busy.
quick = settings(deadline=None, max_examples=40)
VALUE = st.floats(-1e6, 1e6, allow_subnormal=False).map(lambda x: round(x, 3))


def pairs(min_size=1, max_size=10):
    return st.lists(st.tuples(VALUE, VALUE), min_size=min_size, max_size=max_size).map(
        lambda rows: np.array(rows).T
    )


def compare(differences, **options):
    differences = np.asarray(differences)
    return comparison.paired_comparison(
        differences, np.zeros(differences.shape), better="lower", **options
    )


def censored(time, reached):
    return CensoredTimes(np.array(time, float), np.array(reached, bool))


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
            comparison.clip_at_worst(loss, 4.0, better="lower"), [1, 4, 4, 4, 4]
        )
        np.testing.assert_array_equal(
            comparison.clip_at_worst([0.7, np.nan, -1.0], 0.0, better="higher"), [0.7, 0, 0]
        )

    def test_worst_may_differ_by_lane(self):
        values = np.full((2, 3), np.nan)
        clipped = comparison.clip_at_worst(values, np.array([[1.0], [2.0]]), better="lower")
        np.testing.assert_array_equal(clipped, [[1, 1, 1], [2, 2, 2]])

    def test_refuses_a_worst_that_is_not_finite_and_an_unknown_direction(self):
        with pytest.raises(ValueError, match="worst must be finite, got nan"):
            comparison.clip_at_worst([1.0], np.nan, better="lower")
        with pytest.raises(ValueError, match="better must be 'lower' or 'higher', got 'less'"):
            comparison.clip_at_worst([1.0], 2.0, better="less")  # pyrefly: ignore[bad-argument-type]


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
        result = comparison.paired_comparison(a, b, better="lower")
        assert result.pairs == 4
        assert result.mean_difference == 0.0
        assert result.median_difference == -0.5
        assert result.probability_better == 2.5 / 4
        assert comparison.paired_comparison(a, b, better="higher").probability_better == 1.5 / 4

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
        assert comparison.paired_comparison(a, b, better="lower").mean_difference < 1.0

    @quick
    @given(pairs())
    @example(np.array([[0.1, 0.2, 0.0], [0.0, 0.0, 0.3]]))
    def test_swapping_the_arms_mirrors_the_result(self, ab):
        a, b = ab
        there = comparison.paired_comparison(a, b, better="lower", resamples=99)
        back = comparison.paired_comparison(b, a, better="lower", resamples=99)
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
        first = comparison.paired_comparison(*ab, better="lower", resamples=99)
        second = comparison.paired_comparison(*ab[:, order], better="lower", resamples=99)
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
        result = comparison.paired_comparison(*ab, better="lower", resamples=199)
        slack = 1e-9 * np.abs(d).max()
        assert d.min() - slack <= result.low <= result.high <= d.max() + slack

    def test_refuses_what_it_cannot_pair(self):
        with pytest.raises(ValueError, match=r"shapes \(2,\) and \(3,\)"):
            comparison.paired_comparison([1, 2], [1, 2, 3], better="lower")
        with pytest.raises(ValueError, match=r"N >= 1, got shapes \(0,\)"):
            comparison.paired_comparison([], [], better="lower")
        with pytest.raises(ValueError, match=r"b must be finite, got 2 diverged .* of 3.*clip_at"):
            comparison.paired_comparison([1, 2, 3], [np.nan, np.inf, 1], better="lower")


class TestHolm:
    def test_by_hand(self):
        adjusted = comparison.holm([0.01, 0.04, 0.03, 0.005])
        np.testing.assert_allclose(adjusted, [0.03, 0.06, 0.06, 0.02], rtol=1e-12)

    def test_keeps_shape_and_stops_at_one(self):
        np.testing.assert_array_equal(comparison.holm([[0.9, 0.6], [0.25, 1.0]]), np.ones((2, 2)))
        assert comparison.holm([]).shape == (0,)

    @quick
    @given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
    def test_rejects_exactly_what_the_step_down_procedure_rejects(self, p):
        adjusted, level, m = comparison.holm(p), 0.3, len(p)
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
            comparison.holm([0.5, bad])


class TestStepsToThreshold:
    STEPS = (0, 10, 20, 30, 40)

    @pytest.mark.parametrize(
        ("values", "consecutive", "time", "reached"),
        [
            ([0.1, 0.5, 0.95, 0.95, 0.95], 1, 20, True),
            ([0.1, 0.95, 0.5, 0.95, 0.95], 1, 10, True),
            ([0.1, 0.95, 0.5, 0.95, 0.95], 2, 30, True),
            ([0.1, 0.95, 0.5, 0.95, 0.95], 3, 40, False),
            ([0.9, 0.9, 0.0, 0.0, 0.0], 2, 0, True),  # at the threshold, at once, lost later
            ([0.0, 0.0, 0.0, 0.0, 0.9], 1, 40, True),  # at the budget, yet reached
            ([0.0, 0.0, 0.0, 0.0, 0.9], 2, 40, False),
            ([0.0, 0.95, np.nan, np.nan, np.nan], 2, 40, False),  # diverged before two in a row
            ([0.95, 0.95, np.nan, np.nan, np.nan], 2, 0, True),  # diverged afterwards
            ([np.nan] * 5, 1, 40, False),
            ([np.inf] * 5, 1, 40, False),
            ([1.0] * 5, 5, 0, True),
            ([1.0] * 5, 6, 40, False),
        ],
    )
    def test_by_hand(self, values, consecutive, time, reached):
        result = comparison.steps_to_threshold(self.STEPS, values, 0.9, consecutive)
        assert (result.time, result.reached) == (time, reached)

    def test_maps_over_leading_axes(self):
        values = np.array([[[0, 1, 1], [0, 0, np.nan]]])
        time, reached = comparison.steps_to_threshold([1, 2, 4], values, 1.0, 2)
        np.testing.assert_array_equal(time, [[2, 4]])
        np.testing.assert_array_equal(reached, [[True, False]])

    def test_refuses_malformed_series(self):
        with pytest.raises(ValueError, match="strictly increasing"):
            comparison.steps_to_threshold([0, 5, 5], [0, 1, 2], 1.0)
        with pytest.raises(ValueError, match=r"values must be \[..., 3\].*got shape \(2,\)"):
            comparison.steps_to_threshold([0, 5, 6], [0, 1], 1.0)
        with pytest.raises(ValueError, match="consecutive must be at least 1, got 0"):
            comparison.steps_to_threshold([0], [0], 1.0, 0)
        with pytest.raises(ValueError, match="threshold must be finite, got nan"):
            comparison.steps_to_threshold([0], [0], np.nan)


class TestKaplanMeier:
    def test_fan_belts(self):
        # Conover, Practical Nonparametric Statistics, 3rd edition, page 91.
        curve = comparison.kaplan_meier(
            censored([77, 47, 81, 56, 80, 62, 60, 43, 71, 37], [True] * 5 + [False] * 5)
        )
        np.testing.assert_array_equal(curve.time, [0, 37, 43, 47, 56, 60, 62, 71, 77, 80, 81])
        np.testing.assert_allclose(
            curve.survival, [1, 1, 1, 0.875, 0.75, 0.75, 0.75, 0.75, 0.5, 0.25, 0], atol=1e-12
        )
        assert curve.median == 77

    @pytest.mark.parametrize("half", range(1, 30))
    def test_median_is_where_exactly_half_have_arrived(self, half):
        # A running product of ratios misses 1/2 by a rounding for some of these.
        times = np.r_[np.arange(1, half + 1), np.full(half, 99)]
        curve = comparison.kaplan_meier(censored(times, times < 99))
        assert curve.median == half

    def test_nobody_arrives(self):
        curve = comparison.kaplan_meier(censored([50, 50, 50], [False] * 3))
        np.testing.assert_array_equal(curve.time, [0, 50])
        np.testing.assert_array_equal(curve.survival, [1, 1])
        assert curve.median == np.inf

    def test_all_arrive_at_once(self):
        curve = comparison.kaplan_meier(censored([20, 20], [True] * 2))
        np.testing.assert_array_equal(curve.survival, [1, 0])
        assert curve.median == 20

    def test_arrival_at_the_first_step(self):
        curve = comparison.kaplan_meier(censored([0, 8], [True, True]))
        np.testing.assert_array_equal(curve.time, [0, 0, 8])
        np.testing.assert_array_equal(curve.survival, [1, 0.5, 0])
        assert curve.median == 0

    def test_refuses_malformed_times(self):
        with pytest.raises(ValueError, match=r"times must hold times and booleans.*\(0,\)"):
            comparison.kaplan_meier(censored([], []))
        with pytest.raises(ValueError, match="dtype int64"):
            comparison.kaplan_meier(CensoredTimes(np.ones(2), np.ones(2, int)))
        with pytest.raises(ValueError, match=r"not negative, got \[-1\. nan\]"):
            comparison.kaplan_meier(censored([-1, np.nan], [True, True]))


class TestRestrictedMean:
    def test_by_hand_with_censoring(self):
        # S is 1, 3/4 from 1, 3/8 from 3. Variance: (15/8)²/12 + (3/8)²/2.
        result = comparison.restricted_mean(
            censored([1, 2, 3, 4], [True, False, True, False]), horizon=4
        )
        assert result.mean == pytest.approx(1 + 1.5 + 0.375, rel=1e-12)
        error = np.sqrt((15 / 8) ** 2 / 12 + (3 / 8) ** 2 / 2)
        assert result.standard_error == pytest.approx(error, rel=1e-12)
        assert result.low == pytest.approx(2.875 - 1.959964 * error, abs=1e-6)
        assert result.high == 4.0  # 4.056 cut at the horizon

    @quick
    @given(
        st.lists(st.integers(0, 60), min_size=2, max_size=12),
        st.integers(1, 60),
    )
    def test_without_earlier_censoring_it_is_the_mean_of_the_cut_times(self, steps, horizon):
        time = np.minimum(np.array(steps, float), 50)
        assume(horizon <= 50)
        result = comparison.restricted_mean(
            censored(time, np.array(steps) < 50), horizon, confidence=0.9
        )
        cut = np.minimum(time, horizon)
        assert result.mean == pytest.approx(cut.mean(), abs=1e-9)
        error = np.std(cut) / np.sqrt(cut.size)
        assert result.standard_error == pytest.approx(error, abs=1e-6)
        assert 0 <= result.low <= result.mean + 1e-9
        assert result.mean - 1e-9 <= result.high <= horizon

    def test_horizon_beyond_the_last_arrival_when_all_arrive(self):
        result = comparison.restricted_mean(censored([1, 3], [True, True]), horizon=100)
        assert result.mean == 2.0

    def test_edge_cases(self):
        nobody = comparison.restricted_mean(censored([50, 50], [False] * 2), 50)
        assert nobody == (50.0, 0.0, 50.0, 50.0)
        at_once = comparison.restricted_mean(censored([20, 20], [True] * 2), 50)
        assert at_once == (20.0, 0.0, 20.0, 20.0)
        alone = comparison.restricted_mean(censored([20], [True]), 50)
        assert alone == (20.0, np.inf, 0.0, 50.0)

    @pytest.mark.parametrize("horizon", [0, 51, np.inf, np.nan])
    def test_refuses_a_horizon_that_was_not_watched(self, horizon):
        with pytest.raises(ValueError, match="horizon must be positive and at most the 50 steps"):
            comparison.restricted_mean(censored([10, 50], [True, False]), horizon)


class TestLogRank:
    # Recurrent glioma, weeks: Bland & Altman, BMJ 328:1073 (2004), who give chi-squared 7.5.
    # fmt: off
    ASTROCYTOMA = censored(
        [6, 13, 21, 30, 37, 38, 49, 50, 63, 79, 86, 98, 202, 219, 31, 47, 80, 82, 82, 149],
        [True] * 14 + [False] * 6,
    )
    GLIOBLASTOMA = censored(
        [10, 10, 12, 13, 14, 15, 16, 17, 18, 20, 24, 24, 25, 28, 30, 33,
         35, 37, 40, 40, 46, 48, 76, 81, 82, 91, 112, 181, 34, 40, 70],
        [True] * 28 + [False] * 3,
    )
    # fmt: on

    def test_published_example(self):
        result = comparison.log_rank(self.ASTROCYTOMA, self.GLIOBLASTOMA)
        assert result.statistic == pytest.approx(-np.sqrt(7.4966), abs=1e-4)
        assert result.p_value == pytest.approx(0.006, abs=5e-4)

    def test_by_hand(self):
        # At 1: 1 of 2 + 2 arrives, from A. At 2: 1 of 1 + 2, from A. B is censored at 3.
        result = comparison.log_rank(
            censored([1, 2], [True, True]), censored([3, 3], [False, False])
        )
        observed_less_expected = 2 - (2 / 4 + 1 / 3)
        variance = 1 / 4 + 2 / 9
        assert result.statistic == pytest.approx(observed_less_expected / np.sqrt(variance))

    def test_swapping_the_arms_flips_the_sign(self):
        there = comparison.log_rank(self.ASTROCYTOMA, self.GLIOBLASTOMA)
        back = comparison.log_rank(self.GLIOBLASTOMA, self.ASTROCYTOMA)
        assert back.statistic == pytest.approx(-there.statistic)
        assert back.p_value == pytest.approx(there.p_value)

    @pytest.mark.parametrize(
        ("a", "b"),
        [
            (censored([50] * 3, [False] * 3), censored([50] * 3, [False] * 3)),
            (censored([20] * 3, [True] * 3), censored([20] * 3, [True] * 3)),
            (censored([20], [True]), censored([10], [False])),  # B was gone before A arrived
        ],
    )
    def test_data_that_cannot_tell_give_p_of_one(self, a, b):
        assert comparison.log_rank(a, b) == (0.0, 1.0)


class TestPairedTimes:
    def test_by_hand(self):
        a = censored([10, 20, 50, 50], [True, True, True, False])
        b = censored([30, 50, 50, 50], [True, False, False, False])
        result = comparison.paired_times(a, b, 50)  # differences -20, -30, 0, 0
        assert result.mean_difference == -12.5
        assert result.p_value == 2 / 4
        assert result.probability_better == 3 / 4
        means = [comparison.restricted_mean(arm, 50).mean for arm in (a, b)]
        assert result.mean_difference == pytest.approx(means[0] - means[1])

    def test_times_are_cut_at_the_horizon(self):
        a = censored([10, 45], [True, True])
        b = censored([30, 50], [True, False])
        assert comparison.paired_times(a, b, 40).mean_difference == -10.0

    @pytest.mark.parametrize("reached", [True, False])
    def test_no_lane_differs(self, reached):
        arm = censored([50] * 5, [reached] * 5)
        result = comparison.paired_times(arm, arm, 50)
        assert (result.mean_difference, result.low, result.high) == (0, 0, 0)
        assert (result.p_value, result.wilcoxon_p_value) == (1, 1)
        assert result.probability_better == 0.5

    def test_refuses_lanes_given_up_before_the_horizon(self):
        a, b = censored([10, 50], [True, False]), censored([10, 40], [True, False])
        with pytest.raises(ValueError, match=r"at most the 40 steps .* lane of b .* got 50"):
            comparison.paired_times(a, b, 50)
        with pytest.raises(ValueError, match="horizon must be positive"):
            comparison.paired_times(a, b, 0)


class TestClippedLossArea:
    def test_straight_line(self):
        assert comparison.clipped_loss_area([0, 1, 4], [4.0, 3.0, 0.0], 4.0) == 2.0

    def test_clips_and_counts_divergence_as_the_initial_loss(self):
        losses = [[2.0, 9.0, 2.0], [2.0, np.nan, np.inf], [0.0, 0.0, np.nan]]
        area = comparison.clipped_loss_area([0, 1, 2], losses, 2.0)
        np.testing.assert_allclose(area, [2.0, 2.0, 0.5])

    def test_initial_loss_may_differ_by_lane(self):
        area = comparison.clipped_loss_area([0, 2], np.full((2, 2), np.nan), [1.0, 3.0])
        np.testing.assert_array_equal(area, [1, 3])

    def test_one_step_spans_no_area(self):
        with pytest.raises(ValueError, match="at least 2 steps to span an area, got 1"):
            comparison.clipped_loss_area([0], [1.0], 1.0)


class TestLearningRateSensitivity:
    def test_by_hand(self):
        result = comparison.learning_rate_sensitivity([3.0, 1.0, 0.5, np.nan, 80.0], 4.0)
        assert result.best_loss == 0.5
        assert result.best_index == 2
        assert result.sensitivity == pytest.approx((2.5 + 0.5 + 0 + 3.5 + 3.5) / 5)

    def test_zero_sensitivity_of_success_and_of_failure_is_told_apart_by_the_best_loss(self):
        result = comparison.learning_rate_sensitivity([[0.1, 0.1], [np.inf, 9.0]], [4.0, 5.0])
        np.testing.assert_array_equal(result.sensitivity, [0, 0])
        np.testing.assert_array_equal(result.best_loss, [0.1, 5.0])

    def test_refuses_an_empty_grid(self):
        with pytest.raises(ValueError, match=r"losses must be \[..., R\] with R >= 1"):
            comparison.learning_rate_sensitivity([], 1.0)


class TestEquivalence:
    def test_two_pairs_in_closed_form(self):
        # Differences -1 and 1: se = 1, and one degree of freedom is Cauchy's distribution.
        result = comparison.equivalence_test([-1.0, 1.0], [0.0, 0.0], 8.0)
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
        assert comparison.equivalence_test(a, b, 0.25).p_value == pytest.approx(expected, rel=1e-9)

    @pytest.mark.parametrize(
        ("difference", "p_value", "equivalent"),
        [(0.0, 0.0, True), (0.25, 0.0, True), (0.5, 1.0, False), (-0.75, 1.0, False)],
    )
    def test_identical_differences(self, difference, p_value, equivalent):
        result = comparison.equivalence_test([difference] * 6, [0.0] * 6, 0.5)
        assert result == (equivalent, p_value, difference, difference, difference)

    def test_one_pair_shows_nothing(self):
        result = comparison.equivalence_test([0.0], [0.0], 1.0)
        assert result == (False, 1.0, 0.0, -np.inf, np.inf)

    @quick
    @given(pairs(2), st.floats(1e-3, 1e6), st.floats(0.01, 0.2))
    def test_equivalent_exactly_when_the_interval_is_inside_the_margin(self, ab, margin, alpha):
        a, b = ab
        result = comparison.equivalence_test(a, b, margin, alpha=alpha)
        assume(abs(result.p_value - alpha) > 1e-9)
        assert result.equivalent == (-margin < result.low and result.high < margin)
        back = comparison.equivalence_test(b, a, margin, alpha=alpha)
        assert back.p_value == pytest.approx(result.p_value, abs=1e-12)
        assert back.mean_difference == -result.mean_difference

    def test_refuses_margins_and_levels_out_of_range(self):
        with pytest.raises(ValueError, match="margin must be positive and finite, got 0"):
            comparison.equivalence_test([1, 2], [1, 2], 0)
        with pytest.raises(ValueError, match=r"alpha must be between 0 and 0\.5, got 0\.5"):
            comparison.equivalence_test([1, 2], [1, 2], 1, alpha=0.5)
        with pytest.raises(ValueError, match="a must be finite, got 1 diverged"):
            comparison.equivalence_test([np.nan, 2], [1, 2], 1)


class TestGradientSpikes:
    def test_by_hand(self):
        norm = np.ones(14)
        norm[1] = 9.0  # no whole window before it
        norm[6] = 3.0  # at the factor, not above it
        norm[9] = 3.1
        result = comparison.gradient_spikes(norm, factor=3.0, window=4)
        assert (result.spikes, result.nonfinite, result.judged) == (1, 0, 10)
        assert result.per_thousand == 100.0

    def test_a_new_level_stops_being_a_spike(self):
        norm = np.r_[np.ones(10), np.full(10, 20.0)]
        # From the median of 5 norms on, three old ones must leave the window.
        assert comparison.gradient_spikes(norm, factor=5.0, window=5).spikes == 3

    def test_diverged_lanes_go_on_counting(self):
        norm = np.ones((3, 24))
        norm[1, 8:] = np.nan
        norm[2, 2:] = np.inf
        result = comparison.gradient_spikes(norm, factor=5.0, window=4)
        np.testing.assert_array_equal(result.spikes, [0, 16, 20])
        np.testing.assert_array_equal(result.nonfinite, [0, 16, 20])
        np.testing.assert_array_equal(result.per_thousand, [0, 800, 1000])

    @quick
    @given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0, np.nan]), min_size=4, max_size=20))
    def test_agrees_with_a_plain_loop(self, norms):
        window, factor, spikes = 3, 2.0, 0
        for step in range(window, len(norms)):
            before = sorted(x if x == x else np.inf for x in norms[step - window : step])
            spikes += not norms[step] <= factor * before[1]
        assert comparison.gradient_spikes(norms, factor=factor, window=window).spikes == spikes

    def test_refuses_runs_shorter_than_the_window(self):
        with pytest.raises(ValueError, match=r"window must be .*shape \(50,\), got 50"):
            comparison.gradient_spikes(np.ones(50))
        with pytest.raises(ValueError, match=r"factor must be at least 1 and finite, got 0\.5"):
            comparison.gradient_spikes(np.ones(60), factor=0.5)
