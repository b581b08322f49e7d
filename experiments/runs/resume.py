"""Going on with a run: what may differ, which checkpoint it starts from, which rows it keeps."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from experiments.config import RunConfig
from experiments.engine.lanes import PlannedLane
from experiments.engine.training import LaneState
from experiments.runs import checkpoints, states
from experiments.runs.folder import (
    CHECKPOINTS,
    CONFIG,
    EVALUATION,
    METRICS,
    RunFolderError,
    stored_config,
    write_json,
)
from experiments.runs.rows import read_last_row, rows_size
from experiments.runs.seal import (
    Seal,
    beginning_of,
    check_seal,
    digest,
    read_seal,
    write_seal,
)
from experiments.runs.writer import checkpoint_identity

_FREE = ("format", "version", "steps", "checkpoint_every")  # may differ from the run so far


def check_resumable(folder: Path, config: RunConfig, *, accept_edits: bool) -> None:
    """Refuse to go on with another run than the one that is there; changes nothing.

    Raises:
      RunFolderError: another setting, files that were changed, or no run; one line.
    """
    before, now = stored_config(folder).to_json(), config.to_json()
    for name in now:
        if name not in _FREE and now[name] != before[name]:
            raise RunFolderError(
                f"resume: {name} is {now[name]}, but {folder} was run with {before[name]}"
            )
    check_seal(folder, accept_edits=accept_edits)


def restore(
    folder: Path, config: RunConfig, planned: Sequence[PlannedLane], say: Callable[[str], None]
) -> tuple[int, list[LaneState] | None]:
    """The newest good checkpoint, its step and all states; (0, None) if there never was one.

    For the run that holds the folder: newer checkpoints that are bad are renamed away.

    Raises:
      RunFolderError: none is good, or all are gone, or the newest is past config.steps.
    """
    try:
        step, packed = checkpoints.restore_latest(
            folder / CHECKPOINTS,
            states.template(planned),
            identity=checkpoint_identity(config),
            warn=say,
        )
    except checkpoints.CheckpointNotFound:
        _check_never_had_one(folder, config)
        say(f"{folder} has no checkpoint yet: the run starts from the beginning")
        return 0, None
    except (checkpoints.CorruptCheckpoint, ValueError) as error:
        raise RunFolderError(str(error)) from None
    if step > config.steps:
        raise RunFolderError(f"resume: steps is {config.steps}, but {folder} has {step} already")
    return step, states.unpack(planned, packed)


def _check_never_had_one(folder: Path, config: RunConfig) -> None:
    """Rows past the first checkpoint say that there was one: they are not to be made again."""
    last = read_last_row(folder / METRICS)
    first = min(config.checkpoint_every, stored_config(folder).checkpoint_every, config.steps)
    seal = read_seal(folder)
    if (seal and seal.marks) or (last is not None and last["step"] >= first):
        raise RunFolderError(
            f"resume: {folder} has rows but its checkpoints are gone, so it can't go on; its rows "
            "can still be read. To start over, give another --out, or --overwrite"
        )


def begin_rows(folder: Path, config: RunConfig, start: int, *, accept_edits: bool) -> None:
    """Write config.json, and leave the rows and evaluations that a run has at update `start`.

    Raises:
      RunFolderError: the rows are not those that the checkpoint was made with; nothing was changed.
    """
    sizes = {METRICS: 0, EVALUATION: 0}  # from the start, everything is made again
    if start > 0:
        sizes = _sizes(folder, config, start)
        if not accept_edits:
            _check_rows(folder, start)
    seal = _replace_config(folder, config, sizes)
    for name, size in sizes.items():
        (folder / name).touch()
        os.truncate(folder / name, size)
    if seal and start == config.steps:  # nothing will come that sets another
        write_seal(folder, seal._replace(config=seal.config[-1:], ended=True))


def _sizes(folder: Path, config: RunConfig, start: int) -> dict[str, int]:
    """Bytes of the rows that a run of this config has at update `start`."""
    evaluated = list(range(0, start + 1, config.eval_every))
    # The end of the shorter run that this one prolongs was evaluated; that of this one would not.
    if start == config.steps and start % config.eval_every:
        evaluated.append(start)
    lanes = len(config.lane_names())
    return {
        METRICS: rows_size(folder / METRICS, range(0, start, config.log_every), lanes),
        EVALUATION: rows_size(folder / EVALUATION, evaluated, lanes),
    }


def _replace_config(folder: Path, config: RunConfig, sizes: Mapping[str, int]) -> Seal | None:
    """A new config.json under a seal that knows the old one too, and of no row past `sizes`.

    So wherever a kill hits, what it leaves is no change. Returns the seal, if there is one.
    """
    path, content = folder / CONFIG, config.to_json()
    seal = read_seal(folder)
    if seal is None:
        write_json(path, content)
        return None
    trial = path.with_name(f"{CONFIG}.new")
    write_json(trial, content)
    marks = [
        mark
        for mark in seal.marks
        if mark.metrics.size <= sizes[METRICS] and mark.evaluation.size <= sizes[EVALUATION]
    ]
    configs = (digest(path.read_bytes()), digest(trial.read_bytes()))
    seal = Seal(configs, tuple(marks), ended=False)
    write_seal(folder, seal)
    trial.replace(path)
    return seal


def _check_rows(folder: Path, start: int) -> None:
    """Hold the rows against the digests that the checkpoint at `start` was saved with."""
    identity = checkpoints.verify(folder / CHECKPOINTS / str(start)).get("identity", {})
    for name in (METRICS, EVALUATION):
        saved = identity.get(name)  # None: of an earlier version
        if saved and str(beginning_of(folder / name, int(saved.partition(":")[0]))) != saved:
            raise RunFolderError(
                f"{folder / name}: not the rows that its checkpoint {start} was made with; if they "
                "were changed on purpose, say --accept_edits"
            )


def read_states(
    folder: Path, config: RunConfig, planned: Sequence[PlannedLane], say: Callable[[str], None]
) -> tuple[int, list[LaneState]]:
    """The newest good checkpoint, for those who only look: no file is changed.

    Raises:
      RunFolderError: there is none, or it is that of another model.
    """
    for step in reversed(checkpoints.committed_steps(folder / CHECKPOINTS)):
        try:
            packed = checkpoints.restore(
                folder / CHECKPOINTS / str(step),
                states.template(planned),
                identity=checkpoint_identity(config),
            )
        except checkpoints.CorruptCheckpoint as error:
            say(f"bad checkpoint, passed over: {error}")
        except ValueError as error:
            raise RunFolderError(str(error)) from None
        else:
            return step, states.unpack(planned, packed)
    raise RunFolderError(f"{folder} has no good checkpoint")
