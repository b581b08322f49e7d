"""Everything that is run: tasks, training, lanes, recording, studies.

In a notebook: `from experiments import TrainConfig, load_runs, train`.
"""

from typing import TYPE_CHECKING

from experiments.config import RecordOptions, TrainConfig

if TYPE_CHECKING:
    from experiments.runs.recording import load_runs
    from experiments.runs.run import train

__all__ = ["RecordOptions", "TrainConfig", "load_runs", "train"]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str):
    # Late, because these start importing JAX, and --help should answer at once.
    if name == "train":
        from experiments.runs.run import train

        return train
    if name == "load_runs":
        from experiments.runs.recording import load_runs

        return load_runs
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
