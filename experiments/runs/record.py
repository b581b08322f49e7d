"""One run from its config to its folder: devices, lanes, rows, checkpoints.

`train` is for notebooks: it returns arrays, and writes only if asked to. `record` is what the
command line does: everything goes to the run folder, and nothing is kept in memory. Of several
processes one records, and the others `follow`.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import jax
import numpy as np

from experiments.config import LaneName, RecordOptions, RunConfig, TrainConfig, from_json, resolve
from experiments.engine import lanes, processes
from experiments.engine.devices import Place, start_places
from experiments.engine.lanes import Chunk, ChunkResult, PlannedLane
from experiments.engine.processes import Followers
from experiments.engine.training import LaneState
from experiments.metrics import Evaluation, StepMetrics
from experiments.runs import claim, states
from experiments.runs.environment import note_surroundings
from experiments.runs.folder import RunFolderError, disk_errors_named
from experiments.runs.resume import begin_rows, check_resumable, restore
from experiments.runs.writer import Writer
from experiments.settings import normalised

Watch = Callable[[ChunkResult], None]


class TrainResult(NamedTuple):
    """A run in memory; arrays are NumPy's."""

    config: RunConfig
    names: tuple[LaneName, ...]
    metrics: StepMetrics  # fields [lanes, steps, ...]
    evaluation_steps: np.ndarray  # [E]: updates taken before each evaluation
    evaluation: Evaluation  # fields [lanes, E]
    states: tuple[LaneState | None, ...]  # one a lane, after the last step; None: elsewhere


class Recorded(NamedTuple):
    """How a recorded run ended."""

    config: RunConfig
    names: tuple[LaneName, ...]
    steps_done: int
    diverged_at: tuple[int, ...]  # one a lane; -1 where it did not
    stopped_by: int | None  # the signal that stopped it, if one did


def train(
    config: TrainConfig, out: str | Path | None = None, watch: Watch | None = None
) -> TrainResult:
    """Train every lane of a config and return what was measured.

    Args:
      config: what to run; None fields get their defaults.
      out: a folder to record the run in, which must not exist; None writes nothing.
      watch: called with each ChunkResult as it is done.

    Raises:
      ValueError: a setting that can't be; one line that names it.
      RunFolderError: the folder exists, or can't be made.
    """
    run = resolve(config)
    results: list[ChunkResult] = []
    last: list[LaneState | None] = []

    def keep(result: ChunkResult) -> None:
        results.append(result._replace(states=()))
        last[:] = result.states
        if watch:
            watch(result)

    if out is None:
        planned = lanes.plan_lanes(run)
        chunks = _plan(run, 0)
        places = _places(run)
        for result in lanes.run_chunks(
            planned, chunks, places=places, vectorize=run.vectorize_lanes
        ):
            keep(result)
    else:
        record(run, normalised(RecordOptions(cast(Path, out))), watch=keep)
    return _joined(run, results, last)


def _joined(
    config: RunConfig, results: Sequence[ChunkResult], last: Sequence[LaneState | None]
) -> TrainResult:
    evaluated = [result for result in results if result.evaluation is not None]
    return TrainResult(
        config=config,
        names=config.lane_names(),
        metrics=jax.tree.map(
            lambda *arrays: np.concatenate(arrays, axis=1), *(r.metrics for r in results)
        ),
        evaluation_steps=np.array([result.chunk.stop for result in evaluated]),
        evaluation=jax.tree.map(
            lambda *values: np.stack(values, axis=1), *(result.evaluation for result in evaluated)
        ),
        states=tuple(last),
    )


def record(
    config: RunConfig,
    options: RecordOptions,
    *,
    watch: Watch = lambda result: None,
    begin: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
    followers: Followers | None = None,
) -> Recorded:
    """Run a config into a run folder, or go on with the run that is there.

    Rows are written chunk by chunk by a thread of their own, while the devices go on. SIGINT and
    SIGTERM stop the run after the chunk under way, with a checkpoint.

    Args:
      config: what to run.
      options: where it is kept.
      watch: called with each ChunkResult as it is done.
      begin: called once, when nothing speaks against the run any more.
      say: called with one line for each thing worth knowing.
      followers: the other processes, if there are any; they are told when the run begins.

    Raises:
      ValueError: this machine's devices can't serve.
      RunFolderError: the folder can't be used as asked.
      OSError: the disk is full, read-only or gone; what was written stays readable.
    """
    folder = options.out
    planned, places = lanes.plan_lanes(config), _places(config)  # before the folder is touched
    if not options.resume:
        claim.make_folder(folder)
    elif not folder.is_dir():
        raise RunFolderError(f"resume: there is no run folder {folder}")
    with disk_errors_named(folder), claim.locked(folder, say):
        start, restored = 0, None
        if options.resume:
            check_resumable(folder, config, accept_edits=options.accept_edits)
            start, restored = restore(folder, config, planned, say)
        else:
            claim.claim(folder, config, overwrite=options.overwrite)
        note_surroundings(folder, config, planned, places, say)
        begin_rows(folder, config, start, accept_edits=options.accept_edits)
        begin()
        return _record(config, planned, places, options, start, restored, watch, say, followers)


def follow() -> int:
    """What every process but the leading one does; returns the exit status."""
    order = processes.hear()
    if not order:  # the leader has said why
        return 2
    config = from_json(order["config"])
    planned, places = lanes.plan_lanes(config), _places(config)
    given = _share_states(planned, order["start"], None)
    ended = _advance(config, planned, places, order["start"], given, _ignore, _ignore)
    return 0 if ended.stopped_by is None else 128 + ended.stopped_by


def _ignore(*_: object) -> None:
    pass


def _places(config: RunConfig) -> list[Place]:
    return start_places(len(config.lane_names()), config.batch_shards, attention=config.attention)


def _record(
    config: RunConfig,
    planned: Sequence[PlannedLane],
    places: Sequence[Place],
    options: RecordOptions,
    start: int,
    restored: Sequence[LaneState] | None,
    watch: Watch,
    say: Callable[[str], None],
    followers: Followers | None,
) -> Recorded:
    """The part of `record` in which the devices are at work."""
    folder = options.out
    with (
        Writer(folder, config, planned, start, say) as writer,
        _events(options, config, start) as write_events,
    ):

        def deal(result: ChunkResult) -> None:
            writer.write(result)
            write_events(result)
            watch(result)

        if followers is not None:
            followers.tell({"config": config.to_json(), "start": start})
        restored = _share_states(planned, start, restored)
        ended = _advance(config, planned, places, start, restored, deal, writer.checkpoint)
    diverged_at = tuple(int(state.diverged_at) for state in ended.states)
    return Recorded(config, config.lane_names(), ended.steps_done, diverged_at, ended.stopped_by)


class _Ended(NamedTuple):
    """How `_advance` ended."""

    steps_done: int
    states: Sequence[LaneState]  # of all lanes
    stopped_by: int | None


def _advance(
    config: RunConfig,
    planned: Sequence[PlannedLane],
    places: Sequence[Place],
    start: int,
    given: Sequence[LaneState] | None,
    deal: Callable[[ChunkResult], None],
    save: Callable[[int, Sequence[LaneState]], None],
) -> _Ended:
    """Run the lanes from `start` to the end or to a signal; of several processes, all do.

    Args:
      config, planned, places: what is run, and where.
      start: updates that the states have had.
      given: the states of all lanes; None starts from scratch.
      deal: called with each chunk's result.
      save: called with updates taken and all lanes' states wherever a checkpoint is due, and at
        the end.
    """
    owners = [places[i % len(places)].process for i in range(len(planned))]
    like = states.shapes(planned)
    done, saved, complete = start, start, given or ()
    running: Sequence[LaneState | None] = ()
    stopped_by = None

    def save_all() -> None:
        nonlocal saved, complete
        own = {i: state for i, state in enumerate(running) if state is not None}
        saved, complete = done, processes.gather_lanes(own, owners, like)
        save(done, complete)

    with _Signals() as signals:
        chunks = itertools.takewhile(lambda _: stopped_by is None, _plan(config, start))
        for result in lanes.run_chunks(
            planned, chunks, places=places, states=given, vectorize=config.vectorize_lanes
        ):
            deal(result)
            done, running = result.chunk.stop, result.states
            stopped_by = processes.largest(signals.received or 0) or None
            if done and done % config.checkpoint_every == 0:
                save_all()
        if done > saved:
            save_all()
    return _Ended(done, complete, stopped_by)


def _share_states(
    planned: Sequence[PlannedLane], start: int, given: Sequence[LaneState] | None
) -> Sequence[LaneState] | None:
    """Broadcast: the leader's states in every process; the others give None."""
    if start == 0 or not processes.several():
        return given
    if given is None:
        packed = jax.tree.map(
            lambda leaf: np.zeros(leaf.shape, leaf.dtype), states.template(planned)
        )
    else:
        packed = states.pack(planned, given)
    return states.unpack(planned, processes.leaders(packed))


@contextlib.contextmanager
def _events(
    options: RecordOptions, config: RunConfig, start: int
) -> Generator[Callable[[ChunkResult], None]]:
    """What writes event files, if they were asked for."""
    if not options.tensorboard:
        yield _ignore
        return
    from experiments.runs.event_files import EventWriter

    names, every = config.lane_names(), config.log_every
    with contextlib.closing(EventWriter(options.out, names, log_every=every, start=start)) as w:
        yield w.write


def _plan(config: RunConfig, start: int) -> Iterator[Chunk]:
    return lanes.plan_chunks(
        start,
        config.steps,
        evaluate_every=config.eval_every,
        end_every=config.checkpoint_every,
    )


class _Signals(contextlib.AbstractContextManager):
    """Turns the first SIGINT or SIGTERM into a wish to stop; a second one acts as ever.

    A signal that the parent had ignored (as nohup and some shells do) stays ignored.
    """

    received: int | None = None

    def __enter__(self) -> _Signals:
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception) -> None:
        self._restore()

    def _note(self, number, frame) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
