"""`python -m experiments`: the list, the flags, what is refused, where results go."""

import subprocess
import sys

import pytest

from experiments import __main__ as command
from experiments.studies import STUDIES, common


@pytest.fixture
def fake_study(monkeypatch):
    """Every study answers at once, and says what it was asked."""
    asked = []

    def run(request):
        asked.append(request)
        if request.seeds == 13:
            raise ValueError("unlucky")
        request.say("working")
        return common.Findings("T", "An answer.", (), {}, {}, {}, {})

    monkeypatch.setattr(command, "load", lambda name: run)
    monkeypatch.setattr(command.startup, "use_compilation_cache", lambda folder: None)
    return asked


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"], ["article", "--help"]])
def test_the_list_names_every_study_and_its_time(argv, capsys):
    assert command.main(["experiments", *argv]) == 0
    printed = capsys.readouterr().out
    for name, study in STUDIES.items():
        assert f"{name} " in printed and study.about in printed and f"({study.takes})" in printed
    assert all(len(line) <= 100 for line in printed.splitlines())


@pytest.mark.parametrize(
    "argv, message",
    [
        (["artcle"], "unknown study 'artcle' (nearest: article); choose from score_variance, "),
        (["xyz"], "unknown study 'xyz'; choose from "),
        (["--quick", "article"], "--quick comes too early: python -m experiments NAME"),
        (["article", "--seeds=0"], "seeds: 0, must be from 2 to 1000000"),
        (["article", "--seeds=many"], "seeds: 'many', must be a whole number"),
        (["article", "length"], "stray word 'length'"),
        (["article", "--sedes=3"], "sedes"),
        (["article", "--out=FILE"], "FILE is a file, must be a folder"),
    ],
)
def test_usage_errors_are_one_line_and_status_2(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").touch()
    with pytest.raises(SystemExit) as stopped:
        command.main(["experiments", *argv])
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out
    assert [path.name for path in tmp_path.iterdir()] == ["FILE"]


def test_a_study_runs_as_asked(fake_study, tmp_path, capsys):
    out = tmp_path / "here"
    argv = ["experiments", "length", f"--out={out}", "--quick", "--seeds=5"]
    assert command.main(argv) == 0
    (request,) = fake_study
    assert (request.out, request.seeds, request.quick) == (out, 5, True)
    assert (out / "report.md").exists() and (out / "summary.json").exists()
    assert f"python -m experiments length --out={out} --quick" in (out / "report.md").read_text()
    captured = capsys.readouterr()
    assert "An answer." in captured.out
    assert "length: working" in captured.err


def test_all_gives_each_study_a_folder(fake_study, tmp_path):
    assert command.main(["experiments", "all", f"--out={tmp_path}"]) == 0
    assert [request.out for request in fake_study] == [tmp_path / name for name in STUDIES]


def test_without_out_results_go_under_runs(fake_study, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command.main(["experiments", "article"]) == 0
    assert (tmp_path / "runs" / "studies" / "article" / "report.md").exists()


def test_what_a_study_refuses_is_a_usage_error(fake_study, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["experiments", "length", f"--out={tmp_path}", "--seeds=13"])
    assert stopped.value.code == 2
    assert "length: unlucky" in capsys.readouterr().err


def test_tools_get_their_own_arguments(monkeypatch, capsys):
    seen = []
    tool = command.Command("RUN", "does something", lambda argv: seen.append(argv) or 3)
    monkeypatch.setitem(command.COMMANDS, "tool", tool)
    assert command.main(["experiments", "tool", "a", "--b"]) == 3
    assert seen == [["tool", "a", "--b"]]
    command.main(["experiments"])
    assert "does something" in capsys.readouterr().out


def test_the_list_and_errors_start_no_backend():
    script = (
        "import sys; from experiments.__main__ import main\n"
        "main(['experiments'])\n"
        "try: main(['experiments', 'nothing'])\n"
        "except SystemExit as stopped: assert stopped.code == 2\n"
        "bridge = sys.modules.get('jax._src.xla_bridge')\n"
        "assert bridge is None or not bridge.backends_are_initialized()\n"
        "assert 'matplotlib' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
