"""Runs for tests: a tiny one that is trained, and folders whose rows are made up."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from experiments.config import RecordOptions, TrainConfig, resolve
from experiments.metrics import (
    HEAD_STATISTICS,
    STEP_SCALARS,
    Evaluation,
    HeadStatistics,
    StepMetrics,
)
from experiments.runs.folder import CONFIG, ENVIRONMENT, EVALUATION, METRICS, write_json
from experiments.runs.rows import RowFormat


@pytest.fixture(scope="session")
def tiny_run(tiny, tmp_path_factory):
    """The folder of a finished tiny run; not to be changed."""
    from experiments.runs.record import record

    folder = tmp_path_factory.mktemp("runs") / "tiny"
    record(resolve(tiny), RecordOptions(folder, figures=False))
    return folder


@pytest.fixture
def make_run(tmp_path):
    """Writes a run folder without training: what its rows say is up to the test."""

    def make(
        name="run",
        *,
        done=None,
        accuracy: Any = 0.5,
        loss: Any = 1.0,
        measures=None,
        parameters=None,
        **settings: Any,
    ):
        """An unsealed folder with every row and evaluation up to step `done`: 0, or None for all.

        accuracy and loss are those of the held-out set, [lanes, E]; measures holds columns of the
        metrics, [lanes, T], 1 where it says nothing; parameters those of an arm's own, [lanes, T]
        for both of the two heads. All broadcast.
        """
        chosen: dict[str, Any] = {"steps": 40, "num_seeds": 3, "eval_every": 10} | settings
        config = resolve(TrainConfig(**chosen))
        done = config.steps if done is None else done
        names = config.lane_names()
        multipliers = {arm.name: arm.rule.multiplier for arm in config.arms()}
        rows = RowFormat(names, [multipliers[lane.scale] for lane in names], config.log_every)

        def column(values: Any) -> np.ndarray:
            return np.broadcast_to(np.asarray(values, np.float32), (len(names), done))

        def of_heads(values: Any) -> np.ndarray:
            return np.broadcast_to(column(values)[..., None, None], (len(names), done, 1, 2))

        said = dict.fromkeys((*STEP_SCALARS, *HEAD_STATISTICS), 1.0) | (measures or {})
        steps = StepMetrics(
            **{name: column(said[name]) for name in STEP_SCALARS},
            heads=HeadStatistics(**{name: of_heads(said[name]) for name in HEAD_STATISTICS}),
            parameters={name: of_heads(values) for name, values in (parameters or {}).items()},
        )
        evaluated = range(0, done + 1, config.eval_every)
        shape = (len(names), len(evaluated))
        held_out = np.array([np.broadcast_to(x, shape) for x in (loss, accuracy)], np.float32)

        def result(start: int, stop: int, evaluation: Evaluation | None) -> Any:
            chunk = SimpleNamespace(start=start, stop=stop)
            return SimpleNamespace(chunk=chunk, metrics=steps, evaluation=evaluation)

        folder = tmp_path / name
        folder.mkdir()
        write_json(folder / CONFIG, config.to_json())
        write_json(
            folder / ENVIRONMENT,
            {
                "versions": {"jax": "1.2.3"},
                "platform": "cpu",
                "git_revision": "abc+",
                "digests": {str(s): {"weights": f"w{s}", "data": f"d{s}"} for s in config.seeds()},
            },
        )
        (folder / METRICS).write_text(rows.metrics(result(0, done, None)))
        lines = [
            rows.evaluation(result(step, step, Evaluation(*held_out[..., i])))
            for i, step in enumerate(evaluated)
        ]
        (folder / EVALUATION).write_text("".join(lines))
        return folder

    return make
