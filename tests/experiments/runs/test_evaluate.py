"""What a run has learned, by its newest good checkpoint, at its own length and at shorter ones."""

import dataclasses
import shutil

import numpy as np
import pytest

from experiments import tasks
from experiments.config import resolve
from experiments.engine import lanes, training
from experiments.runs import checkpoints, claim, states
from experiments.runs.evaluate import evaluate_run
from experiments.runs.folder import RunFolderError, write_json
from experiments.runs.rows import read_rows
from experiments.runs.writer import checkpoint_identity
from experiments.tasks.samplers import sample


def last_evaluations(folder, step):
    rows = read_rows(folder / "evaluation.jsonl")
    return {
        name: np.array([row[name] for row in rows if row["step"] == step], np.float32)
        for name in ("loss", "accuracy")
    }


def test_the_newest_checkpoint_is_evaluated_as_the_run_did(tiny_run):
    found = evaluate_run(tiny_run, say=pytest.fail)
    assert (found.step, found.task.sequence_length) == (12, 8)
    rows = last_evaluations(tiny_run, 12)
    np.testing.assert_array_equal(found.loss, rows["loss"])
    np.testing.assert_array_equal(found.accuracy, rows["accuracy"])


def test_a_bad_checkpoint_is_passed_over_and_nothing_is_changed(tiny_run, tmp_path):
    folder = shutil.copytree(tiny_run, tmp_path / "run")
    data = max((folder / "checkpoints" / "12").rglob("*"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:-1])
    before = sorted(folder.rglob("*"))
    lines = []
    with claim.locked(folder, pytest.fail):  # looking is allowed while the run goes on
        found = evaluate_run(folder, say=lines.append)
    assert found.step == 8
    rows = last_evaluations(folder, 8)
    np.testing.assert_array_equal(found.loss, rows["loss"])
    (line,) = lines
    assert line.startswith("bad checkpoint, passed over: ")
    assert sorted(folder.rglob("*")) == before
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(RunFolderError, match="has no good checkpoint"):
        evaluate_run(folder, say=pytest.fail)


@pytest.mark.parametrize(
    ("task", "scale"), [("reverse", "none"), ("histogram", "none"), ("reverse", "learned")]
)
def test_shorter_sequences_are_those_of_the_shorter_task(tiny, tmp_path, task, scale):
    config = resolve(dataclasses.replace(tiny, task=task, num_seeds=1, scale=scale))
    (planned,) = lanes.plan_lanes(config)
    program, lane = planned
    state = training.initialize(program, lane)
    write_json(tmp_path / "config.json", config.to_json())
    checkpoints.save(
        tmp_path / "checkpoints",
        0,
        states.pack([planned], [state]),
        identity=checkpoint_identity(config),
        warn=pytest.fail,
    )
    found = evaluate_run(tmp_path, 5, say=pytest.fail)
    task_of_five = tasks.make_task(task, sequence_length=5, vocab_size=4)
    key = training.stream_key(np.uint32(training.EVALUATION_SEED), "evaluation")
    batch = sample(task_of_five, key, 8)
    output = training.transformer.apply(
        program.model, state.params, batch.tokens_BT, lane.multiplier
    )
    loss, accuracy = training.loss_and_accuracy(output.logits, batch)
    np.testing.assert_allclose(found.loss, [loss], rtol=1e-5)
    np.testing.assert_allclose(found.accuracy, [accuracy])
    assert found.task.chance_loss == task_of_five.chance_loss
