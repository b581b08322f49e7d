"""Going on with a run: from where, with what, and when not."""

import dataclasses
import json
import shutil

import pytest

from experiments.runs import folder as run_folders
from experiments.runs.folder import CONFIG, EVALUATION, METRICS, RunFolderError, stored_config
from experiments.runs.seal import check_seal


def contents(folder):
    """Every file of a folder."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def cut_lines(path, count):
    """Leave the first lines of a file only."""
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:count]))


def crash_before_the_first_checkpoint(folder):
    """Leave what a run has that is killed after three steps."""
    shutil.rmtree(folder / "checkpoints")
    (folder / "seal.json").unlink()
    cut_lines(folder / METRICS, 3 * 4)
    cut_lines(folder / EVALUATION, 4)


def test_rows_after_the_checkpoint_are_cut_and_made_again(tiny, tiny_run, run_folder, go, rows):
    seal = json.loads((run_folder / "seal.json").read_text())
    seal["marks"].pop()
    seal["ended"] = False
    run_folders.write_json(run_folder / "seal.json", seal)
    shutil.rmtree(run_folder / "checkpoints" / "12")  # as if killed between row 11 and it
    with (run_folder / METRICS).open("a") as file:
        file.write('{"step":12,"sca')
    go(tiny, run_folder, resume=True)
    assert rows(run_folder) == rows(tiny_run)


def test_a_run_killed_before_its_first_checkpoint_starts_over(tiny, tiny_run, run_folder, go, rows):
    crash_before_the_first_checkpoint(run_folder)
    lines = []
    go(tiny, run_folder, resume=True, say=lines.append)
    assert rows(run_folder) == rows(tiny_run)
    assert "starts from the beginning" in lines[0]


@pytest.mark.parametrize("sealed", [True, False])
def test_a_run_whose_checkpoints_are_gone_is_not_started_over(tiny, run_folder, go, sealed):
    shutil.rmtree(run_folder / "checkpoints")
    if not sealed:
        (run_folder / "seal.json").unlink()
    before = contents(run_folder)
    for config in (tiny, dataclasses.replace(tiny, steps=24, checkpoint_every=24)):
        with pytest.raises(RunFolderError, match=r"checkpoints are gone.* --out, or --overwrite"):
            go(config, run_folder, resume=True)
        assert contents(run_folder) == before


def test_more_steps_equal_the_run_that_had_them_from_the_start(tiny, tiny_run, tmp_path, go, rows):
    short = tmp_path / "short"
    go(dataclasses.replace(tiny, steps=6), short)  # whose last evaluation the longer run lacks
    assert check_seal(short) is None
    go(tiny, short, resume=True)
    assert rows(short) == rows(tiny_run)
    assert stored_config(short).steps == 12
    assert check_seal(short) is None
    assert json.loads((short / "seal.json").read_text())["ended"]


def test_a_prolonged_run_that_dies_at_once_goes_on_as_the_longer_one(
    tiny, tiny_run, tmp_path, go, rows
):
    def die(result):
        raise KeyboardInterrupt

    cut = tmp_path / "cut"
    go(dataclasses.replace(tiny, steps=6), cut)
    with pytest.raises(KeyboardInterrupt):
        go(tiny, cut, resume=True, watch=die)
    assert stored_config(cut).steps == 12
    assert check_seal(cut) is None  # a crash is no change
    go(stored_config(cut), cut, resume=True)
    assert rows(cut) == rows(tiny_run)


def test_a_finished_run_that_is_gone_on_with_stays_as_it_is(tiny, run_folder, go):
    before = contents(run_folder)
    done = go(tiny, run_folder, resume=True)
    assert (done.steps_done, done.stopped_by) == (12, None)
    after = contents(run_folder)
    assert {path.name for path in before if before[path] != after[path]} <= {"seal.json"}
    with (run_folder / METRICS).open("ab") as file:
        file.write(before[run_folder / METRICS].splitlines(keepends=True)[-1])
    with pytest.raises(RunFolderError, match="rows after the run's end"):
        check_seal(run_folder)


def test_fewer_steps_than_done_are_refused(tiny, run_folder, go):
    before = contents(run_folder)
    with pytest.raises(RunFolderError, match=r"steps is 5, but .* has 12 already"):
        go(dataclasses.replace(tiny, steps=5), run_folder, resume=True)
    assert contents(run_folder) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_k": 4}, r"d_k is 4, but .* was run with 8"),
        ({"num_seeds": 3}, "num_seeds is 3"),
        ({"scale": ("none",)}, r"scale is \['none'\]"),
        ({"eval_every": 5}, "eval_every is 5"),
        ({"learning_rate": 0.1, "steps": 24}, r"learning_rate is \[0.1\]"),
    ],
)
def test_resuming_as_another_run_is_refused(tiny, tiny_run, go, change, message):
    before = contents(tiny_run)
    with pytest.raises(RunFolderError, match=message):
        go(dataclasses.replace(tiny, **change), tiny_run, resume=True)
    assert contents(tiny_run) == before


@pytest.mark.parametrize("lost", [METRICS, EVALUATION])
def test_an_unsealed_run_that_lacks_rows_is_refused_and_left_alone(tiny, run_folder, go, lost):
    (run_folder / "seal.json").unlink()
    cut_lines(run_folder / lost, 8)
    before = contents(run_folder)
    with pytest.raises(RunFolderError, match=r"8 good rows .* vouches for"):
        go(dataclasses.replace(tiny, steps=24), run_folder, resume=True)
    assert contents(run_folder) == before


def test_a_bad_newest_checkpoint_costs_only_time_even_if_the_next_life_is_short(
    tiny, tiny_run, run_folder, go, rows
):
    """The seal knows of step 12, the run goes back to step 8: a crash there is still no change."""
    data = run_folder / "checkpoints" / "12" / "arrays.npz"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    (run_folder / "checkpoints" / "20").mkdir()

    def die(result):
        raise KeyboardInterrupt

    lines = []
    with pytest.raises(KeyboardInterrupt):
        go(tiny, run_folder, resume=True, watch=die, say=lines.append)
    bad = [line for line in lines if line.startswith("bad checkpoint")]
    assert len(bad) == 2 and "20" in bad[0] and "12" in bad[1]
    assert len((run_folder / METRICS).read_bytes().splitlines()) >= 8 * 4
    assert check_seal(run_folder) is None
    go(tiny, run_folder, resume=True)
    assert rows(run_folder) == rows(tiny_run)
    assert check_seal(run_folder) is None


def test_killed_between_the_seal_and_the_new_config(
    tiny, tiny_run, tmp_path, go, rows, monkeypatch
):
    folder = tmp_path / "run"
    go(dataclasses.replace(tiny, steps=6), folder)
    before = rows(folder)

    def die(path, target):
        if target == folder / CONFIG:
            raise KeyboardInterrupt
        return replace(path, target)

    replace = type(folder).replace
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(folder), "replace", die)
        go(tiny, folder, resume=True)
    assert stored_config(folder).steps == 6
    assert rows(folder) == before
    assert check_seal(folder) is None
    go(tiny, folder, resume=True)
    assert rows(folder) == rows(tiny_run)
    assert check_seal(folder) is None
    go(tiny, folder, overwrite=True)  # and nothing that the kill left is a stranger
    assert rows(folder) == rows(tiny_run)


def test_nobody_is_resumed_nowhere(tiny, tmp_path, go):
    with pytest.raises(RunFolderError, match="there is no run folder"):
        go(tiny, tmp_path / "nowhere", resume=True)
    assert not (tmp_path / "nowhere").exists()
