"""Rows: strict JSON with the same bits, half-written and damaged files."""

import json
from typing import Any

import numpy as np
import pytest

from experiments.config import LaneName
from experiments.engine.lanes import Chunk, ChunkResult
from experiments.metrics import (
    HEAD_STATISTICS,
    STEP_SCALARS,
    Evaluation,
    HeadStatistics,
    StepMetrics,
    columns,
    parameter_column,
)
from experiments.runs.folder import RunFolderError
from experiments.runs.rows import RowFormat, read_last_row, read_rows, rows_size

NAMES = (LaneName("none", 1e-3, 0), LaneName("0.2", 1e-3, 0))


def result(start=0, stop=3, layers=2, heads=3, seed=0, parameters=()):
    draw = np.random.default_rng(seed)
    steps = stop - start

    def normal(*more):
        return draw.normal(size=(2, steps, *more)).astype(np.float32)

    scalars: dict[str, Any] = {name: normal() for name in STEP_SCALARS}
    return ChunkResult(
        chunk=Chunk(start, stop, True),
        metrics=StepMetrics(
            **scalars,
            heads=HeadStatistics(**{name: normal(layers, heads) for name in HEAD_STATISTICS}),
            parameters={name: normal(layers, heads) for name in parameters},
        ),
        evaluation=Evaluation(*draw.normal(size=(2, 2)).astype(np.float32)),
        states=(),
    )


def rows_of(text):
    def refuse(token):
        raise ValueError(token)

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_rows_give_back_the_same_bits_in_step_order():
    chunk = result(parameters=["log_scale"])
    rows = rows_of(RowFormat(NAMES, [1.0, 0.2], log_every=1).metrics(chunk))
    assert [(row["step"], row["scale"]) for row in rows] == [
        (step, scale) for step in range(3) for scale in ("none", "0.2")
    ]
    for i, row in enumerate(rows):
        step, lane = divmod(i, 2)
        for name in STEP_SCALARS:
            assert np.float32(row[name]) == getattr(chunk.metrics, name)[lane, step]
        for name, how in HEAD_STATISTICS.items():
            values = getattr(chunk.metrics.heads, name)[lane, step]
            np.testing.assert_array_equal(np.float32(row[f"{name}_by_head"]), values)
            expected = values.max() if how.largest else values.mean()
            np.testing.assert_allclose(row[name], expected, rtol=1e-6)
        own = chunk.metrics.parameters["log_scale"][lane, step]
        np.testing.assert_array_equal(np.float32(row["parameter_log_scale_by_head"]), own)
        assert row["multiplier"] == (1.0, 0.2)[lane]


def test_the_columns_are_those_of_the_list_in_its_order():
    form = RowFormat(NAMES, [1.0, 0.2], log_every=1)
    [row, *_] = rows_of(form.metrics(result(parameters=["gain"])))
    named = [column.name for column in columns()]
    own = named.index(parameter_column("NAME"))
    assert sorted(row) == sorted([*named[:own], parameter_column("gain"), *named[own + 1 :]])
    [plain, *_] = rows_of(form.metrics(result()))
    assert sorted(plain) == sorted(named[:own] + named[own + 1 :])


def test_what_is_not_finite_is_null_and_the_rest_of_its_row_stays():
    chunk = result(parameters=["gain"])
    chunk.metrics.loss[1, 2] = np.nan
    chunk.metrics.heads.logit_max[1, 2, 0, 1] = np.inf
    chunk.metrics.parameters["gain"][1] = np.nan
    evaluation: Any = chunk.evaluation
    evaluation.loss[0] = -np.inf
    form = RowFormat(NAMES, [1.0, 0.2], log_every=1)
    row = rows_of(form.metrics(chunk))[-1]
    assert row["loss"] is None
    assert row["logit_max"] is None
    assert row["logit_max_by_head"][0][1] is None
    assert row["parameter_gain_by_head"] == [[None] * 3] * 2
    assert np.float32(row["accuracy"]) == chunk.metrics.accuracy[1, 2]
    assert rows_of(form.evaluation(chunk))[0]["loss"] is None


@pytest.mark.parametrize(("start", "stop"), [(0, 10), (3, 10), (10, 11), (8, 9)])
def test_log_every_writes_the_multiples(start, stop):
    form = RowFormat(NAMES, [1.0, 0.2], log_every=4)
    chunk = result(start, stop)
    rows = rows_of(form.metrics(chunk))
    steps = [step for step in range(start, stop) if step % 4 == 0]
    assert [row["step"] for row in rows] == [step for step in steps for _ in NAMES]
    for row in rows[::2]:
        assert np.float32(row["loss"]) == chunk.metrics.loss[0, row["step"] - start]


def write_rows(path, steps, tail=""):
    lines = [f'{{"step":{step},"seed":{seed}}}\n' for step in steps for seed in (0, 1)]
    path.write_text("".join(lines) + tail)


def test_the_size_of_the_rows_before_a_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_rows(path, range(6), tail='{"step":6,"se')
    size = rows_size(path, range(4), lanes=2)
    whole = path.read_bytes()
    write_rows(path, range(4))
    assert path.read_bytes() == whole[:size]


@pytest.mark.parametrize("damage", ["missing", "broken line", "doubled", "no file"])
def test_rows_that_the_checkpoint_vouches_for_must_be_there(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    write_rows(path, range(3) if damage == "missing" else range(6))
    if damage == "broken line":
        path.write_text(path.read_text().replace('{"step":2,"seed":1}', '{"step":2,"se\x00d":1'))
    if damage == "doubled":
        path.write_text(path.read_text().replace('{"step":2,', '{"step":1,'))
    if damage == "no file":
        path.unlink()
    with pytest.raises(RunFolderError, match=r"metrics.jsonl: \d good rows .* vouches for 8"):
        rows_size(path, range(4), lanes=2)


def test_reading_leaves_out_a_half_written_last_line_and_names_a_damaged_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_rows(path, range(2), tail='{"step":2,')
    assert [row["step"] for row in read_rows(path)] == [0, 0, 1, 1]
    path.write_text('{"step":0}\n[1]\n{"step":1}\n')
    with pytest.raises(RunFolderError, match="line 2: damaged"):
        read_rows(path)
    path.write_text('{"step":0}\n' + "[" * 10**5 + "\n")
    with pytest.raises(RunFolderError, match="line 2: damaged"):
        read_rows(path)
    with pytest.raises(RunFolderError, match=r"nothing.jsonl can't be read"):
        read_rows(tmp_path / "nothing.jsonl")


def test_the_last_whole_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_last_row(path) is None
    path.write_text('{"st')
    assert read_last_row(path) is None
    write_rows(path, range(3), tail='{"step":3,')
    assert read_last_row(path) == {"step": 2, "seed": 1}
