"""Seals: what a run wrote, known by its digests, so that a later change is seen and said.

    seal.json   SHA-256 of config.json, and, for each checkpoint, of the rows and evaluations so far

A seal is set at each checkpoint, at each stop and at the end. What comes after the last one is what
a crash left, unless the run had ended. Runs from before there were seals are unsealed, which is no
damage. This guards against accidents and forgotten edits, not against forgery. Imports no JAX.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

from experiments.runs.folder import (
    CONFIG,
    EVALUATION,
    METRICS,
    RunFolderError,
    read_json,
    write_json,
)

SEAL = "seal.json"
_BLOCK = 2**20


class Extent(NamedTuple):
    """The beginning of a file."""

    size: int  # bytes
    sha256: str

    def __str__(self) -> str:
        """What a checkpoint says of the rows that it was made with."""
        return f"{self.size}:{self.sha256}"


class Mark(NamedTuple):
    """What the rows were when `step` updates had been taken."""

    step: int
    metrics: Extent
    evaluation: Extent


class Seal(NamedTuple):
    """The content of seal.json."""

    config: tuple[str, ...]  # SHA-256 of config.json; two while a resume changes it
    marks: tuple[Mark, ...]  # in step order
    ended: bool  # whether nothing was to come after the last mark


def digest(content: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def write_seal(folder: Path, seal: Seal) -> None:
    """Replace a run's seal in one piece."""
    marks = [
        {"step": mark.step, METRICS: mark.metrics._asdict(), EVALUATION: mark.evaluation._asdict()}
        for mark in seal.marks
    ]
    write_json(folder / SEAL, {"config": seal.config, "marks": marks, "ended": seal.ended})


def read_seal(folder: Path) -> Seal | None:
    """A run's seal; None for an unsealed run.

    Raises:
      RunFolderError: there is one, but it can't be understood.
    """
    path = folder / SEAL
    if not path.exists():
        return None
    content = read_json(path)
    try:
        marks = [
            Mark(int(m["step"]), *(_extent(m[name]) for name in (METRICS, EVALUATION)))
            for m in content["marks"]
        ]
        return Seal(tuple(map(str, content["config"])), tuple(marks), bool(content["ended"]))
    except (KeyError, TypeError, ValueError):
        raise RunFolderError(f"{path} is not a seal that this version can read") from None


def _extent(content: dict[str, Any]) -> Extent:
    return Extent(int(content["size"]), str(content["sha256"]))


def beginning_of(path: Path, size: int) -> Extent:
    """The first bytes of a file: `size` of them, or as many as there are."""
    sha, left = hashlib.sha256(), size
    with path.open("rb") as file:
        while left and (block := file.read(min(left, _BLOCK))):
            sha.update(block)
            left -= len(block)
    return Extent(size - left, sha.hexdigest())


def check_seal(folder: Path, *, accept_edits: bool = False) -> str | None:
    """Compare a run folder with its seal.

    Args:
      folder: of the run.
      accept_edits: go on with what was changed, and say so.

    Returns:
      None where everything is as it was written, or unsealed; else what was changed, in one line.

    Raises:
      RunFolderError: something was changed, and nobody has said that it was meant.
    """
    found = _first_change(folder)
    if found is None:
        return None
    if accept_edits:
        return f"edited: {found}"
    raise RunFolderError(
        f"{folder}: {found}; if that was meant, say --accept_edits, and what is made of it says so"
    )


def _first_change(folder: Path) -> str | None:
    seal = read_seal(folder)
    if seal is None:
        return None
    try:
        config = digest((folder / CONFIG).read_bytes())
    except OSError as error:
        return f"{CONFIG} can't be read: {error.strerror}"
    if config not in seal.config:
        return f"{CONFIG} is not the one that the run was sealed with"
    for name, extents in (
        (METRICS, [mark.metrics for mark in seal.marks]),
        (EVALUATION, [mark.evaluation for mark in seal.marks]),
    ):
        steps = [mark.step for mark in seal.marks]
        if change := _change_of(folder / name, extents, steps, seal.ended):
            return change
    return None


def _change_of(path: Path, extents: list[Extent], steps: list[int], ended: bool) -> str | None:
    """The first stretch of a file between two marks that is not as it was written."""
    sha, since = hashlib.sha256(), 0
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            for extent, step in zip(extents, steps, strict=True):
                if size < extent.size:
                    return f"{path.name} lacks rows that were written before step {step}"
                while missing := extent.size - file.tell():
                    sha.update(file.read(min(missing, _BLOCK)))
                if sha.hexdigest() != extent.sha256:
                    return f"{path.name} was changed between steps {since} and {step}"
                since = step
    except OSError as error:
        return f"{path.name} can't be read: {error.strerror}"
    if ended and extents and size > extents[-1].size:
        return f"{path.name} has rows after the run's end at step {since}"
    return None
