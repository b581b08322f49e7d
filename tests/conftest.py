"""Suite-wide: two CPU devices, no rank broadcast by accident, warnings are errors, one cache.

Most of the suite's time is compiling. XLA's lowest level halves that, and what is tested holds at
any level; `XLA_FLAGS= pytest` has the one that users have.
"""

import os
import time

# A program that comes from the cache otherwise has 14 KB to say; read when XLA is loaded.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import hypothesis
import jax
import pytest

from experiments.config import TrainConfig

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples in every run, and no deadline: the first example of a shape compiles.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.load_profile("suite")

A_FORTNIGHT = 14 * 24 * 3600.0  # seconds


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=30, help="how often test_survival.py kills runs")


def pytest_configure(config):
    """Share compiled programs between workers, the processes that tests start, and sessions.

    JAX names an entry by all that its bytes depend on: program, compiler, flags, CPU; so none is
    ever stale. Parallel workers can at worst meet half an entry, and compile what it stands for.
    `pytest --cache-clear` empties it.
    """
    config.addinivalue_line("filterwarnings", "ignore:Error (reading|writing) persistent comp")
    cache = getattr(config, "cache", None)
    inherited = os.environ.get("JAX_COMPILATION_CACHE_DIR")  # by a worker, or the user's own
    if cache is None or inherited:
        return
    folder = cache.mkdir("compiled")
    for entry in folder.iterdir():
        if entry.stat().st_mtime < time.time() - A_FORTNIGHT:
            entry.unlink(missing_ok=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)  # which commands then leave as it is
    from experiments.commands import startup

    startup.use_compilation_cache(folder)


TINY = TrainConfig(
    task="reverse",
    steps=12,
    num_seeds=2,
    batch_size=4,
    sequence_length=8,
    vocab_size=4,
    d_model=16,
    d_k=8,
    d_ff=16,
    eval_every=4,
    eval_size=8,
    checkpoint_every=4,
)


@pytest.fixture(scope="session")
def tiny():
    """The settings of the smallest run; every test that uses them shares one compiled program."""
    return TINY
