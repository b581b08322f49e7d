"""Every task is learned, at a small size, by scaled attention; chance is far below."""

import pytest

from experiments.config import TrainConfig, resolve
from experiments.engine import training
from experiments.engine.lanes import plan_lanes
from experiments.tasks import TASKS, make_task

STEPS = {"sort": 400, "recall": 500, "histogram": 700, "induction": 500, "majority": 900}


@pytest.mark.parametrize("name", TASKS)
def test_scaled_attention_learns(name):
    size = {"sequence_length": 8, "vocab_size": 6, "d_model": 32, "d_k": 16, "eval_size": 128}
    config = TrainConfig(task=name, scale="sqrt", learning_rate=3e-3, num_seeds=1, **size)
    [(program, lane)] = plan_lanes(resolve(config))
    state, left = training.initialize(program, lane), STEPS.get(name, 200)
    while left > 0:
        state, _, _ = training.advance(program, lane, state, min(left, training.CAPACITY))
        left -= training.CAPACITY
    accuracy = training.evaluate(program, lane, state).accuracy
    chance = make_task(name, sequence_length=8, vocab_size=6).chance_accuracy
    assert chance < 0.75
    assert accuracy > max(0.9, chance + 0.2)
