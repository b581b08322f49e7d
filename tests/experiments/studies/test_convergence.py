"""Cells, tuning and the convergence study, on a cell that takes a second."""

import csv
import dataclasses
from typing import Any

import numpy as np
import pytest

from experiments.arms import make_arm
from experiments.config import LEARNING_RATES
from experiments.engine import lanes, training
from experiments.studies.convergence import cells, outcomes, protocol, report
from experiments.studies.convergence.cells import (
    ARMS,
    CellRuns,
    LaneKey,
    load_cell,
    make_cell,
    run_cell,
)
from experiments.studies.convergence.figures import Plane, entropy_floor, plane_figure
from experiments.studies.convergence.protocol import Protocol, run_protocol_cell, stored_results
from experiments.studies.convergence.tuning import rate, tune

STEPS, EVERY = 60, 10


@pytest.fixture(scope="module")
def cell():
    """At d_k = 1 every arm is the same lane: the study's true null."""
    base = protocol.TrainConfig(
        task="recall", steps=STEPS, eval_every=EVERY, eval_size=8, batch_size=4, num_layers=1,
        sequence_length=8, vocab_size=4, d_model=8, d_k=1, d_ff=8,
    )  # fmt: skip
    return make_cell(base, ("sqrt", "none"))


@pytest.fixture(scope="module")
def plan(cell):
    return Protocol((cell,), 2, (1000,), {"adam": range(-7, -4)}, (0.0, 0.25), 1, quick=True)


@pytest.fixture(scope="module")
def out(cell, plan, tmp_path_factory):
    """A folder that holds the finished cell."""
    folder = tmp_path_factory.mktemp("study")
    run_protocol_cell(cell, plan, folder)
    return folder


def test_fold_starts_as_scaled_and_hot_as_unscaled():
    for d_k in (4, 16, 64, 256):
        lane = {name: lanes.make_lane(make_arm(name, d_k), 1e-3, 0) for name in ARMS}
        scale = {name: one.multiplier * one.query_key_init**2 for name, one in lane.items()}
        assert scale["fold"] == pytest.approx(scale["sqrt"], rel=1e-6)
        assert scale["hot"] == pytest.approx(scale["none"], rel=1e-6)


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_trains_as_its_point_of_the_plane_does(cell, name):
    config = dataclasses.replace(cell.config, d_k=64)
    point = protocol.make_plane_arm(protocol.plane_arm(*protocol.PLANE_POINTS[name]), 64)
    losses = []
    for arm in (make_arm(name, 64), point):
        program, lane = training.lane_program(config, arm), lanes.make_lane(arm, 1e-3, 1)
        _, rows, _ = training.advance(program, lane, training.initialize(program, lane), 20)
        losses.append(np.asarray(rows.loss)[:20])
    # Adam's ε is not moved along, so the two part slowly; another point parts at once.
    np.testing.assert_allclose(*losses, rtol=2e-3)
    off = point._replace(query_key_init=point.query_key_init * 1.5)
    lane = lanes.make_lane(off, 1e-3, 1)
    _, rows, _ = training.advance(program, lane, training.initialize(program, lane), 20)
    assert not np.allclose(np.asarray(rows.loss)[:20], losses[0], rtol=2e-3)


def test_a_lane_of_a_cell_is_the_lane_alone(cell, out):
    key = LaneKey("none", 1e-3, 1)
    stored, _ = load_cell(cells.cell_path(out, cell))
    assert stored is not None
    runs = stored.select([key])
    arm = make_arm("none", cell.config.d_k)
    program, lane = training.lane_program(cell.config, arm), lanes.make_lane(arm, 1e-3, 1)
    start = training.initialize(program, lane)
    state, rows, _ = training.advance(program, lane, start, STEPS)
    last = training.evaluate(program, lane, state)
    first = training.evaluate(program, lane, start)
    np.testing.assert_array_equal(runs.steps, range(0, STEPS + 1, EVERY))
    np.testing.assert_array_equal(runs.loss[0, [0, -1]], [first.loss, last.loss])
    entropy = np.asarray(rows.heads.entropy).mean(axis=(1, 2))
    np.testing.assert_array_equal(runs.entropy[0], entropy[[*range(0, STEPS, EVERY), STEPS - 1]])


def test_what_is_there_is_not_run_again(cell, plan, out, monkeypatch):
    monkeypatch.setattr(lanes, "run_chunks", None)
    counted = []
    result = run_protocol_cell(cell, plan, out, counted.append)
    assert result.tuning is not None
    test_lanes, tuning_lanes = 2 * plan.seeds * 2, 2 * len(result.tuning.rates)
    assert sum(counted) == STEPS * (test_lanes + tuning_lanes)


def test_other_settings_are_refused(cell, out):
    config = dataclasses.replace(cell.config, batch_size=5)
    with pytest.raises(ValueError, match=r"was run with batch_size 4, now it is 5"):
        run_cell(
            cell._replace(config=config), [LaneKey("sqrt", 1e-3, 0)], cells.cell_path(out, cell)
        )


def test_lanes_of_other_code_are_not_mixed_in(cell, out, monkeypatch):
    other = {"0": {"weights": "those of a later version", "data": "likewise"}}
    monkeypatch.setattr("experiments.runs.environment.starting_digests", lambda *arguments: other)
    with pytest.raises(ValueError, match=r"was run with seed_0 .*, now it is .* later version"):
        run_cell(cell, [LaneKey("sqrt", 1e-3, 77)], cells.cell_path(out, cell))


def test_a_damaged_file_is_named(cell, tmp_path):
    path = tmp_path / "cell.npz"
    path.write_bytes(b"PK\x03\x04 not a zip")
    with pytest.raises(ValueError, match="is damaged, delete it"):
        load_cell(path)


def test_rates_are_half_decades():
    assert [rate(n) for n in (-8, -7, -6, -5, -1, 0)] == [1e-4, 3.16e-4, 1e-3, 3.16e-3, 0.316, 1.0]


def test_the_grid_grows_until_the_best_rate_is_interior(cell, monkeypatch, tmp_path):
    best_rate = 0.0316

    def fake(cell, keys, path, **kwargs):
        distance = np.array([abs(np.log10(key.learning_rate / best_rate)) for key in keys])
        return _runs(keys, loss=np.stack([np.full(len(keys), 9.0), distance], axis=1))

    monkeypatch.setattr("experiments.studies.convergence.tuning.run_cell", fake)
    tuning = tune(cell, tmp_path, grid=range(-8, -3))
    assert tuning.best == {"sqrt": best_rate, "none": best_rate}
    assert tuning.rates[-1] == 0.1
    assert all(tuning.interior.values())


def _runs(keys, loss, accuracy=None, diverged_at=None):
    """Lanes with these held-out values at steps 0, 10, ..."""
    count, evaluations = loss.shape
    arm, learning_rate, seed = map(np.array, zip(*keys, strict=True))
    zeros = np.zeros((count, evaluations))
    values: dict[str, Any] = dict.fromkeys(cells.ROW_STATISTICS, zeros)
    return CellRuns(
        arm=arm,
        learning_rate=learning_rate,
        seed=seed,
        steps=10 * np.arange(evaluations),
        loss=loss,
        accuracy=zeros if accuracy is None else accuracy,
        spikes_per_thousand=np.zeros(count),
        diverged_at=np.full(count, -1) if diverged_at is None else diverged_at,
        **values,
    )


def test_a_diverged_lane_counts_as_untrained_from_there_on():
    keys = [LaneKey("sqrt", 1e-3, seed) for seed in range(2)]
    accuracy = np.tile([0.1, 0.95, 0.95, 0.95, 0.95], (2, 1))
    loss = np.tile([2.0, 1.0, 0.1, 0.1, 0.1], (2, 1))
    own = outcomes.outcome(_runs(keys, loss, accuracy, diverged_at=np.array([-1, 15])))
    assert own.times.time.tolist() == [10, 40]
    assert own.times.reached.tolist() == [True, False]
    assert own.accuracy.tolist() == [0.95, 0.1]
    assert own.loss.tolist() == [0.1, 2.0]
    assert own.diverged == 1


def test_the_null_is_exactly_null(cell, plan, out):
    (result,) = stored_results(plan, out)
    for name, values in result.common["none"]._asdict().items():
        if name != "arm":
            np.testing.assert_array_equal(values, getattr(result.common["sqrt"], name))
    for c in outcomes.compare([result]):
        assert (c.times.mean_difference, c.times.p_value, c.holm_p_value, c.ratio) == (0, 1, 1, 1)
        assert c.times_equivalence.equivalent


def test_arms_are_compared_with_sqrt_seed_by_seed_and_corrected_together(cell):
    """Steps to 90 % that are written into the accuracies: sqrt at 10, slow at 30, same at 10."""
    reached = {"sqrt": 1, "none": 3, "fold": 1}
    evaluations = np.arange(7)

    def lanes_of(arm):
        keys = [LaneKey(arm, 1e-3, seed) for seed in range(8)]
        accuracy = np.broadcast_to(np.where(evaluations >= reached[arm], 0.95, 0.2), (8, 7))
        return _runs(keys, loss=1 - accuracy, accuracy=accuracy)

    common = {arm: lanes_of(arm) for arm in reached}
    result = outcomes.CellResult(cell._replace(arms=tuple(reached)), common, None, None)
    slow, same = outcomes.compare([result, result])[:2]
    assert (slow.arm, slow.times.mean_difference, slow.ratio, slow.never) == ("none", 20, 3, 0)
    assert slow.times.p_value == 2 / 2**8
    assert slow.holm_p_value == pytest.approx(4 * 2 / 2**8)  # the least of four
    assert not slow.times_equivalence.equivalent
    assert (same.times.mean_difference, same.holm_p_value) == (0, 1)
    assert same.times_equivalence.equivalent


def test_an_unfinished_cell_is_reported_at_the_common_rate(cell, plan, tmp_path):
    keys = protocol.test_keys(cell.arms, dict.fromkeys(cell.arms, 1e-3), plan.seeds)
    run_cell(cell, keys[:-1], cells.cell_path(tmp_path, cell))
    assert stored_results(plan, tmp_path) == []  # an arm lacks a seed
    run_cell(cell, keys, cells.cell_path(tmp_path, cell))
    (result,) = stored_results(plan, tmp_path)
    assert result.own is None
    protocol.write_csv(tmp_path / "results.csv", [result], quick=False)
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["arm"], row["seed"], row["rate"]) for row in rows] == [
        (key.arm, str(key.seed), "common") for key in keys
    ]
    assert float(rows[0]["final_loss"]) == pytest.approx(
        result.common["sqrt"].loss[0, -1], rel=1e-5
    )


def test_report_has_every_part(plan, out):
    results = stored_results(plan, out)
    findings = report.report(results, ["recall-adam-4"], None, quick=True)
    assert set(findings.captions) == set(findings.figures)
    assert findings.settings["cells not run"] == "recall-adam-4"
    assert all("Quick run" in grid.title for grid in findings.tables)
    assert "recall" in findings.answer
    for grid in findings.tables:
        assert {len(row) for row in grid.rows} == {len(grid.header)}
    for figure in findings.figures.values():
        figure.canvas.draw()
    points = [LaneKey("x", 1e-3, i) for i in range(4)]
    plane_figure(Plane(_runs(points, np.ones((4, 3))), (0.0, 0.25), protocol.PLANE_POINTS))


def test_unknown_cells_are_named():
    with pytest.raises(ValueError, match=r"cells: unknown 'recall-adam-65'; choose from recall-ad"):
        protocol.choose_cells(protocol.protocol().cells, ["recall-adam-65"])


def test_the_protocol_pairs_fresh_seeds():
    plan = protocol.protocol()
    assert plan.seeds >= 12
    assert min(plan.tuning_seeds) >= plan.seeds
    for cell in plan.cells:
        common = LEARNING_RATES[cell.config.optimizer]
        assert common in [rate(n) for n in plan.grids[cell.config.optimizer]]
    assert plan.cells[0].name == "recall-adam-64"


def test_entropy_floor_is_reached_by_rows_with_one_logit_above_the_others_and_passed_by_none():
    row = np.zeros(16)
    row[0] = 8.0  # far enough that spreading the same deviation unevenly over rows gains nothing
    assert entropy_floor(row.std(), [16] * 3) == pytest.approx(_entropy(row), rel=1e-2)
    assert entropy_floor(0.0, [4, 16]) == pytest.approx((np.log(4) + np.log(16)) / 2, rel=1e-3)
    rng = np.random.default_rng(0)
    for _ in range(20):
        counts = rng.integers(1, 17, size=6)
        rows = [rng.normal(size=c) * rng.exponential(3) for c in counts]
        mean_std = np.mean([row.std() for row in rows])
        assert np.mean([_entropy(row) for row in rows]) >= entropy_floor(mean_std, counts) - 1e-3


def _entropy(row):
    p = np.exp(row - row.max())
    p /= p.sum()
    return -np.sum(p[p > 0] * np.log(p[p > 0]))
