"""What a run has learned, by its newest good checkpoint, at its own length and at shorter ones."""

import dataclasses
import shutil

import numpy as np
import pytest

from experiments import tasks
from experiments.__main__ import main as experiments
from experiments.commands.evaluate import evaluate_run
from experiments.config import resolve
from experiments.engine import lanes, training
from experiments.runs import checkpoints, recording, run


def last_evaluations(folder, step):
    rows = recording.read_rows(folder / "evaluation.jsonl")
    return {
        name: np.array([row[name] for row in rows if row["step"] == step], np.float32)
        for name in ("loss", "accuracy")
    }


def test_the_newest_checkpoint_is_evaluated_as_the_run_did(tiny_run):
    found = evaluate_run(tiny_run, None, say=pytest.fail)
    assert (found.step, found.sequence_length) == (12, 8)
    rows = last_evaluations(tiny_run, 12)
    np.testing.assert_array_equal(found.loss, rows["loss"])
    np.testing.assert_array_equal(found.accuracy, rows["accuracy"])


def test_a_bad_checkpoint_is_passed_over_and_nothing_is_changed(tiny_run, tmp_path):
    folder = shutil.copytree(tiny_run, tmp_path / "run")
    data = max((folder / "checkpoints" / "12").rglob("*"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:-1])
    before = sorted(folder.rglob("*"))
    lines = []
    with recording.locked(folder):  # looking is allowed while the run goes on
        found = evaluate_run(folder, None, say=lines.append)
    assert found.step == 8
    rows = last_evaluations(folder, 8)
    np.testing.assert_array_equal(found.loss, rows["loss"])
    (line,) = lines
    assert line.startswith("bad checkpoint, passed over: ")
    assert sorted(folder.rglob("*")) == before
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(recording.RunFolderError, match="has no good checkpoint"):
        evaluate_run(folder, None, say=pytest.fail)


@pytest.mark.parametrize("task", ["reverse", "histogram"])
def test_shorter_sequences_are_those_of_the_shorter_task(tiny, tmp_path, task):
    config = resolve(dataclasses.replace(tiny, task=task, num_seeds=1, scale=("none",)))
    program = training.lane_program(config)
    state = training.initialize(program, lanes.lanes_of(config)[0])
    recording.write_json(tmp_path / "config.json", config.to_json())
    checkpoints.save(tmp_path / "checkpoints", 0, run.stack_states([state]), warn=pytest.fail)
    found = evaluate_run(tmp_path, 5, say=pytest.fail)
    task_of_five = tasks.make_task(task, sequence_length=5, vocab_size=4)
    key = training.stream_key(np.uint32(training.EVALUATION_SEED), "evaluation")
    batch = task_of_five.sample(key, 8)
    output = training.transformer.apply(program.model, state.params, batch.tokens_BT, 1.0)
    loss, accuracy = training.loss_and_accuracy(output.logits, batch)
    np.testing.assert_allclose(found.loss, [loss], rtol=1e-5)
    np.testing.assert_allclose(found.accuracy, [accuracy])
    assert found.chance_loss == task_of_five.chance_loss


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sequence_length=9"], "sequence_length: 9, must be at most 8: the run learned an "),
        (["--sequence_length=1"], "sequence_length: 1, must be a whole number from 2 up"),
        (["--sequence_length=x"], "sequence_length: 'x', must be a whole number"),
        (["--length=8"], "Unknown command line flag 'length'"),
        (["another"], "give one run folder"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_one_line(tiny_run, flags, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        experiments(["experiments", "evaluate", str(tiny_run), *flags])
    error = capsys.readouterr().err
    assert exit_.value.code == 2
    assert message in error
    assert error.count("\n") == 1


def test_the_command_prints_a_row_for_each_arm(tiny_run, capsys, monkeypatch):
    monkeypatch.setattr("experiments.commands.startup.use_compilation_cache", lambda folder: None)
    assert experiments(["experiments", "evaluate", str(tiny_run), "--sequence_length=4"]) == 0
    text = capsys.readouterr().out
    assert "8 held-out sequences of 4 tokens, trained on 8" in text
    assert text.count("none ×1") == text.count("sqrt ×1/√d_k") == 1
    assert "chance" in text
