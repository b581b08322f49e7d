"""Many lanes over the devices of one machine or many: which lane runs where, in what order.

A place is a device, or several that share each batch. Each place of this process has one host
thread that feeds it its lanes one after the other, chunk by chunk. A lane never shares a
computation with another, so its numbers depend neither on which lanes run beside it nor on how many
places or processes there are.
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
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from experiments.config import TrainConfig
from experiments.engine import processes, training
from experiments.engine.training import Evaluation, Lane, LaneProgram, LaneState, StepMetrics


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
    states: tuple[LaneState | None, ...]  # one a lane, where it runs; None: in another process


class Place(NamedTuple):
    """Where lanes run: one device, or several that share their batches."""

    devices: tuple[jax.Device, ...]

    @property
    def process(self) -> int:
        """The process whose devices these are."""
        return self.devices[0].process_index

    def put(self, tree: Any) -> Any:
        """The tree here, on every device."""
        sharding = SingleDeviceSharding(self.devices[0])
        if len(self.devices) > 1:
            sharding = NamedSharding(self._mesh(), PartitionSpec())
        return jax.device_put(tree, sharding)

    def current(self) -> contextlib.AbstractContextManager:
        """Compute here, in this thread: makes training.BATCH_AXIS the name of the devices."""
        return jax.set_mesh(self._mesh()) if len(self.devices) > 1 else contextlib.nullcontext()

    def _mesh(self) -> Mesh:
        return Mesh(self.devices, (training.BATCH_AXIS,), axis_types=(AxisType.Auto,))


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


def start_places(num_lanes: int, batch_shards: int = 1) -> list[Place]:
    """The places for lanes, of all processes; on CPU one per core, at most one per lane.

    The number of CPU devices can only be chosen before JAX's backend starts; a process that has
    already used JAX keeps the devices it has. Either way the numbers are the same.

    Args:
      num_lanes: as many places are wanted.
      batch_shards: devices per place, all of one process.

    Raises:
      ValueError: too few devices for a place, or too few lanes for the processes.
    """
    count = num_cores() // batch_shards
    if not jax.distributed.is_initialized():
        count = min(count, num_lanes)
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", batch_shards * max(1, count))
    if num_lanes < jax.process_count():
        raise ValueError(
            f"num_processes: {jax.process_count()}, but there are only {num_lanes} lanes; "
            "each process needs one"
        )
    by_process = []
    for process in range(jax.process_count()):
        devices = jax.local_devices(process_index=process)
        if len(devices) < batch_shards:
            raise ValueError(
                f"batch_shards: {batch_shards}, but a process has {len(devices)} devices "
                f"({devices[0].platform})"
            )
        starts = range(0, len(devices) - batch_shards + 1, batch_shards)
        by_process.append([Place(tuple(devices[i : i + batch_shards])) for i in starts])
    # Every process gets a lane before any gets two.
    rounds = itertools.zip_longest(*by_process)
    return [place for dealt in rounds for place in dealt if place is not None][:num_lanes]


def devices_of(places: Iterable[Place]) -> list[jax.Device]:
    """All devices of these places."""
    return [device for place in places for device in place.devices]


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
    places: Sequence[Place],
    states: Sequence[LaneState | None] | None = None,
    vectorize: bool = False,
) -> Iterator[ChunkResult]:
    """Run the lanes through the chunks; yields each chunk's result in order, as it is done.

    The next chunk is under way while the caller deals with the last one, so writing costs the
    devices nothing. `chunks` may end early: what was begun is finished and yielded. Of several
    processes all must go through the same chunks; every one gets the rows of all lanes, but no
    chunk is begun ahead, so that what they exchange comes in one order.

    Args:
      program: what the lanes share.
      lanes: what each has of its own.
      chunks: from `plan_chunks`.
      places: lane i runs at places[i % len(places)].
      states: where to start from (NumPy or JAX arrays); None starts from scratch.
      vectorize: run each device's lanes as one batch, which may change the last bits.
    """
    owners = [places[i % len(places)].process for i in range(len(lanes))]
    shares = {
        place: range(i, len(lanes), len(places))
        for i, place in enumerate(places)
        if place.process == jax.process_index()
    }
    here = {i: place.put(lanes[i]) for place, share in shares.items() for i in share}
    current: dict[int, LaneState] = {}

    def begin(place: Place, share: range) -> None:
        with place.current():
            for i in share:
                if states is None:
                    current[i] = training.initialize(program, here[i])
                else:
                    current[i] = place.put(states[i])

    def take_steps(share: range, steps: int) -> Iterable[tuple[LaneState, StepMetrics]]:
        if not vectorize:
            return (training.advance(program, here[i], current[i], steps) for i in share)
        together = (_stack([here[i] for i in share]), _stack([current[i] for i in share]))
        result = training.advance_together(program, *together, steps)
        return (jax.tree.map(lambda x, k=k: x[k], result) for k in range(len(share)))

    def work(place: Place, share: range, chunk: Chunk) -> dict[int, _Done]:
        done = {}
        steps = chunk.stop - chunk.start
        with place.current():
            for i, (state, rows) in zip(share, take_steps(share, steps), strict=True):
                current[i] = state
                evaluation = None
                if chunk.evaluate:
                    evaluation = training.evaluate(program, here[i], state)
                rows = jax.tree.map(lambda row, n=steps: np.asarray(row)[:n], rows)
                done[i] = _Done(state, (rows, jax.tree.map(np.asarray, evaluation)))
        return done

    def collect(chunk: Chunk, futures: list[Future[dict[int, _Done]]]) -> ChunkResult:
        done = {i: one for future in futures for i, one in future.result().items()}
        written = {i: one.written for i, one in done.items()}
        rows, evaluations = zip(*processes.gather_lanes(written, owners), strict=True)
        return ChunkResult(
            chunk,
            _stack(rows, np.stack),
            _stack(evaluations, np.stack) if chunk.evaluate else None,
            tuple(done[i].state if i in done else None for i in range(len(lanes))),
        )

    ahead = 0 if processes.several() else 1
    with contextlib.ExitStack() as stack:
        threads = {place: stack.enter_context(ThreadPoolExecutor(1)) for place in shares}
        for future in [threads[p].submit(begin, p, share) for p, share in shares.items()]:
            future.result()
        under_way: collections.deque[tuple[Chunk, list[Future]]] = collections.deque()
        for chunk in chunks:
            futures = [threads[p].submit(work, p, share, chunk) for p, share in shares.items()]
            under_way.append((chunk, futures))
            if len(under_way) > ahead:
                yield collect(*under_way.popleft())
        while under_way:
            yield collect(*under_way.popleft())


class _Done(NamedTuple):
    """What a lane's chunk left behind."""

    state: LaneState  # where it runs
    written: tuple[StepMetrics, Evaluation | None]  # NumPy's


def _stack(trees: Sequence[Any], stack: Callable = jnp.stack) -> Any:
    """One tree whose leaves have a leading axis over the trees."""
    return jax.tree.map(lambda *leaves: stack(leaves), *trees)
