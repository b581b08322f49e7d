"""The lanes' states as one tree: what a checkpoint holds, and what processes send each other.

Lanes of one kind are stacked. Where all lanes are of one kind that stack is the whole tree, as
checkpoints of every version have it; else the tree is a dict from kind to stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from experiments.engine import training
from experiments.engine.lanes import PlannedLane
from experiments.engine.training import LaneProgram, LaneState


def shapes(lanes: Sequence[PlannedLane]) -> list[LaneState]:
    """Each lane's state as shapes and dtypes."""
    of_program: dict[LaneProgram, LaneState] = {}
    for program, lane in lanes:
        if program not in of_program:
            of_program[program] = jax.eval_shape(partial(training.initialize, program), lane)
    return [of_program[program] for program, _ in lanes]


def pack(lanes: Sequence[PlannedLane], states: Sequence[LaneState]) -> Any:
    """All states as one tree of NumPy arrays, a leading axis over the lanes of a kind."""
    return _pack(lanes, states, lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]))


def template(lanes: Sequence[PlannedLane]) -> Any:
    """What `pack` gives, as shapes and dtypes."""

    def stacked(*leaves: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((len(leaves), *leaves[0].shape), leaves[0].dtype)

    return _pack(lanes, shapes(lanes), stacked)


def unpack(lanes: Sequence[PlannedLane], packed: Any) -> list[LaneState]:
    """The inverse of `pack`."""
    groups = _groups(lanes)
    by_kind = {next(iter(groups)): packed} if len(groups) == 1 else packed
    states = {
        i: jax.tree.map(lambda leaf, place=place: leaf[place], by_kind[kind])
        for kind, members in groups.items()
        for place, i in enumerate(members)
    }
    return [states[i] for i in range(len(lanes))]


def _groups(lanes: Sequence[PlannedLane]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for i, lane in enumerate(lanes):
        groups.setdefault(lane.program.kind, []).append(i)
    return groups


def _pack(lanes: Sequence[PlannedLane], states: Sequence[Any], stack: Callable) -> Any:
    by_kind = {
        kind: jax.tree.map(stack, *(states[i] for i in members))
        for kind, members in _groups(lanes).items()
    }
    return next(iter(by_kind.values())) if len(by_kind) == 1 else by_kind
