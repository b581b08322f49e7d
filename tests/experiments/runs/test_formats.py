"""A stored run of each format version can be read, compared, evaluated and gone on with.

    run_format1_early   before settings vectorize_lanes and batch_shards, Orbax, SGD (0acf72d)
    run_format1         the last without a format in config.json, Orbax, Adam (3b86acc)
    run_format2         seals, NumPy archives, arms of two kinds, SGD

each made by train.py of its time with `--task=reverse --steps=4 --num_seeds=2 --batch_size=2
--sequence_length=4 --vocab_size=3 --d_model=4 --d_k=2 --d_ff=4 --num_heads=1 --eval_every=2
--eval_size=4 --checkpoint_every=4 --learning_rate=0.01`, --optimizer=sgd where it says SGD, and
--scale=sqrt,learned for the last.
"""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from experiments import load_runs
from experiments.analysis.compare import compare_runs
from experiments.analysis.read import read_arms
from experiments.analysis.summary import summarize
from experiments.config import BEFORE, as_typed
from experiments.runs.environment import BIT_SETTINGS
from experiments.runs.evaluate import evaluate_run
from experiments.runs.folder import (
    CONFIG,
    ENVIRONMENT,
    EVALUATION,
    METRICS,
    RunFolderError,
    read_json,
    stored_config,
    write_json,
)
from experiments.runs.rows import read_rows
from experiments.runs.seal import check_seal, read_seal

DATA = Path(__file__).parents[2] / "data"
STORED = {
    "run_format1_early": {"optimizer": "sgd", "scale": ("none", "sqrt")},
    "run_format1": {"optimizer": "adam", "scale": ("none", "sqrt")},
    "run_format2": {"optimizer": "sgd", "scale": ("sqrt", "learned")},
}
BY_NAME = pytest.mark.parametrize("name", STORED)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory, go):
    """The same run made now, to twice the steps, with mup beside; each made once."""
    made = {}

    def fresh(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("fresh") / name
            config = as_typed(stored_config(DATA / name))
            scale = (*STORED[name]["scale"], "mup")
            go(dataclasses.replace(config, scale=scale, steps=8), made[name])
        return made[name]

    return fresh


@pytest.fixture
def stored(fresh, tmp_path):
    """A copy of a stored run.

    Another compiler, level or CPU rounds the first weights otherwise than those of its time did:
    there, the copy says that it began with the weights that are made here.
    """

    def stored(name):
        folder = shutil.copytree(DATA / name, tmp_path / "stored")
        then, now = (read_json(path / ENVIRONMENT) for path in (folder, fresh(name)))
        if not same_bits(then, now):
            for seed, digests in then["digests"].items():
                digests["weights"] = now["digests"][seed]["weights"]
            write_json(folder / ENVIRONMENT, then)
        return folder

    return stored


def same_bits(then, now):
    """Whether all that decides last bits is the same; one device or two make the same."""
    deciding = set(BIT_SETTINGS) - {"git_revision", "devices"}
    return all(then.get(what) == now[what] for what in deciding)


@BY_NAME
def test_its_settings_are_those_of_its_time(name):
    written, config = read_json(DATA / name / CONFIG), stored_config(DATA / name)
    assert written.get("format", 1) == (2 if name == "run_format2" else 1)
    lacking = {"run_format1_early": {"vectorize_lanes", "batch_shards"}}.get(name, set())
    assert BEFORE.keys() - written.keys() == lacking
    assert (config.optimizer, config.scale) == tuple(STORED[name].values())
    for setting, value in config.to_json().items():
        assert value == written.get(setting, BEFORE.get(setting, value))


@BY_NAME
def test_it_is_read_summarized_and_compared(name, fresh, stored):
    folder = stored(name)
    table = load_runs(folder)
    assert list(table["step"]) == [step for step in range(4) for _ in range(4)]
    assert set(table["scale"]) == set(STORED[name]["scale"])
    assert np.isfinite(table["entropy_layer0_head0"]).all()
    assert list(load_runs(folder, "evaluation")["step"]) == [s for s in (0, 2, 4) for _ in "abcd"]
    arms = read_arms([folder])
    assert [arm.arm.name for arm in arms] == list(STORED[name]["scale"])
    assert summarize(folder)["steps_done"] == 4
    pairs = compare_runs(folder, fresh(name))
    assert len(pairs) == 4  # each of two arms against the other one and mup
    together = load_runs([folder, fresh(name)])
    assert len(together["step"]) == 4 * 4 + 8 * 6


@BY_NAME
def test_its_checkpoint_is_evaluated_as_the_run_did(name):
    found = evaluate_run(DATA / name, say=pytest.fail)
    rows = [row for row in read_rows(DATA / name / EVALUATION) if row["step"] == 4]
    assert found.step == 4
    np.testing.assert_allclose(found.loss, [row["loss"] for row in rows], rtol=1e-4)
    np.testing.assert_allclose(found.accuracy, [row["accuracy"] for row in rows])


@BY_NAME
def test_it_goes_on_to_what_an_uninterrupted_run_is(name, fresh, stored, go):
    folder = stored(name)
    longer = dataclasses.replace(stored_config(folder), steps=8)
    done = go(longer, folder, resume=True)
    assert done.steps_done == 8
    assert read_json(folder / CONFIG) == longer.to_json()
    assert check_seal(folder) is None
    seal = read_seal(folder)
    assert seal is not None
    assert [mark.step for mark in seal.marks] == [4] * (name == "run_format2") + [8]
    then, now = (read_json(path / ENVIRONMENT) for path in (DATA / name, fresh(name)))
    bits = same_bits(then, now)
    for file in (METRICS, EVALUATION):
        assert (folder / file).read_bytes().startswith((DATA / name / file).read_bytes())
        gone_on = read_rows(folder / file)
        whole = [row for row in read_rows(fresh(name) / file) if row["scale"] != "mup"]
        assert len(gone_on) == len(whole)
        for one, other in zip(gone_on, whole, strict=True):
            if bits:  # of this machine
                assert one == other
            assert one.keys() == other.keys()
            for column in one:
                assert type(one[column]) is type(other[column])
                if isinstance(one[column], str | int):
                    assert one[column] == other[column]
                else:
                    numbers = (np.array(row[column], float) for row in (one, other))
                    np.testing.assert_allclose(*numbers, rtol=1e-4, atol=1e-6, err_msg=column)


@BY_NAME
def test_it_is_not_gone_on_with_as_another_run(name, tmp_path, go):
    folder = shutil.copytree(DATA / name, tmp_path / "run")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(RunFolderError, match=r"seed is 1, but .* was run with 0"):
        go(dataclasses.replace(stored_config(folder), seed=1), folder, resume=True)
    assert {path: path.read_bytes() for path in before} == before


@BY_NAME
@pytest.mark.parametrize("changes", [{"flux": 3}, {"format": 3}, {"format": 3, "version": "9.9"}])
def test_what_a_later_version_wrote_is_an_error_that_names_both(name, tmp_path, go, changes):
    folder = shutil.copytree(DATA / name, tmp_path / "run")
    (folder / "seal.json").unlink(missing_ok=True)
    write_json(folder / CONFIG, read_json(folder / CONFIG) | changes)
    version = changes.get("version", read_json(DATA / name / CONFIG).get("version", "0.1"))
    for use in (
        lambda: load_runs(folder),
        lambda: read_arms([folder]),
        lambda: evaluate_run(folder, say=pytest.fail),
        lambda: go(stored_config(DATA / name), folder, resume=True),
    ):
        with pytest.raises(RunFolderError, match=rf"by {version}, format \d; this is 0\.2\.0") as e:
            use()
        assert "damaged" not in str(e.value) and "\n" not in str(e.value)
