"""The same training in Flax, as one writes it there: its layers, a TrainState, optax.

It shares the task's sampler with `train.py`, so that the data are the same, and no other code: what
makes this project's model or loop fast is not handed on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from benchmarks.rounds import Work
from experiments.config import RunConfig
from experiments.metrics import HEAD_STATISTICS, STEP_SCALARS
from experiments.tasks.samplers import Batch, sample

LEARNING_RATE, SCALE = 1e-3, 0.125

Numbers = dict[str, jax.Array]


class Attention(nn.Module):
    """[B, T, D] to the same, and the statistics of each head."""

    c: RunConfig

    @nn.compact
    def __call__(self, x: jax.Array, probe: jax.Array) -> tuple[jax.Array, Numbers]:
        """The probe is added to the logits, to take a gradient at."""
        c, unit = self.c, nn.initializers.variance_scaling(1.0, "fan_in", "normal")

        def heads(name: str, width: int) -> jax.Array:
            shape = (c.num_heads, width)
            return nn.DenseGeneral(shape, use_bias=False, kernel_init=unit, name=name)(x)

        query, key, value = heads("query", c.d_k), heads("key", c.d_k), heads("value", c.d_v)
        logits = jnp.einsum("bthk,bshk->bhts", query, key) * SCALE + probe
        values = jnp.einsum("bhts,bshv->bthv", nn.softmax(logits), value)
        output = nn.Dense(c.d_model, use_bias=False, name="output")
        statistics = row_statistics(jax.lax.stop_gradient(logits))
        return output(values.reshape(*x.shape[:-1], -1)), statistics


class FeedForward(nn.Module):
    """[B, T, D] to the same."""

    c: RunConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """One hidden layer."""
        hidden = nn.relu(nn.Dense(self.c.d_ff, name="hidden")(x))
        return nn.Dense(self.c.d_model, name="output")(hidden)


class Transformer(nn.Module):
    """Pre-norm, learned positions: logits, and statistics [L, H]."""

    c: RunConfig

    @nn.compact
    def __call__(self, tokens: jax.Array, probes: jax.Array) -> tuple[jax.Array, Numbers]:
        """A probe for each layer."""
        c, normal = self.c, nn.initializers.normal(1.0)
        position = nn.Embed(c.sequence_length, c.d_model, embedding_init=normal, name="position")
        x = nn.Embed(c.vocab_size, c.d_model, embedding_init=normal, name="token")(tokens)
        x = x + position(jnp.arange(c.sequence_length))[None]
        statistics = []
        for i in range(c.num_layers):
            normed = nn.LayerNorm(name=f"attention_norm_{i}")(x)
            update, rows = Attention(c, name=f"attention_{i}")(normed, probes[i])
            x = x + update
            normed = nn.LayerNorm(name=f"feed_forward_norm_{i}")(x)
            x = x + FeedForward(c, name=f"feed_forward_{i}")(normed)
            statistics.append(rows)
        logits = nn.Dense(c.vocab_size, name="readout")(nn.LayerNorm(name="final_norm")(x))
        return logits, jax.tree.map(lambda *layers: jnp.stack(layers), *statistics)


def row_statistics(logits: jax.Array) -> Numbers:
    """What `attention_statistics` and `head_means` give, by the same tail sums: each [H]."""
    maximum = logits.max(-1, keepdims=True)
    shifted = logits - maximum
    below = shifted < 0
    tail = jnp.where(below, jnp.exp(shifted), 0.0)
    ties = logits.shape[-1] - 1 - below.sum(-1)  # of the maximum, beside the one left out
    a1, a2, a3 = (power.sum(-1) + ties for power in (tail, tail**2, tail**3))
    z = 1 + a1
    entropy = jnp.log1p(a1) - (tail * shifted).sum(-1) / z
    norm = a1**2 + 3 * a2 - 2 * a3 + 2 * a1 * (a2 - a3) + a1**2 * a2 + a2**2
    rows = {
        "dead_row_fraction": jnp.sqrt(norm) / z**2 < 1e-3,
        "entropy": entropy,
        "normalized_entropy": entropy / math.log(logits.shape[-1]),
        "max_weight": 1 / z,
        "saturation": 1 / z > 0.9,
        "jacobian_trace": (2 * a1 + a1**2 - a2) / z**2,
        "logit_std": logits.std(-1),
    }
    means = {name: values.mean((0, 2)) for name, values in rows.items()}
    return means | {"logit_max": maximum.max((0, 2, 3))}


def make_state(c: RunConfig, key: jax.Array) -> TrainState:
    """Initial weights and Adam."""
    model = Transformer(c)
    tokens, probes = jnp.zeros((1, c.sequence_length), jnp.int32), [0.0] * c.num_layers
    params: Any = model.init(key, tokens, probes)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(LEARNING_RATE))


def update(c: RunConfig, state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
    """One update, and the numbers of its row in order."""
    probes = jnp.zeros((c.num_layers, c.batch_size, c.num_heads, *[c.sequence_length] * 2))

    def loss_fn(params, probes):
        logits, heads = state.apply_fn({"params": params}, batch.tokens_BT, probes)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets_BT)
        accuracy = (logits.argmax(-1) == batch.targets_BT).mean()
        return losses.mean(), {"accuracy": accuracy, **heads}

    (loss, row), (gradients, of_logits) = jax.value_and_grad(loss_fn, (0, 1), has_aux=True)(
        state.params, probes
    )
    new = state.apply_gradients(grads=gradients)
    kernels = [part for name, part in gradients.items() if name.startswith("attention_")]
    row |= {
        "loss": loss,
        "applied_learning_rate": jnp.float32(LEARNING_RATE),
        "grad_norm": optax.tree.norm(gradients),
        "grad_norm_logits": optax.tree.norm(of_logits),
        "update_norm": optax.tree.norm(jax.tree.map(jnp.subtract, new.params, state.params)),
        **{
            f"grad_norm_{name}_kernel": optax.tree.norm([part.get(name) for part in kernels])
            for name in ("query", "key", "value", "output")
        },
    }
    ordered = [row[name] for name in (*STEP_SCALARS, *HEAD_STATISTICS)]
    return new, jnp.concatenate([numbers.ravel() for numbers in ordered])


class Way(NamedTuple):
    """One way to run it."""

    lanes: int = 0  # models in one batch by jax.vmap; 0: one by itself
    scan: int = 1  # steps that one call of the compiled program takes


def make_step(c: RunConfig, way: Way) -> Callable[..., tuple[TrainState, jax.Array]]:
    """(state, key) to (state, rows), compiled: way.scan updates, each with a batch of its own."""
    task = c.make_task()

    def step(state: TrainState, key: jax.Array) -> tuple[TrainState, jax.Array]:
        batch = sample(task, jax.random.fold_in(key, state.step), c.batch_size)
        return update(c, state, batch)

    def several(state: TrainState, key: jax.Array) -> tuple[TrainState, jax.Array]:
        return jax.lax.scan(lambda state, _: step(state, key), state, length=way.scan)

    taken = step if way.scan == 1 else several
    return jax.jit(jax.vmap(taken) if way.lanes else taken, donate_argnums=0)


def contender(c: RunConfig, way: Way) -> Work:
    """Task sort, drawn anew at every step; every row is read."""
    step, key = make_step(c, way), jax.random.key(0)
    initial: Any = partial(make_state, c)
    if way.lanes:
        key, initial = jax.random.split(key, way.lanes), jax.vmap(initial)
    state = jax.jit(initial)(key)

    def work(seconds: float) -> tuple[float, float]:
        nonlocal state
        calls, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            state, rows = step(state, key)
            np.asarray(rows)
            calls += 1
        return calls * way.scan * max(way.lanes, 1), time.perf_counter() - start

    work(0.01)
    return work
