"""Run folders as columns: what JSON says, fast, and damage named by path and line."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import load_runs
from experiments.analysis import columns, report
from experiments.analysis.columns import flat, read_columns
from experiments.analysis.read import read_arms
from experiments.analysis.summary import summarize
from experiments.runs.folder import RunFolderError


def by_json(path):
    """The columns by the plain way, a row at a time."""
    rows = [flat(json.loads(line)) for line in path.read_bytes().split(b"\n")[:-1]]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def assert_same(table, expected):
    assert list(table) == list(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(table[name], values, err_msg=name)


def write(tmp_path, *lines):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


# Columns --------------------------------------------------------------------------------------


def test_the_fast_way_gives_what_json_gives(make_run, monkeypatch):
    draw = np.random.default_rng(0)
    values = draw.lognormal(0, 20, (6, 40)).astype(np.float32) * draw.choice([-1, 1], (6, 40))
    values[1, 7:] = np.nan
    values[4, 9] = np.inf
    values[2, :5] = (0, 1, -2, 1e-40, 1e38)
    said = {"loss": values, "entropy": values[::-1], "logit_max": np.abs(values)}
    folder = make_run(scale=("none", "-1e-3"), measures=said, parameters={"log_scale": values})
    path = folder / "metrics.jsonl"
    monkeypatch.setattr(columns, "_one_by_one", None)  # it isn't needed
    for block, piece in ((2**22, 2**19), (2**22, 3000), (5000, 5000), (500, 100)):
        monkeypatch.setattr(columns, "_BLOCK", block)
        monkeypatch.setattr(columns, "_PIECE", piece)
        assert_same(read_columns(path), by_json(path))


LINE = '{"step":3,"scale":"none","seed":0,"loss":2.5,"a_by_head":[[1,-2e-05],[0.125,4]]}'
TOKENS = st.sampled_from(["0", "1", "9", ".", "e", "E", "+", "-", ",", "null", " ", "]", '"', "x"])


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(st.integers(0, len(LINE) - 1), st.integers(0, 2), TOKENS), min_size=1, max_size=2
    )
)
def test_whatever_is_done_to_a_row_it_is_read_as_json_does_or_refused(tmp_path_factory, changes):
    line = LINE
    for at, cut, token in changes:
        line = line[:at] + token + line[at + cut :]
    path = write(tmp_path_factory.getbasetemp(), LINE, line, LINE)
    try:
        row = flat(json.loads(line))
        expected = None if row.keys() != flat(json.loads(LINE)).keys() else by_json(path)
    except (ValueError, TypeError, KeyError, AttributeError):
        expected = None
    try:
        found = read_columns(path)
    except RunFolderError as error:
        assert str(error).startswith(f"{path}, line 2: damaged")
        assert expected is None
    else:
        # The reader of numbers lets zeros lead, which JSON does not.
        zeros = expected is None and any(f"{before}0" in line for before in ":[,-")
        assert zeros or expected is not None
        if expected is not None:
            expected = {n: np.where(np.isinf(v), np.nan, v) if v.dtype == float else v
                        for n, v in expected.items()}  # fmt: skip
            assert_same(found, expected)


@pytest.mark.parametrize(
    "damaged",
    [
        LINE.replace("2.5", "2.5.5"),
        LINE.replace("2.5", "2-5"),
        LINE.replace("2.5", "2."),
        LINE.replace("2.5", "1e-5.3"),
        LINE.replace("2.5", "1e5e3"),
        LINE.replace("2.5", "NaN."),
        LINE.replace("2.5", ""),
        LINE.replace("2.5", "[2.5]"),
        LINE.replace('"seed":0', '"seed":0.5'),
        LINE.replace('"step":3', '"step":null'),
        LINE.replace('"loss"', '"lost"'),
        LINE.replace("[0.125,4]", "[0.125,4],[1,2]"),
        LINE.replace("],[", ",").replace("[[", "[[1],["),
        LINE[:-1],
        "[" * 10**5,
        "[]",
        "",
    ],
)
def test_damage_is_named_by_path_and_line(tmp_path, damaged):
    for before in (1, 3):
        path = write(tmp_path, *[LINE] * before, damaged, *[LINE] * 3)
        with pytest.raises(RunFolderError) as caught:
            read_columns(path)
        assert str(caught.value).startswith(f"{path}, line {before + 1}: damaged")
        assert "\n" not in str(caught.value)


def test_hostile_files_are_damaged_not_slow(tmp_path, monkeypatch):
    path = write(tmp_path, '{"step":0,"a":"')
    with pytest.raises(RunFolderError, match=r"line 1: damaged"):
        read_columns(path)
    monkeypatch.setattr(columns, "_LONGEST_ROW", 2**20)
    path.write_bytes(b"x" * 2**21)
    with pytest.raises(RunFolderError, match=f"^{path}: damaged, a line of more than"):
        read_columns(path)
    monkeypatch.setattr(columns, "_MOST_SKELETONS", 2)
    monkeypatch.setattr(columns, "_BLOCK", 100)
    lines = [f'{{"step":{i},"scale":"{i}","seed":0,"loss":{i}}}' for i in range(20)]
    assert_same(read_columns(write(tmp_path, *lines)), by_json(path))


def test_rows_in_another_form_are_read_too(tmp_path):
    other = json.loads(LINE)
    path = write(tmp_path, LINE, json.dumps(other), json.dumps(dict(reversed(other.items()))))
    assert_same(read_columns(path), by_json(write(tmp_path, LINE, LINE, LINE)))


def test_a_half_written_last_line_is_left_out(tmp_path):
    path = write(tmp_path, LINE, LINE)
    with path.open("a") as file:
        file.write(LINE[:30])
    assert len(read_columns(path)["step"]) == 2
    path.write_text(LINE)
    assert list(read_columns(path)) == ["step"]


def test_what_is_no_file_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "nothing", Path("/dev/zero")):
        with pytest.raises(RunFolderError, match=f"^{path} can't be read: "):
            read_columns(path)


# Tables ---------------------------------------------------------------------------------------


def test_load_runs_gives_one_tidy_table(make_run):
    draw = np.random.default_rng(1).normal(size=(6, 40))
    folder = make_run(measures={"loss": draw}, accuracy=0.25)
    table = load_runs([folder])
    frame = pd.DataFrame(table)
    assert len(frame) == 6 * 40
    assert set(frame.scale) == {"none", "sqrt"}
    assert {"run", "task", "d_k", "num_seeds", "entropy_layer0_head1"} <= set(frame.columns)
    assert list(frame.step[:7]) == [0] * 6 + [1]
    assert frame.loss.dtype == float and frame.seed.dtype == int
    raw = pd.read_json(folder / "metrics.jsonl", lines=True, precise_float=True)
    np.testing.assert_array_equal(frame.loss, raw.loss)
    assert set(frame.d_k) == {64} and set(frame.run) == {str(folder)}
    assert frame.clip_norm.isna().all()
    assert not {"format", "version"} & set(frame.columns)
    evaluation = load_runs(folder, rows="evaluation")
    assert sorted(set(evaluation["step"])) == [0, 10, 20, 30, 40]
    assert set(evaluation["accuracy"]) == {0.25}


def test_what_one_run_lacks_is_nan(make_run):
    learned = make_run("a", scale=("learned", "sqrt"), parameters={"log_scale": 0.5}, num_seeds=1)
    plain = make_run("b", scale="none", num_seeds=1, done=7)
    first = [True] * 80 + [False] * 7
    for paths, own in (([learned, plain], first), ([plain, learned], first[::-1])):
        table = load_runs(paths)
        assert len({len(column) for column in table.values()}) == 1
        of_head = table["parameter_log_scale_layer0_head1"]
        np.testing.assert_array_equal(of_head, np.where(own, 0.5, np.nan))
        assert list(table["run"] == str(learned)) == own


def test_a_run_from_before_a_setting_has_the_value_of_then(make_run):
    folder = make_run()
    config = json.loads((folder / "config.json").read_text())
    for name in ("format", "version", "batch_shards", "vectorize_lanes"):
        del config[name]
    (folder / "config.json").write_text(json.dumps(config))
    assert set(load_runs(folder)["batch_shards"]) == {1}


def test_what_is_no_run_is_said_to_be_none(tmp_path):
    with pytest.raises(RunFolderError, match=r"has no config.json: not a run folder"):
        load_runs(tmp_path)
    with pytest.raises(ValueError, match="choose from metrics, evaluation"):
        load_runs(tmp_path, rows="losses")


# Arms -----------------------------------------------------------------------------------------


def test_rates_that_differ_in_the_tenth_digit_are_told_apart(make_run):
    arms = read_arms([make_run(scale="none", learning_rate=(1e-3, 1.0000001e-3, 1.0), num_seeds=1)])
    assert [arm.label.rpartition("lr ")[2] for arm in arms] == ["0.001", "0.0010000001", "1.0"]


def test_an_arms_own_parameter_is_a_measure(make_run):
    values = [[2.0], [np.nan]]
    folder = make_run(scale=("learned", "sqrt"), num_seeds=1, parameters={"log_scale": values})
    learned, sqrt = read_arms([folder])
    np.testing.assert_array_equal(learned.measures["parameter_log_scale"], np.full((1, 40), 2.0))
    assert "parameter_log_scale" not in sqrt.measures
    assert "| parameter log scale |" in report.report(summarize(folder))
    assert learned.arm.rule.hooks is not None


def test_a_divergence_between_written_rows_is_seen(make_run):
    loss = [[1, 1, np.nan, np.nan, np.nan], [1, 1, 1, 1, 1]]
    accuracy = [[0.5] * 5, [0.5, 0.5, 0.5, np.nan, 0.5]]
    folder = make_run(scale="none", num_seeds=2, log_every=40, loss=loss, accuracy=accuracy)
    [arm] = read_arms([folder])
    assert list(arm.steps) == [0]
    assert list(arm.diverged_at()) == [19, 29]


# Without JAX ----------------------------------------------------------------------------------

WITHOUT_JAX = """
import sys
from pathlib import Path

class NoJax:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "jaxlib", "flax", "optax"):
            raise ImportError(f"{name} must not be imported")

sys.meta_path.insert(0, NoJax())
a, b, out = map(Path, sys.argv[1:])
from experiments import load_runs
from experiments.analysis import report
from experiments.analysis.compare import compare_runs, table
from experiments.analysis.read import read_arms
from experiments.analysis.summary import summarize
from experiments.figures.curves import draw_curves
from experiments.figures.draw import draw_figures

assert len(load_runs([a, b])["loss"]) == 240
(pair,) = compare_runs(a, b)
assert pair.compared["loss"].test.pairs == 3 and table(pair).rows
assert draw_curves(read_arms([a, b]), out).is_file()
said = []
report.write_results(a, draw=draw_figures, say=said.append)
assert said == ["no attention maps: jax must not be imported"], said
assert "curves.png" in (a / "report.md").read_text()
"""


def test_reading_comparing_and_drawing_need_no_jax(make_run, tmp_path):
    runs = [make_run(name, scale=name) for name in ("none", "sqrt")]
    command = [sys.executable, "-W", "error", "-c", WITHOUT_JAX, *map(str, runs), str(tmp_path)]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
