"""Two runs made by separate commands: are they a pair, and what do they show?"""

import io
import json

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from experiments.analysis.compare import compare_runs, notes, tables
from experiments.analysis.paired import paired_comparison
from experiments.runs.folder import RunFolderError
from experiments.runs.seal import Extent, Mark, Seal, digest, write_seal

SEEDS = 5
STEPS = (0, 4, 8, 12)
DRAW = np.random.default_rng(3)
LOSS = {name: DRAW.uniform(0.5, 2, (SEEDS, 4)).astype(np.float32) for name in ("none", "sqrt")}
ACCURACY = {name: DRAW.uniform(0, 0.8, (SEEDS, 4)).astype(np.float32) for name in LOSS}


@pytest.fixture
def make_arm_run(make_run):
    """Writes the run of one arm with LOSS and ACCURACY, or with what a test says instead."""

    def make(scale, name=None, **said):
        settings = {"steps": 12, "eval_every": 4, "num_seeds": SEEDS, "task": "reverse"}
        values = {"loss": LOSS.get(scale, 1.0), "accuracy": ACCURACY.get(scale, 0.5)}
        return make_run(name or scale, scale=scale, **settings | values | said)

    return make


@pytest.fixture
def pair(make_arm_run):
    return make_arm_run("none"), make_arm_run("sqrt")


def edit(folder, name, change):
    """A JSON file of a run, changed."""
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


def result_of(pair, quantity):
    """The test of a quantity of a pair."""
    test = pair.compared[quantity].test
    assert test is not None
    return test


def on_terminal(pair):
    text = io.StringIO()
    Console(file=text, width=130).print(tables(pair))
    return text.getvalue()


def test_a_pair_is_compared_seed_by_seed(pair):
    (found,) = compare_runs(*pair)
    assert (found.a.arm.name, found.b.arm.name, found.step) == ("none", "sqrt", 12)
    assert list(found.compared) == ["accuracy", "loss", "loss_area", "steps_to_threshold"]
    none, sqrt = (LOSS[name].astype(float) for name in ("none", "sqrt"))
    difference = none[:, -1] - sqrt[:, -1]
    test = result_of(found, "loss")
    assert test == paired_comparison(none[:, -1], sqrt[:, -1], better="lower")
    assert test.mean_difference == pytest.approx(difference.mean())
    assert test.p_value == pytest.approx(
        stats.permutation_test(
            (difference,), np.sum, permutation_type="samples", n_resamples=np.inf
        ).pvalue
    )
    assert test.probability_better == np.mean(difference < 0)
    np.testing.assert_array_equal(found.compared["accuracy"].a, ACCURACY["none"][:, -1])
    area = np.trapezoid(np.minimum(sqrt, sqrt[:, :1]), STEPS, axis=1) / 12
    np.testing.assert_allclose(found.compared["loss_area"].b, area)
    times = found.compared["steps_to_threshold"]  # nobody gets there in 12 steps
    assert (times.test, times.short) == (None, (SEEDS, SEEDS))


def test_the_table_says_what_few_seeds_cannot_show(pair):
    text = on_terminal(compare_runs(*pair)[0])
    assert "none ×1 − sqrt ×1/√d_k: reverse, 5 seeds, held-out, to step 12" in text
    assert "With 5 pairs the smallest possible p is 0.0625, so none can be below 0.05." in text
    assert "not by 12" in text
    assert "diverged" not in text


def test_swapping_the_runs_swaps_the_signs(pair):
    (found,), (swapped,) = compare_runs(*pair), compare_runs(*pair[::-1])
    for name in ("accuracy", "loss", "loss_area"):
        one, other = result_of(found, name), result_of(swapped, name)
        assert one.mean_difference == -other.mean_difference
        assert one.p_value == other.p_value
        assert one.probability_better == pytest.approx(1 - other.probability_better)


def test_times_are_compared_with_the_late_ones_censored(make_arm_run):
    at = np.arange(0, 33, 4)

    def arrive(times):
        return np.where(at >= np.array(times)[:, None], 0.95, 0.1)

    late, early = arrive([8, 8, 12, 28, 99]), arrive([4, 4, 4, 4, 8])  # 28: two are not three
    pair = [
        make_arm_run(name, steps=32, accuracy=accuracy, loss=1.0)
        for name, accuracy in (("none", late), ("sqrt", early))
    ]
    (found,) = compare_runs(*pair)
    times = found.compared["steps_to_threshold"]
    assert times.short == (2, 0)
    assert result_of(found, "steps_to_threshold").mean_difference == pytest.approx(
        np.mean([4, 4, 8, 28, 24])
    )
    text = on_terminal(found)
    assert "≥ 18 (8–>32)" in text
    assert "5 (4–8)" in text
    assert "≥ +14" in text
    assert "counts as step 32" in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"d_k": 4}, "differ in more than the scale: d_k: 4 and 64"),
        ({"num_seeds": 4, "loss": 1.0, "accuracy": 0.5}, "num_seeds: 4 and 5"),
        ({"learning_rate": 0.1}, r"learning_rate: \[0.1\] and \[0.001\]"),
    ],
)
def test_runs_that_differ_in_more_are_refused(make_arm_run, settings, message):
    with pytest.raises(ValueError, match=message):
        compare_runs(make_arm_run("none", **settings), make_arm_run("sqrt"))


def test_settings_that_only_say_how_it_was_watched_may_differ(make_arm_run):
    a = make_arm_run("none")
    b = make_arm_run(
        "sqrt",
        eval_every=2,
        log_every=3,
        steps=16,
        done=14,
        loss=np.repeat(LOSS["sqrt"], 2, axis=1),
        accuracy=0.5,
    )
    (found,) = compare_runs(a, b)
    assert list(found.a.evaluation_steps) == list(found.b.evaluation_steps) == [0, 4, 8, 12]
    loss = [LOSS[name][:, -1].astype(float) for name in ("none", "sqrt")]
    assert found.compared["loss"].test == paired_comparison(*loss, better="lower")
    assert any("16 steps were asked for" in note for note in notes(found))


@pytest.mark.parametrize("what", ["weights", "data"])
def test_other_weights_or_data_are_refused_and_so_is_not_knowing(pair, what):
    edit(pair[0], "environment.json", lambda e: e["digests"]["3"].update({what: "0"}))
    with pytest.raises(ValueError, match=f"are no pair: seed 3 has other {what} at the start"):
        compare_runs(*pair)
    edit(pair[0], "environment.json", lambda e: e["digests"].pop("3"))
    with pytest.raises(RunFolderError, match="has no digests of seed 3"):
        compare_runs(*pair)


def test_another_machine_is_a_warning(pair):
    edit(pair[0], "environment.json", lambda e: e.update(platform="gpu", cores=99))
    edit(pair[0], "environment.json", lambda e: e["versions"].update(jax="2", numpy="1"))
    lines = []
    compare_runs(*pair, say=lines.append)
    assert lines == [
        "warning: version of jax is 2 and 1.2.3: last bits may differ",
        "warning: platform is gpu and cpu: last bits may differ",
    ]


def test_the_same_arm_twice_and_the_same_run_twice_are_refused(make_arm_run, pair):
    for same in ("1e0", "1"):
        with pytest.raises(ValueError, match="scale: the same in"):
            compare_runs(pair[0], make_arm_run(same, loss=1.0))
    with pytest.raises(ValueError, match="is given twice"):
        compare_runs(pair[0], pair[0])


def test_arms_are_told_apart_by_what_they_are_not_by_a_multiplier(make_arm_run):
    fold, none = make_arm_run("fold"), make_arm_run("none")
    (found,) = compare_runs(fold, none)
    assert found.a.arm.rule.multiplier == found.b.arm.rule.multiplier
    assert found.compared["loss"].test is not None


def test_a_diverged_lane_counts_as_untrained(make_arm_run):
    lost = np.ones((SEEDS, 12))
    lost[2, 6:] = np.nan
    a = make_arm_run("none", measures={"loss": lost})
    (found,) = compare_runs(a, make_arm_run("sqrt"))
    assert found.compared["loss"].a[2] == LOSS["none"][2, 0]
    assert any("1 of 5 diverged (seed 2 by step 6)" in note for note in notes(found))


def test_a_lane_without_any_value_is_a_sentence_not_a_test(make_arm_run):
    loss = LOSS["none"].copy()
    loss[4] = np.nan
    (found,) = compare_runs(make_arm_run("none", loss=loss), make_arm_run("sqrt"))
    assert found.compared["loss"].test is found.compared["loss_area"].test is None
    assert any("no loss even before training" in note for note in notes(found))
    last = LOSS["none"].copy()
    last[4, -1] = np.nan  # as it would be if the lane had diverged between rows
    (found,) = compare_runs(make_arm_run("none", "last", loss=last), make_arm_run("sqrt", "b"))
    assert found.compared["loss"].a[4] == LOSS["none"][4, 0]


def test_one_seed_shows_values_and_no_test(make_arm_run):
    one = {"num_seeds": 1, "loss": 1.0, "accuracy": 0.5}
    (found,) = compare_runs(make_arm_run("none", **one), make_arm_run("sqrt", **one))
    text = on_terminal(found)
    assert "there is no interval and no test" in text
    assert "inf" not in text


def test_a_run_that_has_only_begun_is_compared_at_its_start_or_said_to_have_nothing(
    make_arm_run, pair
):
    (found,) = compare_runs(make_arm_run("0.3", done=0, loss=1.0, accuracy=0.5), pair[1])
    assert (found.step, list(found.compared)) == (0, ["accuracy", "loss"])
    (pair[0] / "evaluation.jsonl").write_text("")
    with pytest.raises(ValueError, match="have no evaluation of every seed in common"):
        compare_runs(*pair)


def test_every_arm_meets_those_of_the_other_run(make_run, make_arm_run, pair):
    loss = np.concatenate([np.ones((SEEDS, 4)), LOSS["sqrt"], LOSS["none"]])
    several = make_arm_run(("mup", "sqrt", "none"), "several", loss=loss, accuracy=0.5)
    found = compare_runs(pair[0], several)
    assert [(p.a.arm.name, p.b.arm.name) for p in found] == [("none", "mup"), ("none", "sqrt")]
    assert found[1].compared["loss"].test == compare_runs(*pair)[0].compared["loss"].test


def test_a_run_that_was_changed_is_refused_or_says_so(pair):
    def extent(name):
        content = (pair[0] / name).read_bytes()
        return Extent(len(content), digest(content))

    mark = Mark(12, extent("metrics.jsonl"), extent("evaluation.jsonl"))
    write_seal(pair[0], Seal((digest((pair[0] / "config.json").read_bytes()),), (mark,), True))
    assert not any("edited" in note for note in notes(compare_runs(*pair)[0]))
    rows = (pair[0] / "evaluation.jsonl").read_text()
    (pair[0] / "evaluation.jsonl").write_text(rows.replace('"loss":1.', '"loss":0.'))
    with pytest.raises(RunFolderError, match=r"evaluation\.jsonl was changed between steps"):
        compare_runs(*pair)
    (found,) = compare_runs(*pair, accept_edits=True)
    assert notes(found)[0].startswith(f"{pair[0]}: edited: evaluation.jsonl was changed")
