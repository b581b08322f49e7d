"""One run from its config to its folder: devices, lanes, rows, checkpoints, summary, figures.

`train` is for notebooks: it returns arrays, and writes only if asked to. `record` is what the
command line does: everything goes to the run folder, and nothing is kept in memory. Of several
processes one records, and the others `follow`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.config import RecordOptions, TrainConfig, resolve
from experiments.engine import lanes, processes, training
from experiments.engine.lanes import Chunk, ChunkResult, LaneName, Place
from experiments.engine.processes import Followers
from experiments.engine.training import Evaluation, LaneProgram, LaneState, StepMetrics
from experiments.runs import checkpoints, recording
from experiments.runs.event_files import EventWriter
from experiments.runs.recording import RunFolderError

Watch = Callable[[ChunkResult], None]
CHECKPOINTS = "checkpoints"  # folder in the run folder


class TrainResult(NamedTuple):
    """A run in memory; arrays are NumPy's."""

    config: TrainConfig  # resolved
    names: tuple[LaneName, ...]
    metrics: StepMetrics  # fields [lanes, steps, ...]
    evaluation_steps: np.ndarray  # [E]: updates taken before each evaluation
    evaluation: Evaluation  # fields [lanes, E]
    states: tuple[LaneState | None, ...]  # one a lane, after the last step; None: elsewhere


class Recorded(NamedTuple):
    """How a recorded run ended."""

    config: TrainConfig  # resolved
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
    """
    config = resolve(config)
    results: list[ChunkResult] = []

    def keep(result: ChunkResult) -> None:
        results.append(result._replace(states=()))
        states[:] = result.states
        if watch:
            watch(result)

    states: list[LaneState | None] = []
    if out is None:
        program, places = prepare(config)
        chunks = _plan(config, 0)
        for result in lanes.run_chunks(
            program,
            lanes.lanes_of(config),
            chunks,
            places=places,
            vectorize=config.vectorize_lanes,
        ):
            keep(result)
    else:
        record(config, RecordOptions(Path(out)), watch=keep)
    evaluated = [result for result in results if result.evaluation is not None]

    def join(parts):
        return jax.tree.map(lambda *arrays: np.concatenate(arrays, axis=1), *parts)

    return TrainResult(
        config=config,
        names=lanes.lane_names(config),
        metrics=join([result.metrics for result in results]),
        evaluation_steps=np.array([result.chunk.stop for result in evaluated]),
        evaluation=jax.tree.map(
            lambda *values: np.stack(values, axis=1), *(result.evaluation for result in evaluated)
        ),
        states=tuple(states),
    )


def record(
    config: TrainConfig,
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
      config: what to run; None fields get their defaults.
      options: where it is kept.
      watch: called with each ChunkResult as it is done.
      begin: called once, when nothing speaks against the run any more.
      say: called with one line for each thing worth knowing.
      followers: the other processes, if there are any; they are told when the run begins.

    Raises:
      ValueError: a setting that can't be, or that this machine's devices can't serve.
      RunFolderError: the folder can't be used as asked.
      OSError: the disk is full, read-only or gone; what was written stays readable.
    """
    config = resolve(config)
    folder = options.out
    prepared = prepare(config)  # before the folder is touched: the devices may not serve
    if not options.resume:
        _make_folder(folder)
    elif not folder.is_dir():
        raise RunFolderError(f"resume: there is no run folder {folder}")
    with recording.disk_errors_named(folder), recording.locked(folder):
        if not options.resume:
            _claim_folder(folder, config, overwrite=options.overwrite)
        return _record(config, *prepared, options, watch, begin, say, followers)


def follow() -> int:
    """What every process but the leading one does; returns the exit status."""
    order = processes.hear()
    if not order:  # the leader has said why
        return 2
    config = resolve(TrainConfig.from_json(order["config"]))
    program, places = prepare(config)
    states = _share_states(config, program, order["start"], None)
    ended = _advance(config, program, places, order["start"], states, _ignore, _ignore)
    return 0 if ended.stopped_by is None else 128 + ended.stopped_by


def _ignore(*_: Any) -> None:
    pass


def prepare(config: TrainConfig) -> tuple[LaneProgram, list[Place]]:
    """The compiled-in part of a resolved config, and where to run it.

    Raises:
      ValueError: this machine's devices can't.
    """
    jax.config.update("jax_default_matmul_precision", config.matmul_precision)
    places = lanes.start_places(len(lanes.lane_names(config)), config.batch_shards)
    if config.attention == "fused" and (platform := places[0].devices[0].platform) != "gpu":
        raise ValueError(
            f"attention: fused needs an NVIDIA GPU, but this is {platform}; choose plain or "
            "streaming"
        )
    return training.lane_program(config), places


def _record(
    config: TrainConfig,
    program: LaneProgram,
    places: Sequence[Place],
    options: RecordOptions,
    watch: Watch,
    begin: Callable[[], None],
    say: Callable[[str], None],
    followers: Followers | None,
) -> Recorded:
    folder, names = options.out, lanes.lane_names(config)
    if options.resume:
        _check_resumable(folder, config)
    begin()
    start, states = 0, None
    if options.resume:
        start, states = restore_states(folder, config, program, say)
        steps: Any = config.steps
        if start > steps:
            raise RunFolderError(f"resume: steps is {steps}, but {folder} has {start} already")
    _note_surroundings(folder, config, program, places, say)
    # Before the cut, which leaves the rows of a run to config.steps.
    recording.write_json(folder / recording.CONFIG, config.to_json())
    _cut_rows_to(folder, config, start)
    with (
        _Writer(folder, names, config, say) as writer,
        _events(options, names, config.log_every, start) as events,
    ):

        def deal(result: ChunkResult) -> None:
            writer.write(result)
            if events is not None:
                events.write(result)
            watch(result)

        if followers is not None:
            followers.tell({"config": config.to_json(), "start": start})
        states = _share_states(config, program, start, states)
        ended = _advance(config, program, places, start, states, deal, writer.checkpoint)
    diverged_at = tuple(int(state.diverged_at) for state in ended.states)
    return Recorded(config, names, ended.steps_done, diverged_at, ended.stopped_by)


class _Ended(NamedTuple):
    """How `_advance` ended."""

    steps_done: int
    states: Sequence[LaneState]  # of all lanes
    stopped_by: int | None


def _advance(
    config: TrainConfig,
    program: LaneProgram,
    places: Sequence[Place],
    start: int,
    states: Sequence[LaneState] | None,
    deal: Callable[[ChunkResult], None],
    save: Callable[[int, Sequence[LaneState]], None],
) -> _Ended:
    """Run the lanes from `start` to the end or to a signal; of several processes, all do.

    Args:
      config, program, places: what is run, and where.
      start: updates that the states have had.
      states: of all lanes; None starts from scratch.
      deal: called with each chunk's result.
      save: called with updates taken and all lanes' states wherever a checkpoint is due, and at
        the end.
    """
    owners = [places[i % len(places)].process for i in range(len(lanes.lane_names(config)))]
    done, saved, complete = start, start, states or ()
    running: Sequence[LaneState | None] = ()
    stopped_by = None

    def save_all() -> None:
        nonlocal saved, complete
        own = {i: state for i, state in enumerate(running) if state is not None}
        saved, complete = done, processes.gather_lanes(own, owners)
        save(done, complete)

    with _Signals() as signals:
        chunks = itertools.takewhile(lambda _: stopped_by is None, _plan(config, start))
        for result in lanes.run_chunks(
            program,
            lanes.lanes_of(config),
            chunks,
            places=places,
            states=states,
            vectorize=config.vectorize_lanes,
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
    config: TrainConfig, program: LaneProgram, start: int, states: Sequence[LaneState] | None
) -> Sequence[LaneState] | None:
    """The leader's states in every process; the others give None."""
    if start == 0 or not processes.several():
        return states
    if states is None:
        template = _template(config, program)
        stacked = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), template)
    else:
        stacked = stack_states(states)
    return unstack_states(processes.leaders(stacked), len(lanes.lane_names(config)))


@contextlib.contextmanager
def _events(
    options: RecordOptions, names: Sequence[LaneName], log_every: int, start: int
) -> Generator[EventWriter | None]:
    """The writer of event files, if they were asked for."""
    if not options.tensorboard:
        yield None
        return
    with contextlib.closing(EventWriter(options.out, names, log_every=log_every, start=start)) as w:
        yield w


def _plan(config: TrainConfig, start: int) -> Iterator[Chunk]:
    c: Any = config
    return lanes.plan_chunks(
        start, c.steps, evaluate_every=c.eval_every, end_every=c.checkpoint_every
    )


def starting_digests(
    program: LaneProgram, config: TrainConfig, place: Place
) -> dict[str, dict[str, str]]:
    """Per seed, digests of the initial weights and of the first batch: what pairs two runs.

    Made at one of the places that the lanes will run at, which then need not compile it again.
    """
    sample = jax.jit(training.sample_batch, static_argnames="program")
    digests = {}
    for seed in config.seeds():
        with place.current():
            state = training.initialize(program, place.put(lanes.make_lane(1.0, 1.0, seed)))
            batch = sample(program, place.put(training.stream_key(np.uint32(seed), "data")))
        digests[str(seed)] = {
            "weights": recording.digest(state.params),
            "data": recording.digest(batch),
        }
    return digests


class _Writer:
    """Writes rows and checkpoints in a thread of its own, in order; an error surfaces here."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[LaneName],
        config: TrainConfig,
        say: Callable[[str], None],
    ):
        self._folder, self._say = folder, say
        multipliers = [lane.multiplier.item() for lane in lanes.lanes_of(config)]
        self._format = recording.RowFormat(names, multipliers, config.log_every)

    def __enter__(self) -> _Writer:
        self._files = contextlib.ExitStack()
        self._metrics, self._evaluation = (
            self._files.enter_context((self._folder / name).open("a"))
            for name in (recording.METRICS, recording.EVALUATION)
        )
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future | None = None
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            self._finish_pending()
        finally:
            self._thread.shutdown()
            with contextlib.suppress(OSError):  # rows that the disk refused: the error is out
                self._files.close()

    def write(self, result: ChunkResult) -> None:
        """Write a chunk's rows."""
        self._begin(self._write, result)

    def checkpoint(self, step: int, states: Sequence[LaneState]) -> None:
        """Save the lanes' states as they are before update number `step`."""
        self._begin(self._checkpoint, step, states)

    def _begin(self, job: Callable, *arguments: Any) -> None:
        self._finish_pending()
        self._pending = self._thread.submit(job, *arguments)

    def _finish_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, result: ChunkResult) -> None:
        if not self._folder.is_dir():  # its open files would take rows that nobody can find
            raise OSError(errno.ENOENT, "deleted while the run was writing to it")
        self._metrics.write(self._format.metrics(result))
        self._evaluation.write(self._format.evaluation(result))
        self._metrics.flush()
        self._evaluation.flush()

    def _checkpoint(self, step: int, states: Sequence[LaneState]) -> None:
        for file in (self._metrics, self._evaluation):
            recording.sync(file)
        checkpoints.save(self._folder / CHECKPOINTS, step, stack_states(states), warn=self._say)


def stack_states(states: Sequence[LaneState]) -> LaneState:
    """One state whose leaves have a leading axis of lanes."""
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(x) for x in leaves]), *states)


def unstack_states(state: LaneState, count: int) -> list[LaneState]:
    """The inverse of `stack_states`."""
    return [jax.tree.map(lambda leaf, i=i: leaf[i], state) for i in range(count)]


def _make_folder(folder: Path) -> None:
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()
        if isinstance(error, FileExistsError | NotADirectoryError):
            raise RunFolderError(f"out: {folder} is, or is in, a file; give a folder") from None
        raise RunFolderError(f"out: {folder} can't be made: {error.strerror}") from None


def _claim_folder(folder: Path, config: TrainConfig, *, overwrite: bool) -> None:
    """Make an empty folder, or one whose run may be deleted, the folder of a new run.

    From the first moment on it holds a config.json, so whenever the run is killed, it can go on.
    """
    unfinished = recording.partial(folder / recording.CONFIG)
    entries = [entry for entry in folder.iterdir() if entry != unfinished]
    if entries and not (folder / recording.CONFIG).is_file():
        name = "overwrite" if overwrite else "out"
        raise RunFolderError(f"{name}: {folder} is not a run folder, so it is left alone")
    if entries and not overwrite:
        raise RunFolderError(f"out: {folder} exists; give another, or --resume, or --overwrite")
    # A run folder until the end, so that what a kill leaves can be overwritten again.
    for entry in sorted(entries, key=lambda entry: entry.name == recording.CONFIG):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    recording.write_json(folder / recording.CONFIG, config.to_json())


def stored_config(folder: Path) -> TrainConfig:
    """The resolved config of a run folder."""
    settings = recording.read_json(folder / recording.CONFIG)
    try:
        return resolve(TrainConfig.from_json(settings))
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise RunFolderError(f"{folder / recording.CONFIG} is damaged: {error}") from None


def _check_resumable(folder: Path, config: TrainConfig) -> None:
    before, now = stored_config(folder).to_json(), config.to_json()
    free = ("steps", "checkpoint_every")
    differing = [name for name in now if name not in free and now[name] != before[name]]
    if differing:
        name = differing[0]
        raise RunFolderError(
            f"resume: {name} is {now[name]}, but {folder} was run with {before[name]}"
        )


def _note_surroundings(
    folder: Path,
    config: TrainConfig,
    program: LaneProgram,
    places: Sequence[Place],
    say: Callable[[str], None],
) -> None:
    """Write environment.json, or compare it with a run that is there already."""
    path = folder / recording.ENVIRONMENT
    now = recording.environment(lanes.devices_of(places), config.matmul_precision)
    if path.exists():
        try:
            before = recording.read_json(path)
        except RunFolderError as error:
            say(f"warning: {error}: it is made again, as things are now")
        else:
            for name in recording.BIT_SETTINGS:
                if before.get(name) != now[name]:
                    say(
                        f"warning: {name} was {before.get(name)} and is now {now[name]}: the run "
                        "goes on, but may differ in the last bits from an uninterrupted one"
                    )
            return
    now["digests"] = starting_digests(program, config, places[0])
    recording.write_json(path, now)


def restore_states(
    folder: Path, config: TrainConfig, program: LaneProgram, say: Callable[[str], None]
) -> tuple[int, list[LaneState] | None]:
    """The newest good checkpoint: its step and every lane's state; (0, None) if there is none.

    For the run that holds the folder: newer checkpoints that are bad are renamed away.
    """
    template = _template(config, program)
    try:
        step, stacked = checkpoints.restore_latest(folder / CHECKPOINTS, template, warn=say)
    except checkpoints.CheckpointNotFound:
        say(f"{folder} has no checkpoint yet: the run starts from the beginning")
        return 0, None
    except (checkpoints.CorruptCheckpoint, ValueError) as error:
        raise RunFolderError(str(error)) from None
    return step, unstack_states(stacked, len(lanes.lane_names(config)))


def read_states(
    folder: Path, config: TrainConfig, program: LaneProgram, say: Callable[[str], None]
) -> tuple[int, list[LaneState]]:
    """The newest good checkpoint, for those who only look: no file is changed.

    Raises:
      RunFolderError: there is none, or it is that of another model.
    """
    template = _template(config, program)
    for step in reversed(checkpoints.committed_steps(folder / CHECKPOINTS)):
        try:
            stacked = checkpoints.restore(folder / CHECKPOINTS / str(step), template)
        except checkpoints.CorruptCheckpoint as error:
            say(f"bad checkpoint, passed over: {error}")
        except ValueError as error:
            raise RunFolderError(str(error)) from None
        else:
            return step, unstack_states(stacked, len(lanes.lane_names(config)))
    raise RunFolderError(f"{folder} has no good checkpoint")


def _template(config: TrainConfig, program: LaneProgram) -> LaneState:
    """Shapes and dtypes of all lanes' states, stacked."""
    one = jax.eval_shape(
        lambda lane: training.initialize(program, lane), lanes.make_lane(1.0, 1.0, 0)
    )
    count = len(lanes.lane_names(config))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), one)


def _cut_rows_to(folder: Path, config: TrainConfig, step: int) -> None:
    """Leave the rows and evaluations that a run to config.steps has when it is at `step`."""
    c: Any = config
    metrics, evaluation = folder / recording.METRICS, folder / recording.EVALUATION
    if step == 0:  # everything is made again
        for path in (metrics, evaluation):
            path.write_bytes(b"")
        return
    evaluated = list(range(0, step + 1, c.eval_every))
    # The end of the shorter run that this one prolongs was evaluated; that of this one would not.
    if step == c.steps and step % c.eval_every:
        evaluated.append(step)
    lanes_count = len(lanes.lane_names(config))
    recording.cut_rows(metrics, range(0, step, c.log_every), lanes_count)
    recording.cut_rows(evaluation, evaluated, lanes_count)


class _Signals(contextlib.AbstractContextManager):
    """Turns the first SIGINT or SIGTERM into a wish to stop; a second one acts as ever."""

    received: int | None = None

    def __enter__(self) -> _Signals:
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
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
