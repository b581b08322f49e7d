"""Figures: the same bytes each time, no spike lost, labels apart; and the command for them."""

import itertools
import shutil

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention import transformer
from experiments.analysis.read import read_arms
from experiments.commands.plot import plot_command
from experiments.config import resolve
from experiments.engine import lanes, training
from experiments.figures import attention_maps, curves, style
from experiments.figures.attention_maps import ArmMaps, Example


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    """Commands that are called here leave this process's compilation cache as it is."""
    monkeypatch.setattr("experiments.commands.startup.use_compilation_cache", lambda folder: None)


def test_the_same_rows_give_the_same_bytes(make_run, tmp_path):
    draw = np.random.default_rng(0)
    noisy = draw.lognormal(size=(4, 300)).astype(np.float32)
    folder = make_run(
        steps=300, num_seeds=2, measures={"loss": noisy, "grad_norm": noisy, "logit_std": noisy}
    )
    written = []
    for name in ("a", "b"):
        png = curves.draw_curves(read_arms([folder]), tmp_path / name)
        written.append((png.read_bytes(), png.with_suffix(".svg").read_bytes()))
    assert written[0] == written[1]
    assert b"<dc:date>" not in written[0][1]


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


@given(st.integers(1, 3000), st.integers(0, 2**32 - 1))
def test_a_decimated_line_keeps_its_extremes_and_ends(length, seed):
    draw = np.random.default_rng(seed)
    lane = draw.normal(size=length)
    lane[draw.random(length) < 0.1] = np.nan
    kept = curves.extremes(lane)
    assert len(kept) <= curves.MOST_POINTS + 1
    assert np.all(np.diff(kept) > 0)
    assert (kept[0], kept[-1]) <= (length - 1, length - 1)
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


def test_a_rule_has_one_colour_and_rates_have_dashes(make_run):
    arms = read_arms([make_run(scale=("none", "0.3", "sqrt"), learning_rate=(0.1, 0.2))])
    lines = curves.arm_lines(arms)
    colours = [line.colour for line in lines[::2]]
    assert colours == [style.VERMILLION, style.ORANGE, style.BLUE]
    assert [line.colour for line in lines[1::2]] == colours
    assert len({(line.colour, str(line.dash)) for line in lines}) == len(lines)


def test_runs_of_one_rule_differ_in_colour(make_run):
    folders = [make_run(f"d{d_k}", scale=("sqrt",), d_k=d_k) for d_k in (8, 16, 32)]
    lines = curves.arm_lines(read_arms(folders))
    assert lines[0].colour == style.BLUE
    assert len({line.colour for line in lines}) == 3


def test_maps_are_the_weights_before_and_after_training(tiny, tiny_run):
    config = resolve(tiny)
    program = training.lane_program(config)
    none, sqrt = attention_maps.read_maps(read_arms([tiny_run]), pytest.fail)
    assert (none.label, sqrt.label) == ("none ×1", "sqrt ×1/√d_k")
    assert none.steps == sqrt.steps == (0, 12)
    tokens_BT = training.evaluation_batch(program).tokens_BT
    np.testing.assert_array_equal(none.start.tokens_T, tokens_BT[0])
    params = training.initialize(program, lanes.make_lane(1.0, 1.0, 0)).params
    apply = jax.jit(transformer.apply, static_argnums=0)
    for maps, scale in ((none, 1.0), (sqrt, config.d_k**-0.5)):
        weights = apply(program.model, params, tokens_BT, scale).weights[:, 0]
        np.testing.assert_allclose(maps.start.weights_LHTS, weights, atol=1e-6)
        assert not np.allclose(maps.end.weights_LHTS, maps.start.weights_LHTS)
        np.testing.assert_allclose(maps.end.weights_LHTS.sum(-1), 1, rtol=1e-5)


def test_with_logits_of_zero_a_model_attends_evenly(tiny):
    program = training.lane_program(resolve(tiny))
    lane = lanes.make_lane(0.0, 1.0, 0)
    example = attention_maps.attend(program, lane, training.initialize(program, lane).params)
    np.testing.assert_allclose(example.weights_LHTS, 1 / 8, rtol=1e-6)


def maps_of(label, heads=2, length=4, layers=1):
    tokens = np.arange(length)
    weights = np.full((layers, heads, length, length), 1 / length)
    example = Example(tokens, tokens[::-1], tokens > 0, weights)
    return ArmMaps(label, 0, (0, 7), example, example)


def test_maps_are_drawn_the_same_each_time(tmp_path):
    written = []
    for name in ("a", "b"):
        png = attention_maps.draw_maps([maps_of("none"), maps_of("sqrt")], tmp_path / name)
        written.append((png.read_bytes(), png.with_suffix(".svg").read_bytes()))
    assert written[0] == written[1]


def test_maps_of_different_examples_are_not_set_side_by_side(tmp_path):
    with pytest.raises(ValueError, match="b: not the example and heads of a"):
        attention_maps.draw_maps([maps_of("a"), maps_of("b", length=5)], tmp_path)
    with pytest.raises(ValueError, match="b: not the example and heads of a"):
        attention_maps.draw_maps([maps_of("a"), maps_of("b", heads=1)], tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_damaged_checkpoint_gives_way_to_an_older_one(tiny_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(tiny_run, folder)
    manifest = folder / "checkpoints" / "12" / "manifest.json"
    manifest.write_text("{}")
    before = sorted(folder.rglob("*"))
    said: list[str] = []
    assert attention_maps.read_maps(read_arms([folder]), said.append)[0].steps == (0, 8)
    assert len(said) == 1
    assert sorted(folder.rglob("*")) == before


def test_plot_draws_runs_together(make_run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = make_run("a", scale=("none",)), make_run("b", scale=("sqrt",), accuracy=1.0)
    assert plot_command(["plot", str(a), str(b)]) == 0
    captured = capsys.readouterr()
    assert "none ×1 − sqrt ×1/√d_k" in captured.out
    assert captured.err == (
        f"python -m experiments plot: no attention maps: {a} has no good checkpoint\n"
    )
    written = sorted(path.name for path in (tmp_path / "runs" / "plot").iterdir())
    assert written == ["curves.png", "curves.svg"]


def test_plot_of_one_run_fills_its_own_figures(tiny_run, tmp_path, capsys):
    assert plot_command(["plot", str(tiny_run)]) == 0
    names = {"curves", "attention_maps"}
    written = {path.name for path in (tiny_run / "figures").iterdir()}
    assert written == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give at least one run folder: python -m experiments plot RUN [RUN ...] [--out=DIR]"),
        (["nothing"], "nothing has no config.json: not a run folder"),
        (["run", "nothing"], "nothing has no config.json"),
        (["run", "run"], "run is given twice"),
        (["run", "--oot=x"], "Unknown command line flag 'oot'"),
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
    with pytest.raises(SystemExit) as stopped:
        plot_command(["plot", *words])
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"python -m experiments plot: {message}")
    assert captured.err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_plot_help(capsys):
    assert plot_command(["plot", "--help"]) == 0
    assert "usage: python -m experiments plot RUN [RUN ...] [--out=DIR]" in capsys.readouterr().out
