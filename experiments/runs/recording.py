"""The run folder: what is written, when, and how it is read back.

    config.json       every resolved setting
    environment.json  versions, devices, git revision, precision, digests of weights and data
    metrics.jsonl     one line per step and lane, in step order
    evaluation.jsonl  one line per held-out evaluation and lane
    checkpoints/      see checkpoints.py
    summary.json, report.md, figures/   made from the rows when the run ends

Rows are strict JSON: NaN and infinities are null. Rows reach the disk before the checkpoint that
follows them, so a checkpoint never knows of a step that the rows do not; on resuming, rows after
the checkpoint are cut and made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import io
import itertools
import json
import math
import os
import platform
import subprocess
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

from experiments.engine.lanes import ChunkResult, LaneName, num_cores
from experiments.engine.training import StepMetrics

CONFIG, ENVIRONMENT = "config.json", "environment.json"
METRICS, EVALUATION = "metrics.jsonl", "evaluation.jsonl"
HEAD_STATISTICS = (
    "dead_row_fraction",
    "entropy",
    "normalized_entropy",
    "max_weight",
    "saturation",
    "jacobian_trace",
    "logit_std",
    "logit_max",
)
STEP_SCALARS = tuple(field for field in StepMetrics._fields if field != "heads")
# What can change the last bits of the numbers, so that resuming under another one is warned about.
BIT_SETTINGS = ("versions", "platform", "devices", "thread_pool_size", "xla_flags")


class RunFolderError(Exception):
    """A run folder that can't be used as asked; the message is one line."""


# Writing ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(folder: Path) -> Generator[None]:
    """Hold a run folder for this process.

    The lock is the kernel's, on the folder itself: no file is made for it, and it goes with the
    process, however that ends.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderError(f"{folder} is in use by another run") from None
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def disk_errors_named(folder: Path) -> Generator[None]:
    """Give the folder's name to an error of the disk that names nothing, as a full one does."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(folder)
        raise


def write_json(path: Path, content: Any) -> None:
    """Write strict JSON to path in one piece: readers see the old file or the new one."""
    partial(path).write_text(json.dumps(strict(content), indent=1, ensure_ascii=False) + "\n")
    partial(path).replace(path)


def partial(path: Path) -> Path:
    """Where a file stands until it is whole."""
    return path.with_name(path.name + ".partial")


def strict(content: Any) -> Any:
    """The same content made of what strict JSON has: NumPy and JAX values become Python's.

    NaN and infinities become None.
    """
    if isinstance(content, dict):
        return {str(key): strict(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [strict(value) for value in content]
    if isinstance(content, np.generic | np.ndarray | jax.Array):
        return strict(np.asarray(content).tolist())
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content


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
        layers, heads = result.metrics.heads.entropy.shape[-2:]
        template = self._template(layers, heads)
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
        lines = []
        for identity, *numbers in zip(
            self._lanes, *(np.asarray(field).tolist() for field in result.evaluation), strict=True
        ):
            fields = dict(zip(("loss", "accuracy"), numbers, strict=True))
            body = json.dumps(strict(fields), separators=(",", ":"))[1:]
            lines.append(f'{{"step":{result.chunk.stop},{identity},{body}\n')
        return "".join(lines)

    @staticmethod
    def _template(layers: int, heads: int) -> str:
        by_head = "[" + ",".join(["[" + ",".join(["%.9g"] * heads) + "]"] * layers) + "]"
        return "".join(
            [
                *(f',"{name}":%.9g' for name in STEP_SCALARS + HEAD_STATISTICS),
                *(f',"{name}_by_head":{by_head}' for name in HEAD_STATISTICS),
            ]
        )


def mean_over_heads(name: str, values: np.ndarray) -> np.ndarray:
    """[..., L, H] to [...]: the mean, but the largest for logit_max."""
    return values.max(axis=(-2, -1)) if name == "logit_max" else values.mean(axis=(-2, -1))


def _flat_values(metrics: StepMetrics, rows: slice) -> np.ndarray:
    """Every number of the rows, in the template's order: [lanes, rows, numbers]."""
    heads = {name: getattr(metrics.heads, name)[:, rows] for name in HEAD_STATISTICS}
    return np.concatenate(
        [
            *(getattr(metrics, name)[:, rows, None] for name in STEP_SCALARS),
            *(mean_over_heads(name, values)[..., None] for name, values in heads.items()),
            *(values.reshape(*values.shape[:2], -1) for values in heads.values()),
        ],
        axis=-1,
    )


def _nulls(template: str, numbers: list[float]) -> str:
    texts = tuple(f"{x:.9g}" if math.isfinite(x) else "null" for x in numbers)
    return template.replace("%.9g", "%s") % texts


def sync(file: IO[str]) -> None:
    """Have a file's rows on the disk before going on."""
    file.flush()
    os.fsync(file.fileno())


def environment(devices: Sequence[jax.Device], matmul_precision: str) -> dict[str, Any]:
    """What the numbers depend on besides the config, for environment.json."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy", "scipy", "orbax-checkpoint")
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
        "platform": devices[0].platform,
        "devices": [device.device_kind for device in devices],
        "machine": platform.machine(),
        "cores": num_cores(),
        # XLA's CPU thread pool has this many threads; the number changes the last bits of sums.
        "thread_pool_size": max(
            int(os.environ.get("NPROC") or num_cores()), jax.local_device_count()
        ),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "matmul_precision": matmul_precision,
        "git_revision": git_revision(),
    }


def git_revision() -> str | None:
    """The commit of this source tree, with "+" if it has uncommitted changes; None outside git."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def digest(tree: Any) -> str:
    """SHA-256 of a pytree's paths, dtypes, shapes and bytes."""
    sha = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        sha.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
        sha.update(np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()


# Reading ---------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or RunFolderError with one line that says what is wrong with its file."""
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
    except FileNotFoundError:
        raise RunFolderError(f"{path.parent} has no {path.name}: not a run folder") from None
    except (ValueError, OSError) as error:
        raise RunFolderError(f"{path} can't be read: {error}") from None
    return content


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


def cut_rows(path: Path, steps: Iterable[int], lanes: int) -> None:
    """Cut a .jsonl file after the rows of these steps, each of which has one row per lane.

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
    os.truncate(path, size)


def _row(line: bytes) -> dict[str, Any] | None:
    """A line as a row; None if it is not one."""
    try:
        row = json.loads(line)
        return row if isinstance(row, dict) and type(row["step"]) is int else None
    except (ValueError, KeyError):
        return None


def load_runs(paths: str | Path | Sequence[str | Path], rows: str = "metrics") -> dict[str, Any]:
    """Read runs as one tidy table, for notebooks: `pandas.DataFrame(load_runs(paths))`.

    Args:
      paths: one run folder or several.
      rows: "metrics" for every step, "evaluation" for the held-out evaluations.

    Returns:
      Column name to NumPy array, one entry a row. The columns of the rows (a statistic of head h
      in layer l is `entropy_layer0_head1`, and so on), then `run` (the folder) and the settings.
      Missing numbers are NaN.

    Raises:
      RunFolderError: a folder that is no run, or a damaged one.
    """
    if rows not in ("metrics", "evaluation"):
        raise ValueError(f"rows: {rows!r}, choose from metrics, evaluation")
    paths = [paths] if isinstance(paths, str | Path) else paths
    tables = []
    for path in map(Path, paths):
        settings = read_json(path / "config.json")
        lines = read_rows(path / f"{rows}.jsonl")
        try:
            table = _columns(lines)
        except (ValueError, TypeError, KeyError, IndexError, OverflowError):
            raise RunFolderError(f"{path / rows}.jsonl: damaged, its rows are not alike") from None
        count = len(lines)
        for name, value in {"run": str(path), **settings}.items():
            if name not in table and not isinstance(value, list | dict):
                table[name] = np.full(count, np.nan if value is None else value)
        tables.append(table)
    names = dict.fromkeys(itertools.chain.from_iterable(tables))
    lengths = [len(table["step"]) for table in tables]
    return {
        name: np.concatenate(
            [
                table.get(name, np.full(length, np.nan))
                for table, length in zip(tables, lengths, strict=True)
            ]
        )
        for name in names
    }


def _columns(lines: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    columns: dict[str, np.ndarray] = {"step": np.zeros(0, int)}
    if any(line.keys() != lines[0].keys() for line in lines):
        raise ValueError("rows with other columns than the first")
    for name in lines[0] if lines else ():
        values = [line[name] for line in lines]
        if name.endswith("_by_head"):
            by_head = np.array(values, float)
            for layer, head in itertools.product(*map(range, by_head.shape[1:])):
                key = f"{name.removesuffix('_by_head')}_layer{layer}_head{head}"
                columns[key] = by_head[:, layer, head]
        elif name in ("step", "seed"):
            columns[name] = np.array(values, int)
        elif name == "scale":
            columns[name] = np.array(values, str)
        else:
            columns[name] = np.array(values, float)
    return columns
