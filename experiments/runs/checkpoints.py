"""Checkpoints that are either whole and proven, or don't count.

Orbax writes and reads the arrays. It restores damaged data silently (28 of 32 single-bit flips, on
0.12.8) and takes an empty folder for its newest step, so this file adds what it lacks. A step is a
folder named by its number,

    20/manifest.json    step, tree structure, shapes, dtypes, SHA-256 of every file and of itself
    20/arrays/          Orbax's own files: one flat dictionary from tree path to array

written as `20.tmp`, read back, and renamed once it is safely on disk. No manifest means not
committed. Everything is verified before Orbax opens anything; a bad step is renamed to `20.bad`.

One process writes at a time. Several would each hand Orbax their shards of global arrays; the
manifest and the rename stay with one of them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

_MANIFEST = "manifest.json"
_ARRAYS = "arrays"
_STEP = re.compile(r"0|[1-9][0-9]*")
# A read that fails in one of these ways says that the checkpoint is bad. Others (permission, too
# many open files) say nothing about it, and must not get a good one renamed away.
_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO}


class CorruptCheckpoint(Exception):
    """A step that is not, byte for byte, what was saved; one line says what is wrong."""


class CheckpointNotFound(Exception):
    """There is no step, good or bad, to restore."""


class Restored(NamedTuple):
    """What `restore_latest` found."""

    step: int
    """Number of the step, as given to `save`."""
    state: Any
    """The template's pytree, with NumPy arrays as leaves."""


def save(
    directory: Path, step: int, state: Any, *, keep: int = 2, warn: Callable[[str], None]
) -> Path:
    """Saves `state` as step `step` in `directory`, whose parent must exist; returns the folder.

    A kill at any moment leaves either no new step or a complete one, and never touches another.
    The step is read back and compared bit for bit before it is committed. Afterwards committed
    steps older than the last `keep` (this one included) are deleted. Safe in any one thread.

    Args:
        directory: folder of all steps.
        step: at least 0, and not yet committed; something bad in its place is renamed away.
        state: pytree of NumPy or JAX arrays (numbers or booleans, at least one element each).
        keep: at least 1.
        warn: called with one line for each bad step that was renamed away.

    Raises:
        ValueError: an argument is not as above; the message names it.
        OSError: the disk is full, read-only or gone; earlier steps are as they were.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"step must be at least 0 and keep at least 1, got {step=} and {keep=}")
    arrays = {path: np.asarray(leaf) for path, leaf in _leaves(state, "state").items()}
    directory = directory.absolute()
    # Not the parents: a run folder that was deleted must not come back as a ghost.
    directory.mkdir(exist_ok=True)
    _delete_temporaries(directory)
    final = directory / str(step)
    if os.path.lexists(final):
        try:
            verify(final)
        except CorruptCheckpoint as error:
            _set_aside(final, error, warn)
        else:
            raise ValueError(f"step must not be committed yet, got {step=}, which is in {final}")

    temporary = _temporary(final)
    temporary.mkdir()
    try:
        _require_room(temporary, 2 * sum(array.nbytes for array in arrays.values()) + 2**20)
        _orbax_write(temporary / _ARRAYS, arrays)
        read = _orbax_read(temporary / _ARRAYS, arrays)
        for path, array in arrays.items():
            same = _description(read[path]) == _description(array)
            if not same or read[path].tobytes() != array.tobytes():
                raise OSError(errno.EIO, f"{path} reads back other than it was saved", str(final))
        (temporary / _MANIFEST).write_bytes(_manifest(step, arrays, temporary))
        for entry in (*temporary.rglob("*"), temporary):
            _flush(entry)
        temporary.rename(final)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(temporary)  # A full disk alone would not say which.
        raise
    _flush(directory)

    older = [other for other in committed_steps(directory) if other < step]
    for other in older[::-1][keep - 1 :]:
        # Under its own name, a half-deleted step would be a bad one.
        path = directory / str(other)
        shutil.rmtree(path.rename(_temporary(path)))
    return final


def committed_steps(directory: Path) -> list[int]:
    """The steps that have a manifest, in increasing order; whether they are good is not checked."""
    return [step for step in _steps(directory) if (directory / str(step) / _MANIFEST).is_file()]


def verify(path: Path) -> dict[str, Any]:
    """Returns the manifest of the step at `path`, if every file is the one that was saved.

    Raises:
        CorruptCheckpoint: the first thing that is wrong, in one line.
    """
    with _damage_reported(path):
        raw = (path / _MANIFEST).read_bytes()
    try:
        manifest = json.loads(raw)
        manifest.pop("sha256")
    except (ValueError, AttributeError, KeyError, TypeError):
        manifest = None
    if manifest is None or raw != _signed(manifest):
        raise CorruptCheckpoint(f"{path}: {_MANIFEST} is not the one that was saved")
    if str(manifest["step"]) != path.name:
        raise CorruptCheckpoint(f"{path}: holds step {manifest['step']}")
    for name, digest in manifest["files"].items():
        with _damage_reported(path):
            found = _sha256(path / name)
        if found != digest:
            size = (path / name).stat().st_size
            raise CorruptCheckpoint(f"{path}: {name} ({size} bytes) is not the one that was saved")
    return manifest


def restore(path: Path, template: Any) -> Any:
    """Reads the step at `path` into the structure of `template`; changes nothing on disk.

    Args:
        path: folder of one step, as `save` returns it.
        template: pytree of arrays or `jax.ShapeDtypeStruct`, with the paths, shapes and dtypes of
            the saved state. Its containers (named tuples, empty ones) are the result's.

    Returns:
        The same pytree with NumPy arrays as leaves, bit for bit what was saved.

    Raises:
        CorruptCheckpoint: the step is not what was saved.
        ValueError: the template doesn't fit; the message names the leaf.
    """
    wanted = _leaves(template, "template")
    path = path.absolute()
    saved = verify(path)["leaves"]
    for leaf in [*wanted, *saved]:
        if leaf not in saved:
            raise ValueError(f"template leaf {leaf} is not in {path}")
        if leaf not in wanted:
            raise ValueError(f"template has no leaf {leaf}, which is in {path}")
        if (given := _description(wanted[leaf])) != saved[leaf]:
            raise ValueError(
                f"template leaf {leaf} is {given['dtype']}{given['shape']}, but"
                f" {saved[leaf]['dtype']}{saved[leaf]['shape']} in {path}"
            )
    arrays = _orbax_read(path / _ARRAYS, wanted)
    return jax.tree.unflatten(jax.tree.structure(template), [arrays[leaf] for leaf in wanted])


def restore_latest(directory: Path, template: Any, *, warn: Callable[[str], None]) -> Restored:
    """Restores the newest good step; only for the one process that may write to `directory`.

    Each bad step that is newer is renamed away, and what a killed save left behind is deleted.

    Args:
        directory: folder of all steps.
        template: as for `restore`.
        warn: called with one line for each bad step that was renamed away.

    Raises:
        CheckpointNotFound: there never was a step.
        CorruptCheckpoint: there are some, and none is good.
        ValueError: the template doesn't fit; the message names the leaf.
    """
    _delete_temporaries(directory)
    for step in reversed(_steps(directory)):
        path = directory / str(step)
        try:
            return Restored(step, restore(path, template))
        except CorruptCheckpoint as error:
            _set_aside(path, error, warn)
    if bad := sorted(entry.name for entry in directory.glob("*.bad*")):
        raise CorruptCheckpoint(f"{directory}: none of its checkpoints is good ({', '.join(bad)})")
    raise CheckpointNotFound(f"{directory}: there is no checkpoint")


def _steps(directory: Path) -> list[int]:
    """Everything that is named like a step, whatever it is, in increasing order."""
    if not directory.is_dir():
        return []
    return sorted(int(entry.name) for entry in directory.iterdir() if _STEP.fullmatch(entry.name))


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp")


def _delete_temporaries(directory: Path) -> None:
    for entry in directory.glob("*.tmp"):
        if _STEP.fullmatch(entry.stem):
            shutil.rmtree(entry)


def _set_aside(path: Path, error: CorruptCheckpoint, warn: Callable[[str], None]) -> None:
    names = (path.with_name(f"{path.name}.bad{number or ''}") for number in itertools.count())
    target = next(name for name in names if not os.path.lexists(name))
    path.rename(target)
    warn(f"bad checkpoint, renamed to {target.name}: {error}")


def _leaves(tree: Any, argument: str) -> dict[str, Any]:
    """The leaves of a pytree by their path, such as `.params['layer_0'][1]`."""
    leaves = {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    if not leaves:
        raise ValueError(f"{argument} must hold at least one array, got {tree!r}")
    for path, leaf in leaves.items():
        dtype = getattr(leaf, "dtype", None)
        # Typed PRNG keys have a dtype that is none of NumPy's. Orbax can't store empty arrays.
        if not isinstance(dtype, np.dtype) or dtype.kind not in "biufcV" or not leaf.size:
            what = type(leaf).__name__ if dtype is None else f"{dtype}{list(leaf.shape)}"
            raise ValueError(
                f"{argument} leaf {path} must be a non-empty array of numbers or booleans,"
                f" got {what}"
            )
    return leaves


def _description(leaf: Any) -> dict[str, Any]:
    return {"dtype": str(leaf.dtype), "shape": list(leaf.shape)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest(step: int, arrays: dict[str, np.ndarray], folder: Path) -> bytes:
    files = sorted(entry for entry in folder.rglob("*") if entry.is_file())
    return _signed(
        {
            "step": step,
            "leaves": {path: _description(array) for path, array in arrays.items()},
            "files": {entry.relative_to(folder).as_posix(): _sha256(entry) for entry in files},
        }
    )


def _signed(manifest: dict[str, Any]) -> bytes:
    """The one spelling of a manifest, so that a change of any byte of the file is seen."""
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return (json.dumps({"sha256": digest, **manifest}, indent=1) + "\n").encode()


@contextlib.contextmanager
def _damage_reported(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _DAMAGE:
            raise
        name = os.path.relpath(error.filename or path, path)
        raise CorruptCheckpoint(f"{path}: {name}: {error.strerror}") from error


def _flush(path: Path) -> None:
    """Waits until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _require_room(folder: Path, size: int) -> None:
    """Writes and deletes `size` bytes.

    A full disk must be found out here: Orbax reports it too, but only after its threads have
    printed a traceback per array.
    """
    block = os.urandom(2**20)  # Random, because a file system may compress.
    probe = folder / "probe"
    with probe.open("wb") as file:
        for _ in range(0, size, len(block)):
            file.write(block)
    probe.unlink()


def _orbax_write(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    import orbax.checkpoint as ocp  # Half a second, which `--help` need not pay.
    from etils import epath

    with _orbax_reported(folder), contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        handler.save(epath.Path(folder), args=ocp.args.PyTreeSave(arrays))
        handler.finalize(epath.Path(folder))


def _orbax_read(folder: Path, wanted: dict[str, Any]) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp
    from etils import epath

    as_numpy = {path: ocp.RestoreArgs(restore_type=np.ndarray) for path in wanted}
    with _orbax_reported(folder), contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        return handler.restore(
            epath.Path(folder), args=ocp.args.PyTreeRestore(item=wanted, restore_args=as_numpy)
        )


@contextlib.contextmanager
def _orbax_reported(folder: Path) -> Generator[None]:
    """Turns tensorstore's disk errors into OSError, and drops Orbax's log of what it raises."""

    def elsewhere(record: logging.LogRecord) -> bool:
        return "orbax" not in Path(record.pathname).parts

    logger = logging.getLogger("absl")
    logger.addFilter(elsewhere)
    try:
        yield
    except Exception as error:
        if code := re.search(r"os_error_code='(\d+)'", str(error)):
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(folder)) from error
        raise
    finally:
        logger.removeFilter(elsewhere)
