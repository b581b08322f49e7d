"""`python -m experiments plot`: what it draws, and what it refuses in one line."""

import pytest

from experiments.__main__ import main as experiments


def plot(*words):
    return experiments(["experiments", "plot", *map(str, words)])


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    """Commands that are called here leave this process's compilation cache as it is."""
    monkeypatch.setattr("experiments.commands.startup.use_compilation_cache", lambda *folder: None)


def test_plot_draws_runs_together(make_run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = make_run("a", scale=("none",)), make_run("b", scale=("sqrt",), accuracy=1.0)
    assert plot(a, b) == 0
    captured = capsys.readouterr()
    assert "none ×1 − sqrt ×1/√d_k" in captured.out
    assert captured.err == (f"no attention maps: {a} has no good checkpoint\n")
    written = sorted(path.name for path in (tmp_path / "runs" / "plot").iterdir())
    assert written == ["curves.png", "curves.svg"]


def test_words_of_users_are_no_markup(make_run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = make_run("x[red]y", scale="none"), make_run(":100:", scale="none", d_k=8)
    assert plot(*runs, "--out=p[/]q") == 0
    captured = capsys.readouterr()
    assert captured.out.endswith("figures: p[/]q/curves.png\n")
    assert f"no attention maps: {runs[0]} has no good checkpoint" in captured.err


def test_plot_of_one_run_fills_its_own_figures(tiny_run, tmp_path, capsys):
    assert plot(tiny_run) == 0
    names = {"curves", "attention_maps"}
    written = {path.name for path in (tiny_run / "figures").iterdir()}
    assert written == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give RUN [RUN ...]: python -m experiments plot RUN [RUN ...]"),
        (["nothing"], "nothing has no config.json: not a run folder"),
        (["run", "nothing"], "nothing has no config.json"),
        (["run", "run"], "run is given twice"),
        (["run", "--oot=x"], "unknown flag --oot"),
        (["run", "--out="], "out: empty, give a value"),
        (["run", "--out=file"], "out: file is a file, must be a folder"),
        (["damaged"], "damaged/metrics.jsonl, line 3: damaged"),
        (["empty"], "empty has no rows yet"),
    ],
)
def test_what_can_not_be_plotted_is_refused_in_one_line(
    words, message, make_run, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    make_run()
    make_run("empty", done=0)
    damaged = make_run("damaged") / "metrics.jsonl"
    lines = damaged.read_text().splitlines(keepends=True)
    damaged.write_text("".join([*lines[:2], "{\n", *lines[2:]]))
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    assert plot(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"plot: {message}")
    assert captured.err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_plot_help(capsys):
    assert plot("--help") == 0
    assert (
        "usage: python -m experiments plot RUN [RUN ...] [--flag=value ...]"
        in capsys.readouterr().out
    )
