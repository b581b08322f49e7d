"""The lanes' states as one tree: what every version's checkpoints hold, and its inverse."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from experiments.config import resolve
from experiments.engine import lanes, training
from experiments.runs import states


@pytest.mark.parametrize(
    ("scales", "kinds"),
    [
        (("none", "sqrt"), None),
        (("learned",), None),
        (("none", "learned", "sqrt"), {"": 4, "learned": 2}),
    ],
)
def test_states_of_every_kind_come_apart_again(tiny, scales, kinds):
    planned = lanes.plan_lanes(resolve(dataclasses.replace(tiny, scale=scales)))
    every = [training.initialize(program, lane) for program, lane in planned]
    packed = states.pack(planned, every)
    if kinds is None:  # as checkpoints of every version have it
        assert isinstance(packed, training.LaneState) and len(packed.step) == len(planned)
    else:
        assert {kind: len(stack.step) for kind, stack in packed.items()} == kinds
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(packed))
    chex.assert_trees_all_equal(states.unpack(planned, packed), every)
    template = states.template(planned)
    chex.assert_trees_all_equal_shapes_and_dtypes(packed, template)
    assert jax.tree.structure(packed) == jax.tree.structure(template)
