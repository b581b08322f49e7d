"""The run folder: what is written, when, and how it is read back.

    config.json       every resolved setting
    environment.json  versions, devices, git revision, precision, digests of weights and data
    seal.json         digests of what was written, see seal.py
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
import json
import math
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

from experiments.config import RunConfig, from_json

CONFIG, ENVIRONMENT = "config.json", "environment.json"
METRICS, EVALUATION = "metrics.jsonl", "evaluation.jsonl"
CHECKPOINTS = "checkpoints"


class RunFolderError(Exception):
    """A run folder that can't be used as asked; the message is one line."""


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
    write_text(path, json.dumps(strict(content), indent=1, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 to path in one piece, whatever the locale."""
    partial(path).write_bytes(text.encode())
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
    if hasattr(content, "__array__"):  # NumPy and JAX alike
        return strict(np.asarray(content).tolist())
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or RunFolderError with one line that says what is wrong with its file."""
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
    except FileNotFoundError:
        raise RunFolderError(f"{path.parent} has no {path.name}: not a run folder") from None
    except (ValueError, OSError, RecursionError) as error:
        raise RunFolderError(f"{path} can't be read: {error}") from None
    return content


def stored_config(folder: Path) -> RunConfig:
    """The settings of a run folder, of whatever format.

    Raises:
      RunFolderError: no run, a damaged one, or one of a later version; one line.
    """
    settings = read_json(folder / CONFIG)
    try:
        return from_json(settings)
    except ValueError as error:
        raise RunFolderError(f"{folder / CONFIG}: {error}") from None
