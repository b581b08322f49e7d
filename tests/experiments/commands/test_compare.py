"""Two runs made by separate commands: are they a pair, and what do they show?"""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from scipy import stats

from experiments.__main__ import main as experiments
from experiments.commands.compare import compare_runs, notes
from experiments.config import RecordOptions
from experiments.runs import recording
from experiments.runs.run import record

SEEDS = 5


@pytest.fixture(scope="module")
def pair(tiny, tmp_path_factory):
    """Folders of the arms `none` and `sqrt`, by a command each; not to be changed."""
    folder = tmp_path_factory.mktemp("pair")
    for scale in ("none", "sqrt"):
        config = dataclasses.replace(tiny, scale=(scale,), num_seeds=SEEDS)
        record(config, RecordOptions(folder / scale, figures=False))
    return folder / "none", folder / "sqrt"


def edit(folder, name, change):
    """A JSON file of a run, changed."""
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


def rewrite(folder, change):
    """The evaluations of a run, changed row by row; change returns False to drop one."""
    rows = recording.read_rows(folder / "evaluation.jsonl")
    kept = [row for row in rows if change(row) is not False]
    (folder / "evaluation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))


@pytest.fixture
def copies(pair, tmp_path):
    return [shutil.copytree(folder, tmp_path / folder.name) for folder in pair]


def result_of(pair, index):
    """The test of the quantity number `index` of a pair."""
    test = pair.compared[index].test
    assert test is not None
    return test


def evaluations(folder, name):
    """[seeds, evaluations], by the shortest way."""
    rows = recording.read_rows(folder / "evaluation.jsonl")
    return np.array([row[name] for row in rows]).reshape(-1, SEEDS).T


def test_a_pair_is_compared_seed_by_seed(pair):
    (found,) = compare_runs(*pair)
    assert (found.a.rule.name, found.b.rule.name, found.step) == ("none", "sqrt", 12)
    by_name = {compared.name: compared for compared in found.compared}
    assert list(by_name) == ["accuracy %", "loss", "loss area", "steps to 90%"]
    loss = [evaluations(folder, "loss") for folder in pair]
    difference = loss[0][:, -1] - loss[1][:, -1]
    test = result_of(found, 1)
    assert test.mean_difference == pytest.approx(difference.mean())
    assert test.p_value == pytest.approx(
        stats.permutation_test(
            (difference,), np.sum, permutation_type="samples", n_resamples=np.inf
        ).pvalue
    )
    assert test.probability_better == np.mean(difference < 0)
    accuracy = by_name["accuracy %"]
    np.testing.assert_allclose(accuracy.a, 100 * evaluations(pair[0], "accuracy")[:, -1])
    area = np.trapezoid(np.minimum(loss[1], loss[1][:, :1]), [0, 4, 8, 12], axis=1) / 12
    np.testing.assert_allclose(by_name["loss area"].b, area)
    assert by_name["steps to 90%"].test is None  # nobody gets there in 12 steps
    assert by_name["steps to 90%"].short == (SEEDS, SEEDS)


def test_the_command_prints_a_table_and_what_few_seeds_cannot_show(pair, capsys):
    assert experiments(["experiments", "compare", *map(str, pair)]) == 0
    text = capsys.readouterr().out
    assert "none ×1 − sqrt ×1/√d_k: reverse, 5 seeds, held-out, to step 12" in text
    assert "With 5 pairs the smallest possible p is 0.0625, so none can be below 0.05." in text
    assert "not by 12" in text
    assert "diverged" not in text


def test_swapping_the_runs_swaps_the_signs(pair):
    (found,), (swapped,) = compare_runs(*pair), compare_runs(*pair[::-1])
    for index in range(3):
        one, other = result_of(found, index), result_of(swapped, index)
        assert one.mean_difference == -other.mean_difference
        assert one.p_value == other.p_value
        assert one.probability_better == pytest.approx(1 - other.probability_better)


def test_times_are_compared_with_the_late_ones_censored(copies, capsys):
    reached = {"none": [8, 8, 12, None, None], "sqrt": [4, 4, 4, 4, 8]}
    for folder in copies:
        times = reached[folder.name]

        def arrive(row, times=times):
            time = times[row["seed"]]
            row["accuracy"] = 0.95 if time is not None and row["step"] >= time else 0.1

        rewrite(folder, arrive)
    (found,) = compare_runs(*copies)
    times = found.compared[-1]
    assert times.short == (2, 0)
    assert result_of(found, 3).mean_difference == pytest.approx(np.mean([4, 4, 8, 8, 4]))
    assert experiments(["experiments", "compare", *map(str, copies)]) == 0
    text = capsys.readouterr().out
    assert "≥ 10 (8–>12)" in text
    assert "5 (4–8)" in text
    assert "≥ +6" in text
    assert "counts as step 12" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(d_k=4), "differ in more than the scale: d_k: 4 and 8"),
        (lambda c: c.update(num_seeds=4), "num_seeds: 4 and 5"),
        (lambda c: c.update(learning_rate=[0.1]), r"learning_rate: \[0.1\] and \[0.001\]"),
    ],
)
def test_runs_that_differ_in_more_are_refused(pair, tmp_path, tiny, change, message):
    settings = dataclasses.replace(tiny, scale=("none",), num_seeds=SEEDS).to_json()
    change(settings)
    other = dataclasses.replace(
        tiny, **{k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    )
    folder = tmp_path / "other"
    folder.mkdir()
    rows = [
        {"step": 0, "scale": "none", "learning_rate": rate, "seed": seed, "loss": 1, "accuracy": 0}
        for rate in other.learning_rate or (1e-3,)
        for seed in other.seeds()
    ]
    recording.write_json(folder / "config.json", other.to_json())
    (folder / "metrics.jsonl").touch()
    (folder / "evaluation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=message):
        compare_runs(folder, pair[1])


def test_settings_that_only_say_how_it_was_watched_may_differ(pair, copies):
    config = lambda c: c.update(steps=16, log_every=3, checkpoint_every=5)  # noqa: E731
    edit(copies[1], "config.json", config)
    rewrite(copies[1], lambda row: row["step"] != 4)
    (found,) = compare_runs(*copies)
    assert list(found.a.evaluation_steps) == list(found.b.evaluation_steps) == [0, 8, 12]
    assert result_of(found, 1) == result_of(compare_runs(*pair)[0], 1)
    assert any("16 steps were asked for" in note for note in notes(found))


@pytest.mark.parametrize("what", ["weights", "data"])
def test_other_weights_or_data_are_refused_and_so_is_not_knowing(copies, what):
    edit(copies[0], "environment.json", lambda e: e["digests"]["3"].update({what: "0"}))
    with pytest.raises(ValueError, match=f"are no pair: seed 3 has other {what} at the start"):
        compare_runs(*copies)
    edit(copies[0], "environment.json", lambda e: e["digests"].pop("3"))
    with pytest.raises(recording.RunFolderError, match="has no digests of seed 3"):
        compare_runs(*copies)


def test_another_machine_is_a_warning(copies):
    edit(copies[0], "environment.json", lambda e: e.update(thread_pool_size=99))
    lines = []
    compare_runs(*copies, say=lines.append)
    (line,) = lines
    assert line.startswith("warning: thread_pool_size is 99 and ")


def test_the_same_arm_twice_and_the_same_run_twice_are_refused(pair, copies):
    with pytest.raises(ValueError, match="scale: the same in"):
        compare_runs(pair[0], copies[0])
    with pytest.raises(ValueError, match="is given twice"):
        compare_runs(pair[0], pair[0])


def test_a_diverged_lane_counts_as_untrained(copies):
    rows = recording.read_rows(copies[0] / "metrics.jsonl")
    for row in rows:
        if row["seed"] == 2 and row["step"] >= 6:
            row["loss"] = None
    (copies[0] / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = compare_runs(*copies)
    before = evaluations(copies[0], "loss")[2, 0]
    assert found.compared[1].a[2] == before
    assert any("1 of 5 diverged (seed 2 by step 6)" in note for note in notes(found))


def test_one_seed_shows_values_and_no_test(tiny, tmp_path, capsys):
    folders = [tmp_path / scale for scale in ("none", "sqrt")]
    for folder in folders:
        config = dataclasses.replace(tiny, scale=(folder.name,), num_seeds=1)
        record(config, RecordOptions(folder, figures=False))
    assert experiments(["experiments", "compare", *map(str, folders)]) == 0
    text = capsys.readouterr().out
    assert "there is no interval and no test" in text
    assert "inf" not in text


def test_a_run_that_has_only_begun_is_compared_at_its_start_or_said_to_have_nothing(copies):
    rewrite(copies[0], lambda row: row["step"] == 0)
    (found,) = compare_runs(*copies)
    assert (found.step, len(found.compared)) == (0, 2)
    (copies[0] / "evaluation.jsonl").write_text("")
    with pytest.raises(ValueError, match="have no evaluation of every seed in common"):
        compare_runs(*copies)


def test_every_arm_meets_those_of_the_other_run(pair, tiny, tmp_path):
    folder = tmp_path / "several"
    config = dataclasses.replace(tiny, scale=("mup", "sqrt", "none"), num_seeds=SEEDS)
    record(config, RecordOptions(folder, figures=False))
    found = compare_runs(pair[0], folder)
    assert [(p.a.rule.name, p.b.rule.name) for p in found] == [("none", "mup"), ("none", "sqrt")]
    assert result_of(found[1], 1) == result_of(compare_runs(*pair)[0], 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give two run folders"),
        (["one"], "give two run folders"),
        (["one", "two", "three"], "give two run folders"),
        (["one", "two"], "one has no config.json: not a run folder"),
        (["one", "two", "--holm"], "Unknown command line flag 'holm'"),
    ],
)
def test_usage_errors_are_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        experiments(["experiments", "compare", *words])
    error = capsys.readouterr().err
    assert exit_.value.code == 2
    assert message in error
    assert error.count("\n") == 1


def test_help(capsys):
    assert experiments(["experiments", "compare", "--help"]) == 0
    text = capsys.readouterr().out
    assert "compare RUN_A RUN_B" in text
    assert max(map(len, text.splitlines())) <= 100
