"""Toy sequence tasks: what a small transformer is asked to learn, and what guessing earns.

A task is a value without JAX in it: what it asks, its sizes, its chance level. `samplers.py` draws
its batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from scipy import special

from attention.names import unknown
from experiments.tasks.chance import chance_given_own_token, mode_given_own_token

DEFAULT_SEQUENCE_LENGTH = 16  # multiples of 16 are the fastest
DEFAULT_VOCAB_SIZE = 16

_RASP = "Weiss et al. 2021, Thinking Like Transformers"
_INDUCTION_HEADS = "Olsson et al. 2022, In-context Learning and Induction Heads"


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
    chance_loss: float  # nats per answer
    chance_accuracy: float  # fraction of answers
    steps: int  # default: enough for scaled attention to learn the task
    num_layers: int = 1  # default
    min_layers: int = 1  # fewer can't learn it ...
    depth_reason: str = ""  # ... and this sentence says so; empty where one layer is enough
    num_shown: int = 0  # key-value pairs (recall) or symbols (induction) before the queries


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
        raise unknown("task", name, TASKS)
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

    # The token of rank t is at most v iff more than t tokens are. The own token u is one of them
    # iff u <= v, the other T - 1 are Binomial(T - 1, (v + 1) / V): two cumulative distributions.
    rank_T1 = np.arange(length)[:, None]
    share_1V = np.arange(1, vocab + 1)[None] / vocab
    without_own_TV = special.bdtrc(rank_T1, length - 1, share_1V)
    with_own_TV = special.bdtrc(rank_T1 - 1, length - 1, share_1V)
    smaller_TV = np.diff(without_own_TV, prepend=0)
    chance_loss, chance_accuracy = chance_given_own_token(
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
        num_shown=pairs,
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
        chance_loss=float(special.entr(others_T).sum()),
        chance_accuracy=float(others_T.max()),
        steps=1200,
    )


def induction(length: int, vocab: int) -> Task:
    """Build the task: output what followed the own token where it first occurred."""
    _check("induction", "sequence_length", length, at_least=4)
    _check("induction", "vocab_size", vocab, at_least=3)
    context = min(max(length // 2, 3), vocab)

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
        num_shown=context,
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

    chance_loss, chance_accuracy = chance_given_own_token(*mode_given_own_token(length, vocab))
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
        source=_RASP,
    )


def copy(length: int, vocab: int) -> Task:
    """Build the task: output the token one position back."""
    return _positional(
        "copy",
        length,
        vocab,
        summary="output the token one position back, in a circle (positional control)",
        rule="Position t outputs the token at t - 1, and the first position the last token",
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
    name: str, length: int, vocab: int, *, summary: str, rule: str, source: str
) -> Task:
    """Build a task where each position outputs the token of another."""
    _check(name, "sequence_length", length, at_least=2)
    _check(name, "vocab_size", vocab, at_least=2)
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
