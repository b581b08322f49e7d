"""Censored times on data whose answers are known: by hand, published, or by a second route."""

import numpy as np
import pytest

from experiments.analysis.times import (
    CensoredTimes,
    kaplan_meier,
    log_rank,
    paired_times,
    steps_to_threshold,
)


def censored(time, reached):
    return CensoredTimes(np.array(time, float), np.array(reached, bool))


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
            ([0.1, 0.1, 0.1, 0.95, 0.95], 3, 40, False),  # two are not three, whatever might follow
            ([0.1, 0.1, 0.95, 0.95, 0.95], 3, 20, True),
        ],
    )
    def test_by_hand(self, values, consecutive, time, reached):
        result = steps_to_threshold(self.STEPS, values, 0.9, consecutive)
        assert (result.time, result.reached) == (time, reached)

    def test_the_rule_is_three_in_a_row_at_nine_of_ten(self):
        assert steps_to_threshold(self.STEPS, [0.9, 0.9, 0.5, 0.9, 0.9]).reached == np.False_
        assert steps_to_threshold(self.STEPS, [0.8, 0.9, 0.9, 0.9, 0.2]).time == 10

    def test_nine_of_ten_in_float32_is_nine_of_ten(self):
        nine = np.full(3, np.float32(0.9))
        assert float(nine[0]) < 0.9
        assert steps_to_threshold([0, 1, 2], nine).reached
        assert not steps_to_threshold([0, 1, 2], np.nextafter(nine, np.float32(0))).reached

    def test_maps_over_leading_axes(self):
        values = np.array([[[0, 1, 1], [0, 0, np.nan]]])
        time, reached = steps_to_threshold([1, 2, 4], values, 1.0, 2)
        np.testing.assert_array_equal(time, [[2, 4]])
        np.testing.assert_array_equal(reached, [[True, False]])

    def test_refuses_malformed_series(self):
        with pytest.raises(ValueError, match="strictly increasing"):
            steps_to_threshold([0, 5, 5], [0, 1, 2], 1.0)
        with pytest.raises(ValueError, match=r"accuracies must be \[..., 3\].*got shape \(2,\)"):
            steps_to_threshold([0, 5, 6], [0, 1], 1.0)
        with pytest.raises(ValueError, match="consecutive must be at least 1, got 0"):
            steps_to_threshold([0], [0], 1.0, 0)
        with pytest.raises(ValueError, match="threshold must be finite, got nan"):
            steps_to_threshold([0], [0], np.nan)


class TestKaplanMeier:
    def test_fan_belts(self):
        # Conover, Practical Nonparametric Statistics, 3rd edition, page 91.
        curve = kaplan_meier(
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
        curve = kaplan_meier(censored(times, times < 99))
        assert curve.median == half

    def test_nobody_arrives(self):
        curve = kaplan_meier(censored([50, 50, 50], [False] * 3))
        np.testing.assert_array_equal(curve.time, [0, 50])
        np.testing.assert_array_equal(curve.survival, [1, 1])
        assert curve.median == np.inf

    def test_all_arrive_at_once(self):
        curve = kaplan_meier(censored([20, 20], [True] * 2))
        np.testing.assert_array_equal(curve.survival, [1, 0])
        assert curve.median == 20

    def test_arrival_at_the_first_step(self):
        curve = kaplan_meier(censored([0, 8], [True, True]))
        np.testing.assert_array_equal(curve.time, [0, 0, 8])
        np.testing.assert_array_equal(curve.survival, [1, 0.5, 0])
        assert curve.median == 0

    def test_refuses_malformed_times(self):
        with pytest.raises(ValueError, match=r"times must hold times and booleans.*\(0,\)"):
            kaplan_meier(censored([], []))
        with pytest.raises(ValueError, match="dtype int64"):
            kaplan_meier(CensoredTimes(np.ones(2), np.ones(2, int)))
        with pytest.raises(ValueError, match=r"not negative, got \[-1\. nan\]"):
            kaplan_meier(censored([-1, np.nan], [True, True]))


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
        result = log_rank(self.ASTROCYTOMA, self.GLIOBLASTOMA)
        assert result.statistic == pytest.approx(-np.sqrt(7.4966), abs=1e-4)
        assert result.p_value == pytest.approx(0.006, abs=5e-4)

    def test_by_hand(self):
        # At 1: 1 of 2 + 2 arrives, from A. At 2: 1 of 1 + 2, from A. B is censored at 3.
        result = log_rank(censored([1, 2], [True, True]), censored([3, 3], [False, False]))
        observed_less_expected = 2 - (2 / 4 + 1 / 3)
        variance = 1 / 4 + 2 / 9
        assert result.statistic == pytest.approx(observed_less_expected / np.sqrt(variance))

    def test_swapping_the_arms_flips_the_sign(self):
        there = log_rank(self.ASTROCYTOMA, self.GLIOBLASTOMA)
        back = log_rank(self.GLIOBLASTOMA, self.ASTROCYTOMA)
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
        assert log_rank(a, b) == (0.0, 1.0)


class TestPairedTimes:
    def test_by_hand(self):
        a = censored([10, 20, 50, 50], [True, True, True, False])
        b = censored([30, 50, 50, 50], [True, False, False, False])
        result = paired_times(a, b, 50)  # differences -20, -30, 0, 0
        assert result.mean_difference == -12.5
        assert result.p_value == 2 / 4
        assert result.probability_better == 3 / 4
        curves = [kaplan_meier(arm) for arm in (a, b)]  # the area under each, up to 50
        areas = [np.sum(c.survival[:-1] * np.diff(c.time)) for c in curves]
        assert result.mean_difference == pytest.approx(areas[0] - areas[1])

    def test_times_are_cut_at_the_horizon(self):
        a = censored([10, 45], [True, True])
        b = censored([30, 50], [True, False])
        assert paired_times(a, b, 40).mean_difference == -10.0

    @pytest.mark.parametrize("reached", [True, False])
    def test_no_lane_differs(self, reached):
        arm = censored([50] * 5, [reached] * 5)
        result = paired_times(arm, arm, 50)
        assert (result.mean_difference, result.low, result.high) == (0, 0, 0)
        assert (result.p_value, result.wilcoxon_p_value) == (1, 1)
        assert result.probability_better == 0.5

    def test_refuses_lanes_given_up_before_the_horizon(self):
        a, b = censored([10, 50], [True, False]), censored([10, 40], [True, False])
        with pytest.raises(ValueError, match=r"at most the 40 steps .* lane of b .* got 50"):
            paired_times(a, b, 50)
        with pytest.raises(ValueError, match="horizon must be positive"):
            paired_times(a, b, 0)
