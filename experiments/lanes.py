"""Many lanes over the devices of a machine: which lane runs where, and in what order.

Each device has one host thread that feeds it its lanes one after the other, chunk by chunk. A lane
never shares a computation with another, so its numbers depend neither on which lanes run beside it
nor on how many devices there are.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import training
from experiments.config import TrainConfig
from experiments.training import Evaluation, Lane, LaneProgram, LaneState, StepMetrics


class LaneName(NamedTuple):
    """What tells the lanes of a run apart; the key of every row that is written."""

    scale: str  # the rule as typed
    learning_rate: float
    seed: int


class Chunk(NamedTuple):
    """A stretch of steps that every lane takes before any lane goes on."""

    start: int  # updates taken before it
    stop: int  # updates taken after it
    evaluate: bool  # on the held-out set, at `stop`


class ChunkResult(NamedTuple):
    """What a chunk gave; arrays are NumPy's, with a leading axis of lanes."""

    chunk: Chunk
    metrics: StepMetrics  # fields [lanes, steps of the chunk, ...]
    evaluation: Evaluation | None  # fields [lanes]
    states: tuple[LaneState, ...]  # one a lane, on its device


def lane_names(config: TrainConfig) -> tuple[LaneName, ...]:
    """The lanes of a resolved config, in the order of the rows: scale, learning rate, seed."""
    rates: Any = config.learning_rate
    return tuple(
        itertools.starmap(LaneName, itertools.product(config.scale, rates, config.seeds()))
    )


def lanes_of(config: TrainConfig) -> tuple[Lane, ...]:
    """The traced numbers of each lane, in the order of `lane_names`."""
    multiplier = {rule.name: rule.multiplier for rule in config.rules()}
    return tuple(
        make_lane(multiplier[name.scale], name.learning_rate, name.seed)
        for name in lane_names(config)
    )


def make_lane(multiplier: float, learning_rate: float, seed: int, **query_key: float) -> Lane:
    """A Lane with its numbers in the dtypes that the compiled program was made for."""
    lane = Lane(multiplier, learning_rate, 0, **query_key)
    return Lane(*map(np.float32, lane))._replace(seed=np.uint32(seed))


def start_devices(num_lanes: int) -> list[jax.Device]:
    """This process's devices; on CPU one per core, at most one per lane.

    The number of CPU devices can only be chosen before JAX's backend starts; a process that has
    already used JAX keeps the devices it has. Either way the numbers are the same.
    """
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", max(1, min(num_cores(), num_lanes)))
    return jax.local_devices()[:num_lanes]


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def plan_chunks(start: int, stop: int, *, evaluate_every: int, end_every: int) -> Iterator[Chunk]:
    """Cut the steps from start to stop into chunks.

    A chunk ends at each multiple of evaluate_every and of end_every, after training.CAPACITY
    steps, and at the end. A run from step 0 begins with an empty chunk that evaluates the initial
    weights. How a run is cut changes none of its numbers.
    """
    if start == 0:
        yield Chunk(0, 0, True)
    while start < stop:
        multiples = [(start // every + 1) * every for every in (evaluate_every, end_every)]
        end = min(stop, start + training.CAPACITY, *multiples)
        yield Chunk(start, end, end % evaluate_every == 0 or end == stop)
        start = end


def run_chunks(
    program: LaneProgram,
    lanes: Sequence[Lane],
    chunks: Iterable[Chunk],
    *,
    devices: Sequence[jax.Device],
    states: Sequence[LaneState] | None = None,
    vectorize: bool = False,
) -> Iterator[ChunkResult]:
    """Run the lanes through the chunks; yields each chunk's result in order, as it is done.

    The next chunk is under way while the caller deals with the last one, so writing costs the
    devices nothing. `chunks` may end early: what was begun is finished and yielded.

    Args:
      program: what the lanes share.
      lanes: what each has of its own.
      chunks: from `plan_chunks`.
      devices: lane i runs on devices[i % len(devices)].
      states: where to start from (NumPy or JAX arrays); None starts from scratch.
      vectorize: run each device's lanes as one batch, which may change the last bits.
    """
    shares = [range(i, len(lanes), len(devices)) for i in range(len(devices))]
    on_device = [jax.device_put(lane, devices[i % len(devices)]) for i, lane in enumerate(lanes)]
    current: list[LaneState] = [None] * len(lanes)  # type: ignore[list-item]

    def begin(share: range, device: jax.Device) -> None:
        for i in share:
            if states is None:
                current[i] = training.initialize(program, on_device[i])
            else:
                current[i] = jax.device_put(states[i], device)

    def take_steps(share: range, steps: int) -> Iterable[tuple[LaneState, StepMetrics]]:
        if not vectorize:
            return (training.advance(program, on_device[i], current[i], steps) for i in share)
        together = (_stack([on_device[i] for i in share]), _stack([current[i] for i in share]))
        result = training.advance_together(program, *together, steps)
        return (jax.tree.map(lambda x, k=k: x[k], result) for k in range(len(share)))

    def work(share: range, chunk: Chunk) -> list[tuple[LaneState, StepMetrics, Evaluation | None]]:
        done = []
        steps = chunk.stop - chunk.start
        for i, (state, rows) in zip(share, take_steps(share, steps), strict=True):
            current[i] = state
            evaluation = None
            if chunk.evaluate:
                evaluation = training.evaluate(program, on_device[i], current[i].params)
            rows = jax.tree.map(lambda row, n=steps: np.asarray(row)[:n], rows)
            done.append((current[i], rows, jax.tree.map(np.asarray, evaluation)))
        return done

    def collect(chunk: Chunk, futures: list[Future]) -> ChunkResult:
        done = [None] * len(lanes)
        for share, future in zip(shares, futures, strict=True):
            done[share.start :: len(devices)] = future.result()
        new_states, metrics, evaluations = zip(*done, strict=True)  # type: ignore[arg-type]
        evaluation = _stack(evaluations, np.stack) if chunk.evaluate else None
        return ChunkResult(chunk, _stack(metrics, np.stack), evaluation, new_states)

    with contextlib.ExitStack() as stack:
        threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in devices]
        begun = [
            thread.submit(begin, share, device)
            for thread, share, device in zip(threads, shares, devices, strict=True)
        ]
        under_way: collections.deque[tuple[Chunk, list[Future]]] = collections.deque()
        for future in begun:
            future.result()
        for chunk in chunks:
            futures = [
                thread.submit(work, share, chunk)
                for thread, share in zip(threads, shares, strict=True)
            ]
            under_way.append((chunk, futures))
            if len(under_way) > 1:
                yield collect(*under_way.popleft())
        while under_way:
            yield collect(*under_way.popleft())


def _stack(trees: Sequence[Any], stack: Callable = jnp.stack) -> Any:
    """One tree whose leaves have a leading axis over the trees."""
    return jax.tree.map(lambda *leaves: stack(leaves), *trees)
