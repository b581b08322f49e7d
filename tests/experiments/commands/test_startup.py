"""The compilation cache: damaged entries go, and no later start hears of them."""

import os
import subprocess
import sys
import zlib
from pathlib import Path

import jax
import pytest

from experiments.commands import startup

ROOT = Path(__file__).parents[3]
GOOD = zlib.compress(bytes(range(256)) * 40)


@pytest.fixture
def updates(monkeypatch):
    """What would be set in JAX's configuration."""
    found = {}
    monkeypatch.setattr(jax.config, "update", found.__setitem__)
    return found


def test_damaged_entries_are_deleted_and_good_ones_stay(tmp_path, updates):
    damaged = {"empty": b"", "cut": GOOD[:-1], "half": GOOD[: len(GOOD) // 2]}
    for bit in range(0, 8 * len(GOOD), 41):
        content = bytearray(GOOD)
        content[bit // 8] ^= 1 << bit % 8
        damaged[f"bit{bit}"] = bytes(content)
    for name, content in damaged.items():
        (tmp_path / f"{name}-cache").write_bytes(content)
    others = {"good-cache": GOOD, "other-cache": b"\x28\xb5\x2f\xfdzstandard", "notes": b"mine"}
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
    startup.use_compilation_cache(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == others
    assert updates["jax_compilation_cache_dir"] == str(tmp_path)


def test_a_cache_that_cannot_be_is_done_without(tmp_path, updates):
    (tmp_path / "file").touch()
    startup.use_compilation_cache(tmp_path / "file")
    startup.use_compilation_cache(tmp_path / "file" / "cache")
    assert updates == {}


COMPILE = """
import sys
from pathlib import Path
from experiments import startup
import jax
if sys.argv[2] == "ours":
    startup.use_compilation_cache(Path(sys.argv[1]))
else:
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
print(jax.jit(lambda x: 2 * x + 1)(20.5))
"""


def start(cache, whose="ours"):
    """Standard error of a process that compiles a function."""
    command = [sys.executable, "-c", COMPILE, str(cache), whose]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment.pop("TF_CPP_MIN_LOG_LEVEL", None)  # JAX sets it where it is imported, as here
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "42.0\n"
    return done.stderr


def test_a_damaged_cache_is_made_again_without_a_word(tmp_path):
    assert start(tmp_path) == ""
    good = {path: path.read_bytes() for path in tmp_path.glob("*-cache")}
    assert good
    for path in good:
        os.truncate(path, path.stat().st_size // 2)
    assert "Error reading persistent compilation cache entry" in start(tmp_path, "JAX's own")
    assert start(tmp_path) == ""
    for path in good:
        zlib.decompress(path.read_bytes())
    assert start(tmp_path) == ""


def test_a_cache_that_is_full_is_done_without_a_word(tmp_path):
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n" + COMPILE
    command = [sys.executable, "-c", limited, str(tmp_path), "ours"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, check=True
    )
    assert (done.stdout, done.stderr) == ("42.0\n", "")
