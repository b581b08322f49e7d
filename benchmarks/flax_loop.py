"""The usual way to train in Flax: a jitted step that Python calls, its metrics read every step.

    python -m benchmarks.flax_loop

The same model, task, optimizer and diagnostics as `train.py`, so that what differs is the loop.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from attention import transformer
from benchmarks.rounds import Work, measure, spread
from experiments.config import TrainConfig, resolve
from experiments.engine import training
from experiments.engine.training import LaneProgram


def make_step(program: LaneProgram) -> Any:
    """(state, multiplier, key) to (state, metrics): one update and everything that a row holds."""
    c = program.model
    shape = (c.num_layers, program.batch_size, c.num_heads, c.sequence_length, c.sequence_length)

    def step(state: TrainState, multiplier: jax.Array, key: jax.Array):
        batch = training.sample_batch(program, jax.random.fold_in(key, state.step))

        def loss_fn(params, probe):
            output = state.apply_fn(params, batch.tokens_BT, multiplier, logit_probe_LBHTS=probe)
            loss, accuracy = training.loss_and_accuracy(output.logits, batch)
            return loss, (accuracy, output.statistics)

        (loss, (accuracy, heads)), (gradients, of_logits) = jax.value_and_grad(
            loss_fn, argnums=(0, 1), has_aux=True
        )(state.params, jnp.zeros(shape))
        new = state.apply_gradients(grads=gradients)
        change = jax.tree.map(jnp.subtract, new.params, state.params)
        kernels = [part for part in gradients.values() if "query" in part]
        metrics = {
            "loss": loss,
            "accuracy": accuracy,
            "grad_norm": optax.tree.norm(gradients),
            "grad_norm_logits": optax.tree.norm(of_logits),
            "update_norm": optax.tree.norm(change),
            "heads": heads,
            **{
                name: optax.tree.norm([part[name] for part in kernels])
                for name in ("query", "key", "value", "output")
            },
        }
        return new, metrics

    return step


def make_state(program: LaneProgram, key: jax.Array) -> TrainState:
    """Initial weights and Adam."""

    def apply_fn(params, *arguments, **keywords):
        return transformer.apply(program.model, params, *arguments, **keywords)

    params = transformer.init(program.model, key)
    return TrainState.create(apply_fn=apply_fn, params=params, tx=optax.adam(1e-3))


def one_by_one(config: TrainConfig, steps: int) -> Work:
    """One model at a time."""
    program = training.lane_program(resolve(config))
    step = jax.jit(make_step(program))
    state = jax.jit(lambda key: make_state(program, key))(jax.random.key(0))
    multiplier = jnp.float32(0.125)

    def work() -> tuple[float, float]:
        nonlocal state
        start = time.perf_counter()
        for _ in range(steps):
            state, metrics = step(state, multiplier, jax.random.key(1))
            jax.tree.map(np.asarray, metrics)
        return steps, time.perf_counter() - start

    return work


def vmapped(config: TrainConfig, steps: int, lanes: int = 10) -> Work:
    """Ten models as one batch."""
    program = training.lane_program(resolve(config))
    step = jax.jit(jax.vmap(make_step(program)))
    keys = jax.random.split(jax.random.key(0), lanes)
    states = jax.jit(jax.vmap(lambda key: make_state(program, key)))(keys)
    multipliers = jnp.full(lanes, 0.125)

    def work() -> tuple[float, float]:
        nonlocal states
        start = time.perf_counter()
        for _ in range(steps // lanes):
            states, metrics = step(states, multipliers, keys)
            jax.tree.map(np.asarray, metrics)
        return steps // lanes * lanes, time.perf_counter() - start

    return work


def main() -> None:
    """Print model-steps per second."""
    contenders = {"one by one": (one_by_one, (TrainConfig(), 200))} | {
        "ten vmapped": (vmapped, (TrainConfig(), 200))
    }
    for name, rates in measure(contenders, rounds=3).items():
        print(f"{name}: {spread(rates, '.0f')} model-steps/s")


if __name__ == "__main__":
    main()
