"""What happens to the files under a run that goes on: an error, never fewer rows in silence."""

import dataclasses
import os
import shutil

import pytest

from experiments.runs.folder import CONFIG, EVALUATION, METRICS, RunFolderError
from experiments.runs.rows import read_rows
from experiments.runs.seal import check_seal


def at(step, do):
    """A watch that does something to the folder once the chunk up to `step` is done."""

    def watch(result):
        if result.chunk.stop == step:
            do()

    return watch


def append(path):
    with path.open("a") as file:
        file.write("x")


def replace_by_copy(path):
    copy = path.with_suffix(".copy")
    shutil.copy(path, copy)
    copy.replace(path)


TAMPERING = {
    "truncated": lambda path: os.truncate(path, 0),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 10),
    "deleted": os.unlink,
    "replaced by a copy": replace_by_copy,
    "appended to": append,
}


@pytest.mark.parametrize("name", [METRICS, EVALUATION])
@pytest.mark.parametrize("tamper", TAMPERING.values(), ids=TAMPERING)
def test_rows_that_are_tampered_with_end_the_run_with_an_error(tiny, tmp_path, go, name, tamper):
    path = tmp_path / "run" / name
    config = dataclasses.replace(tiny, steps=24)
    what = "deleted" if tamper is os.unlink else "changed or replaced"
    with pytest.raises(OSError, match=f"was {what} while the run was writing to it") as error:
        go(config, tmp_path / "run", watch=at(8, lambda: tamper(path)))
    assert error.value.filename == str(path)


def test_a_config_edited_under_the_run_is_seen_afterwards(tiny, tmp_path, go):
    path = tmp_path / "run" / CONFIG
    go(tiny, tmp_path / "run", watch=at(4, lambda: path.write_text(path.read_text() + " ")))
    with pytest.raises(RunFolderError, match=r"config.json is not the one"):
        check_seal(tmp_path / "run")


def test_a_folder_deleted_under_the_run_ends_it_and_does_not_come_back(tiny, tmp_path, go):
    folder = tmp_path / "run"
    delete = at(4, lambda: shutil.rmtree(folder))
    with pytest.raises(OSError, match="deleted while the run was writing to it"):
        go(dataclasses.replace(tiny, steps=24), folder, watch=delete)
    assert not folder.exists()


def test_a_folder_that_another_run_made_anew_gets_none_of_our_rows(tiny, tmp_path, go):
    folder = tmp_path / "run"
    other = dataclasses.replace(tiny, steps=4, seed=10, num_seeds=1)

    def usurp():
        shutil.rmtree(folder)
        go(other, folder)

    with pytest.raises(OSError, match="while the run was writing to it"):
        go(dataclasses.replace(tiny, steps=24), folder, watch=at(4, usurp))
    assert {row["seed"] for row in read_rows(folder / METRICS)} == {10}
    assert check_seal(folder) is None
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["4"]


def test_a_checkpoint_that_can_not_be_written_ends_the_run_and_costs_no_row(
    tiny, tiny_run, tmp_path, go, rows
):
    folder = tmp_path / "run"
    with pytest.raises(OSError, match="checkpoints"):
        go(tiny, folder, watch=at(4, (folder / "checkpoints").touch))
    assert [row["step"] for row in read_rows(folder / METRICS)[::4]] == [0, 1, 2, 3]
    (folder / "checkpoints").unlink()
    go(tiny, folder, resume=True)
    assert rows(folder) == rows(tiny_run)
