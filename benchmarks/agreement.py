"""Whether the peers compute what this project does: from the same weights, on the same batches.

    python -m benchmarks.agreement --out=results/benchmarks/agreement.md

Every number of every row of some updates, the whole update's floating-point operations by three
counters, and by hand. A contender that saved work would be seen here.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import flax_peer
from benchmarks.rounds import publish
from experiments.config import RunConfig, TrainConfig, resolve
from experiments.engine import lanes, training
from experiments.engine.training import LaneProgram
from experiments.metrics import HEAD_STATISTICS, STEP_SCALARS, StepMetrics
from experiments.tasks.samplers import Batch


class Reference(NamedTuple):
    """This project's updates, and what they were made from."""

    params: Any  # the initial weights
    batches: list[Batch]
    rows: np.ndarray  # [updates, numbers]


def reference(config: RunConfig, updates: int) -> Reference:
    """The first updates of a lane, as the engine takes them."""
    program, lane = lanes.plan_lanes(config)[0]
    state = training.initialize(program, lane)

    @jax.jit
    def batch(step: int) -> Batch:
        return training.sample_batch(program, training.stream_key(lane.seed, "data", step))

    batches: list[Batch] = [batch(step) for step in range(updates)]
    rows = training.advance(program, lane, state, np.int32(updates)).rows
    return Reference(state.params, batches, flat(rows)[:updates])


def flat(rows: StepMetrics) -> np.ndarray:
    """The numbers of rows in the order that the peers have them in: [rows, numbers]."""
    fields = [getattr(rows, name) for name in STEP_SCALARS]
    fields += [getattr(rows.heads, name) for name in HEAD_STATISTICS]
    return np.concatenate([np.asarray(field).reshape(len(rows.loss), -1) for field in fields], 1)


def flax_rows(config: RunConfig, given: Reference) -> np.ndarray:
    """The same updates by the Flax peer."""
    state = flax_peer.make_state(config, jax.random.key(0)).replace(params=given.params)
    update = jax.jit(partial(flax_peer.update, config))
    rows = []
    for batch in given.batches:
        state, row = update(state, batch)
        rows.append(np.asarray(row))
    return np.stack(rows)


def torch_rows(config: RunConfig, given: Reference, way: Any) -> np.ndarray:
    """The same updates by the PyTorch peer; of an ensemble, its last model's."""
    import torch

    from benchmarks import torch_peer

    step = torch_peer.make_step(config, way, torch_peer.weights_of(given.params))
    rows = []
    for batch in given.batches:
        pair = [torch.tensor(np.asarray(x), dtype=torch.long) for x in batch[:2]]
        if way.lanes:
            pair = [x.expand(way.lanes, *x.shape) for x in pair]
        rows.append(np.asarray(step(*pair).tolist()).reshape(max(way.lanes, 1), -1)[-1])
    return np.stack(rows)


def step_operations(program: LaneProgram) -> int:
    """Floating-point operations of the matrix products of one update, by hand.

    A product of [m, k] and [k, n] is 2 m k n; going back takes two more of that size for each.
    """
    c = program.model
    tokens = program.batch_size * c.sequence_length
    layer = c.d_model * c.num_heads * (2 * c.d_k + c.d_v)  # queries, keys, values
    layer += c.sequence_length * c.num_heads * (c.d_k + c.d_v)  # logits, weighted values
    layer += c.num_heads * c.d_v * c.d_model + 2 * c.d_model * c.d_ff
    return 3 * 2 * tokens * (c.num_layers * layer + c.d_model * c.num_outputs)


def jax_operations(function: Callable, *arguments: Any) -> int:
    """Floating-point operations of the matrix products that XLA has compiled a function to."""
    text = jax.jit(function).lower(*arguments).compile().as_text() or ""
    shapes = dict(re.findall(r"%(\S+) = \w+\[([\d,]*)\]", text))
    count = 0
    for result, left, axes in re.findall(
        r"= \w+\[([\d,]*)\]\S* dot\(%(\S+), %.*?lhs_contracting_dims=\{([\d,]*)\}", text
    ):
        summed = math.prod(_numbers(shapes[left])[axis] for axis in _numbers(axes))
        count += 2 * summed * math.prod(_numbers(result))
    return count


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def torch_operations(config: RunConfig, given: Reference, way: Any) -> int:
    """Floating-point operations of the matrix products of an update, by PyTorch's counter."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        torch_rows(config, given._replace(batches=given.batches[:1]), way)
    return counter.get_total_flops() // max(way.lanes, 1)


def has_torch() -> bool:
    """Whether PyTorch is installed."""
    return importlib.util.find_spec("torch") is not None


def difference(rows: np.ndarray, expected: np.ndarray) -> float:
    """The largest, relative to the largest value that the number takes (1 where that is 0)."""
    size = np.abs(expected).max(axis=0)
    return float(np.max(np.abs(rows - expected) / np.where(size == 0, 1, size)))


def torch_ways() -> dict[str, Any]:
    """Every way that PyTorch is asked for, if it is there."""
    if not has_torch():
        return {}
    from benchmarks.torch_peer import Way

    return {
        "PyTorch, eager": Way(),
        "PyTorch, eager, ensemble": Way(2),
        "PyTorch, torch.compile, model": Way(compiled=True),
        "PyTorch, torch.compile, whole update": Way(whole=True, compiled=True),
        "PyTorch, torch.compile, whole update, ensemble": Way(2, whole=True, compiled=True),
    }


def operations(config: RunConfig, given: Reference) -> dict[str, int]:
    """Floating-point operations of the matrix products of an update, by hand and by counters."""
    program, lane = lanes.plan_lanes(config)[0]
    state = training.initialize(program, lane)
    peer = flax_peer.make_state(config, jax.random.key(0))
    return {
        "by hand": step_operations(program),
        "this project": jax_operations(partial(training.train_step, program), lane, state),
        "Flax": jax_operations(partial(flax_peer.update, config), peer, given.batches[0]),
        **{
            name: torch_operations(config, given, way)
            for name, way in torch_ways().items()
            if not way.compiled  # the counter sees what is dispatched
        },
    }


def compare(config: RunConfig, updates: int) -> list[tuple[str, ...]]:
    """A line of the table for this project and each peer."""
    given = reference(config, updates)
    counts = {name: f"{n / 1e6:.3f}" for name, n in operations(config, given).items()}
    rows = {"this project": given.rows, "Flax": flax_rows(config, given)}
    rows |= {name: torch_rows(config, given, way) for name, way in torch_ways().items()}
    differences = {
        name: (
            f"{difference(numbers[:, :1], given.rows[:, :1]):.1e}",
            f"{difference(numbers, given.rows):.1e}",
            f"{numbers[-1, 0]:.6f}",
        )
        for name, numbers in rows.items()
    }
    nothing = ("–",) * 3
    return [
        (name, counts.get(name, "–"), *differences.get(name, nothing))
        for name in dict.fromkeys((*counts, *rows))
    ]


def main() -> None:
    """Compare, print a table, write it."""
    parser = argparse.ArgumentParser(
        description="Whether the peers compute what this project does."
    )
    parser.add_argument("--sequence_length", type=int, default=16)
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--out", type=Path, help="a page of markdown: .../agreement.md")
    options = parser.parse_args()
    config = resolve(TrainConfig(scale=("sqrt",), sequence_length=options.sequence_length))
    publish(
        options.out,
        f"Agreement, {config.batch_size} sequences of {config.sequence_length} tokens",
        ("", "products, MFLOP per update", "loss differs by", "any number by", "last loss"),
        compare(config, options.updates),
        f"Largest difference over {options.updates} updates from the same weights on the same "
        "batches, relative to the largest value that a number takes; accuracy and fractions of "
        "rows move by an answer or a row at a time. Products are counted in XLA's compiled "
        "program and by PyTorch's FlopCounterMode.",
    )


if __name__ == "__main__":
    main()
