"""What a command sets for its whole process before JAX is used.

Import this before jax: XLA reads its log level once, when it is loaded.
"""

import os

# A warm start from the compilation cache otherwise prints some 14 KB of loader messages.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import warnings
import zlib
from pathlib import Path


def default_cache() -> Path:
    """The user's own cache folder for compiled programs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "why-sqrt-dk"


def use_compilation_cache(folder: Path) -> None:
    """Keep compiled programs in a folder, so that the next start needs no compiler.

    A damaged entry is deleted first: JAX would warn about it at every start, and never replace it.
    A folder that can't be made or read is done without, and so is an entry that can't be written.
    """
    import jax

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for entry in folder.glob("*-cache"):
            if _damaged(entry.read_bytes()):
                entry.unlink()
    except OSError:
        return
    warnings.filterwarnings("ignore", "Error writing persistent compilation cache entry")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _damaged(entry: bytes) -> bool:
    """Whether a zlib stream is broken; entries compressed otherwise are left alone."""
    if entry[:4] == b"\x28\xb5\x2f\xfd":  # zstandard, which JAX uses where it is installed
        return False
    try:
        zlib.decompress(entry)
    except zlib.error:
        return True
    return False
