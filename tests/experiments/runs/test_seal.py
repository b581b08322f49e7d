"""Seals: every change of what was written is seen, named and located; a crash is none."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from experiments import load_runs
from experiments.runs.evaluate import evaluate_run
from experiments.runs.folder import CONFIG, EVALUATION, METRICS, RunFolderError, stored_config
from experiments.runs.seal import SEAL, beginning_of, check_seal, read_seal


def flip_a_digit(folder):
    """One digit of a loss in the rows between the checkpoints at 4 and 8."""
    path = folder / METRICS
    lines = path.read_bytes().splitlines(keepends=True)
    row = lines[5 * 4]
    at = row.index(b'"loss":') + 9
    lines[5 * 4] = row[:at] + (b"1" if row[at : at + 1] != b"1" else b"2") + row[at + 1 :]
    path.write_bytes(b"".join(lines))


def replace_a_column(folder):
    """Accuracies of one arm, all along."""
    path = folder / EVALUATION
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["scale"] == "none":
            row["accuracy"] = 1.0
    path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))


def lose_lines(name, count):
    def lose(folder):
        path = folder / name
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-count]))

    return lose


def add_rows(folder):
    path = folder / METRICS
    path.write_bytes(path.read_bytes() + path.read_bytes().splitlines(keepends=True)[-1] * 4)


def edit_config(folder):
    path = folder / CONFIG
    path.write_text(path.read_text().replace('"batch_size": 4', '"batch_size": 8'))


def delete_rows(folder):
    (folder / EVALUATION).unlink()


CHANGES = {
    "a digit": (flip_a_digit, "metrics.jsonl was changed between steps 4 and 8"),
    "a column": (replace_a_column, "evaluation.jsonl was changed between steps 0 and 4"),
    "last rows": (lose_lines(METRICS, 4), "metrics.jsonl lacks rows .* before step 12"),
    "last evaluations": (
        lose_lines(EVALUATION, 4),
        "evaluation.jsonl lacks rows .* before step 12",
    ),
    "rows at the end": (add_rows, "metrics.jsonl has rows after the run's end at step 12"),
    "config": (edit_config, "config.json is not the one that the run was sealed with"),
    "no evaluations": (delete_rows, "evaluation.jsonl can't be read: No such file"),
}
BY_NAME = pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)


def test_a_finished_run_is_sealed_and_reading_it_costs_next_to_nothing(tiny_run):
    seal = read_seal(tiny_run)
    assert seal is not None and seal.ended
    assert [mark.step for mark in seal.marks] == [4, 8, 12]
    for mark in seal.marks:
        assert mark.metrics == beginning_of(tiny_run / METRICS, mark.metrics.size)
        assert mark.evaluation == beginning_of(tiny_run / EVALUATION, mark.evaluation.size)
    assert seal.marks[-1].metrics.size == (tiny_run / METRICS).stat().st_size
    assert check_seal(tiny_run) is None


@BY_NAME
def test_a_change_is_refused_by_whoever_reads_and_by_resume(tiny, run_folder, go, change, message):
    change(run_folder)
    before = {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()}
    resumed = dataclasses.replace(stored_config(run_folder), steps=16)
    for use in (
        lambda: check_seal(run_folder),
        lambda: load_runs(run_folder),
        lambda: evaluate_run(run_folder, say=pytest.fail),
        lambda: go(resumed, run_folder, resume=True),
    ):
        with pytest.raises(RunFolderError, match=f"{message}.*--accept_edits") as error:
            use()
        assert "\n" not in str(error.value)
    after = {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()}
    assert after == before


@BY_NAME
def test_what_was_meant_can_be_said_and_is_repeated(run_folder, change, message):
    change(run_folder)
    remark = check_seal(run_folder, accept_edits=True)
    assert remark is not None and remark.startswith("edited: ")
    with pytest.raises(RunFolderError, match=remark.removeprefix("edited: ").replace(".", r"\.")):
        check_seal(run_folder)


def test_an_edited_run_goes_on_if_that_is_said_and_stays_known_as_edited(tiny, run_folder, go):
    flip_a_digit(run_folder)
    edited = (run_folder / METRICS).read_bytes()
    longer = dataclasses.replace(tiny, steps=16)
    go(longer, run_folder, resume=True, accept_edits=True)
    assert (run_folder / METRICS).read_bytes().startswith(edited)
    assert stored_config(run_folder).steps == 16
    assert check_seal(run_folder, accept_edits=True) == (
        "edited: metrics.jsonl was changed between steps 4 and 8"
    )
    assert len(load_runs(run_folder, accept_edits=True)["step"]) == 16 * 4


def test_what_a_crash_leaves_after_the_last_seal_is_no_change(run_folder):
    """Rows and a checkpoint that the seal has not heard of, and half a row."""
    seal = json.loads((run_folder / SEAL).read_text())
    seal["marks"].pop()
    seal["ended"] = False
    (run_folder / SEAL).write_text(json.dumps(seal))
    assert check_seal(run_folder) is None
    with (run_folder / METRICS).open("ab") as file:
        file.write(b'{"step":12,')
    assert check_seal(run_folder) is None
    assert len(load_runs(run_folder)["step"]) == 12 * 4


def test_runs_from_before_there_were_seals_are_not_damaged(tiny, tiny_run, run_folder, go, rows):
    (run_folder / SEAL).unlink()
    flip_a_digit(run_folder)  # nobody can know
    assert check_seal(run_folder) is None
    assert len(load_runs(run_folder)["step"]) == 12 * 4
    # But the checkpoint does.
    with pytest.raises(RunFolderError, match="not the rows that its checkpoint 12 was made with"):
        go(tiny, run_folder, resume=True)
    shutil.copy(tiny_run / METRICS, run_folder)
    go(dataclasses.replace(tiny, steps=16), run_folder, resume=True)
    seal = read_seal(run_folder)
    assert seal is not None
    [mark] = seal.marks
    assert mark.step == 16 and check_seal(run_folder) is None  # all of it is sealed from now on


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"config":["x"],"marks":[{"step":4}],"ended":true}',
        '{"config":["x"],"marks":[{"step":"?","metrics.jsonl":0,"evaluation.jsonl":0}],"ended":1}',
        '{"config":["x"],"marks":7,"ended":false}',
        "[" * 10**5,
    ],
)
def test_a_broken_seal_is_one_line(run_folder, content):
    (run_folder / SEAL).write_text(content)
    for use in (check_seal, load_runs):
        with pytest.raises(RunFolderError, match=SEAL) as error:
            use(run_folder)
        assert "\n" not in str(error.value)


# Checkpoints

OTHERS = {
    "seed": {"seed": 5},
    "batch size": {"batch_size": 8},
    "arm": {"scale": ("none", "mup")},
    "learning rate": {"learning_rate": 2e-3},
}


@pytest.fixture(scope="module")
def others(tiny, tmp_path_factory, go):
    """The checkpoint folders of runs whose states have the same shapes; each made once."""
    made = {}

    def other(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("others") / "run"
            go(dataclasses.replace(tiny, **OTHERS[name]), folder)
            made[name] = folder / "checkpoints"
        return made[name]

    return other


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_run_is_passed_over(
    tiny, tiny_run, run_folder, go, rows, others, name
):
    shutil.rmtree(run_folder / "checkpoints" / "12")
    shutil.copytree(others(name) / "12", run_folder / "checkpoints" / "12")
    lines = []
    found = evaluate_run(run_folder, say=lines.append)
    assert found.step == 8
    assert np.all(np.isfinite(found.loss))
    go(tiny, run_folder, resume=True, say=lines.append)
    assert ["of another run" in line for line in lines[:2]] == [True, True]
    assert rows(run_folder) == rows(tiny_run)
    assert check_seal(run_folder) is None


def test_only_checkpoints_of_another_run_are_refused(tiny, run_folder, go, rows, others):
    shutil.rmtree(run_folder / "checkpoints")
    shutil.copytree(others("seed"), run_folder / "checkpoints")
    before = rows(run_folder)
    with pytest.raises(RunFolderError, match="no good checkpoint"):
        evaluate_run(run_folder, say=lambda line: None)
    with pytest.raises(RunFolderError, match="none of its checkpoints is good"):
        go(tiny, run_folder, resume=True)
    assert rows(run_folder) == before
