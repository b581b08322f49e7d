"""Whose folder it is: one run at a time, and only a run is ever deleted."""

import errno
import fcntl
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from experiments.runs.claim import claim, locked, make_folder
from experiments.runs.folder import RunFolderError, stored_config


def everything(folder):
    """Every path below a folder, with the bytes of files and the targets of links."""
    return {
        path: path.readlink() if path.is_symlink() else path.is_file() and path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def refused(folder, match, **options: Any):
    """That an --overwrite names what it found, and touches nothing."""
    before = everything(folder)
    with pytest.raises(RunFolderError, match=match) as error:
        claim(folder, stored_or_none(folder), overwrite=True, **options)
    assert "\n" not in str(error.value)
    assert everything(folder) == before


def stored_or_none(folder) -> Any:
    try:
        return stored_config(folder)
    except RunFolderError:
        return None  # never reached: it is refused before


def test_one_run_at_a_time_and_no_lock_file(tmp_path):
    with locked(tmp_path, pytest.fail):
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(RunFolderError, match="in use"), locked(tmp_path, pytest.fail):
            pass
    with locked(tmp_path, pytest.fail):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_done_without(tmp_path, monkeypatch, number):
    def flock(handle, flags):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    said = []
    with locked(tmp_path, said.append):
        pass
    [line] = said
    assert line.startswith("warning: ") and str(tmp_path) in line and "\n" not in line


def test_a_folder_in_use_is_not_gone_on_with(tiny, tiny_run, go, rows):
    before = rows(tiny_run)
    in_use = pytest.raises(RunFolderError, match="is in use by another run")
    with locked(tiny_run, pytest.fail):
        for options in ({"resume": True}, {"overwrite": True}):
            with in_use:
                go(tiny, tiny_run, **options)
    assert rows(tiny_run) == before


def test_a_run_is_not_written_over_unless_told_to(tiny, tiny_run, run_folder, go, rows):
    before = everything(run_folder)
    with pytest.raises(RunFolderError, match="exists; give another, or --resume, or --overwrite"):
        go(tiny, run_folder)
    assert everything(run_folder) == before
    go(tiny, run_folder, overwrite=True)
    assert rows(run_folder) == rows(tiny_run)


def test_all_that_a_run_makes_can_be_overwritten(tiny, tiny_run, run_folder, go, rows):
    """What a finished run has, and what kills, crashes and earlier versions leave in it."""
    go(tiny, run_folder, overwrite=True, tensorboard=True)
    for name in (
        *("summary.json", "report.md", "report.md.partial", "config.json.partial"),
        *("config.json.new", "config.json.new.partial", "seal.json.partial"),
        *("figures/curves.png", "figures/curves.svg", "figures/attention_maps.png"),
        *("figures/curves.png.partial", "checkpoints/8.bad/manifest.json"),
        *("checkpoints/8.bad1/arrays.npz", "checkpoints/16.tmp/arrays.npz"),
        *("checkpoints/16.tmp1/probe", "checkpoints/4/arrays/d/f1fd179f5e1b9c13"),
    ):
        path = run_folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    go(tiny, run_folder, overwrite=True)
    assert rows(run_folder) == rows(tiny_run)
    assert {path.name for path in run_folder.iterdir()} == {p.name for p in tiny_run.iterdir()}


@pytest.mark.parametrize(
    "stranger",
    [
        *("notes/idea.txt", "thesis.tex", "config.json.bak", ".git/HEAD", "metrics.jsonl.gz"),
        *("checkpoints/best/weights.npz", "checkpoints/notes.txt", "checkpoints/12/mine.npz"),
        *("figures/mine.png", "tensorboard/notes.txt", "tensorboard/scale=none/x/y"),
    ],
)
def test_a_stranger_in_a_run_folder_is_named_and_nothing_is_touched(run_folder, stranger):
    path = run_folder / stranger
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    top = re.escape(stranger.partition("/")[0])
    refused(run_folder, f"holds {top}.*, which no run makes, so nothing was deleted")


@pytest.mark.parametrize(
    "content",
    [
        '{"name": "my-app", "version": "1.0.0"}',
        '{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096}',
        "{}",
        "[]",
        "not json",
        "[" * 10**5,
        "",
    ],
)
def test_another_programs_config_is_no_run(tmp_path, content):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(content)
    (folder / "metrics.jsonl").write_text("theirs")
    refused(folder, "overwrite: .* is not a run of this project, so it is left alone")


def test_a_folder_without_a_config_is_left_alone(tiny, tmp_path, go):
    (tmp_path / "thesis.txt").write_text("mine")
    for options in ({"overwrite": True}, {}):
        with pytest.raises(RunFolderError, match="is not a run folder, so it is left alone"):
            go(tiny, tmp_path, **options)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_what_links_lead_to_is_never_deleted(tiny, tiny_run, run_folder, tmp_path, go, rows):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "12").mkdir()
    (outside / "12" / "manifest.json").write_text("mine")
    shutil.rmtree(run_folder / "checkpoints")
    (run_folder / "checkpoints").symlink_to(outside)
    (run_folder / "report.md").symlink_to(outside / "12" / "manifest.json")
    go(tiny, run_folder, overwrite=True)
    assert rows(run_folder) == rows(tiny_run)
    assert (outside / "12" / "manifest.json").read_text() == "mine"
    assert not (run_folder / "checkpoints").is_symlink()


def test_a_folder_where_a_file_of_ours_should_be_is_a_stranger(run_folder):
    (run_folder / "report.md").mkdir()
    (run_folder / "report.md" / "mine.txt").write_text("mine")
    refused(run_folder, "holds report.md/mine.txt")


def test_an_empty_folder_can_become_a_run_folder(tiny, tiny_run, tmp_path, go, rows):
    (tmp_path / "config.json.partial").write_text('{"st')  # killed before it was one
    go(tiny, tmp_path)
    assert rows(tmp_path) == rows(tiny_run)
    assert not (tmp_path / "config.json.partial").exists()


def test_an_overwrite_that_was_cut_short_can_be_done_again(
    tiny, tiny_run, run_folder, go, rows, monkeypatch
):
    def refuse(path):
        raise OSError(5, "Input/output error", str(path))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="checkpoints"):
        patch.setattr(shutil, "rmtree", refuse)
        go(tiny, run_folder, overwrite=True)
    assert (run_folder / "config.json").is_file()
    go(tiny, run_folder, overwrite=True)
    assert rows(run_folder) == rows(tiny_run)


def test_folders_are_made_whole_or_not_at_all(tmp_path):
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match=r"out: .* is, or is in, a file; give a folder"):
        make_folder(tmp_path / "file" / "run")
    with pytest.raises(RunFolderError, match=r"out: .* is, or is in, a file; give a folder"):
        make_folder(tmp_path / "file")
    with pytest.raises(RunFolderError, match="can't be made: File name too long"):
        make_folder(tmp_path / "new" / ("x" * 300))
    assert not (tmp_path / "new").exists()
    with pytest.raises(RunFolderError, match=r"can't be made: No such file"):
        make_folder(Path("/proc/nowhere/run"))


@pytest.mark.parametrize(
    "name", ["a b", "[red]y", "ü", "😀", "50%", "back\\slash", "-dash", "new\nline"]
)
def test_any_name_will_do(tiny, tiny_run, tmp_path, go, rows, name):
    go(tiny, tmp_path / name)
    assert rows(tmp_path / name) == rows(tiny_run)
    go(tiny, tmp_path / name, resume=True)
    assert json.loads((tmp_path / name / "seal.json").read_text())["ended"]
