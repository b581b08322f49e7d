"""The peers compute what this project does: every number of every row, and as many products."""

import importlib.util
from functools import partial

import jax
import numpy as np
import pytest

from benchmarks import agreement, flax_peer
from experiments.config import TrainConfig, resolve
from experiments.engine import lanes, training

CONFIG = resolve(
    TrainConfig(
        scale="sqrt",
        num_seeds=1,
        batch_size=8,
        sequence_length=8,
        vocab_size=8,
        d_model=16,
        d_ff=32,
        num_layers=2,
    )
)
needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs PyTorch")


@pytest.fixture(scope="module")
def given():
    return agreement.reference(CONFIG, updates=10)


def test_flax_trains_alike(given):
    rows = agreement.flax_rows(CONFIG, given)
    assert rows[-1, 0] < rows[0, 0]
    np.testing.assert_allclose(rows, given.rows, rtol=1e-3, atol=1e-5)


def test_a_difference_is_relative_to_what_the_number_reaches():
    expected = np.array([[1.0, 0.0], [4.0, 0.0]])
    for error, size in (([0.0, 0.0], 0.0), ([0.5, 0.0], 0.125), ([0.5, 0.25], 0.25)):
        assert agreement.difference(expected + np.array([[0.0, 0.0], error]), expected) == size


def test_products_are_counted_alike(given):
    program, lane = lanes.plan_lanes(CONFIG)[0]
    state = training.initialize(program, lane)
    by_hand = agreement.step_operations(program)
    assert agreement.jax_operations(partial(training.train_step, program), lane, state) == by_hand
    peer = flax_peer.make_state(CONFIG, jax.random.key(0))
    update = partial(flax_peer.update, CONFIG)
    assert agreement.jax_operations(update, peer, given.batches[0]) == by_hand


def test_a_product_has_two_operations_for_each_term():
    a, b = np.ones((3, 5, 4), np.float32), np.ones((3, 4, 7), np.float32)
    assert agreement.jax_operations(lambda a, b: a @ b, a, b) == 2 * 3 * 5 * 4 * 7


@needs_torch
@pytest.mark.parametrize(
    "settings", [{}, {"lanes": 2}, {"whole": True}, {"lanes": 2, "whole": True}]
)
def test_torch_trains_alike_with_as_many_products(given, settings):
    from benchmarks.torch_peer import Way

    way = Way(**settings)
    rows = agreement.torch_rows(CONFIG, given, way)
    np.testing.assert_allclose(rows, given.rows, rtol=1e-3, atol=1e-5)
    by_hand = agreement.step_operations(lanes.plan_lanes(CONFIG)[0].program)
    assert agreement.torch_operations(CONFIG, given, way) == by_hand
