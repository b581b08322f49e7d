"""The compilation cache: damaged entries go, and no later start hears of them."""

import os
import pwd
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
    """What would be set in JAX's configuration, and in this process's environment."""
    found = {}
    monkeypatch.setattr(jax.config, "update", found.__setitem__)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return found


def entry(name):
    """A file as JAX names its own."""
    return f"jit_{name}-{zlib.crc32(name.encode()):064x}-cache"


def test_damaged_entries_are_deleted_and_what_else_is_there_stays(tmp_path, updates):
    damaged = {"empty": b"", "cut": GOOD[:-1], "half": GOOD[: len(GOOD) // 2]}
    for bit in range(0, 8 * len(GOOD), 41):
        content = bytearray(GOOD)
        content[bit // 8] ^= 1 << bit % 8
        damaged[f"bit{bit}"] = bytes(content)
    for name, content in damaged.items():
        (tmp_path / entry(name)).write_bytes(content)
    others = {entry("good"): GOOD, entry("other"): b"\x28\xb5\x2f\xfdzstandard"}
    others |= {"notes": b"mine", "my-cache": b"mine"}
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
    startup.use_compilation_cache(pytest.fail, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == others
    assert updates["jax_compilation_cache_dir"] == str(tmp_path)


def test_a_cache_that_cannot_be_is_done_without_in_one_line(tmp_path, updates):
    (tmp_path / "file").touch()
    lines = []
    startup.use_compilation_cache(lines.append, tmp_path / "file")
    startup.use_compilation_cache(lines.append, tmp_path / "file" / "cache")
    assert updates == {}
    assert len(lines) == 2
    assert all(
        line.startswith("no compilation cache: ") and str(tmp_path) in line for line in lines
    )


def test_no_home_is_no_cache_and_one_line(updates, monkeypatch):
    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(startup, "_USERS_FOLDER", None)
    for name in ("HOME", "XDG_CACHE_HOME"):
        os.environ.pop(name, None)
    lines = []
    startup.use_compilation_cache(lines.append)
    assert updates == {}
    assert lines == ["no compilation cache: Could not determine home directory."]


def test_off_is_no_cache_and_no_line(updates):
    startup.use_compilation_cache(pytest.fail, Path("off"))
    assert updates == {}


COMPILE = """
import sys
from pathlib import Path
from experiments.commands import startup
if sys.argv[1] == "JAX":
    import jax
    jax.config.update("jax_compilation_cache_dir", sys.argv[2])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
else:
    startup.use_compilation_cache(print, *map(Path, sys.argv[2:]))
    assert "jax" not in sys.modules
import jax
print(jax.jit(lambda x: 2 * x + 1)(20.5))
"""


def start(*folder, whose="ours", before="", **environment):
    """Standard error of a process that compiles a function."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment
    environment.pop("TF_CPP_MIN_LOG_LEVEL", None)  # JAX sets it where it is imported, as here
    done = subprocess.run(
        [sys.executable, "-c", before + COMPILE, whose, *map(str, folder)],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert done.stdout == "42.0\n"
    return done.stderr


def test_a_damaged_cache_is_made_again_without_a_word(tmp_path):
    assert start(tmp_path) == ""
    good = {path: path.read_bytes() for path in tmp_path.glob("*-cache")}
    assert good
    for path in good:
        os.truncate(path, path.stat().st_size // 2)
    assert "Error reading persistent compilation cache entry" in start(tmp_path, whose="JAX")
    assert start(tmp_path) == ""
    for path in good:
        zlib.decompress(path.read_bytes())
    assert start(tmp_path) == ""


def test_a_cache_that_is_full_is_done_without_a_word(tmp_path):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
    assert start(tmp_path, before=limit) == ""


def test_the_users_own_choice_of_a_folder_is_respected(tmp_path):
    theirs, ours, typed = (tmp_path / name for name in ("theirs", "ours", "typed"))
    surroundings = {
        "XDG_CACHE_HOME": str(ours),
        "JAX_COMPILATION_CACHE_DIR": str(theirs),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    assert start(**surroundings) == ""
    assert list(theirs.iterdir()) and not ours.exists()
    written = sorted(theirs.iterdir())
    assert start(typed, **surroundings) == ""
    assert list(typed.iterdir()) and not ours.exists()
    assert sorted(theirs.iterdir()) == written
    assert start(**surroundings | {"JAX_COMPILATION_CACHE_DIR": ""}) == ""
    assert list((ours / "why-sqrt-dk").iterdir())
