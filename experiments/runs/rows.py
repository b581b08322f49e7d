"""Rows: chunk results as lines of strict JSON, fast, and what files of them hold."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.config import LaneName
from experiments.metrics import (
    HEAD_STATISTICS,
    STEP_SCALARS,
    StepMetrics,
    by_head,
    parameter_column,
    reduce_heads,
)
from experiments.runs.folder import RunFolderError, strict

if TYPE_CHECKING:
    from experiments.engine.lanes import ChunkResult


_LONGEST_ROW = 2**22  # bytes


class RowFormat:
    """Turns chunk results into lines of JSON, fast: a template filled in, no encoder per value.

    float32 is written with nine digits, which give back the same bits.
    """

    def __init__(self, names: Sequence[LaneName], multipliers: Sequence[float], log_every: int):
        self.names, self.log_every = names, log_every
        self._lanes = [
            f'"scale":{json.dumps(name.scale)},"learning_rate":{name.learning_rate!r},'
            f'"seed":{name.seed}'
            for name in names
        ]
        self._multipliers = [f',"multiplier":{multiplier!r}' for multiplier in multipliers]

    def metrics(self, result: ChunkResult) -> str:
        """Lines for the steps of a chunk that are written: step by step, lane by lane."""
        start, stop = result.chunk.start, result.chunk.stop
        steps = range(start + -start % self.log_every, stop, self.log_every)
        if not steps:
            return ""
        rows = slice(steps.start - start, None, self.log_every)
        template = _template(result.metrics)
        values = _flat_values(result.metrics, rows)  # [lanes, rows, numbers]
        finite = np.asarray(np.isfinite(values).all(axis=-1))
        lines = []
        for row, step in enumerate(steps):
            for lane, identity in enumerate(self._lanes):
                numbers = values[lane, row].tolist()
                body = template % tuple(numbers) if finite[lane, row] else _nulls(template, numbers)
                lines.append(f'{{"step":{step},{identity}{self._multipliers[lane]}{body}}}\n')
        return "".join(lines)

    def evaluation(self, result: ChunkResult) -> str:
        """One line a lane for the held-out evaluation at the end of a chunk, if it has one."""
        if result.evaluation is None:
            return ""
        numbers = zip(*(np.asarray(field).tolist() for field in result.evaluation), strict=True)
        lines = []
        for identity, values in zip(self._lanes, numbers, strict=True):
            fields = strict(dict(zip(result.evaluation._fields, values, strict=True)))
            body = json.dumps(fields, separators=(",", ":"))[1:]
            lines.append(f'{{"step":{result.chunk.stop},{identity},{body}\n')
        return "".join(lines)


def _template(metrics: StepMetrics) -> str:
    layers, heads = metrics.heads.entropy.shape[-2:]
    every_head = "[" + ",".join(["[" + ",".join(["%.9g"] * heads) + "]"] * layers) + "]"
    columns = [*map(by_head, HEAD_STATISTICS), *map(parameter_column, metrics.parameters)]
    return "".join(
        [
            *(f',"{name}":%.9g' for name in (*STEP_SCALARS, *HEAD_STATISTICS)),
            *(f',"{name}":{every_head}' for name in columns),
        ]
    )


def _flat_values(metrics: StepMetrics, rows: slice) -> np.ndarray:
    """Every number of the rows, in the template's order: [lanes, rows, numbers]."""
    heads = {name: getattr(metrics.heads, name)[:, rows] for name in HEAD_STATISTICS}
    by_layer = [*heads.values(), *(values[:, rows] for values in metrics.parameters.values())]
    return np.concatenate(
        [
            *(getattr(metrics, name)[:, rows, None] for name in STEP_SCALARS),
            *(reduce_heads(name, values)[..., None] for name, values in heads.items()),
            *(values.reshape(*values.shape[:2], -1) for values in by_layer),
        ],
        axis=-1,
    )


def _nulls(template: str, numbers: list[float]) -> str:
    texts = tuple(f"{x:.9g}" if math.isfinite(x) else "null" for x in numbers)
    return template.replace("%.9g", "%s") % texts


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file; a half-written last line is left out.

    Raises:
      RunFolderError: there is no such file, or a line other than the last is not a row.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        reason = error.strerror or error
        raise RunFolderError(f"{path} can't be read: {reason}") from None
    rows = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is half
        row = _row(line)
        if row is None:
            raise RunFolderError(f"{path}, line {number}: damaged, not a row of JSON")
        rows.append(row)
    return rows


def rows_size(path: Path, steps: Iterable[int], lanes: int) -> int:
    """Bytes that the rows of these steps take, each of which has one row per lane.

    Raises:
      RunFolderError: the file does not begin with these rows.
    """
    wanted = [step for step in steps for _ in range(lanes)]
    size = 0
    with path.open("rb") if path.exists() else io.BytesIO() as lines:
        for number, step in enumerate(wanted):
            line = lines.readline()
            row = _row(line) if line.endswith(b"\n") else None
            if row is None or row["step"] != step:
                raise RunFolderError(
                    f"{path}: {number} good rows up to the checkpoint, which vouches for "
                    f"{len(wanted)}; only starting over with --overwrite makes them again"
                )
            size += len(line)
    return size


def read_last_row(path: Path) -> dict[str, Any] | None:
    """The last whole row of a .jsonl file; None if there is none."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LONGEST_ROW))
        lines = file.read().split(b"\n")
    return next(filter(None, map(_row, reversed(lines[:-1]))), None)


def _row(line: bytes) -> dict[str, Any] | None:
    """A line as a row; None if it is not one."""
    try:
        row = json.loads(line)
        return row if isinstance(row, dict) and type(row["step"]) is int else None
    except (ValueError, KeyError, RecursionError):
        return None
