"""The disk fails under a run: one line names the path, and what was written can be read."""

import errno
import os
import resource
import shlex
import shutil
from pathlib import Path

import pytest

import train
from experiments import load_runs
from experiments.analysis.summary import train_command
from experiments.commands.train import RunProgress
from experiments.config import resolve
from experiments.runs.rows import read_rows

ROWS = ("metrics.jsonl", "evaluation.jsonl")


@pytest.fixture
def main(tiny):
    """Runs train.py with the settings of the tiny run."""
    flags = shlex.split(train_command(resolve(tiny)))[2:]

    def main(*more):
        return train.main(["train.py", *flags, "--nofigures", "--compilation_cache=off", *more])

    return main


def failure(main, capsys, *flags):
    """The last line of a run that fails with status 1."""
    assert main(*flags) == 1
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("limit", "culprit"),
    [(100, ""), (5_000, ""), (10_000, ""), (100_000, "checkpoints/4.tmp")],
)
def test_a_full_disk_ends_the_run_in_one_line(main, tiny_run, tmp_path, capsys, limit, culprit):
    folder = tmp_path / "run"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        line = failure(main, capsys, f"--out={folder}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert line.startswith(f"train.py: {folder / culprit}")
    assert line.endswith(": File too large")
    resume = []
    if limit > 100:  # enough for config.json: there is a run
        resume = ["--resume"]
        for name in ROWS:
            written = (folder / name).read_bytes()
            assert (tiny_run / name).read_bytes().startswith(written)
            assert len(read_rows(folder / name)) == written.count(b"\n")
        load_runs(folder)
    assert main(f"--out={folder}", *resume) == 0  # when there is room again
    for name in ROWS:
        assert (folder / name).read_bytes() == (tiny_run / name).read_bytes()


def test_a_folder_deleted_under_the_run_ends_it_in_one_line(main, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run"
    monkeypatch.setattr(
        RunProgress, "update", lambda self, result: shutil.rmtree(folder, ignore_errors=True)
    )
    line = failure(main, capsys, f"--out={folder}")
    assert line.startswith(f"train.py: {folder}")
    assert "deleted" in line or "No such file" in line
    assert not folder.exists()


def test_a_place_where_no_folder_can_be_is_refused(main, capsys):
    assert main("--out=/proc/nowhere/run") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "train.py: out: /proc/nowhere/run can't be made: No such file or directory"


def test_a_read_only_folder_is_read_and_not_gone_on_with(
    main, tiny_run, tmp_path, capsys, monkeypatch
):
    folder = shutil.copytree(tiny_run, tmp_path / "run")

    def read_only(path, *arguments, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "write_bytes", read_only)
    line = failure(main, capsys, f"--out={folder}", "--resume")
    assert line.startswith(f"train.py: {folder / 'config.json'}")
    assert line.endswith("Read-only file system")
    for name in ROWS:
        assert (folder / name).read_bytes() == (tiny_run / name).read_bytes()
