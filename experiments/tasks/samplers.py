"""How batches are drawn: on device, from a key, inside the training loop at every step.

A sampler is jit-able, has static shapes and keeps to a few operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from experiments.tasks.table import Task


class Batch(NamedTuple):
    """B sequences of T positions."""

    tokens_BT: jax.Array  # int32 in [0, num_tokens): the model's input
    targets_BT: jax.Array  # int32 in [0, num_outputs): the right output; 0 where it doesn't count
    answers_BT: jax.Array  # bool: the positions that count in loss and accuracy


def sample(task: Task, key: jax.Array, batch_size: int) -> Batch:
    """Draw batch_size sequences of a task."""
    return SAMPLERS[task.name](task, key, batch_size)


def _sort(task: Task, key: jax.Array, batch_size: int) -> Batch:
    tokens_BT = _uniform_tokens(task, key, batch_size)
    return _every_position_counts(tokens_BT, jnp.sort(tokens_BT, axis=-1))


def _recall(task: Task, key: jax.Array, batch_size: int) -> Batch:
    pairs, vocab = task.num_shown, task.vocab_size
    for_keys, for_values, for_queries = random.split(key, 3)
    keys_BP = _distinct_symbols(for_keys, batch_size, pairs, vocab)
    values_BP = _distinct_symbols(for_values, batch_size, pairs, vocab)
    # With replacement: from a permutation of the pairs, late answers are left by elimination.
    asked = (batch_size, task.sequence_length - 2 * pairs)
    asked_BQ = random.randint(for_queries, asked, 0, pairs)
    context_BPP = jnp.stack([keys_BP, vocab + values_BP], axis=-1)
    return _queries_count(
        context=context_BPP.reshape(batch_size, 2 * pairs),
        queries=jnp.take_along_axis(keys_BP, asked_BQ, axis=1),
        answers=jnp.take_along_axis(values_BP, asked_BQ, axis=1),
    )


def _histogram(task: Task, key: jax.Array, batch_size: int) -> Batch:
    tokens_BT = _uniform_tokens(task, key, batch_size)
    equal_BTS = tokens_BT[:, :, None] == tokens_BT[:, None, :]
    return _every_position_counts(tokens_BT, jnp.sum(equal_BTS, axis=-1) - 1)


def _induction(task: Task, key: jax.Array, batch_size: int) -> Batch:
    shown = task.num_shown
    for_context, for_queries = random.split(key)
    context_BC = _distinct_symbols(for_context, batch_size, shown, task.vocab_size)
    asked = (batch_size, task.sequence_length - shown)
    asked_BQ = random.randint(for_queries, asked, 0, shown - 1)
    return _queries_count(
        context=context_BC,
        queries=jnp.take_along_axis(context_BC, asked_BQ, axis=1),
        answers=jnp.take_along_axis(context_BC, asked_BQ + 1, axis=1),
    )


def _majority(task: Task, key: jax.Array, batch_size: int) -> Batch:
    tokens_BT = _uniform_tokens(task, key, batch_size)
    symbols_V = jnp.arange(task.vocab_size)
    counts_BV = jnp.sum(tokens_BT[:, :, None] == symbols_V[None, None], axis=1)
    mode_B1 = jnp.argmax(counts_BV, axis=-1, keepdims=True)
    return _every_position_counts(tokens_BT, jnp.broadcast_to(mode_B1, tokens_BT.shape))


def _reverse(task: Task, key: jax.Array, batch_size: int) -> Batch:
    return _positional(task, key, batch_size, np.arange(task.sequence_length)[::-1])


def _copy(task: Task, key: jax.Array, batch_size: int) -> Batch:
    # One back, because copying the own token needs no attention.
    return _positional(task, key, batch_size, np.roll(np.arange(task.sequence_length), 1))


SAMPLERS: dict[str, Callable[[Task, jax.Array, int], Batch]] = {
    "sort": _sort,
    "recall": _recall,
    "histogram": _histogram,
    "induction": _induction,
    "majority": _majority,
    "reverse": _reverse,
    "copy": _copy,
}


def _positional(task: Task, key: jax.Array, batch_size: int, source_T: np.ndarray) -> Batch:
    """Position t outputs the token at source_T[t]; it counts unless that is its own."""
    tokens_BT = _uniform_tokens(task, key, batch_size)
    counts_T = source_T != np.arange(task.sequence_length)  # not the middle of an odd reverse
    answers_BT = jnp.broadcast_to(counts_T, tokens_BT.shape)
    return Batch(tokens_BT, jnp.where(answers_BT, tokens_BT[:, source_T], 0), answers_BT)


def _uniform_tokens(task: Task, key: jax.Array, batch_size: int) -> jax.Array:
    return random.randint(key, (batch_size, task.sequence_length), 0, task.vocab_size)


def _distinct_symbols(key: jax.Array, batch_size: int, count: int, vocab: int) -> jax.Array:
    """Draw `count` distinct symbols per row in random order: int32 [batch_size, count].

    The rank of one of V random numbers among all of them is uniform, and two never share one. On
    CPU this takes a tenth of the time of jax.random.permutation.
    """
    index_bits = (vocab - 1).bit_length()
    random_BV = random.bits(key, (batch_size, vocab), jnp.uint32)
    # The symbol's own index in the low bits makes ties impossible.
    unique_BV = random_BV >> index_bits << index_bits | jnp.arange(vocab, dtype=jnp.uint32)[None]
    smaller_BPV = unique_BV[:, None, :] < unique_BV[:, :count, None]
    return jnp.sum(smaller_BPV, axis=-1, dtype=jnp.int32)


def _every_position_counts(tokens_BT: jax.Array, targets_BT: jax.Array) -> Batch:
    answers_BT = jnp.ones(tokens_BT.shape, bool)
    return Batch(tokens_BT, targets_BT.astype(jnp.int32), answers_BT)


def _queries_count(context: jax.Array, queries: jax.Array, answers: jax.Array) -> Batch:
    """Put queries, which count, after a context, which doesn't; all int32 [B, ...]."""
    return Batch(
        tokens_BT=jnp.concatenate([context, queries], axis=1),
        targets_BT=jnp.concatenate([jnp.zeros_like(context), answers], axis=1),
        answers_BT=jnp.concatenate(
            [jnp.zeros(context.shape, bool), jnp.ones(queries.shape, bool)], axis=1
        ),
    )
