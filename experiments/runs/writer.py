"""Writes a run's rows, checkpoints and seals, in a thread of its own, while the devices go on.

Rows reach the disk before the checkpoint that follows them, and the checkpoint before the seal, so
a checkpoint never knows of a step that the rows do not. A file that is changed, cut or replaced
under the run, or a folder that is deleted under it, ends the run with an error.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from experiments.config import RunConfig
from experiments.engine.lanes import ChunkResult, PlannedLane
from experiments.engine.training import LaneState
from experiments.runs import checkpoints, states
from experiments.runs.folder import CHECKPOINTS, CONFIG, EVALUATION, METRICS
from experiments.runs.rows import RowFormat
from experiments.runs.seal import Extent, Mark, Seal, digest, read_seal, write_seal


class RowsFile:
    """A file that rows are appended to; knows its size and digest."""

    def __init__(self, path: Path):
        self._path = path
        content = path.read_bytes()
        self._sha, self._size = hashlib.sha256(content), len(content)
        self._file = path.open("ab")

    def append(self, rows: str) -> None:
        """Write rows at the end, and hand them to the system."""
        content = rows.encode()
        self._file.write(content)
        self._file.flush()
        self._sha.update(content)
        self._size += len(content)
        ours = os.fstat(self._file.fileno())
        try:
            there = self._path.stat()
        except FileNotFoundError:
            there = None
        if there is None:  # who deletes a folder deletes its files first, so either may be met
            raise _deleted(self._path if self._path.parent.is_dir() else self._path.parent)
        if not os.path.samestat(there, ours) or ours.st_size != self._size:
            message = "was changed or replaced while the run was writing to it"
            raise OSError(errno.EIO, message, str(self._path))

    def extent(self) -> Extent:
        """Size and digest, once all of it is on the disk."""
        os.fsync(self._file.fileno())
        return Extent(self._size, self._sha.hexdigest())

    def close(self) -> None:
        """Close it; what the disk refused has been raised before."""
        with contextlib.suppress(OSError):
            self._file.close()


def _deleted(path: Path) -> OSError:
    return OSError(errno.ENOENT, "was deleted while the run was writing to it", str(path))


def checkpoint_identity(config: RunConfig) -> dict[str, str]:
    """What binds a checkpoint to its run: a digest of every setting that decides the states."""
    free = {"format", "version", "steps", "checkpoint_every", "log_every", "eval_every"}
    settings = {name: value for name, value in config.to_json().items() if name not in free}
    return {"config": digest(repr(sorted(settings.items())).encode())}


class Writer:
    """Takes chunk results and states; writes in order; an error surfaces at the next call."""

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        lanes: Sequence[PlannedLane],
        start: int,
        say: Callable[[str], None],
    ):
        """Go on with the rows that are in the folder, which are those of `start` updates."""
        self._folder, self._config, self._lanes, self._say = folder, config, lanes, say
        multipliers = [one.lane.multiplier.item() for one in lanes]
        self._format = RowFormat(config.lane_names(), multipliers, config.log_every)
        self._stat = folder.stat()
        self._digest = digest((folder / CONFIG).read_bytes())  # now: a later one may be edited
        before = read_seal(folder)
        self._marks = list(before.marks) if before else []
        self._metrics, self._evaluation = (
            RowsFile(folder / name) for name in (METRICS, EVALUATION)
        )
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future | None = None

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exception) -> None:
        try:
            self._finish_pending()
        finally:
            self._thread.shutdown()
            self._metrics.close()
            self._evaluation.close()

    def write(self, result: ChunkResult) -> None:
        """Write a chunk's rows."""
        self._begin(self._write, result)

    def checkpoint(self, step: int, all_states: Sequence[LaneState]) -> None:
        """Save the lanes' states as they are before update number `step`, and seal the rows."""
        self._begin(self._checkpoint, step, all_states)

    def _begin(self, job: Callable, *arguments: Any) -> None:
        self._finish_pending()
        self._pending = self._thread.submit(job, *arguments)

    def _finish_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, result: ChunkResult) -> None:
        self._check_folder()
        self._metrics.append(self._format.metrics(result))
        self._evaluation.append(self._format.evaluation(result))

    def _checkpoint(self, step: int, all_states: Sequence[LaneState]) -> None:
        self._check_folder()
        mark = Mark(step, self._metrics.extent(), self._evaluation.extent())
        rows = {METRICS: str(mark.metrics)}
        ended = step == self._config.steps
        if not ended or step % self._config.eval_every == 0:  # else: a longer run lacks the last
            rows[EVALUATION] = str(mark.evaluation)
        checkpoints.save(
            self._folder / CHECKPOINTS,
            step,
            states.pack(self._lanes, all_states),
            identity=checkpoint_identity(self._config) | rows,
            warn=self._say,
        )
        self._marks.append(mark)
        write_seal(self._folder, Seal((self._digest,), tuple(self._marks), ended))

    def _check_folder(self) -> None:
        """The open files would take rows that nobody can find, or another run's folder would."""
        try:
            same = os.path.samestat(self._folder.stat(), self._stat)
        except FileNotFoundError:
            same = False
        if not same:
            raise _deleted(self._folder)
