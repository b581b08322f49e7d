"""Many lanes over their places: which lane runs where, in what order.

Each place of this process has a worker, a host thread that feeds it its lanes one after the other,
chunk by chunk. A lane never shares a computation with another, so its numbers depend neither on
which lanes run beside it nor on how many places or processes there are.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.arms import Arm
from experiments.config import RunConfig
from experiments.engine import processes, training
from experiments.engine.devices import Place
from experiments.engine.training import Lane, LaneProgram, LaneState
from experiments.metrics import Evaluation, StepMetrics


class PlannedLane(NamedTuple):
    """A lane before it runs: the program it shares with others of its kind, and its own numbers."""

    program: LaneProgram
    lane: Lane


class Chunk(NamedTuple):
    """A stretch of steps that every lane takes before any lane goes on."""

    start: int  # updates taken before it
    stop: int  # updates taken after it
    evaluate: bool  # on the held-out set, at `stop`


class ChunkResult(NamedTuple):
    """What a chunk gave; arrays are NumPy's, with a leading axis of lanes."""

    chunk: Chunk
    metrics: StepMetrics  # fields [lanes, steps of the chunk, ...]; NaN where nothing was measured
    evaluation: Evaluation | None  # fields [lanes]
    states: tuple[LaneState | None, ...]  # one a lane, where it runs; None: in another process


def plan_lanes(config: RunConfig) -> tuple[PlannedLane, ...]:
    """The lanes of a config, in the order of its `lane_names`."""
    arms = {arm.name: arm for arm in config.arms()}
    programs = {name: training.lane_program(config, arm) for name, arm in arms.items()}
    return tuple(
        PlannedLane(
            programs[name.scale], make_lane(arms[name.scale], name.learning_rate, name.seed)
        )
        for name in config.lane_names()
    )


def make_lane(arm: Arm, learning_rate: float, seed: int, **query_key: float) -> Lane:
    """A Lane with its numbers in the dtypes that the compiled program was made for."""
    numbers = {
        "query_key_init": arm.query_key_init,
        "query_key_learning_rate": arm.query_key_rate,
        **query_key,
    }
    lane = Lane(arm.rule.multiplier, learning_rate, 0, **numbers)
    return Lane(*map(np.float32, lane))._replace(seed=np.uint32(seed))


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
    lanes: Sequence[PlannedLane],
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
      lanes: from `plan_lanes`.
      chunks: from `plan_chunks`.
      places: lane i runs at places[i % len(places)].
      states: where to start from (NumPy or JAX arrays); None starts from scratch.
      vectorize: run a place's lanes of a kind as one batch, which may change the last bits.
    """
    owners = [places[i % len(places)].process for i in range(len(lanes))]
    columns = own_columns(lanes)
    ahead = 0 if processes.several() else 1
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(
                Worker(place, {i: lanes[i] for i in range(n, len(lanes), len(places))}, vectorize)
            )
            for n, place in enumerate(places)
            if place.process == jax.process_index()
        ]
        for starting in [worker.start(states) for worker in workers]:
            starting.result()
        under_way: collections.deque[tuple[Chunk, list[Future]]] = collections.deque()

        def collect() -> ChunkResult:
            chunk, futures = under_way.popleft()
            done = {i: one for future in futures for i, one in future.result().items()}
            return _collect(chunk, done, owners, columns)

        for chunk in chunks:
            under_way.append((chunk, [worker.take(chunk) for worker in workers]))
            if len(under_way) > ahead:
                yield collect()
        while under_way:
            yield collect()


class Done(NamedTuple):
    """What a lane's chunk left behind."""

    state: LaneState  # where it runs
    rows: StepMetrics  # NumPy's, one a step
    evaluation: Evaluation | None


class Worker(contextlib.AbstractContextManager):
    """One place and its lanes; a thread of its own feeds them to it in the order of the calls."""

    def __init__(self, place: Place, lanes: Mapping[int, PlannedLane], vectorize: bool):
        self._place, self._vectorize = place, vectorize
        self._lanes = {i: one._replace(lane=place.put(one.lane)) for i, one in lanes.items()}
        self._states: dict[int, LaneState] = {}
        self._thread = ThreadPoolExecutor(1)

    def __exit__(self, *exception) -> None:
        self._thread.shutdown()

    def start(self, states: Sequence[LaneState | None] | None) -> Future[None]:
        """Bring the lanes to where they start: the given states, or initial weights."""
        return self._thread.submit(self._start, states)

    def take(self, chunk: Chunk) -> Future[dict[int, Done]]:
        """Take every lane through a chunk."""
        return self._thread.submit(self._take, chunk)

    def _start(self, states: Sequence[LaneState | None] | None) -> None:
        with self._place.current():
            for i, (program, lane) in self._lanes.items():
                self._states[i] = (
                    training.initialize(program, lane)
                    if states is None
                    else self._place.put(states[i])
                )

    def _take(self, chunk: Chunk) -> dict[int, Done]:
        steps = np.int32(chunk.stop - chunk.start)
        done = {}
        with self._place.current():
            for i, (state, rows, taken) in self._advance(steps):
                program, lane = self._lanes[i]
                self._states[i] = state
                evaluation = None
                if chunk.evaluate:
                    evaluation = training.evaluate(program, lane, state)
                rows = rows_taken(rows, int(taken), int(steps))
                done[i] = Done(state, rows, jax.tree.map(np.asarray, evaluation))
        return done

    def _advance(self, steps: np.int32) -> Iterator[tuple[int, training.Advanced]]:
        if not self._vectorize:
            for i, (program, lane) in self._lanes.items():
                yield i, training.advance(program, lane, self._states[i], steps)
            return
        for program in dict.fromkeys(one.program for one in self._lanes.values()):
            share = [i for i, one in self._lanes.items() if one.program == program]
            lanes = _stack([self._lanes[i].lane for i in share])
            states = _stack([self._states[i] for i in share])
            together = training.advance_together(program, lanes, states, steps)
            for k, i in enumerate(share):
                yield i, jax.tree.map(lambda x, k=k: x[k], together)


def rows_taken(rows: StepMetrics, taken: int, steps: int) -> StepMetrics:
    """The first `steps` rows, on the host; NaN in those not taken, and for what isn't measured."""

    def kept(values: Any) -> np.ndarray:
        values = np.array(np.asarray(values)[:steps])  # sliced here: on a device it would compile
        values[taken:] = np.nan
        return values

    if rows.grad_norm_logits is None:
        rows = rows._replace(grad_norm_logits=np.full(steps, np.nan, np.float32))
    return jax.tree.map(kept, rows)


def own_columns(lanes: Sequence[PlannedLane]) -> dict[str, tuple[int, int]]:
    """The parameters that arms have of their own, to their shape [L, H]."""
    shapes: dict[str, tuple[int, int]] = {}
    for program in dict.fromkeys(one.program for one in lanes):
        model = program.model
        key = jax.random.key(0, impl="threefry2x32")
        params = jax.eval_shape(lambda key, model=model: training.transformer.init(model, key), key)
        for name in jax.eval_shape(training.transformer.rule_parameters, params):
            shapes[name] = (model.num_layers, model.num_heads)
    return shapes


def _collect(
    chunk: Chunk,
    done: Mapping[int, Done],
    owners: Sequence[int],
    columns: Mapping[str, tuple[int, int]],
) -> ChunkResult:
    """All lanes' results, those of other processes too; every lane's rows have all columns."""

    def complete(rows: StepMetrics) -> StepMetrics:
        length = len(rows.loss)
        own = {
            name: rows.parameters.get(name, np.full((length, *shape), np.nan, np.float32))
            for name, shape in columns.items()
        }
        return rows._replace(parameters=own)

    written = {i: (complete(one.rows), one.evaluation) for i, one in done.items()}
    rows, evaluations = zip(*processes.gather_lanes(written, owners), strict=True)
    return ChunkResult(
        chunk,
        _stack(rows, np.stack),
        _stack(evaluations, np.stack) if chunk.evaluate else None,
        tuple(done[i].state if i in done else None for i in range(len(owners))),
    )


def _stack(trees: Sequence[Any], stack: Callable = jnp.stack) -> Any:
    """One tree whose leaves have a leading axis over the trees."""
    return jax.tree.map(lambda *leaves: stack(leaves), *trees)
