"""The first steps of every kind of arm, pinned: a change of the numbers is seen, and meant.

Where one is meant, `PIN=1 pytest tests/experiments/engine/test_first_steps.py` writes new ones.
"""

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest

from attention.scale import SCORE_RULES
from experiments.arms import ARMS
from experiments.config import TrainConfig
from experiments.runs.record import train

PINNED = Path(__file__).parents[2] / "data" / "first_steps.json"
STEPS = 20  # so few that last bits, which belong to the machine, stay below 1e-6 in every arm
NAMES = ("none", "sqrt", "mup", "power:-0.25", "learned", "fold", "hot", "0.2")


def first_steps(settings: TrainConfig) -> dict[str, dict[str, list[float]]]:
    """Per arm: loss, mean entropy and gradient norm of each step."""
    metrics = train(dataclasses.replace(settings, scale=NAMES, steps=STEPS, num_seeds=1)).metrics
    columns = {
        "loss": metrics.loss,
        "entropy": metrics.heads.entropy.mean(axis=(-2, -1)),
        "grad_norm": metrics.grad_norm,
        "grad_norm_query_kernel": metrics.grad_norm_query_kernel,
    }
    return {
        name: {column: [float(f"{x:.7g}") for x in values[i]] for column, values in columns.items()}
        for i, name in enumerate(NAMES)
    }


@pytest.fixture(scope="module")
def found(tiny):
    numbers = first_steps(tiny)
    if os.environ.get("PIN"):
        PINNED.write_text(json.dumps(numbers, indent=1) + "\n")
    return numbers


def test_every_arm_of_the_table_is_pinned():
    assert {name.partition(":")[0] for name in NAMES} - {"0.2"} == SCORE_RULES.keys() | ARMS.keys()
    assert json.loads(PINNED.read_text()).keys() == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_steps_have_not_moved(found, name):
    pinned = json.loads(PINNED.read_text())[name]
    for column, values in found[name].items():
        np.testing.assert_allclose(values, pinned[column], rtol=1e-4, err_msg=f"{name}: {column}")
