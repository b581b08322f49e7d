"""One number for a run or a sweep, on data whose answers are known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.analysis import sweeps


class TestClippedLossArea:
    def test_straight_line(self):
        assert sweeps.clipped_loss_area([0, 1, 4], [4.0, 3.0, 0.0], 4.0) == 2.0

    def test_clips_and_counts_divergence_as_the_initial_loss(self):
        losses = [[2.0, 9.0, 2.0], [2.0, np.nan, np.inf], [0.0, 0.0, np.nan]]
        area = sweeps.clipped_loss_area([0, 1, 2], losses, 2.0)
        np.testing.assert_allclose(area, [2.0, 2.0, 0.5])

    def test_initial_loss_may_differ_by_lane(self):
        area = sweeps.clipped_loss_area([0, 2], np.full((2, 2), np.nan), [1.0, 3.0])
        np.testing.assert_array_equal(area, [1, 3])

    def test_one_step_spans_no_area(self):
        with pytest.raises(ValueError, match="at least 2 steps to span an area, got 1"):
            sweeps.clipped_loss_area([0], [1.0], 1.0)


class TestLearningRateSensitivity:
    def test_by_hand(self):
        result = sweeps.learning_rate_sensitivity([3.0, 1.0, 0.5, np.nan, 80.0], 4.0)
        assert result.best_loss == 0.5
        assert result.sensitivity == pytest.approx((2.5 + 0.5 + 0 + 3.5 + 3.5) / 5)

    def test_zero_sensitivity_of_success_and_of_failure_is_told_apart_by_the_best_loss(self):
        result = sweeps.learning_rate_sensitivity([[0.1, 0.1], [np.inf, 9.0]], [4.0, 5.0])
        np.testing.assert_array_equal(result.sensitivity, [0, 0])
        np.testing.assert_array_equal(result.best_loss, [0.1, 5.0])

    def test_refuses_an_empty_grid(self):
        with pytest.raises(ValueError, match=r"losses must be \[..., R\] with R >= 1"):
            sweeps.learning_rate_sensitivity([], 1.0)


class TestSpikesPerThousand:
    def test_by_hand(self):
        norm = np.ones(14)
        norm[1] = 9.0  # no whole window before it
        norm[6] = 3.0  # at the factor, not above it
        norm[9] = 3.1
        assert sweeps.spikes_per_thousand(norm, factor=3.0, window=4) == 100.0  # 1 of 10

    def test_a_new_level_stops_being_a_spike(self):
        norm = np.r_[np.ones(10), np.full(10, 20.0)]
        # From the median of 5 norms on, three old ones must leave the window: 3 of 15.
        assert sweeps.spikes_per_thousand(norm, factor=5.0, window=5) == 200.0

    def test_diverged_lanes_go_on_counting(self):
        norm = np.ones((3, 24))
        norm[1, 8:] = np.nan
        norm[2, 2:] = np.inf
        spikes = sweeps.spikes_per_thousand(norm, factor=5.0, window=4)
        np.testing.assert_array_equal(spikes, [0, 800, 1000])

    @given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0, np.nan]), min_size=4, max_size=20))
    def test_agrees_with_a_plain_loop(self, norms):
        window, factor, spikes = 3, 2.0, 0
        for step in range(window, len(norms)):
            before = sorted(x if x == x else np.inf for x in norms[step - window : step])
            spikes += not norms[step] <= factor * before[1]
        found = sweeps.spikes_per_thousand(norms, factor=factor, window=window)
        assert found == pytest.approx(1000 * spikes / (len(norms) - window))

    def test_refuses_runs_shorter_than_the_window(self):
        with pytest.raises(ValueError, match=r"window must be .*shape \(50,\), got 50"):
            sweeps.spikes_per_thousand(np.ones(50))
        with pytest.raises(ValueError, match=r"factor must be at least 1 and finite, got 0\.5"):
            sweeps.spikes_per_thousand(np.ones(60), factor=0.5)
