"""`python -m experiments`: the list, the flags, what is refused, where results go."""

import subprocess
import sys

import pytest

from experiments import __main__ as command
from experiments.commands import startup, studies
from experiments.studies import STUDIES, common


@pytest.fixture
def fake_study(monkeypatch):
    """Every study answers at once, and says what it was asked."""
    asked = []

    def run(request):
        asked.append(request)
        if request.seeds == 13:
            raise ValueError("unlucky")
        request.say("working on [red] :100:")
        return common.Findings("T", "An answer.", (), {}, {}, {}, {})

    monkeypatch.setattr(studies, "load", lambda name: run)
    monkeypatch.setattr(startup, "use_compilation_cache", lambda *_: None)
    return asked


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_the_list_names_every_study_its_time_and_every_tool(argv, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    assert command.main(["experiments", *argv]) == 0
    printed = capsys.readouterr().out
    text = " ".join(printed.split())
    for name, study in STUDIES.items():
        assert f"{name} {study.about} ({study.takes})" in text
    for tool in ("compare RUN_A RUN_B", "evaluate RUN", "plot RUN [RUN ...]"):
        assert f"  {tool}  " in printed
    assert all(f"--{flag} " in text for flag in ("out", "[no]quick", "seeds", "cells"))
    assert all(len(line) <= 100 for line in printed.splitlines())


@pytest.mark.parametrize("name", [*STUDIES, "all", "compare", "evaluate", "plot"])
def test_everything_has_a_help_of_its_own(name, capsys):
    assert command.main(["experiments", name, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m experiments {name} ")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["artcle"], "unknown 'artcle' (nearest: article); choose from score_variance, "),
        (["plto"], "(nearest: plot); choose from "),
        (["xyz"], "unknown 'xyz'; choose from "),
        (["--quick", "article"], "--quick comes too early"),
        (["article", "--seeds=0"], "seeds: 0, must be a whole number from 2 to 1000000"),
        (["article", "--seeds=many"], "seeds: 'many', must be a whole number"),
        (["article", "length"], "stray word 'length'"),
        (["article", "--sedes=3"], "unknown flag --sedes (nearest: --seeds)"),
        (["article", "--num_seeds=3"], "unknown flag --num_seeds (nearest: --seeds)"),
        (["article", "--cells=x"], "cells: only learning_rate and convergence have cells"),
        (["article", "--out=FILE"], "FILE is a file, must be a folder"),
        (["plot"], "give RUN [RUN ...]"),
        (["plot", "\udcff"], "RUN: '\\udcff', must be a path"),
        (["plot", "FILE", "--out=FILE"], "FILE is a file, must be a folder"),
        (["compare", "one"], "give RUN_A RUN_B"),
        (["compare", "one", "two", "three"], "give RUN_A RUN_B"),
        (["compare", "one", "two", "--holm"], "unknown flag --holm"),
        (["compare", "one", "two"], "one has no config.json: not a run folder"),
        (["compare", "--", "-x", "two"], "-x has no config.json: not a run folder"),
        (["evaluate", "one", "two"], "give RUN"),
        (["evaluate", "one", "--length=8"], "unknown flag --length (nearest: --sequence_length)"),
    ],
)
def test_usage_errors_are_one_line_and_status_2(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(startup, "use_compilation_cache", lambda *_: None)
    (tmp_path / "FILE").touch()
    assert command.main(["experiments", *argv]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out
    assert [path.name for path in tmp_path.iterdir()] == ["FILE"]


def test_a_study_runs_as_asked(fake_study, tmp_path, capsys):
    out = tmp_path / "over here"
    argv = ["experiments", "length", f"--out={out}", "--quick", "--seeds=5"]
    assert command.main(argv) == 0
    (request,) = fake_study
    assert (request.out, request.seeds, request.quick) == (out, 5, True)
    assert (out / "summary.json").exists()
    typed = f"python -m experiments length '--out={out}' --quick --seeds=5"
    assert typed in (out / "report.md").read_text()
    captured = capsys.readouterr()
    assert "An answer." in captured.out
    assert "length: working on [red] :100:\n" in captured.err


def test_all_gives_each_study_a_folder(fake_study, tmp_path):
    assert command.main(["experiments", "all", f"--out={tmp_path}"]) == 0
    assert [request.out for request in fake_study] == [tmp_path / name for name in STUDIES]


def test_without_out_results_go_under_runs(fake_study, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command.main(["experiments", "article"]) == 0
    assert (tmp_path / "runs" / "studies" / "article" / "report.md").exists()


def test_what_a_study_refuses_is_a_usage_error(fake_study, tmp_path, capsys):
    assert command.main(["experiments", "length", f"--out={tmp_path}", "--seeds=13"]) == 2
    assert "length: unlucky" in capsys.readouterr().err


def test_lists_errors_and_reading_load_neither_jax_nor_matplotlib(tmp_path):
    script = (
        "import sys; from experiments.__main__ import main\n"
        "sys.modules.update(jax=None, jaxlib=None, matplotlib=None)  # importing them raises\n"
        "assert main(['experiments']) == 0\n"
        "assert main(['experiments', 'nothing']) == 2\n"
        "assert main(['experiments', 'compare', 'no', 'run']) == 2\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
