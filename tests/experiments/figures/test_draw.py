"""All figures of runs: one that fails is a line, and costs neither the others nor the report."""

import pytest

from experiments.analysis.read import read_arms
from experiments.analysis.report import write_results
from experiments.figures import attention_maps, curves
from experiments.figures.draw import draw_figures


def test_a_figure_that_fails_costs_nothing_else(make_run, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("a bug,\nin two lines")

    folder = make_run()
    monkeypatch.setattr(curves, "draw_curves", fail)
    monkeypatch.setattr(attention_maps, "read_maps", lambda arms, say: [])
    monkeypatch.setattr(attention_maps, "draw_maps", lambda maps, out: out / "attention_maps.png")
    said: list[str] = []
    write_results(folder, draw=draw_figures, say=said.append)
    assert said == ["no curves: a bug, in two lines"]
    page = (folder / "report.md").read_text()
    assert "(figures/attention_maps.png)" in page
    assert "curves" not in page


def test_a_run_without_a_checkpoint_has_no_maps(make_run, tmp_path):
    folder = make_run()
    said: list[str] = []
    drawn = draw_figures(read_arms([folder]), tmp_path / "out", said.append)
    assert [path.name for path in drawn] == ["curves.png"]
    assert said == [f"no attention maps: {folder} has no good checkpoint"]


def test_a_full_disk_is_a_line_a_figure(make_run, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    said: list[str] = []
    assert draw_figures(read_arms([make_run()]), tmp_path / "out", said.append) == []
    assert said[0] == "no curves: [Errno 28] No space left on device"


@pytest.mark.parametrize("done", [0, 1])
def test_a_run_that_has_only_begun_is_drawn(make_run, tmp_path, done):
    said: list[str] = []
    assert len(draw_figures(read_arms([make_run(done=done)]), tmp_path, said.append)) == 1
