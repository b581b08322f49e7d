"""A recorded run: what it leaves, what stops it, what stands beside what in it."""

import dataclasses
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest

from experiments.config import TrainConfig, resolve
from experiments.engine.lanes import plan_lanes
from experiments.runs import checkpoints
from experiments.runs.folder import RunFolderError, read_json, stored_config
from experiments.runs.record import train
from experiments.runs.resume import read_states
from experiments.runs.rows import read_rows


def final_states(folder):
    config = stored_config(folder)
    return read_states(folder, config, plan_lanes(config), say=pytest.fail)


def test_a_run_folder_has_each_step_once_per_lane(tiny, tiny_run):
    names = resolve(tiny).lane_names()
    lines = read_rows(tiny_run / "metrics.jsonl")
    keys = [(row["step"], row["scale"], row["learning_rate"], row["seed"]) for row in lines]
    assert keys == [(step, *name) for step in range(12) for name in names]
    lines = read_rows(tiny_run / "evaluation.jsonl")
    keys = [(row["step"], row["scale"], row["learning_rate"], row["seed"]) for row in lines]
    assert keys == [(step, *name) for step in (0, 4, 8, 12) for name in names]
    assert checkpoints.committed_steps(tiny_run / "checkpoints") == [8, 12]
    environment = read_json(tiny_run / "environment.json")
    assert environment["platform"] == "cpu"
    assert environment["digests"].keys() == {"0", "1"}
    assert {path.name for path in tiny_run.iterdir()} == {
        *("config.json", "environment.json", "seal.json", "checkpoints"),
        *("metrics.jsonl", "evaluation.jsonl"),
    }


def test_recorded_rows_are_the_arrays_that_train_returns(tiny, tiny_run):
    result = train(tiny)
    lines = read_rows(tiny_run / "metrics.jsonl")
    losses = np.array([row["loss"] for row in lines], np.float32).reshape(12, 4).T
    np.testing.assert_array_equal(losses, result.metrics.loss)
    evaluations = read_rows(tiny_run / "evaluation.jsonl")
    accuracy = np.array([row["accuracy"] for row in evaluations], np.float32).reshape(4, 4).T
    np.testing.assert_array_equal(accuracy, result.evaluation.accuracy)
    step, states = final_states(tiny_run)
    assert step == 12
    chex.assert_trees_all_equal(tuple(states), result.states)


def test_the_same_run_twice_is_the_same_bytes(tiny, tiny_run, tmp_path, go, rows):
    go(tiny, tmp_path / "again")
    assert rows(tmp_path / "again") == rows(tiny_run)


def test_train_writes_only_when_asked_and_below_home(tiny, tiny_run, tmp_path, monkeypatch, rows):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    train(tiny)
    assert list(tmp_path.iterdir()) == []
    train(tiny, out="~/run")
    assert rows(tmp_path / "run") == rows(tiny_run)
    with pytest.raises(RunFolderError, match="exists; give another"):
        train(tiny, out=Path("~/run"))
    wrong: Any = (7, "", "~nobody-here/run", "bad\udcff")
    for out in wrong:
        with pytest.raises(ValueError, match=r"^out: "):
            train(tiny, out=out)


def test_numpy_settings_give_the_same_bytes_and_strict_json(tiny, tiny_run, tmp_path, go, rows):
    typed = dataclasses.replace(
        tiny,
        scale=np.array(["none", "sqrt"]),
        learning_rate=np.array([1e-3]),
        steps=np.int64(12),
        d_k=np.uint8(8),
        seed=np.int32(0),
        dropout_rate=np.float32(0),
        vectorize_lanes=np.False_,
    )
    go(typed, tmp_path / "run")
    assert rows(tmp_path / "run") == rows(tiny_run)
    text = (tmp_path / "run" / "config.json").read_text()
    assert text == (tiny_run / "config.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == resolve(tiny).to_json()
    assert stored_config(tmp_path / "run") == resolve(typed)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dropout_rate": 0.1, "optimizer": "adamw"},
        {"scale": ("learned", "sqrt", "fold"), "num_seeds": 1},  # of two kinds
    ],
    ids=lambda changes: " ".join(changes) or "tiny",
)
def test_a_stopped_run_goes_on_to_the_same_bits(tiny, tmp_path, go, rows, stop_at, changes):
    config = dataclasses.replace(tiny, **changes)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    go(config, whole)
    stopped = go(config, cut, watch=stop_at(4))
    assert stopped.stopped_by == signal.SIGTERM
    assert 4 <= stopped.steps_done < 12
    resumed = go(config, cut, resume=True)
    assert (resumed.steps_done, resumed.stopped_by) == (12, None)
    assert rows(cut) == rows(whole)
    chex.assert_trees_all_equal(final_states(cut), final_states(whole))


def test_a_broken_lane_takes_no_other_with_it(tiny, tmp_path, go):
    config = dataclasses.replace(tiny, optimizer="sgd", learning_rate=(1e-2, 1e25), scale=("none",))
    recorded = go(config, tmp_path / "run")
    assert [at >= 0 for at in recorded.diverged_at] == [False, False, True, True]
    healthy = train(dataclasses.replace(config, learning_rate=(1e-2,)))
    lines = read_rows(tmp_path / "run" / "metrics.jsonl")
    for row in lines:
        if row["learning_rate"] == 1e-2:
            assert np.float32(row["loss"]) == healthy.metrics.loss[row["seed"], row["step"]]
        elif row["step"] > recorded.diverged_at[2 + row["seed"]]:
            assert row["loss"] is row["entropy"] is row["grad_norm"] is None
    at = recorded.diverged_at
    for row in read_rows(tmp_path / "run" / "evaluation.jsonl"):
        assert (row["loss"] is None) == (row["learning_rate"] != 1e-2 and row["step"] > at[2])
    resumed = go(dataclasses.replace(config, steps=16), tmp_path / "run", resume=True)
    assert resumed.diverged_at == at


def test_a_divergence_between_written_rows_is_seen(tiny, tmp_path, go):
    config = dataclasses.replace(
        tiny, optimizer="sgd", learning_rate=(1e25,), scale=("none",), log_every=12
    )
    recorded = go(config, tmp_path / "run")
    assert all(0 < at < 4 for at in recorded.diverged_at)
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 0]
    assert all(np.isfinite(row["loss"]) for row in rows)
    evaluations = read_rows(tmp_path / "run" / "evaluation.jsonl")
    assert [row["step"] for row in evaluations if row["loss"] is None] == [4, 4, 8, 8, 12, 12]


# Arms that are more than a number

NULLS = ',"parameter_log_scale_by_head":[[null,null]]'


@pytest.fixture(scope="module")
def mixed_run(tiny, tmp_path_factory, go):
    """The tiny run with an arm of its own parameters between its two."""
    folder = tmp_path_factory.mktemp("mixed") / "run"
    go(dataclasses.replace(tiny, scale=("none", "learned", "sqrt")), folder)
    return folder


def test_an_arm_of_another_kind_changes_no_byte_of_the_arms_beside_it(tiny_run, mixed_run):
    lines = (mixed_run / "metrics.jsonl").read_text().splitlines(keepends=True)
    others = [line for line in lines if '"scale":"learned"' not in line]
    assert len(others) == 48 and all(line.count(NULLS) == 1 for line in others)
    text = "".join(others).replace(NULLS, "")
    assert text == (tiny_run / "metrics.jsonl").read_text()
    lines = (mixed_run / "evaluation.jsonl").read_text().splitlines(keepends=True)
    others = [line for line in lines if '"scale":"learned"' not in line]
    assert "".join(others) == (tiny_run / "evaluation.jsonl").read_text()


def test_an_arms_parameters_are_in_its_rows_by_layer_and_head(mixed_run):
    rows = read_rows(mixed_run / "metrics.jsonl")
    learned = [row for row in rows if row["scale"] == "learned"]
    values = np.array([row["parameter_log_scale_by_head"] for row in learned], np.float32)
    assert values.shape == (24, 1, 2)  # steps × seeds, layers, heads
    assert np.all(values[:2] == 0)
    assert np.all(values[2:] != 0)
    # The last row is that of the parameters before the last update; the checkpoint is after it.
    _, states = final_states(mixed_run)
    last = states[2].params["score_rule"]["layer_0"]["log_scale"]
    assert np.all(np.abs(last - values[-2]) < 2e-3) and np.all(last != values[-2])
    assert all(row["multiplier"] == np.float32(8**-0.5) for row in learned)


def test_a_learned_scale_starts_as_sqrt_on_the_same_weights_and_data(mixed_run):
    rows = [row for row in read_rows(mixed_run / "metrics.jsonl") if row["step"] == 0]
    learned, scaled = (
        [row for row in rows if row["scale"] == name] for name in ("learned", "sqrt")
    )
    for one, other in zip(learned, scaled, strict=True):
        different = {"scale", "parameter_log_scale_by_head", "grad_norm", "update_norm"}
        for name in one.keys() - different:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-5, err_msg=name)
        assert one["loss"] == other["loss"]
        assert one["grad_norm"] > other["grad_norm"]  # it has parameters more


def test_digests_pair_runs_of_every_kind_of_arm(tiny, tiny_run, mixed_run, tmp_path, go):
    wanted = read_json(tiny_run / "environment.json")["digests"]
    assert read_json(mixed_run / "environment.json")["digests"] == wanted
    for scale in ("learned", "hot"):
        config = dataclasses.replace(tiny, scale=scale, steps=1, num_seeds=1, seed=1)
        go(config, tmp_path / scale)
        digests = read_json(tmp_path / scale / "environment.json")["digests"]
        assert digests == {"1": wanted["1"]}


def test_mixed_kinds_resume_from_their_checkpoint(tiny, mixed_run, tmp_path, go, rows):
    cut = shutil.copytree(mixed_run, tmp_path / "cut")
    shutil.rmtree(cut / "checkpoints" / "12")
    go(stored_config(cut), cut, resume=True)
    assert rows(cut) == rows(mixed_run)
    chex.assert_trees_all_equal(final_states(cut), final_states(mixed_run))


def test_a_default_config_resolves():
    assert resolve(TrainConfig()).steps == 600
