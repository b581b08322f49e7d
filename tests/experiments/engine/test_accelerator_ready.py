"""What a GPU or TPU needs and a CPU can show: nothing on the host within a step, no float64."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.config import resolve
from experiments.engine import lanes, training
from experiments.engine.devices import Place
from experiments.engine.lanes import Chunk


@pytest.fixture(scope="module")
def planned(tiny):
    config = dataclasses.replace(tiny, dropout_rate=0.1, warmup_steps=2, clip_norm=1.0)
    return lanes.plan_lanes(resolve(config))[0]


@pytest.mark.parametrize("x64", [False, True])
def test_a_step_never_asks_the_host_and_has_no_float64(planned, x64):
    program, lane = planned
    state = jax.eval_shape(training.initialize, program, lane)
    with jax.enable_x64(x64):
        texts = [
            training.initialize.lower(program, lane).as_text(),
            training.advance.lower(program, lane, state, np.int32(5)).as_text(),
            training.evaluate.lower(program, lane, state).as_text(),
        ]
    for text in texts:
        assert "f32" in text
        assert "f64" not in text
        for word in ("callback", "infeed", "outfeed", "stablehlo.send", "stablehlo.recv"):
            assert word not in text


def test_64_lanes_at_once_agree_with_one_by_one(tiny):
    config = resolve(dataclasses.replace(tiny, num_seeds=32))
    planned = lanes.plan_lanes(config)
    assert len(planned) == 64
    place, chunk = Place((jax.devices()[0],)), Chunk(0, 8, True)
    alone, together = (
        next(lanes.run_chunks(planned, [chunk], places=[place], vectorize=vectorize))
        for vectorize in (False, True)
    )
    for name in ("metrics", "evaluation"):
        trees = [jax.tree.leaves(getattr(result, name)) for result in (alone, together)]
        for ours, theirs in zip(*trees, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
