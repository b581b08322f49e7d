"""A recorded run: what it leaves, how it goes on, what stops it."""

import dataclasses
import json
import os
import shutil
import signal

import chex
import numpy as np
import pytest

from experiments.analysis import read
from experiments.config import RecordOptions, resolve
from experiments.engine import lanes, training
from experiments.runs import checkpoints, recording, run
from experiments.runs.recording import RunFolderError
from experiments.runs.run import record, train


def go(config, folder, *, resume=False, watch=lambda result: None, say=lambda line: None, **kw):
    return record(
        config, RecordOptions(folder, resume=resume, figures=False, **kw), watch=watch, say=say
    )


def rows(folder):
    return {name: (folder / name).read_bytes() for name in ("metrics.jsonl", "evaluation.jsonl")}


def final_state(folder, config):
    config = resolve(config)
    program, _ = run.prepare(config)
    return run.restore_states(folder, config, program, say=pytest.fail)


def stop_at(step):
    """Ends the run as a signal would, once the chunk that ends at `step` is done."""

    def watch(result):
        if result.chunk.stop == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return watch


def test_a_run_folder_has_each_step_once_per_lane(tiny, tiny_run):
    lines = recording.read_rows(tiny_run / "metrics.jsonl")
    keys = [(row["step"], row["scale"], row["learning_rate"], row["seed"]) for row in lines]
    names = lanes.lane_names(resolve(tiny))
    assert keys == [(step, *name) for step in range(12) for name in names]
    assert checkpoints.committed_steps(tiny_run / "checkpoints") == [8, 12]
    environment = json.loads((tiny_run / "environment.json").read_text())
    assert environment["platform"] == "cpu"
    assert environment["digests"].keys() == {"0", "1"}
    assert json.loads((tiny_run / "config.json").read_text()) == resolve(tiny).to_json()


def test_recorded_rows_are_the_arrays_that_train_returns(tiny, tiny_run):
    result = train(tiny)
    lines = recording.read_rows(tiny_run / "metrics.jsonl")
    losses = np.array([row["loss"] for row in lines], np.float32).reshape(12, 4).T
    np.testing.assert_array_equal(losses, result.metrics.loss)
    evaluations = recording.read_rows(tiny_run / "evaluation.jsonl")
    accuracy = np.array([row["accuracy"] for row in evaluations], np.float32).reshape(4, 4).T
    np.testing.assert_array_equal(accuracy, result.evaluation.accuracy)
    _, states = final_state(tiny_run, tiny)
    chex.assert_trees_all_equal(tuple(states or ()), result.states)


def test_the_same_run_twice_is_the_same_bytes(tiny, tiny_run, tmp_path):
    go(tiny, tmp_path / "again")
    assert rows(tmp_path / "again") == rows(tiny_run)


@pytest.mark.parametrize("dropout_rate", [0.0, 0.1])
def test_a_stopped_run_goes_on_to_the_same_bits(tiny, tmp_path, dropout_rate):
    config = dataclasses.replace(tiny, dropout_rate=dropout_rate, optimizer="adamw")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    go(config, whole)
    stopped = go(config, cut, watch=stop_at(4))
    assert stopped.stopped_by == signal.SIGTERM
    assert 4 <= stopped.steps_done < 12
    resumed = go(config, cut, resume=True)
    assert (resumed.steps_done, resumed.stopped_by) == (12, None)
    assert rows(cut) == rows(whole)
    chex.assert_trees_all_equal(final_state(cut, config), final_state(whole, config))


def test_rows_after_the_checkpoint_are_cut_and_made_again(tiny, tiny_run, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(tiny_run, cut)
    shutil.rmtree(cut / "checkpoints" / "12")  # as if killed between row 11 and the checkpoint
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"step":12,"sca')
    go(tiny, cut, resume=True)
    assert rows(cut) == rows(tiny_run)


def test_a_run_killed_before_its_first_checkpoint_starts_over(tiny, tiny_run, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(tiny_run, cut)
    shutil.rmtree(cut / "checkpoints")
    lines = []
    go(tiny, cut, resume=True, say=lines.append)
    assert rows(cut) == rows(tiny_run)
    assert "starts from the beginning" in lines[0]


def test_more_steps_equal_the_run_that_had_them_from_the_start(tiny, tiny_run, tmp_path):
    short, long = tmp_path / "short", dataclasses.replace(tiny, steps=12)
    go(dataclasses.replace(tiny, steps=6), short)
    go(long, short, resume=True)
    assert rows(short) == rows(tiny_run)
    assert json.loads((short / "config.json").read_text())["steps"] == 12


def test_a_prolonged_run_that_dies_at_once_goes_on_as_the_longer_one(tiny, tiny_run, tmp_path):
    def die(result):
        raise KeyboardInterrupt

    cut = tmp_path / "cut"
    go(dataclasses.replace(tiny, steps=6), cut)  # whose last evaluation the longer run lacks
    with pytest.raises(KeyboardInterrupt):
        go(tiny, cut, resume=True, watch=die)
    assert run.stored_config(cut).steps == 12
    go(run.stored_config(cut), cut, resume=True)
    assert rows(cut) == rows(tiny_run)


def test_fewer_steps_than_done_are_refused(tiny, tiny_run, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(tiny_run, cut)
    with pytest.raises(RunFolderError, match=r"steps is 5, but .* has 12 already"):
        go(dataclasses.replace(tiny, steps=5), cut, resume=True)
    assert rows(cut) == rows(tiny_run)
    assert json.loads((cut / "config.json").read_text())["steps"] == 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_k": 4}, r"d_k is 4, but .* was run with 8"),
        ({"num_seeds": 3}, "num_seeds is 3"),
        ({"scale": ("none",)}, r"scale is \['none'\]"),
    ],
)
def test_resuming_as_another_run_is_refused(tiny, tiny_run, change, message):
    before = rows(tiny_run)
    with pytest.raises(RunFolderError, match=message):
        go(dataclasses.replace(tiny, **change), tiny_run, resume=True)
    assert rows(tiny_run) == before


def test_resuming_elsewhere_warns_where_only_the_last_bits_are_at_stake(tiny, tiny_run, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(tiny_run, cut)
    environment = json.loads((cut / "environment.json").read_text())
    environment["thread_pool_size"] = 99
    environment["versions"]["jax"] = "0.0.1"
    (cut / "environment.json").write_text(json.dumps(environment))
    lines = []
    go(tiny, cut, resume=True, say=lines.append)
    assert any(line.startswith("warning: thread_pool_size was 99 and is now") for line in lines)
    assert any("versions" in line and "0.0.1" in line for line in lines)


def test_a_folder_is_not_written_over_unless_told_to_and_only_if_a_run(tiny, tiny_run, tmp_path):
    before = rows(tiny_run)
    with pytest.raises(RunFolderError, match="exists; give another, or --resume, or --overwrite"):
        go(tiny, tiny_run)
    in_use = pytest.raises(RunFolderError, match="is in use by another run")
    with recording.locked(tiny_run), in_use:
        go(tiny, tiny_run, resume=True)
    assert rows(tiny_run) == before
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="is not a run folder, so it is left alone"):
        go(tiny, tmp_path, overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    with pytest.raises(RunFolderError, match="there is no run folder"):
        go(tiny, tmp_path / "nowhere", resume=True)
    assert not (tmp_path / "nowhere").exists()


def test_an_empty_folder_can_become_a_run_folder(tiny, tiny_run, tmp_path):
    (tmp_path / "config.json.partial").write_text('{"st')  # killed before it was one
    go(tiny, tmp_path)
    assert rows(tmp_path) == rows(tiny_run)
    assert not (tmp_path / "config.json.partial").exists()


def test_an_overwrite_that_was_cut_short_can_be_done_again(tiny, tiny_run, tmp_path, monkeypatch):
    def refuse(path):
        raise OSError(5, "Input/output error", str(path))

    folder = shutil.copytree(tiny_run, tmp_path / "run")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="checkpoints"):
        patch.setattr(shutil, "rmtree", refuse)
        go(tiny, folder, overwrite=True)
    assert (folder / "config.json").is_file()
    go(tiny, folder, overwrite=True)
    assert rows(folder) == rows(tiny_run)


@pytest.mark.parametrize("damage", [os.unlink, lambda path: path.write_text('{"versions":')])
def test_a_lost_environment_is_made_again(tiny, tiny_run, tmp_path, damage):
    folder = shutil.copytree(tiny_run, tmp_path / "run")
    damage(folder / "environment.json")
    go(tiny, folder, resume=True)
    made, before = (json.loads((f / "environment.json").read_text()) for f in (folder, tiny_run))
    assert made["digests"] == before["digests"]


def test_a_broken_lane_takes_no_other_with_it(tiny, tmp_path):
    config = dataclasses.replace(tiny, optimizer="sgd", learning_rate=(1e-2, 1e25), scale=("none",))
    recorded = go(config, tmp_path / "run")
    assert [at >= 0 for at in recorded.diverged_at] == [False, False, True, True]
    healthy = train(dataclasses.replace(config, learning_rate=(1e-2,)))
    lines = recording.read_rows(tmp_path / "run" / "metrics.jsonl")
    for row in lines:
        if row["learning_rate"] == 1e-2:
            assert np.float32(row["loss"]) == healthy.metrics.loss[row["seed"], row["step"]]
        elif row["step"] > recorded.diverged_at[2 + row["seed"]]:
            assert row["loss"] is row["entropy"] is row["grad_norm"] is None
    at = recorded.diverged_at
    for row in recording.read_rows(tmp_path / "run" / "evaluation.jsonl"):
        assert (row["loss"] is None) == (row["learning_rate"] != 1e-2 and row["step"] > at[2])
    resumed = go(dataclasses.replace(config, steps=16), tmp_path / "run", resume=True)
    assert resumed.diverged_at == at


def test_a_divergence_between_written_rows_is_seen(tiny, tmp_path):
    config = dataclasses.replace(
        tiny, optimizer="sgd", learning_rate=(1e25,), scale=("none",), log_every=12
    )
    recorded = go(config, tmp_path / "run")
    assert all(0 < at < 12 for at in recorded.diverged_at)
    [arm] = read.read_arms([tmp_path / "run"])
    assert list(arm.steps) == [0] and np.isfinite(arm.measures["loss"]).all()
    assert list(arm.diverged_at()) == [3, 3]  # the evaluation at step 4 has no value


def test_a_checkpoint_with_a_flipped_bit_is_passed_over(tiny, tiny_run, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(tiny_run, cut)
    data = max((cut / "checkpoints" / "12").rglob("*"), key=lambda p: p.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    (cut / "checkpoints" / "20").mkdir()
    lines = []
    go(tiny, cut, resume=True, say=lines.append)
    assert rows(cut) == rows(tiny_run)
    assert len(lines) == 2
    assert "20" in lines[0]


def test_a_folder_deleted_under_the_run_stops_it_in_one_line(tiny, tmp_path):
    folder = tmp_path / "run"

    def delete(result):
        if result.chunk.stop == 4:
            shutil.rmtree(folder, ignore_errors=True)

    with pytest.raises((RunFolderError, OSError), match="run"):
        go(tiny, folder, watch=delete)
    assert not folder.exists()


def test_stacked_states_come_apart_again(tiny):
    program, lane = training.lane_program(resolve(tiny)), lanes.make_lane(1.0, 1e-2, 0)
    states = [training.initialize(program, lane)] * 2
    chex.assert_trees_all_equal(run.unstack_states(run.stack_states(states), 2), states)
