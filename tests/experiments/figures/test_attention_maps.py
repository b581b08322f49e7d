"""Attention maps: the weights themselves, drawn the same each time."""

import shutil

import jax
import numpy as np
import pytest

from attention import transformer
from experiments.analysis.read import read_arms
from experiments.arms import make_arm
from experiments.config import resolve
from experiments.engine import lanes, training
from experiments.figures import attention_maps
from experiments.figures.attention_maps import ArmMaps, Example


def test_maps_are_the_weights_before_and_after_training(tiny, tiny_run):
    config = resolve(tiny)
    arms = {arm.name: arm for arm in config.arms()}
    program = training.lane_program(config, arms["none"])
    none, sqrt = attention_maps.read_maps(read_arms([tiny_run]), pytest.fail)
    assert (none.label, sqrt.label) == ("none ×1", "sqrt ×1/√d_k")
    assert none.steps == sqrt.steps == (0, 12)
    tokens_BT = training.evaluation_batch(program).tokens_BT
    np.testing.assert_array_equal(none.start.tokens_T, tokens_BT[0])
    params = training.initialize(program, lanes.make_lane(arms["none"], 1.0, 0)).params
    apply = jax.jit(transformer.apply, static_argnums=0)
    for maps, scale in ((none, 1.0), (sqrt, config.d_k**-0.5)):
        weights = apply(program.model, params, tokens_BT, scale).weights[:, 0]
        np.testing.assert_allclose(maps.start.weights_LHTS, weights, atol=1e-6)
        assert not np.allclose(maps.end.weights_LHTS, maps.start.weights_LHTS)
        np.testing.assert_allclose(maps.end.weights_LHTS.sum(-1), 1, rtol=1e-5)


def test_with_logits_of_zero_a_model_attends_evenly(tiny):
    arm = make_arm("0.0", 8)
    program = training.lane_program(resolve(tiny), arm)
    lane = lanes.make_lane(arm, 1.0, 0)
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
