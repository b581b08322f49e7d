"""Whose folder it is: making, locking, claiming and clearing the folder of a run."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Generator
from pathlib import Path

from experiments.config import RunConfig
from experiments.runs.folder import (
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    EVALUATION,
    METRICS,
    RunFolderError,
    partial,
    stored_config,
    write_json,
)
from experiments.runs.seal import SEAL

_FILES = (CONFIG, f"{CONFIG}.new", ENVIRONMENT, METRICS, EVALUATION, SEAL)
_FILES += ("summary.json", "report.md")
# What a run makes, as paths relative to its folder; nothing else is ever deleted.
_OURS = re.compile(
    "|".join(
        [
            *(rf"{re.escape(name)}(\.partial)?" for name in _FILES),
            rf"{CHECKPOINTS}",
            rf"{CHECKPOINTS}/\d+(\.tmp\d*|\.bad\d*)?(/manifest\.json|/arrays\.npz|/probe|/arrays(/.*)?)?",
            r"figures",
            r"figures/(curves|attention_maps)\.(png|svg)(\.partial)?",
            r"tensorboard",
            r"tensorboard/scale=[^/]*",
            r"tensorboard/scale=[^/]*/events\.[^/]*",
        ]
    )
)
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, or none of them.

    Raises:
      RunFolderError: it can't be made; one line.
    """
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()
        if isinstance(error, FileExistsError | NotADirectoryError):
            raise RunFolderError(f"out: {folder} is, or is in, a file; give a folder") from None
        raise RunFolderError(f"out: {folder} can't be made: {error.strerror}") from None


@contextlib.contextmanager
def locked(folder: Path, say: Callable[[str], None]) -> Generator[None]:
    """Hold a run folder for this process.

    The lock is the kernel's, on the folder itself: no file is made for it, and it goes with the
    process, however that ends. A file system without locks is done without, with a warning.

    Raises:
      RunFolderError: another process holds it.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderError(f"{folder} is in use by another run") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            say(f"warning: {folder} can't be locked ({error.strerror}): keep other runs off it")
        yield
    finally:
        os.close(handle)


def claim(folder: Path, config: RunConfig, *, overwrite: bool) -> None:
    """Make an empty folder, or one whose run may be deleted, the folder of a new run.

    From the first moment on it holds a config.json, so whenever the run is killed, it can go on.

    Raises:
      RunFolderError: something is there that is no run's, or that nobody has given up.
    """
    unfinished = partial(folder / CONFIG)
    entries = [entry for entry in folder.iterdir() if entry != unfinished]
    if entries and not (folder / CONFIG).is_file():
        name = "overwrite" if overwrite else "out"
        raise RunFolderError(f"{name}: {folder} is not a run folder, so it is left alone")
    if entries and not overwrite:
        raise RunFolderError(f"out: {folder} exists; give another, or --resume, or --overwrite")
    if entries:
        _clear(folder, entries)
    write_json(folder / CONFIG, config.to_json())


def _clear(folder: Path, entries: list[Path]) -> None:
    try:
        stored_config(folder)
    except RunFolderError as error:
        raise RunFolderError(
            f"overwrite: {folder} is not a run of this project, so it is left alone ({error})"
        ) from None
    strangers = sorted(
        path
        for path in _all_below(folder)
        if not _OURS.fullmatch(path.relative_to(folder).as_posix())
    )
    if strangers:
        raise RunFolderError(
            f"overwrite: {folder} holds {strangers[0].relative_to(folder)}, which no run makes, so "
            "nothing was deleted; move it away"
        )
    # A run folder until the end, so that what a kill leaves can be overwritten again.
    for entry in sorted(entries, key=lambda entry: entry.name == CONFIG):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _all_below(folder: Path) -> list[Path]:
    """Everything below, links not followed; a directory named like a file of ours is no file."""
    found = []
    for parent, folders, files in os.walk(folder):
        found += [Path(parent, name) for name in (*folders, *files)]
    return found
