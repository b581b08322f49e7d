"""Event files: TensorBoard reads back what chunks gave, also across a restart."""

import os
from typing import Any

import numpy as np

from experiments.config import LaneName
from experiments.engine.lanes import Chunk, ChunkResult
from experiments.metrics import (
    HEAD_STATISTICS,
    STEP_SCALARS,
    Evaluation,
    HeadStatistics,
    StepMetrics,
)
from experiments.runs.event_files import EventWriter, lane_folder
from experiments.runs.folder import EVALUATION
from experiments.runs.rows import RowFormat, rows_size

NAMES = (LaneName("none", 1e-3, 0), LaneName("1/8", 1e-3, 7))


def chunk_of(start, stop, evaluate=True) -> Any:
    draw = np.random.default_rng(start)

    def normal(*more):
        shape = (len(NAMES), stop - start, *more)
        return draw.normal(size=shape).astype(np.float32)

    scalars: dict[str, Any] = {name: normal() for name in STEP_SCALARS}
    own = normal(2, 3)
    own[0] = np.nan  # the first lane's arm has none
    return ChunkResult(
        Chunk(start, stop, evaluate),
        StepMetrics(
            **scalars,
            heads=HeadStatistics(**{name: normal(2, 3) for name in HEAD_STATISTICS}),
            parameters={"log_scale": own},
        ),
        Evaluation(*draw.normal(size=(2, len(NAMES))).astype(np.float32)) if evaluate else None,
        states=(),
    )


def write(folder, chunks, **options):
    """Event files and evaluation rows, as a run writes them."""
    writer = EventWriter(folder, NAMES, **options)
    rows = RowFormat(NAMES, [1.0, 0.125], log_every=1)
    for chunk in chunks:
        writer.write(chunk)
        with (folder / EVALUATION).open("a") as file:
            file.write(rows.evaluation(chunk))
    writer.close()


def read(folder, name) -> Any:
    """Tag to (steps, values), as TensorBoard sees them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(
        str(folder / "tensorboard" / lane_folder(name)), size_guidance={"scalars": 0}
    )
    events.Reload()
    found = {}
    for tag in events.Tags()["scalars"]:
        scalars = events.Scalars(tag)
        found[tag] = ([s.step for s in scalars], [s.value for s in scalars])
    return found


def test_lanes_have_folders_named_by_what_tells_them_apart():
    assert lane_folder(NAMES[1]) == "scale=1∕8,learning_rate=0.001,seed=7"  # no path


def test_every_number_comes_back(tmp_path):
    chunks = [chunk_of(0, 0), chunk_of(0, 4), chunk_of(4, 7, evaluate=False)]
    write(tmp_path, chunks)
    for lane, name in enumerate(NAMES):
        found = read(tmp_path, name)
        assert found.keys() == {
            *(f"train/{name}" for name in (*STEP_SCALARS, *HEAD_STATISTICS)),
            *["train/parameter_log_scale"] * lane,
            *("held_out/loss", "held_out/accuracy"),
        }
        for scalar in STEP_SCALARS:
            expected = np.concatenate([getattr(c.metrics, scalar)[lane] for c in chunks])
            steps, values = found[f"train/{scalar}"]
            assert steps == list(range(7))
            np.testing.assert_array_equal(np.array(values, np.float32), expected)
        heads = np.concatenate([c.metrics.heads.entropy[lane] for c in chunks])
        np.testing.assert_allclose(found["train/entropy"][1], heads.mean((1, 2)), rtol=1e-6)
        largest = np.concatenate([c.metrics.heads.logit_max[lane] for c in chunks]).max((1, 2))
        np.testing.assert_array_equal(np.array(found["train/logit_max"][1], np.float32), largest)
        if lane:
            own = np.concatenate([c.metrics.parameters["log_scale"][lane] for c in chunks])
            values = found["train/parameter_log_scale"][1]
            np.testing.assert_allclose(values, own.mean((1, 2)), rtol=1e-5)
        losses = [c.evaluation.loss[lane] for c in chunks[:2]]
        assert found["held_out/loss"] == ([0, 4], losses)


def test_steps_are_those_of_the_rows(tmp_path):
    write(tmp_path, [chunk_of(0, 4), chunk_of(4, 5), chunk_of(5, 11)], log_every=3)
    assert read(tmp_path, NAMES[0])["train/loss"][0] == [0, 3, 6, 9]


def test_resuming_hides_what_came_after_the_checkpoint_and_nothing_else(tmp_path):
    first = [chunk_of(0, 0), chunk_of(0, 4), chunk_of(4, 8)]
    write(tmp_path, first)
    # As a run does that was killed after the checkpoint at 4: the rows after it are cut.
    evaluations = tmp_path / EVALUATION
    os.truncate(evaluations, rows_size(evaluations, [0, 4], len(NAMES)))
    again = chunk_of(4, 6)
    write(tmp_path, [again], start=4)
    found = read(tmp_path, NAMES[1])
    steps, values = found["train/loss"]
    assert steps == [0, 1, 2, 3, 4, 5]
    np.testing.assert_array_equal(np.array(values[4:], np.float32), again.metrics.loss[1])
    losses = [c.evaluation.loss[1] for c in (first[0], first[1], again)]
    assert found["held_out/loss"] == ([0, 4, 6], losses)


def test_what_is_not_finite_is_left_out(tmp_path):
    chunk = chunk_of(0, 3)
    chunk.metrics.loss[0, 1] = np.nan
    chunk.metrics.grad_norm[0] = np.inf
    chunk.evaluation.loss[0] = np.nan
    write(tmp_path, [chunk])
    found = read(tmp_path, NAMES[0])
    assert found["train/loss"][0] == [0, 2]
    assert "train/grad_norm" not in found
    assert "held_out/loss" not in found
    assert found["held_out/accuracy"][0] == [3]
    assert read(tmp_path, NAMES[1])["train/grad_norm"][0] == [0, 1, 2]
