"""What a command sets for its whole process before JAX is used.

Import this before jax: XLA reads its log level once, when it is loaded.
"""

import os

# A warm start from the compilation cache otherwise prints some 14 KB of loader messages.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import contextlib
import re
import signal
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

OFF = Path("off")
FOLDER, LEAST_SECONDS = "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
_USERS_FOLDER = os.environ.get(FOLDER)  # before any command has set it
# JAX's own names: the function and a SHA-256; nothing else in the folder is touched.
_ENTRY = re.compile(r".+-[0-9a-f]{64}-cache")


def use_compilation_cache(say: Callable[[str], None], folder: Path | None = None) -> None:
    """Keep compiled programs in a folder, so that the next start needs no compiler.

    A damaged entry is deleted first: JAX would warn about it at every start, and never replace it.
    A folder that can't be made or read is done without, and so is an entry that can't be written.
    Imports no JAX.

    Args:
      say: called with one line if there is no cache although one was wanted.
      folder: OFF is none; None is the one that JAX_COMPILATION_CACHE_DIR names, left as it is, or
        else the user's own cache folder.
    """
    if folder == OFF or (folder is None and _USERS_FOLDER):
        return
    try:
        folder = folder or default_cache()
        folder.mkdir(parents=True, exist_ok=True)
        for entry in folder.iterdir():
            if _ENTRY.fullmatch(entry.name) and _damaged(entry.read_bytes()):
                entry.unlink()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        say(f"no compilation cache: {error}")
        return
    warnings.filterwarnings("ignore", "Error writing persistent compilation cache entry")
    for name, value in ((FOLDER, str(folder)), (LEAST_SECONDS, 0.0)):
        os.environ[name] = str(value)
        if "jax" in sys.modules:  # it has read its environment
            sys.modules["jax"].config.update(name.lower(), value)


def end_at_interrupt(name: str) -> None:
    """Have Ctrl-C end this process at once, in one line that begins with the command's name.

    As an exception it would get lost in whatever is loaded or compiled just then. A run has its own
    way from its first step on, until a second Ctrl-C; before that there is nothing to lose. Where
    the parent ignores the signal, it stays ignored.
    """

    def end(*_: object) -> None:
        show_cursor = b"\x1b[?25h" if os.isatty(2) else b""
        with contextlib.suppress(OSError):
            os.write(2, show_cursor + f"{name}: interrupted\n".encode())
        os._exit(128 + signal.SIGINT)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)


def check_machine(start: Callable[[], object]) -> None:
    """Start JAX's devices by `start`, before anything is made for a run.

    Raises:
      ValueError: there are none such, or they can't serve; one line.
    """
    from experiments.engine.devices import thread_pool_size

    try:
        start()
    except (RuntimeError, AssertionError) as error:  # JAX's, for a platform that is not here
        reason = str(error) or "this machine has no such device"
        platforms = os.environ.get("JAX_PLATFORMS", "")
        raise ValueError(f"JAX_PLATFORMS: {platforms!r}: {reason}") from None
    thread_pool_size()


def default_cache() -> Path:
    """The user's own cache folder for compiled programs; RuntimeError if there is no home."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "why-sqrt-dk"


def _damaged(entry: bytes) -> bool:
    """Whether a zlib stream is broken; entries compressed otherwise are left alone."""
    if entry[:4] == b"\x28\xb5\x2f\xfd":  # zstandard, which JAX uses where it is installed
        return False
    try:
        zlib.decompress(entry)
    except zlib.error:
        return True
    return False
