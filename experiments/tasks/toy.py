"""Toy sequence tasks: what a small transformer is asked to learn.

A task is a value: what it asks, what guessing earns, and a sampler that makes batches on device
from a key. Sampling runs inside the training loop at every step, so it is jit-able, has static
shapes and keeps to a few operations. A new task is one builder here and one entry in TASKS.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from scipy import special

DEFAULT_SEQUENCE_LENGTH = 16  # multiples of 16 are the fastest
DEFAULT_VOCAB_SIZE = 16

# By optimizer; SGD's comes with momentum 0.9.
LEARNING_RATES: Mapping[str, float] = MappingProxyType({"adam": 1e-3, "adamw": 1e-3, "sgd": 0.1})

_RASP = "Weiss et al. 2021, Thinking Like Transformers"
_INDUCTION_HEADS = "Olsson et al. 2022, In-context Learning and Induction Heads"


class Batch(NamedTuple):
    """B sequences of T positions."""

    tokens_BT: jax.Array  # int32 in [0, num_tokens): the model's input
    targets_BT: jax.Array  # int32 in [0, num_outputs): the right output; 0 where it doesn't count
    answers_BT: jax.Array  # bool: the positions that count in loss and accuracy


class Task(NamedTuple):
    """A task at one size.

    Chance is the best expected result without attention that selects: `definition` says what the
    guess may know. A model that beats it has used attention for what the task is about.
    """

    name: str
    summary: str  # one line, for --help
    definition: str  # exact, at this size
    source: str  # where the task comes from
    attention: Literal["sharp", "diffuse", "positional"]  # what a solution asks of attention
    causal: bool  # position t sees positions up to t only
    sequence_length: int  # T
    vocab_size: int  # V, the number of symbols
    num_tokens: int  # size of the model's input vocabulary
    num_outputs: int  # size of the model's output vocabulary
    sample: Callable[[jax.Array, int], Batch]  # (key, batch_size) -> Batch
    chance_loss: float  # nats per answer
    chance_accuracy: float  # fraction of answers
    steps: int  # default: enough for scaled attention to learn the task
    num_layers: int = 1  # default
    min_layers: int = 1  # fewer can't learn it ...
    depth_reason: str = ""  # ... and this sentence says so; empty where one layer is enough
    learning_rates: Mapping[str, float] = LEARNING_RATES  # default by optimizer


def make_task(
    name: str,
    *,
    sequence_length: int | None = None,
    vocab_size: int | None = None,
    num_pairs: int | None = None,
) -> Task:
    """Build a task at a given size.

    Args:
      name: a key of TASKS.
      sequence_length: T; default 16.
      vocab_size: V, the number of symbols; default 16.
      num_pairs: P, the key-value pairs of `recall` (no other task has any);
        default min(max(⌊T/4⌋, 2), V).

    Raises:
      ValueError: an unknown name (lists the choices and the nearest one), a size that is not an
        integer in the task's range, or num_pairs for a task without pairs.
    """
    if name not in TASKS:
        nearest = difflib.get_close_matches(name.lower(), TASKS, n=1, cutoff=0.4)
        hint = f" (nearest: {nearest[0]})" if nearest else ""
        raise ValueError(f"task: unknown {name!r}{hint}; choose from {', '.join(TASKS)}")
    length = DEFAULT_SEQUENCE_LENGTH if sequence_length is None else sequence_length
    vocab = DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
    if num_pairs is None:
        return TASKS[name](length, vocab)
    if name != "recall":
        raise ValueError(
            f"num_pairs: {num_pairs}, must be left out for {name}: only recall has pairs"
        )
    return recall(length, vocab, num_pairs)


def sort(length: int, vocab: int) -> Task:
    """Build the task: output the sequence in ascending order."""
    _check("sort", "sequence_length", length, at_least=2)
    _check("sort", "vocab_size", vocab, at_least=2)

    def sample(key: jax.Array, batch_size: int) -> Batch:
        tokens_BT = _uniform_tokens(key, batch_size, length, vocab)
        return _every_position_counts(tokens_BT, jnp.sort(tokens_BT, axis=-1))

    # The token of rank t is at most v iff more than t tokens are. The own token u is one of them
    # iff u <= v, the other T - 1 are Binomial(T - 1, (v + 1) / V): two cumulative distributions.
    rank_T1 = np.arange(length)[:, None]
    share_1V = np.arange(1, vocab + 1)[None] / vocab
    without_own_TV = special.bdtrc(rank_T1, length - 1, share_1V)
    with_own_TV = special.bdtrc(rank_T1 - 1, length - 1, share_1V)
    smaller_TV = np.diff(without_own_TV, prepend=0)
    chance_loss, chance_accuracy = _chance_given_own_token(
        below=smaller_TV,
        equal=with_own_TV - without_own_TV + smaller_TV,
        above=np.diff(with_own_TV, prepend=0),
    )
    return Task(
        name="sort",
        summary="output the sequence in ascending order",
        definition=(
            f"{length} tokens, independent and uniform over {vocab} symbols. Position t outputs "
            "the token of rank t in ascending order. Every position counts. "
            "Chance knows the position and the own token."
        ),
        source=_RASP,
        attention="diffuse",
        causal=False,
        sequence_length=length,
        vocab_size=vocab,
        num_tokens=vocab,
        num_outputs=vocab,
        sample=sample,
        chance_loss=chance_loss,
        chance_accuracy=chance_accuracy,
        steps=600,
    )


def recall(length: int, vocab: int, num_pairs: int | None = None) -> Task:
    """Build the task: look up the values of keys shown before (multi-query associative recall)."""
    _check("recall", "sequence_length", length, at_least=5)
    _check("recall", "vocab_size", vocab, at_least=2)
    pairs = min(max(length // 4, 2), vocab) if num_pairs is None else num_pairs
    size = f" with sequence_length {length} and vocab_size {vocab}"
    most = min(vocab, (length - 1) // 2)
    _check("recall", "num_pairs", pairs, at_least=2, at_most=most, size=size)

    def sample(key: jax.Array, batch_size: int) -> Batch:
        for_keys, for_values, for_queries = random.split(key, 3)
        keys_BP = _distinct_symbols(for_keys, batch_size, pairs, vocab)
        values_BP = _distinct_symbols(for_values, batch_size, pairs, vocab)
        # With replacement: from a permutation of the pairs, late answers are left by elimination.
        asked_BQ = random.randint(for_queries, (batch_size, length - 2 * pairs), 0, pairs)
        context_BPP = jnp.stack([keys_BP, vocab + values_BP], axis=-1)
        return _queries_count(
            context=context_BPP.reshape(batch_size, 2 * pairs),
            queries=jnp.take_along_axis(keys_BP, asked_BQ, axis=1),
            answers=jnp.take_along_axis(values_BP, asked_BQ, axis=1),
        )

    return Task(
        name="recall",
        summary="look up the values of keys shown before (multi-query associative recall)",
        definition=(
            f"{pairs} pairs of a key and its value, then {length - 2 * pairs} queries: keys drawn "
            f"from the pairs uniformly, with replacement. The keys are distinct, of {vocab} key "
            f"symbols; the values are distinct, of {vocab} value symbols. A query outputs the "
            "value of its key. Only queries count. Chance knows which values were shown, not whose."
        ),
        source=(
            "Arora et al. 2023, Zoology: Measuring and Improving Recall in Efficient Language "
            "Models"
        ),
        attention="sharp",
        causal=True,
        sequence_length=length,
        vocab_size=vocab,
        num_tokens=2 * vocab,
        num_outputs=vocab,
        sample=sample,
        chance_loss=math.log(pairs),
        chance_accuracy=1 / pairs,
        steps=400,
        num_layers=2,
        min_layers=2,
        depth_reason=(
            "recall needs 2 layers: one head marks every value with the key before it, and a head "
            "above it finds the mark; one layer was still guessing after 1500 steps"
        ),
    )


def histogram(length: int, vocab: int) -> Task:
    """Build the task: output how often the own token occurs."""
    _check("histogram", "sequence_length", length, at_least=2)
    _check("histogram", "vocab_size", vocab, at_least=2)

    def sample(key: jax.Array, batch_size: int) -> Batch:
        tokens_BT = _uniform_tokens(key, batch_size, length, vocab)
        equal_BTS = tokens_BT[:, :, None] == tokens_BT[:, None, :]
        return _every_position_counts(tokens_BT, jnp.sum(equal_BTS, axis=-1) - 1)

    others_T = np.diff(special.bdtr(np.arange(length), length - 1, 1 / vocab), prepend=0)
    return Task(
        name="histogram",
        summary="output how often the own token occurs",
        definition=(
            f"{length} tokens, independent and uniform over {vocab} symbols. Each position outputs "
            "how many other positions hold its token (0 for a token that occurs once). Every "
            f"position counts. Chance knows that this is Binomial({length - 1}, 1/{vocab})."
        ),
        source=_RASP,
        attention="diffuse",
        causal=False,
        sequence_length=length,
        vocab_size=vocab,
        num_tokens=vocab,
        num_outputs=length,
        sample=sample,
        chance_loss=float(special.entr(others_T).sum()),
        chance_accuracy=float(others_T.max()),
        steps=1200,
    )


def induction(length: int, vocab: int) -> Task:
    """Build the task: output what followed the own token where it first occurred."""
    _check("induction", "sequence_length", length, at_least=4)
    _check("induction", "vocab_size", vocab, at_least=3)
    context = min(max(length // 2, 3), vocab)

    def sample(key: jax.Array, batch_size: int) -> Batch:
        for_context, for_queries = random.split(key)
        context_BC = _distinct_symbols(for_context, batch_size, context, vocab)
        asked_BQ = random.randint(for_queries, (batch_size, length - context), 0, context - 1)
        return _queries_count(
            context=context_BC,
            queries=jnp.take_along_axis(context_BC, asked_BQ, axis=1),
            answers=jnp.take_along_axis(context_BC, asked_BQ + 1, axis=1),
        )

    # The followers are all of the context but its first symbol. Where that one is asked, any
    # follower may be right; where another one is, itself is ruled out.
    followers = context - 1
    return Task(
        name="induction",
        summary="output what followed the own token where it first occurred",
        definition=(
            f"{context} distinct symbols of {vocab} in random order, then {length - context} "
            "queries: symbols drawn from these, but for the last one, uniformly, with replacement. "
            "A query outputs the symbol that followed it among the first. Only queries count. "
            "Chance knows the own token and which symbols followed another, not their order."
        ),
        source=_INDUCTION_HEADS,
        attention="sharp",
        causal=True,
        sequence_length=length,
        vocab_size=vocab,
        num_tokens=vocab,
        num_outputs=vocab,
        sample=sample,
        chance_loss=(math.log(followers) + (followers - 1) * math.log(followers - 1)) / followers,
        chance_accuracy=(1 + 1 / followers) / followers,
        steps=400,
        num_layers=2,
        min_layers=2,
        depth_reason=(
            "induction needs 2 layers: one head marks every token with the one before it, and a "
            "head above it finds the mark; one layer was still guessing after 1500 steps"
        ),
    )


def majority(length: int, vocab: int) -> Task:
    """Build the task: output the most frequent token of the sequence, everywhere."""
    _check("majority", "sequence_length", length, at_least=2)
    _check("majority", "vocab_size", vocab, at_least=2)

    def sample(key: jax.Array, batch_size: int) -> Batch:
        tokens_BT = _uniform_tokens(key, batch_size, length, vocab)
        counts_BV = jnp.sum(tokens_BT[:, :, None] == jnp.arange(vocab)[None, None], axis=1)
        mode_B1 = jnp.argmax(counts_BV, axis=-1, keepdims=True)
        return _every_position_counts(tokens_BT, jnp.broadcast_to(mode_B1, tokens_BT.shape))

    chance_loss, chance_accuracy = _chance_given_own_token(*_mode_given_own_token(length, vocab))
    return Task(
        name="majority",
        summary="output the most frequent token, everywhere",
        definition=(
            f"{length} tokens, independent and uniform over {vocab} symbols. Each position outputs "
            "the most frequent token of the sequence, the smallest of them if there are several. "
            "Every position counts. Chance knows the own token."
        ),
        source=f"{_RASP} (most frequent token; here with ties to the smallest)",
        attention="diffuse",
        causal=False,
        sequence_length=length,
        vocab_size=vocab,
        num_tokens=vocab,
        num_outputs=vocab,
        sample=sample,
        chance_loss=chance_loss,
        chance_accuracy=chance_accuracy,
        steps=1500,
    )


def reverse(length: int, vocab: int) -> Task:
    """Build the task: output the sequence backwards."""
    return _positional(
        "reverse",
        length,
        vocab,
        summary="output the sequence backwards (positional control)",
        rule=f"Position t outputs the token at {length - 1} - t",
        source_T=np.arange(length)[::-1],
        source=_RASP,
    )


def copy(length: int, vocab: int) -> Task:
    """Build the task: output the token one position back."""
    # One back, because copying the own token needs no attention.
    return _positional(
        "copy",
        length,
        vocab,
        summary="output the token one position back, in a circle (positional control)",
        rule="Position t outputs the token at t - 1, and the first position the last token",
        source_T=np.roll(np.arange(length), 1),
        source=f"{_INDUCTION_HEADS} (previous-token head)",
    )


TASKS: dict[str, Callable[[int, int], Task]] = {
    "sort": sort,
    "recall": recall,
    "histogram": histogram,
    "induction": induction,
    "majority": majority,
    "reverse": reverse,
    "copy": copy,
}


def _positional(
    name: str,
    length: int,
    vocab: int,
    *,
    summary: str,
    rule: str,
    source_T: np.ndarray,
    source: str,
) -> Task:
    """Build a task where position t outputs the token at source_T[t]."""
    _check(name, "sequence_length", length, at_least=2)
    _check(name, "vocab_size", vocab, at_least=2)
    counts_T = source_T != np.arange(length)  # the middle of an odd reverse needs no attention

    def sample(key: jax.Array, batch_size: int) -> Batch:
        tokens_BT = _uniform_tokens(key, batch_size, length, vocab)
        answers_BT = jnp.broadcast_to(counts_T, tokens_BT.shape)
        return Batch(tokens_BT, jnp.where(answers_BT, tokens_BT[:, source_T], 0), answers_BT)

    return Task(
        name=name,
        summary=summary,
        definition=(
            f"{length} tokens, independent and uniform over {vocab} symbols. {rule}. Every "
            "position counts that does not output its own token. Chance is uniform guessing."
        ),
        source=source,
        attention="positional",
        causal=False,
        sequence_length=length,
        vocab_size=vocab,
        num_tokens=vocab,
        num_outputs=vocab,
        sample=sample,
        chance_loss=math.log(vocab),
        chance_accuracy=1 / vocab,
        steps=200,
    )


def _check(
    task: str,
    field: str,
    value: int,
    *,
    at_least: int,
    at_most: float = math.inf,
    size: str = "",
) -> None:
    if type(value) is not int or not at_least <= value <= at_most:
        choices = f"from {at_least} to {at_most}" if at_most < math.inf else f"from {at_least} up"
        raise ValueError(f"{field}: {value}, must be a whole number {choices} for {task}{size}")


def _uniform_tokens(key: jax.Array, batch_size: int, length: int, vocab: int) -> jax.Array:
    return random.randint(key, (batch_size, length), 0, vocab)


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


def _chance_given_own_token(
    below: np.ndarray, equal: np.ndarray, above: np.ndarray
) -> tuple[float, float]:
    """Loss and accuracy of the best guess that knows the own token, uniform over V.

    Args:
      below: [..., V], P(target = v | own token u) for v < u, which doesn't depend on u otherwise.
      equal: [..., V], the same for v = u.
      above: [..., V], the same for v > u.

    Returns:
      Conditional entropy (nats) and expected largest probability, averaged over u and leading axes.
    """
    below, equal, above = (np.maximum(p, 0) for p in (below, equal, above))  # rounding of -1e-17

    def of_all_smaller(reduction: np.ufunc, values: np.ndarray) -> np.ndarray:
        reduced = reduction.accumulate(values, axis=-1)[..., :-1]
        return np.concatenate([np.zeros_like(values[..., :1]), reduced], axis=-1)

    def of_all_larger(reduction: np.ufunc, values: np.ndarray) -> np.ndarray:
        return of_all_smaller(reduction, values[..., ::-1])[..., ::-1]

    entropy = (
        of_all_smaller(np.add, special.entr(below))
        + special.entr(equal)
        + of_all_larger(np.add, special.entr(above))
    )
    largest = np.maximum(of_all_smaller(np.maximum, below), of_all_larger(np.maximum, above))
    return float(entropy.mean()), float(np.maximum(largest, equal).mean())


def _mode_given_own_token(length: int, vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """P(mode = v | own token u) for v < u, v = u and v > u: three arrays [V].

    The smallest mode is v with c occurrences iff smaller symbols occur fewer than c times, larger
    ones at most c times. Counts are Poisson(T/V) conditioned on their sum T, so the probability is
    a coefficient of a product of truncated Poisson generating functions.
    """
    counts = np.arange(length + 1)
    rate = length / vocab
    poisson = np.exp(counts * np.log(rate) - rate - special.gammaln(counts + 1))
    total = np.exp(length * np.log(length) - length - special.gammaln(length + 1))
    symbols = np.arange(vocab)
    below, equal, above = np.zeros((3, vocab))

    def powers(most: int) -> np.ndarray:
        """[V, T + 1]: the distribution of the sum of 0, 1, ..., V - 1 counts of at most `most`."""
        size = 4 * length + 64  # a Poisson(T) sum is never as large, so nothing wraps around
        spectra = np.tile(np.fft.rfft(poisson[: most + 1], size), (vocab, 1))
        spectra[0] = 1
        return np.fft.irfft(np.cumprod(spectra, axis=0), size)[:, : length + 1]

    fewest = -(-length // vocab)
    larger = powers(fewest - 1)
    for c in range(fewest, length + 1):
        if vocab * special.bdtrc(c - 1, length, 1 / vocab) < np.finfo(float).eps / length:
            break  # no symbol occurs this often
        smaller, larger = larger, powers(c)
        rest = counts[: length - c + 1]
        # [v, k]: the mode is v, with c occurrences, and k of the tokens are smaller than it.
        joint = smaller[:, rest] * larger[::-1][:, rest[::-1]] * poisson[c] / total
        equal += np.sum(joint * c, axis=-1)
        above += np.sum(joint * rest, axis=-1) / np.maximum(symbols, 1)
        below += np.sum(joint * rest[::-1], axis=-1) / np.maximum(symbols[::-1], 1)
    return below * vocab / length, equal * vocab / length, above * vocab / length
