"""A run small enough to be a test, and a folder that holds one."""

import pytest

from experiments.config import RecordOptions, TrainConfig
from experiments.run import record

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


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """The folder of a finished tiny run; not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    record(TINY, RecordOptions(folder, figures=False))
    return folder
