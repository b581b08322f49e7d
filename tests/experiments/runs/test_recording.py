"""Rows: strict JSON with the same bits, half-written and damaged files, one tidy table."""

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from attention.statistics import HeadStatistics
from experiments import load_runs
from experiments.engine.lanes import Chunk, ChunkResult, LaneName
from experiments.engine.training import Evaluation, StepMetrics
from experiments.runs import recording
from experiments.runs.recording import RowFormat, RunFolderError

NAMES = (LaneName("none", 1e-3, 0), LaneName("0.2", 1e-3, 0))


def result(start=0, stop=3, layers=2, heads=3, seed=0):
    draw = np.random.default_rng(seed)
    steps = stop - start
    scalars: dict[str, Any] = {
        name: draw.normal(size=(2, steps)).astype(np.float32) for name in recording.STEP_SCALARS
    }
    by_head = draw.normal(size=(len(HeadStatistics._fields), 2, steps, layers, heads))
    return ChunkResult(
        chunk=Chunk(start, stop, True),
        metrics=StepMetrics(**scalars, heads=HeadStatistics(*by_head.astype(np.float32))),
        evaluation=Evaluation(*draw.normal(size=(2, 2)).astype(np.float32)),
        states=(),
    )


def rows_of(text):
    def refuse(token):
        raise ValueError(token)

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_rows_give_back_the_same_bits_in_step_order():
    chunk = result()
    rows = rows_of(RowFormat(NAMES, [1.0, 0.2], log_every=1).metrics(chunk))
    assert [(row["step"], row["scale"]) for row in rows] == [
        (step, scale) for step in range(3) for scale in ("none", "0.2")
    ]
    for i, row in enumerate(rows):
        step, lane = divmod(i, 2)
        assert np.float32(row["loss"]) == chunk.metrics.loss[lane, step]
        by_head = chunk.metrics.heads.entropy[lane, step]
        np.testing.assert_array_equal(np.float32(row["entropy_by_head"]), by_head)
        np.testing.assert_allclose(row["entropy"], by_head.mean(), rtol=1e-6)
        assert np.float32(row["logit_max"]) == chunk.metrics.heads.logit_max[lane, step].max()
        assert row["multiplier"] == (1.0, 0.2)[lane]
    wanted = {"grad_norm", "grad_norm_query_kernel", "grad_norm_logits", "dead_row_fraction"}
    assert wanted | {"update_norm", "saturation_by_head"} <= rows[0].keys()


def test_what_is_not_finite_is_null_and_the_rest_of_its_row_stays():
    chunk = result()
    chunk.metrics.loss[1, 2] = np.nan
    chunk.metrics.heads.logit_max[1, 2, 0, 1] = np.inf
    evaluation: Any = chunk.evaluation
    evaluation.loss[0] = -np.inf
    form = RowFormat(NAMES, [1.0, 0.2], log_every=1)
    row = rows_of(form.metrics(chunk))[-1]
    assert row["loss"] is None
    assert row["logit_max"] is None
    assert row["logit_max_by_head"][0][1] is None
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


def test_strict_json_takes_numpy_and_jax_values(tmp_path):
    content = {"loss": np.float32(np.nan), "accuracy": jnp.float32(0.5), "n": np.int64(3)}
    recording.write_json(tmp_path / "x.json", {**content, "list": (np.float64(np.inf), 1)})
    (row,) = rows_of((tmp_path / "x.json").read_text().replace("\n", ""))
    assert row == {"loss": None, "accuracy": 0.5, "n": 3, "list": [None, 1]}
    assert list(tmp_path.iterdir()) == [tmp_path / "x.json"]


def write_rows(path, steps, tail=""):
    lines = [f'{{"step":{step},"seed":{seed}}}\n' for step in steps for seed in (0, 1)]
    path.write_text("".join(lines) + tail)


def test_cutting_keeps_whole_rows_before_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_rows(path, range(6), tail='{"step":6,"se')
    recording.cut_rows(path, range(4), lanes=2)
    whole = path.read_text()
    write_rows(path, range(4))
    assert path.read_text() == whole


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
        with pytest.raises(RunFolderError, match="0 good rows"):
            recording.cut_rows(path, range(4), lanes=2)
        return
    before = path.read_text()
    with pytest.raises(RunFolderError, match=r"metrics.jsonl: \d good rows .* vouches for 8"):
        recording.cut_rows(path, range(4), lanes=2)
    assert path.read_text() == before


def test_reading_leaves_out_a_half_written_last_line_and_names_a_damaged_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_rows(path, range(2), tail='{"step":2,')
    assert [row["step"] for row in recording.read_rows(path)] == [0, 0, 1, 1]
    path.write_text('{"step":0}\n[1]\n{"step":1}\n')
    with pytest.raises(RunFolderError, match="line 2: damaged"):
        recording.read_rows(path)
    with pytest.raises(RunFolderError, match=r"nothing.jsonl can't be read"):
        recording.read_rows(tmp_path / "nothing.jsonl")


def test_one_run_at_a_time_and_no_lock_file(tmp_path):
    with recording.locked(tmp_path):
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(RunFolderError, match="in use"), recording.locked(tmp_path):
            pass
    with recording.locked(tmp_path):
        pass


def test_load_runs_gives_one_tidy_table(tiny_run):
    table = load_runs([tiny_run, tiny_run])
    frame = pd.DataFrame(table)
    assert len(frame) == 2 * 12 * 4
    assert set(frame.scale) == {"none", "sqrt"}
    assert {"run", "task", "d_k", "entropy_layer0_head1", "num_seeds"} <= set(frame.columns)
    assert list(frame.step[:5]) == [0, 0, 0, 0, 1]
    assert frame.loss.dtype == float
    raw = pd.read_json(tiny_run / "metrics.jsonl", lines=True)
    np.testing.assert_allclose(frame.loss[: len(raw)], raw.loss)
    evaluation = load_runs(tiny_run, rows="evaluation")
    assert sorted(set(evaluation["step"])) == [0, 4, 8, 12]


def test_load_runs_of_different_runs_fills_what_one_lacks(tiny_run, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes((tiny_run / "config.json").read_bytes())
    (other / "metrics.jsonl").write_text('{"step":0,"scale":"mup","seed":0,"loss":null}\n')
    table = load_runs([tiny_run, other])
    assert table["scale"][-1] == "mup"
    assert np.isnan(table["loss"][-1])
    assert np.isnan(table["entropy"][-1])


def test_what_is_no_run_is_said_to_be_none(tmp_path):
    with pytest.raises(RunFolderError, match=r"has no config.json: not a run folder"):
        load_runs(tmp_path)
    with pytest.raises(ValueError, match="choose from metrics, evaluation"):
        load_runs(tmp_path, rows="losses")
