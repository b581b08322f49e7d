"""Runs for tests: a tiny one that is trained, and folders whose rows are made up."""

import json
from typing import Any

import numpy as np
import pytest

from attention.statistics import HeadStatistics
from experiments.config import RecordOptions, TrainConfig, resolve
from experiments.engine.lanes import Chunk, ChunkResult, lane_names
from experiments.engine.training import Evaluation, StepMetrics
from experiments.runs.recording import EVALUATION, METRICS, STEP_SCALARS, RowFormat
from experiments.runs.run import record


@pytest.fixture(scope="session")
def tiny_run(tiny, tmp_path_factory):
    """The folder of a finished tiny run; not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    record(tiny, RecordOptions(folder, figures=False))
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
        **settings: Any,
    ):
        """A folder with every row and evaluation up to step `done`, which can be 0 or None: all.

        accuracy and loss are those of the held-out set, [lanes, E]; measures holds columns of the
        metrics, [lanes, T], 1 where it says nothing. All broadcast.
        """
        chosen: dict[str, Any] = {"steps": 40, "num_seeds": 3, "eval_every": 10} | settings
        config: Any = resolve(TrainConfig(**chosen))
        done = config.steps if done is None else done
        names = lane_names(config)
        rules = {rule.name: rule.multiplier for rule in config.rules()}
        rows = RowFormat(names, [rules[lane.scale] for lane in names], config.log_every)

        def column(name):
            values = np.asarray((measures or {}).get(name, 1.0), np.float32)
            return np.broadcast_to(values, (len(names), done))

        by_head: Any = (
            np.broadcast_to(column(name)[..., None, None], (len(names), done, 1, 2))
            for name in HeadStatistics._fields
        )
        scalars: Any = {name: column(name) for name in STEP_SCALARS}
        steps = StepMetrics(**scalars, heads=HeadStatistics(*by_head))
        evaluated = range(0, done + 1, config.eval_every)
        shape = (len(names), len(evaluated))
        held_out: Any = np.array([np.broadcast_to(x, shape) for x in (loss, accuracy)], np.float32)
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config.to_json()))
        surroundings = {"versions": {"jax": "1.2.3"}, "platform": "cpu", "git_revision": "abc+"}
        (folder / "environment.json").write_text(json.dumps(surroundings))
        (folder / METRICS).write_text(
            rows.metrics(ChunkResult(Chunk(0, done, False), steps, None, ()))
        )
        (folder / EVALUATION).write_text(
            "".join(
                rows.evaluation(
                    ChunkResult(Chunk(step, step, True), steps, Evaluation(*held_out[..., i]), ())
                )
                for i, step in enumerate(evaluated)
            )
        )
        return folder

    return make
