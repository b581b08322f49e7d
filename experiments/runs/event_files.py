"""Event files for TensorBoard: `tensorboard --logdir=RUN/tensorboard`.

One sub-folder a lane, which TensorBoard shows as a run of its own. `train/...` are the numbers of
metrics.jsonl (heads averaged), `held_out/...` those of evaluation.jsonl; what is not finite is left
out. The rows stay the record: these files may be thrown away.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.config import LaneName
from experiments.engine.lanes import ChunkResult
from experiments.metrics import HEAD_STATISTICS, STEP_SCALARS, Evaluation, reduce_heads
from experiments.runs.folder import EVALUATION
from experiments.runs.rows import read_rows

FLUSH_SECONDS = 5.0  # TensorBoard looks at the files about as often


class EventWriter:
    """Writes what chunks give, one event a step and lane; to be used by one thread."""

    def __init__(
        self, run_folder: Path, names: Sequence[LaneName], *, log_every: int = 1, start: int = 0
    ):
        """Open a new event file a lane, in the folder `tensorboard` of a run.

        Args:
          run_folder: the run's.
          names: the lanes, in the order of the results.
          log_every: steps between written rows.
          start: updates taken before the first result, when resuming. TensorBoard then hides what
            an earlier process wrote of this step and later ones. That would take the evaluation at
            `start` too, so it is written again, from the run's rows.

        Raises:
          OSError: the disk is full, read-only or gone.
        """
        # Here, because only those who ask for event files should pay for the import.
        from tensorboardX.event_file_writer import EventsWriter

        # pyrefly: ignore [missing-module-attribute]  # protobuf makes them on import
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        # pyrefly: ignore [missing-module-attribute]
        from tensorboardX.proto.summary_pb2 import Summary

        self._event, self._summary, self._log_every = Event, Summary, log_every
        self._writers = []
        for name in names:
            folder = run_folder / "tensorboard" / lane_folder(name)
            folder.mkdir(parents=True, exist_ok=True)
            # The suffix keeps a second process within the same second off the first one's file.
            suffix = f".{start}.{os.getpid()}"
            self._writers.append(EventsWriter(str(folder / "events"), suffix))
        if start:
            restarted = SessionLog(status=SessionLog.START)
            for writer in self._writers:
                writer.write_event(Event(wall_time=time.time(), step=start, session_log=restarted))
            for row in read_rows(run_folder / EVALUATION):
                if row["step"] == start:
                    lane = names.index(LaneName(row["scale"], row["learning_rate"], row["seed"]))
                    self._held_out(lane, start, row)
        self._flushed = time.monotonic()

    def write(self, result: ChunkResult) -> None:
        """Write the steps and the evaluation of a chunk."""
        chunk, metrics = result.chunk, result.metrics
        first = -chunk.start % self._log_every
        rows = slice(first, None, self._log_every)
        columns = {f"train/{n}": getattr(metrics, n)[:, rows] for n in STEP_SCALARS}
        for name in HEAD_STATISTICS:
            columns[f"train/{name}"] = reduce_heads(name, getattr(metrics.heads, name)[:, rows])
        for name, values in metrics.parameters.items():
            columns[f"train/parameter_{name}"] = values[:, rows].mean(axis=(-2, -1))
        for lane in range(len(self._writers)):
            of_lane = np.stack([column[lane] for column in columns.values()], axis=-1)
            for step, numbers in zip(
                range(chunk.start + first, chunk.stop, self._log_every), of_lane, strict=True
            ):
                self._add(lane, step, dict(zip(columns, numbers.tolist(), strict=True)))
            if result.evaluation is not None:
                values = {n: v[lane].item() for n, v in result.evaluation._asdict().items()}
                self._held_out(lane, chunk.stop, values)
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            for writer in self._writers:
                writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """See everything to the disk and close the files."""
        for writer in self._writers:
            writer.close()

    def _held_out(self, lane: int, step: int, values: Mapping[str, float | None]) -> None:
        self._add(lane, step, {f"held_out/{name}": values[name] for name in Evaluation._fields})

    def _add(self, lane: int, step: int, numbers: Mapping[str, float | None]) -> None:
        values = [
            self._summary.Value(tag=tag, simple_value=number)
            for tag, number in numbers.items()
            if number is not None and math.isfinite(number)
        ]
        if values:
            summary = self._summary(value=values)
            self._writers[lane].write_event(
                self._event(wall_time=time.time(), step=step, summary=summary)
            )


def lane_folder(name: LaneName) -> str:
    """The name of a lane's sub-folder, such as "scale=none,learning_rate=0.001,seed=0"."""
    fields = ",".join(f"{field}={value}" for field, value in name._asdict().items())
    return fields.replace("/", "∕")  # of a fraction such as 1/8: no path
