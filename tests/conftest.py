"""Suite-wide strictness: one CPU device, ranks never broadcast by accident, warnings are errors."""

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


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=30, help="how often test_survival.py kills runs")


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
