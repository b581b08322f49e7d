"""Checkpoints that are either whole and proven, or don't count.

A step is a folder named by its number,

    20/manifest.json   format, step, identity, leaves with dtype and shape, the archive's size and
                       SHA-256, and the SHA-256 of all this
    20/arrays.npz      NumPy's own archive: arr_0, arr_1, ... in the manifest's order of leaves

written as `20.tmp`, hashed on the way to the disk, and renamed once it is there: a save costs the
state's size once. No manifest means not committed. Everything is verified before it is parsed; a
bad step is renamed to `20.bad`. No folder is trusted: only plain files with names of this format
are opened, and only what a save writes is deleted.

Why no longer Orbax (0.12.8; format 1, which is still read): it restores damaged data silently (28
of 32 single-bit flips) and takes an empty folder for its newest step, so a manifest was needed
anyway. It printed a traceback per array on a full disk, so twice the state's size was written first
to see; errors were told apart by their text; all was read back. Its shards from several processes
were never used: one process gathers and saves.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import stat
import zipfile
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np

_MANIFEST, _ARRAYS, _ORBAX = "manifest.json", "arrays.npz", "arrays"
_FILES = {1: r"arrays(/[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}){1,9}", 2: r"arrays\.npz"}  # by format
_WRITTEN = {_MANIFEST: stat.S_IFREG, _ARRAYS: stat.S_IFREG}
_WRITTEN |= {_ORBAX: stat.S_IFDIR, "probe": stat.S_IFREG}  # by format 1
_STEP, _TEMPORARY, _BAD = (
    re.compile(rf"(0|[1-9][0-9]*){end}") for end in ("", r"\.tmp[0-9]*", r"\.bad[0-9]*")
)
# A read that fails in one of these ways says that the checkpoint is bad. Others (permission, too
# many open files) say nothing about it, and must not get a good one renamed away.
_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.EINVAL}
_said: set[str] = set()  # Lines of housekeeping: once in a process is enough.

Identity = Mapping[str, str] | None
Warn = Callable[[str], None]


class CorruptCheckpoint(Exception):
    """A step that is not, byte for byte, what this run saved; one line says what is wrong."""


class CheckpointNotFound(Exception):
    """There is no step, good or bad, to restore."""


class Restored(NamedTuple):
    """What `restore_latest` found."""

    step: int  # as given to `save`
    state: Any  # the template's pytree, with NumPy arrays as leaves


def save(
    directory: Path, step: int, state: Any, *, keep: int = 2, identity: Identity = None, warn: Warn
) -> Path:
    """Saves `state` as step `step` in `directory`, whose parent must exist; returns the folder.

    A kill at any moment leaves either no new step or a complete one, and never touches another.
    Afterwards committed steps older than the last `keep` (this one included) are deleted.

    Args:
      directory: folder of all steps, and not a link to one.
      step: at least 0, and not yet committed; something bad in its place is renamed away.
      state: pytree of NumPy or JAX arrays (numbers or booleans).
      keep: at least 1.
      identity: digests by name that bind the step to its run; see `verify`.
      warn: gets one line for each bad step that was renamed away, and, once, what wasn't tidied up.

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
    _claim(directory, warn)
    final = directory / str(step)
    if os.path.lexists(final):
        try:
            verify(final, identity=identity)
            raise ValueError(f"step must not be committed yet, got {step=}, which is in {final}")
        except CorruptCheckpoint as error:
            _set_aside(final, error, warn)

    temporary = _free(final, "tmp")
    temporary.mkdir()
    try:
        _write(temporary, step, arrays, dict(identity or {}))
        with _housekeeping(directory, "a folder's names were not synced to the disk", warn):
            _sync(temporary)
        temporary.rename(final)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(temporary)  # A full disk alone would not say which.
        raise
    with _housekeeping(directory, "a folder's names were not synced to the disk", warn):
        _sync(directory)
    with _housekeeping(directory, "older steps were not deleted", warn):
        older = [other for other in committed_steps(directory) if other < step]
        for other in older[::-1][keep - 1 :]:
            _delete(directory / str(other), warn)
    return final


def committed_steps(directory: Path) -> list[int]:
    """The steps that have a manifest, in increasing order; whether they are good is not checked."""
    return [step for step in _steps(directory) if (directory / str(step) / _MANIFEST).is_file()]


def verify(path: Path, *, identity: Identity = None) -> dict[str, Any]:
    """Returns the manifest of the step at `path`, if every file is the one that was saved.

    Args:
      path: folder of one step, as `save` returns it.
      identity: must not contradict the one given to `save`. A name that only one of them has is no
        contradiction: steps of format 1 have none.

    Raises:
      CorruptCheckpoint: the first thing that is wrong, in one line.
      ValueError: the step is of a later format.
    """
    path = path.absolute()
    manifest = _read_manifest(path)
    for name, value in (identity or {}).items():
        if (own := manifest["identity"].get(name, value)) != value:
            raise CorruptCheckpoint(f"{path}: of another run: its {name} is {own!r}, not {value!r}")
    for name, digest in manifest["files"].items():
        with _opened(path, name) as file:
            size = os.fstat(file.fileno()).st_size
            # Size first: a file that was made longer can take for ever to hash.
            same_size = size == manifest["sizes"].get(name, size)
            if not same_size or hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise ValueError(f"{size} bytes")
    return manifest


def restore(path: Path, template: Any, *, identity: Identity = None) -> Any:
    """Reads the step at `path`; changes nothing on disk.

    Args:
      path: folder of one step, as `save` returns it.
      template: pytree of arrays or `jax.ShapeDtypeStruct`, with the paths, shapes and dtypes of the
        saved state. Its containers (named tuples, empty ones) are the result's.
      identity: as for `verify`.

    Returns:
      The template's pytree with NumPy arrays as leaves, bit for bit what was saved.

    Raises:
      CorruptCheckpoint: the step is not what was saved.
      ValueError: the template doesn't fit, and the message names the leaf; or as for `verify`.
    """
    wanted = _leaves(template, "template")
    path = path.absolute()
    manifest = verify(path, identity=identity)
    given = {leaf: f"{like.dtype}{list(like.shape)}" for leaf, like in wanted.items()}
    saved = manifest["leaves"]
    for leaf in given | saved:
        here, there = given.get(leaf, "absent"), saved.get(leaf, "absent")
        if here != there:
            raise ValueError(f"template leaf {leaf} is {here}, but {there} in {path}")
    read = _read_orbax if manifest["format"] == 1 else _read_archive
    arrays = read(path, {leaf: wanted[leaf] for leaf in saved})
    return jax.tree.unflatten(jax.tree.structure(template), [arrays[leaf] for leaf in wanted])


def restore_latest(
    directory: Path, template: Any, *, identity: Identity = None, warn: Warn
) -> Restored:
    """Restores the newest good step; only for the one process that may write to `directory`.

    Each bad step that is newer is renamed away, and what a killed save left behind is deleted.
    Arguments and errors are those of `restore` and, for `directory` and `warn`, of `save`.

    Raises:
      CheckpointNotFound: there never was a step.
      CorruptCheckpoint: there are some, and none is good.
    """
    _claim(directory, warn)
    for step in reversed(_steps(directory)):
        path = directory / str(step)
        try:
            return Restored(step, restore(path, template, identity=identity))
        except CorruptCheckpoint as error:
            _set_aside(path, error, warn)
    if bad := sorted(entry.name for entry in _named(directory, _BAD)):
        raise CorruptCheckpoint(f"{directory}: none of its checkpoints is good ({', '.join(bad)})")
    raise CheckpointNotFound(f"{directory}: there is no checkpoint")


def _named(directory: Path, pattern: re.Pattern[str]) -> list[Path]:
    entries = directory.iterdir() if directory.is_dir() else ()
    return [entry for entry in entries if pattern.fullmatch(entry.name)]


def _steps(directory: Path) -> list[int]:
    """Everything that is named like a step, whatever it is, in increasing order."""
    return sorted(int(entry.name) for entry in _named(directory, _STEP))


def _free(path: Path, ending: str) -> Path:
    names = (path.with_name(f"{path.name}.{ending}{number or ''}") for number in itertools.count())
    return next(name for name in names if not os.path.lexists(name))


def _set_aside(path: Path, error: CorruptCheckpoint, warn: Warn) -> None:
    target = path.rename(_free(path, "bad"))
    warn(f"bad checkpoint, renamed to {target.name}: {error}")


def _claim(directory: Path, warn: Warn) -> None:
    """How a writer begins: never behind a link, and without what a killed save left."""
    if directory.is_symlink():
        raise OSError(errno.ENOTDIR, "A link, not a folder", str(directory))
    for entry in _named(directory, _TEMPORARY):
        _delete(entry, warn)


def _delete(path: Path, warn: Warn) -> None:
    """Deletes a step or a temporary, unless there is more in it than a save writes."""
    with _housekeeping(path.parent, "not all that is old was deleted", warn):
        entries = path.iterdir() if path.is_dir() else (path,)
        kinds = {entry.name: stat.S_IFMT(entry.lstat().st_mode) for entry in entries}
        if path.is_symlink() or not kinds.items() <= _WRITTEN.items():
            raise OSError(errno.EPERM, f"{path.name} is more than a save writes")
        # Under its own name, a half-deleted step would be a bad one.
        shutil.rmtree(path.rename(_free(path, "tmp")) if _STEP.fullmatch(path.name) else path)


@contextlib.contextmanager
def _housekeeping(directory: Path, what: str, warn: Warn) -> Generator[None]:
    """What fails in here costs one line, never a run."""
    try:
        yield
    except (OSError, RecursionError) as error:
        line = f"{directory}: {what}: {getattr(error, 'strerror', error)}"
        if line not in _said:
            _said.add(line)
            warn(line)


def _leaves(tree: Any, argument: str) -> dict[str, Any]:
    """The leaves of a pytree by their path, such as `.params['layer_0'][1]`."""
    with_paths = jax.tree_util.tree_leaves_with_path(tree)
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in with_paths}
    if not leaves:
        raise ValueError(f"{argument} must hold at least one array, got {tree!r}")
    for path, leaf in leaves.items():
        dtype = getattr(leaf, "dtype", type(leaf).__name__)
        known = isinstance(dtype, np.dtype)  # That of typed PRNG keys isn't NumPy's.
        if not known or (dtype.kind not in "biufc" and dtype == _stored(dtype)):
            raise ValueError(
                f"{argument} leaf {path} must be an array of numbers or booleans, got {dtype}"
            )
    return leaves


def _stored(dtype: np.dtype) -> np.dtype:
    """What the archive has it as: NumPy's format can't spell bfloat16 and its like."""
    return np.dtype(f"V{dtype.itemsize}") if dtype.type.__module__ == "ml_dtypes" else dtype


class _Hashing(io.RawIOBase):
    """Passes on what is written, and hashes it; can't seek, so no byte is written twice."""

    def __init__(self, file: BinaryIO):
        self.file, self.sha256 = file, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return self.file.write(data)


def _write(
    folder: Path, step: int, arrays: dict[str, np.ndarray], identity: dict[str, str]
) -> None:
    with (folder / _ARRAYS).open("xb") as file:
        stream = _Hashing(file)
        np.savez(stream, *(a.view(_stored(a.dtype)) for a in arrays.values()), allow_pickle=False)
        size = file.tell()
    manifest = {
        "format": 2,
        "step": step,
        "identity": identity,
        "leaves": {p: {"dtype": str(a.dtype), "shape": list(a.shape)} for p, a in arrays.items()},
        "sizes": {_ARRAYS: size},
        "files": {_ARRAYS: stream.sha256.hexdigest()},
    }
    (folder / _MANIFEST).write_bytes(_signed(manifest))
    for name in (_ARRAYS, _MANIFEST):
        _sync(folder / name)


def _sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _signed(manifest: dict[str, Any]) -> bytes:
    """The one spelling of a manifest, so that a change of any byte of the file is seen."""
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return (json.dumps({"sha256": digest, **manifest}, indent=1) + "\n").encode()


@contextlib.contextmanager
def _opened(path: Path, name: str) -> Generator[io.BufferedReader]:
    """A plain file of the step at `path`; what is wrong with it, or in it, is CorruptCheckpoint."""
    file = path / name
    try:
        here = Path(os.path.realpath(path.parent), path.name, name)
        if not stat.S_ISREG(file.lstat().st_mode) or Path(os.path.realpath(file)) != here:
            raise ValueError("no plain file")  # A pipe may never end, a link leads elsewhere.
        with file.open("rb") as opened:
            yield opened
    except Exception as error:
        says_nothing = isinstance(error, MemoryError | AttributeError)
        if says_nothing or (isinstance(error, OSError) and error.errno not in _DAMAGE):
            raise
        why = getattr(error, "strerror", None) or " ".join(str(error).split())[:99]
        raise CorruptCheckpoint(f"{path}: {name} is not the one saved ({why})") from error


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest, leaves spelled as `float32[2, 3]`, with what those of format 1 don't have."""
    with _opened(path, _MANIFEST) as file:
        raw = file.read(2**24)
        signed = dict(json.loads(raw))
        del signed["sha256"]
        if raw != _signed(signed):
            raise ValueError("another SHA-256")
        manifest: dict[str, Any] = {"format": 1, "identity": {}, "sizes": {}} | signed
        if known := manifest["format"] in _FILES:
            if str(manifest["step"]) != path.name:
                raise ValueError(f"holds step {manifest['step']}")
            for key in ("identity", "sizes", "files", "leaves"):
                manifest[key] = dict(manifest[key])
            own = re.compile(_FILES[manifest["format"]]).fullmatch
            if not manifest["files"] or not all(map(own, manifest["files"])):
                raise ValueError("names other files than its own")
            leaves = manifest["leaves"].items()
            manifest["leaves"] = {leaf: "{dtype}{shape}".format(**of) for leaf, of in leaves}
    if not known:
        raise ValueError(f"{path} has format {manifest['format']!r}, not one of {[*_FILES]}")
    return manifest


def _read_archive(path: Path, wanted: dict[str, Any]) -> dict[str, np.ndarray]:
    arrays = {}
    with _opened(path, _ARRAYS) as file, zipfile.ZipFile(file) as archive:
        for number, (leaf, like) in enumerate(wanted.items()):
            with archive.open(f"arr_{number}.npy") as entry:
                np.lib.format.read_magic(entry)
                shape, _, dtype = np.lib.format.read_array_header_1_0(entry)
                if (shape, dtype) != (like.shape, _stored(like.dtype)):  # perhaps a huge one
                    raise ValueError(f"array {number} is {dtype}{shape}")
                entry.seek(0)
                arrays[leaf] = np.lib.format.read_array(entry).view(like.dtype)
    return arrays


def _read_orbax(path: Path, wanted: dict[str, Any]) -> dict[str, np.ndarray]:
    """Format 1: a folder of Orbax's, which holds one flat dictionary from leaf to array."""
    try:
        import orbax.checkpoint as ocp  # Half a second, for runs of that time only.
        from etils import epath

        as_numpy = {leaf: ocp.RestoreArgs(restore_type=np.ndarray) for leaf in wanted}
        arguments = ocp.args.PyTreeRestore(item=wanted, restore_args=as_numpy)
        with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
            return handler.restore(epath.Path(path / _ORBAX), args=arguments)
    except Exception as error:  # Its bytes are those that were saved: this is no damage.
        reason = str(error).partition("\n")[0][:120]
        raise OSError(errno.EIO, f"Orbax can't read it: {reason}", str(path)) from error
