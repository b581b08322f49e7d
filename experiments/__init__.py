"""Everything that is run: tasks, training, lanes, recording, studies.

In a notebook: `from experiments import TrainConfig, load_runs, train`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from experiments.config import RecordOptions, TrainConfig

if TYPE_CHECKING:
    from experiments.analysis.read import load_runs
    from experiments.runs.record import train

__all__ = ["RecordOptions", "TrainConfig", "load_runs", "train"]

# Late, because these start importing JAX or SciPy, and --help should answer at once.
_LATE = {"load_runs": "experiments.analysis.read", "train": "experiments.runs.record"}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
