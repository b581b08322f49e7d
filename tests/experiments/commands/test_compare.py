"""`python -m experiments compare`: what it prints and what it refuses."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.__main__ import main as experiments


def test_the_command_prints_a_table(make_run, capsys):
    runs = [str(make_run(name, scale=name, num_seeds=5)) for name in ("none", "sqrt")]
    assert experiments(["experiments", "compare", *runs]) == 0
    text = capsys.readouterr().out
    assert "none ×1 − sqrt ×1/√d_k: sort, 5 seeds, held-out, to step 40" in text
    assert "steps to 90%" in text


@pytest.mark.parametrize("ending", ["", ">&-", "2>&1 | true", ">/dev/full"])
def test_nobody_has_to_listen(ending, make_run):
    runs = [str(make_run(name, scale=name)) for name in ("none", "sqrt")]
    line = shlex.join([sys.executable, "-m", "experiments", "compare", *runs])
    done = subprocess.run(
        ["bash", "-c", f"{line} {ending}; exit ${{PIPESTATUS[0]}}"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert ("accuracy %" in done.stdout) == (not ending)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give RUN_A RUN_B"),
        (["one"], "give RUN_A RUN_B"),
        (["one", "two", "three"], "give RUN_A RUN_B"),
        (["one", "two"], "one has no config.json: not a run folder"),
        (["one", "two", "--holm"], "unknown flag --holm"),
    ],
)
def test_usage_errors_are_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert experiments(["experiments", "compare", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_help(capsys):
    assert experiments(["experiments", "compare", "--help"]) == 0
    text = capsys.readouterr().out
    assert "compare RUN_A RUN_B" in text
    assert max(map(len, text.splitlines())) <= 100
