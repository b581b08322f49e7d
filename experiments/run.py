"""One run from its config to its folder: devices, lanes, rows, checkpoints, summary, figures.

`train` is for notebooks: it returns arrays, and writes only if asked to. `record` is what the
command line does: everything goes to the run folder, and nothing is kept in memory.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments import checkpoints, lanes, recording, training
from experiments.config import RecordOptions, TrainConfig, resolve
from experiments.lanes import Chunk, ChunkResult, LaneName
from experiments.recording import RunFolderError
from experiments.training import Evaluation, LaneProgram, LaneState, StepMetrics

Watch = Callable[[ChunkResult], None]


class TrainResult(NamedTuple):
    """A run in memory; arrays are NumPy's."""

    config: TrainConfig  # resolved
    names: tuple[LaneName, ...]
    metrics: StepMetrics  # fields [lanes, steps, ...]
    evaluation_steps: np.ndarray  # [E]: updates taken before each evaluation
    evaluation: Evaluation  # fields [lanes, E]
    states: tuple[LaneState, ...]  # one a lane, after the last step


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

    states: list[LaneState] = []
    if out is None:
        program, devices = prepare(config)
        chunks = _plan(config, 0)
        for result in lanes.run_chunks(
            program,
            lanes.lanes_of(config),
            chunks,
            devices=devices,
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

    Raises:
      ValueError: a setting that can't be.
      RunFolderError: the folder can't be used as asked.
      OSError: the disk is full, read-only or gone; what was written stays readable.
    """
    config = resolve(config)
    folder = options.out
    if options.resume and not folder.is_dir():
        raise RunFolderError(f"resume: there is no run folder {folder}")
    if not options.resume:
        _make_folder(folder, overwrite=options.overwrite)
    with recording.locked(folder):
        return _record(config, options, watch, begin, say)


def prepare(config: TrainConfig) -> tuple[LaneProgram, list[jax.Device]]:
    """The compiled-in part of a resolved config, and the devices to run it on."""
    jax.config.update("jax_default_matmul_precision", config.matmul_precision)
    devices = lanes.start_devices(len(lanes.lane_names(config)))
    return training.lane_program(config), devices


def _record(
    config: TrainConfig,
    options: RecordOptions,
    watch: Watch,
    begin: Callable[[], None],
    say: Callable[[str], None],
) -> Recorded:
    folder, names = options.out, lanes.lane_names(config)
    if options.resume:
        _check_resumable(folder, config)
    begin()
    program, devices = prepare(config)
    surroundings = recording.environment(devices, config.matmul_precision)
    start, states = 0, None
    if options.resume:
        _compare_surroundings(folder, surroundings, say)
        start, states = restore_states(folder, config, program, say)
        _cut_rows_to(folder, config, start)
    else:
        (folder / recording.METRICS).touch()
        (folder / recording.EVALUATION).touch()
        surroundings["digests"] = starting_digests(program, config)
        recording.write_json(folder / "environment.json", surroundings)
    # Last, because a folder counts as a run from here on.
    recording.write_json(folder / "config.json", config.to_json())
    stopped_by, done, state_list = None, start, states
    with _Signals() as signals, _Writer(folder, config, names, say) as writer:
        chunks = itertools.takewhile(lambda _: signals.received is None, _plan(config, start))
        for result in lanes.run_chunks(
            program,
            lanes.lanes_of(config),
            chunks,
            devices=devices,
            states=states,
            vectorize=config.vectorize_lanes,
        ):
            writer.write(result)
            watch(result)
            done, state_list = result.chunk.stop, result.states
        stopped_by = signals.received
        if state_list is not None and done > start:
            writer.checkpoint(done, state_list)
    diverged_at = tuple(int(state.diverged_at) for state in state_list or ())
    return Recorded(config, names, done, diverged_at, stopped_by)


def _plan(config: TrainConfig, start: int) -> list[Chunk]:
    c: Any = config
    return lanes.plan_chunks(
        start, c.steps, evaluate_every=c.eval_every, end_every=c.checkpoint_every
    )


def starting_digests(program: LaneProgram, config: TrainConfig) -> dict[str, dict[str, str]]:
    """Per seed, digests of the initial weights and of the first batch: what pairs two runs."""
    sample = jax.jit(training.sample_batch, static_argnames="program")
    digests = {}
    for seed in config.seeds():
        state = training.initialize(program, lanes.make_lane(1.0, 1.0, seed))
        batch = sample(program, training.stream_key(np.uint32(seed), "data"))
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
        config: TrainConfig,
        names: Sequence[LaneName],
        say: Callable[[str], None],
    ):
        self._folder, self._say, self._every = folder, say, config.checkpoint_every
        multipliers = [lane.multiplier.item() for lane in lanes.lanes_of(config)]
        self._format = recording.RowFormat(names, multipliers, config.log_every)
        self._saved = None

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
            self._files.close()

    def write(self, result: ChunkResult) -> None:
        """Write a chunk's rows, and a checkpoint where one is due."""
        self._begin(self._write, result)
        if result.chunk.stop and result.chunk.stop % self._every == 0:
            self.checkpoint(result.chunk.stop, result.states)

    def checkpoint(self, step: int, states: Sequence[LaneState]) -> None:
        """Save the lanes' states as they are before update number `step`, once."""
        if step != self._saved:
            self._saved = step
            self._begin(self._checkpoint, step, states)

    def _begin(self, job: Callable, *arguments: Any) -> None:
        self._finish_pending()
        self._pending = self._thread.submit(job, *arguments)

    def _finish_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._folder)) from error

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
        folder = self._folder / "checkpoints"
        checkpoints.save(folder, step, stack_states(states), warn=self._say)


def stack_states(states: Sequence[LaneState]) -> LaneState:
    """One state whose leaves have a leading axis of lanes."""
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(x) for x in leaves]), *states)


def unstack_states(state: LaneState, count: int) -> list[LaneState]:
    """The inverse of `stack_states`."""
    return [jax.tree.map(lambda leaf, i=i: leaf[i], state) for i in range(count)]


def _make_folder(folder: Path, *, overwrite: bool) -> None:
    if folder.exists() and not overwrite:
        raise RunFolderError(f"out: {folder} exists; give another, or --resume, or --overwrite")
    if folder.exists():
        if not (folder / "config.json").is_file():
            raise RunFolderError(f"overwrite: {folder} is not a run folder, so it is left alone")
        with recording.locked(folder):
            shutil.rmtree(folder)
    folder.mkdir(parents=True)


def stored_config(folder: Path) -> TrainConfig:
    """The resolved config of a run folder."""
    settings = recording.read_json(folder / "config.json")
    try:
        return resolve(TrainConfig.from_json(settings))
    except (ValueError, TypeError, AttributeError) as error:
        raise RunFolderError(f"{folder / 'config.json'} is damaged: {error}") from None


def _check_resumable(folder: Path, config: TrainConfig) -> None:
    before, now = stored_config(folder).to_json(), config.to_json()
    free = ("steps", "checkpoint_every")
    differing = [name for name in now if name not in free and now[name] != before[name]]
    if differing:
        name = differing[0]
        raise RunFolderError(
            f"resume: {name} is {now[name]}, but {folder} was run with {before[name]}"
        )


def _compare_surroundings(folder: Path, now: dict[str, Any], say: Callable[[str], None]) -> None:
    before = recording.read_json(folder / "environment.json")
    for name in recording.BIT_SETTINGS:
        if before.get(name) != now[name]:
            say(
                f"warning: {name} was {before.get(name)} and is now {now[name]}: "
                "the run goes on, but may differ in the last bits from an uninterrupted one"
            )


def restore_states(
    folder: Path, config: TrainConfig, program: LaneProgram, say: Callable[[str], None]
) -> tuple[int, list[LaneState] | None]:
    """The newest good checkpoint: its step and every lane's state; (0, None) if there is none."""
    names = lanes.lane_names(config)
    one = jax.eval_shape(
        lambda lane: training.initialize(program, lane), lanes.make_lane(1.0, 1.0, 0)
    )
    template = jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(names), *x.shape), x.dtype), one)
    try:
        step, stacked = checkpoints.restore_latest(folder / "checkpoints", template, warn=say)
    except checkpoints.CheckpointNotFound:
        say(f"{folder} has no checkpoint yet: the run starts from the beginning")
        return 0, None
    except (checkpoints.CorruptCheckpoint, ValueError) as error:
        raise RunFolderError(str(error)) from None
    return step, unstack_states(stacked, len(names))


def _cut_rows_to(folder: Path, config: TrainConfig, step: int) -> None:
    """Leave the rows and evaluations that a run to config.steps has when it is at `step`."""
    c: Any = config
    if step > c.steps:
        raise RunFolderError(f"resume: steps is {c.steps}, but {folder} has {step} already")
    lanes_count = len(lanes.lane_names(config))
    at_end = step == c.steps
    rows = -(-step // c.log_every)
    # The end of the shorter run that this one prolongs was evaluated; that of this one would not.
    evaluations = step // c.eval_every + 1 + bool(at_end and step % c.eval_every)
    if step == 0:
        evaluations = 0  # made again by the first chunk
    recording.cut_rows(folder / recording.METRICS, lambda s: s < step, rows * lanes_count)
    recording.cut_rows(
        folder / recording.EVALUATION,
        lambda s: step > 0 and s <= step and (at_end or s % c.eval_every == 0),
        evaluations * lanes_count,
    )


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
