"""Curves: the same bytes each time, no spike lost, labels apart and as they were typed."""

import itertools
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.analysis.read import read_arms
from experiments.figures import curves, style


def figure_of(arms, monkeypatch):
    """The figure that is drawn of arms."""
    figures = []
    with monkeypatch.context() as patch:
        patch.setattr(style, "save", lambda figure, path: figures.append(figure) or [path])
        curves.draw_curves(arms, Path())
    return figures[0]


def test_the_same_rows_give_the_same_bytes_whatever_the_users_settings(make_run, tmp_path):
    draw = np.random.default_rng(0)
    noisy = draw.lognormal(size=(4, 300)).astype(np.float32)
    folder = make_run(
        steps=300, num_seeds=2, measures={"loss": noisy, "grad_norm": noisy, "logit_std": noisy}
    )
    written = []
    for name, changes in (("a", {}), ("b", {"text.usetex": True, "lines.linestyle": ":"})):
        with matplotlib.rc_context(changes):
            png = curves.draw_curves(read_arms([folder]), tmp_path / name)
        written.append((png.read_bytes(), png.with_suffix(".svg").read_bytes()))
    assert written[0] == written[1]


def test_runs_that_stopped_diverged_or_say_little_are_drawn(make_run, tmp_path):
    diverging = np.full((2, 40), 1e30)
    diverging[0, 20:] = np.nan
    diverging[1] = np.nan
    cases = {
        "diverged": {"num_seeds": 1, "measures": {"loss": diverging, "grad_norm": diverging}},
        "stopped": {"done": 1, "num_seeds": 1},
        "nothing": {"done": 0, "num_seeds": 1},
        "zero": {"scale": ("0.0",), "measures": {"grad_norm_logits": 0.0}},
    }
    arms = [arm for name, case in cases.items() for arm in read_arms([make_run(name, **case)])]
    assert curves.draw_curves(arms, tmp_path / "figures").is_file()


def test_panels_are_named_by_the_one_list_of_metrics(make_run, monkeypatch):
    figure = figure_of(read_arms([make_run()]), monkeypatch)
    titles = [(ax.get_title(), ax.get_ylabel()) for ax in figure.axes]
    assert titles == [
        ("training loss", "nats"),
        ("held-out accuracy", "fraction"),
        ("normalized entropy", "0 to 1"),
        ("grad norm", "nats"),
        ("grad norm logits", "nats"),
        ("logit std", "logits"),
    ]


def test_an_arms_own_parameter_has_a_panel(make_run, monkeypatch):
    grown = np.stack([np.linspace(0, 3, 40), np.full(40, np.nan)])
    folder = make_run(scale=("learned", "sqrt"), num_seeds=1, parameters={"log_scale": grown})
    figure = figure_of(read_arms([folder]), monkeypatch)
    assert len(figure.axes) == 7
    ax = figure.axes[-1]
    assert ax.get_title() == "parameter log scale"
    drawn = [line.get_ydata() for line in ax.lines if np.isfinite(line.get_ydata()).any()]
    assert [data[-1] for data in drawn] == [pytest.approx(3.0)]


def test_lines_are_those_of_the_rows(make_run, monkeypatch):
    loss = np.arange(6)[:, None] + np.linspace(0, 1, 40)
    figure = figure_of(read_arms([make_run(measures={"loss": loss})]), monkeypatch)
    ax = figure.axes[0]
    thin = [segment for lines in ax.collections for segment in lines.get_segments()]
    np.testing.assert_allclose([segment[:, 1] for segment in thin], loss, rtol=1e-6)
    np.testing.assert_array_equal([segment[:, 0] for segment in thin], [np.arange(40)] * 6)
    assert {line.get_color() for line in ax.lines} >= {style.BLUE, style.VERMILLION}
    low, high = ax.get_ylim()
    assert low == 0 and high > 6


def test_labels_are_as_they_were_typed(make_run, monkeypatch, tmp_path):
    names = ("a$x^{2", "b_%$\\frac$")  # no mathematics, and as such broken
    arms = read_arms([make_run(name, scale="none") for name in names])
    figure = figure_of(arms, monkeypatch)
    texts = "".join(text.get_text() for ax in figure.axes for text in ax.texts)
    assert all(name in texts for name in names)
    assert curves.draw_curves(arms, tmp_path).is_file()


@given(st.integers(1, 3000), st.integers(0, 2**32 - 1))
def test_a_decimated_line_keeps_its_extremes_and_ends(length, seed):
    draw = np.random.default_rng(seed)
    lane = draw.normal(size=length)
    lane[draw.random(length) < 0.1] = np.nan
    kept = curves.extremes(lane)
    assert len(kept) <= curves.MOST_POINTS + 2
    assert np.all(np.diff(kept) > 0)
    assert kept[0] == 0
    assert kept[-1] == length - 1
    if np.isfinite(lane).any():
        assert np.nanmax(lane[kept]) == np.nanmax(lane)
        assert np.nanmin(lane[kept]) == np.nanmin(lane)


def test_the_median_line_starts_exactly_and_ends_when_most_seeds_are_gone():
    lanes_NT = np.array([[1.0, 2, 3], [5, 6, np.nan], [9, 10, np.nan]])
    steps, middle = curves.medians(np.array([0, 1, 2]), lanes_NT)
    np.testing.assert_array_equal(steps, [0, 1, 2])
    np.testing.assert_array_equal(middle, [5, 6, np.nan])
    long = np.arange(1000.0)
    steps, middle = curves.medians(np.arange(1000), np.stack([long, long + 1, long + 2]))
    assert (steps[0], middle[0]) == (0, 1)
    np.testing.assert_allclose(middle, steps + 1)
    assert len(steps) <= curves.MOST_BLOCKS + 1


@given(st.lists(st.tuples(st.floats(-1, 2), st.floats(0.01, 0.2)), min_size=1, max_size=12))
def test_labels_never_overlap_and_keep_their_order(boxes):
    wanted, heights = map(list, zip(*boxes, strict=True))
    centres = curves.apart(wanted, heights)
    order = np.argsort(wanted, kind="stable")
    for low, high in itertools.pairwise(order):
        assert centres[high] - centres[low] >= (heights[low] + heights[high]) / 2 - 1e-9


def test_labels_that_are_apart_stay():
    assert curves.apart([0.9, 0.1], [0.1, 0.1]) == [0.9, 0.1]


def test_an_arm_has_one_colour_and_rates_have_dashes(make_run):
    scale = ("none", "0.3", "sqrt", "fold", "hot", "learned", "power:-0.25")
    arms = read_arms([make_run(scale=scale, learning_rate=(0.1, 0.2), num_seeds=1)])
    lines = curves.arm_lines(arms)
    colours = [line.colour for line in lines[::2]]
    assert colours == [
        *(style.VERMILLION, style.GREY, style.BLUE, style.SKY),
        *(style.PURPLE, style.ORANGE, style.BLACK),
    ]
    assert [line.colour for line in lines[1::2]] == colours
    assert len({(line.colour, str(line.dash)) for line in lines}) == len(lines)


def test_runs_of_one_arm_differ_in_colour(make_run):
    folders = [make_run(f"d{d_k}", scale=("sqrt",), d_k=d_k) for d_k in (8, 16, 32)]
    lines = curves.arm_lines(read_arms(folders))
    assert lines[0].colour == style.BLUE
    assert len({line.colour for line in lines}) == 3
