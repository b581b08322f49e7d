"""Summaries, tables and reports of run folders whose rows are made up, so answers are known."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from experiments.analysis import paired, report
from experiments.analysis.read import read_arms
from experiments.analysis.summary import summarize, summarize_arms, train_command
from experiments.commands.flags import parse
from experiments.config import TrainConfig, resolve
from experiments.runs.folder import EVALUATION, METRICS, RunFolderError, strict

# At steps 0, 10, ... 60. Reached is three in a row: AT_20 is lost again later, NEVER has but two.
NEVER = [0, 0.2, 0.95, 0.6, 0.7, 0.93, 0.94]
AT_20 = [0, 0.5, 0.9, 0.9, 0.95, 0.2, 0.1]
AT_30 = [0, 0.1, 0.2, 0.91, 0.92, 0.93, 0.94]


def on_terminal(summary, width=100):
    text = io.StringIO()
    Console(file=text, width=width).print(report.terminal_tables(summary))
    return text.getvalue()


def test_an_arm_is_medians_and_ranges_over_its_seeds(make_run):
    accuracy = np.zeros((6, 5))
    accuracy[:, -1] = [0.1, 0.4, 0.2, 0.96, 0.97, 0.99]
    loss = np.ones((6, 5))
    loss[:, -1] = [3, 1, 2, 0.5, 0.25, 0.125]
    none, sqrt = summarize(make_run(accuracy=accuracy, loss=loss))["arms"]
    assert (none["rule"], none["multiplier"], none["seeds"]) == ("none ×1", 1.0, 3)
    assert (sqrt["rule"], sqrt["multiplier"]) == ("sqrt ×1/√d_k", 0.125)
    assert none["held_out"]["step"] == 40
    assert none["held_out"]["loss"] == {
        "median": 2,
        "least": 1,
        "largest": 3,
        "by_seed": [3, 1, 2],
    }
    assert sqrt["held_out"]["accuracy"]["median"] == pytest.approx(0.97)


def test_a_seed_that_never_arrives_is_censored(make_run):
    accuracy = [NEVER, AT_20, NEVER, AT_20, NEVER, AT_30]
    folder = make_run(steps=60, accuracy=accuracy)
    none, sqrt = (arm["steps_to_threshold"] for arm in summarize(folder)["arms"])
    assert none["by_seed"] == [None, 20, None]
    assert (none["median"], none["not_reached"]) == (None, 2)
    assert sqrt["by_seed"] == [20, None, 30]
    assert (sqrt["median"], sqrt["least"], sqrt["largest"]) == (30, 20, None)
    text = on_terminal(summarize(folder))
    assert "not by 60  2 of 3" in text
    assert "30 (20–>60)  1 of 3" in text
    assert "none ×1: 2 of 3 still short of 90% at step 60" in text


def test_start_is_step_0_and_the_end_the_last_rows_of_each_seed(make_run):
    # Lane i at step t: 100 i + t. Over 40 steps the end is the median of the last 4 rows: 37.5.
    values = 100 * np.arange(6)[:, None] + np.arange(40)
    none, sqrt = summarize(make_run(measures={"logit_std": values, "loss": values}))["arms"]
    assert (none["start"]["logit_std"], none["end"]["logit_std"]) == (100, 137.5)
    assert (sqrt["start"]["loss"], sqrt["end"]["loss"]) == (400, 437.5)
    assert none["end_steps"] == [36, 39]


def test_a_diverged_lane_counts_as_untrained_and_is_named(make_run):
    gradient = np.ones((3, 60))
    gradient[1, 45:] = np.nan
    entropy = np.ones((3, 60))
    entropy[1] = 2 + np.arange(60)
    entropy[1, 45:] = np.nan
    loss = np.tile([4.0, 3, 2, 1, 0.5, 0.5, 0.5], (3, 1))
    folder = make_run(
        steps=60,
        scale=("none",),
        loss=loss,
        accuracy=[AT_30, AT_20, AT_30],
        measures={"grad_norm": gradient, "entropy": entropy},
    )
    summary = summarize(folder)
    [arm] = summary["arms"]
    assert arm["diverged"] == [{"seed": 1, "step": 45}]
    assert arm["held_out"]["loss"]["by_seed"] == [0.5, 4, 0.5]
    assert arm["held_out"]["accuracy"]["by_seed"][1] == 0
    assert arm["steps_to_threshold"]["by_seed"] == [30, 20, 30]  # it arrived before
    assert arm["end"]["entropy"] == 1  # of 1, 43.5 and 1
    text = on_terminal(summary)
    assert "none ×1: 1 of 3 diverged (seed 1 by step 45)" in text


def test_arms_are_paired_by_seed_with_the_scaled_one(make_run):
    draw = np.random.default_rng(0)
    loss, accuracy = draw.uniform(size=(2, 9, 5))
    folder = make_run(scale=("sqrt", "none", "0.5"), loss=loss, accuracy=accuracy)
    loss = loss.astype(np.float32).astype(float)
    found = summarize(folder)["comparisons"]
    assert [(c["arm"], c["against"]) for c in found] == [
        ("none ×1", "sqrt ×1/√d_k"),
        ("×0.5", "sqrt ×1/√d_k"),
    ]
    expected = [
        paired.paired_comparison(loss[rows, -1], loss[:3, -1], better="lower")
        for rows in (slice(3, 6), slice(6, 9))
    ]
    holm = paired.holm([test.p_value for test in expected])
    for test, p_value, c in zip(expected, holm, found, strict=True):
        assert c["loss"] == {**test._asdict(), "p_value_holm": p_value}
        assert (c["seeds"], c["step"]) == (3, 40)
    assert "p is corrected for 2 comparisons (Holm)." in on_terminal(summarize(folder))


def test_a_difference_of_censored_times_is_shown_as_a_bound(make_run):
    folder = make_run(steps=60, accuracy=[NEVER, AT_30, NEVER, AT_20, AT_20, AT_20])
    summary = summarize(folder)
    [found] = summary["comparisons"]
    test = found["steps_to_threshold"]
    assert test["not_reached"] == [2, 0]
    assert test["mean_difference"] == pytest.approx((40 + 10 + 40) / 3)  # never counts as 60
    assert "≥ +30" in on_terminal(summary)
    nobody = summarize(make_run("nobody", steps=60, accuracy=[NEVER] * 6))
    assert nobody["comparisons"][0]["steps_to_threshold"] is None


def test_learning_rates_are_paired_rate_by_rate(make_run):
    folder = make_run(learning_rate=(0.1, 0.2), num_seeds=2)
    assert [(c["arm"], c["against"]) for c in summarize(folder)["comparisons"]] == [
        (f"none ×1, lr {rate}", f"sqrt ×1/√d_k, lr {rate}") for rate in (0.1, 0.2)
    ]


def test_runs_are_compared_over_the_seeds_and_steps_they_share(make_run):
    times = np.arange(5.0)
    a = make_run("a", scale=("none",), seed=0, loss=[times, times + 1, times + 2])
    b = make_run("b", scale=("sqrt",), seed=1, steps=20, loss=[[7, 7, 7], [9, 9, 9], [0, 0, 0]])
    [found] = summarize_arms(read_arms([a, b]))["comparisons"]
    assert (found["seeds"], found["step"]) == (2, 20)
    assert found["loss"]["mean_difference"] == ((2 + 1 - 7) + (2 + 2 - 9)) / 2
    c = make_run("c", scale=("sqrt",), task="copy")
    assert summarize_arms(read_arms([a, c]))["comparisons"] == []


@pytest.mark.parametrize("done", [0, 1, 15])
def test_a_run_that_stopped_early(make_run, done):
    folder = make_run(done=done)
    with (folder / METRICS).open("a") as file:
        file.write('{"step":15,"scale":"none","lear')
    summary = summarize(folder)
    assert summary["steps_done"] == done
    assert summary["arms"][0]["held_out"]["step"] == done // 10 * 10
    page = report.report(summary)
    assert f"stopped after {done} steps" in page
    assert "none ×1" in on_terminal(summary)


def test_a_run_with_no_complete_evaluation(make_run):
    folder = make_run(done=5)
    rows = (folder / EVALUATION).read_text().splitlines(keepends=True)
    (folder / EVALUATION).write_text("".join(rows[:4]))  # of 6 lanes
    summary = summarize(folder)
    assert [arm["held_out"] for arm in summary["arms"]] == [None, None]
    assert summary["comparisons"] == []
    assert "sqrt ×1/√d_k: no evaluation of every seed yet" in on_terminal(summary)


def test_one_arm_one_seed_and_rows_now_and_then(make_run):
    summary = summarize(make_run(scale=0.2, steps=60, num_seeds=1, log_every=7, accuracy=[AT_20]))
    assert summary["comparisons"] == []
    [arm] = summary["arms"]
    assert (arm["label"], arm["steps_to_threshold"]["median"]) == ("×0.2", 20)
    assert arm["end_steps"] == [56, 56]
    assert summary["steps_done"] == 60
    assert "1 seed." in report.report(summary)


def test_every_lane_diverged_at_once(make_run):
    nothing = {name: np.full((6, 40), np.nan) for name in ("loss", "grad_norm", "logit_std")}
    summary = summarize(make_run(loss=np.nan, measures=nothing))
    assert summary["arms"][0]["start"]["logit_std"] is None
    assert summary["comparisons"][0]["loss"] is None
    assert "3 of 3 diverged" in on_terminal(summary)


def test_results_are_strict_json_and_a_page(make_run):
    folder = make_run()
    summary = report.write_results(folder, draw=None)
    stored = json.loads((folder / "summary.json").read_text(), parse_constant=pytest.fail)
    assert stored == strict(summary)
    page = (folder / "report.md").read_text()
    assert "python train.py --scale=none,sqrt --task=sort --steps=40 --num_seeds=3" in page
    assert "jax 1.2.3" in page
    assert "git revision abc+" in page
    assert "![" not in page
    made = {path.name for path in folder.iterdir()} - {"config.json", "environment.json"}
    assert made == {"metrics.jsonl", "evaluation.jsonl", "summary.json", "report.md"}
    assert "![curves](figures/curves.png)\n\ncurves\n" in report.report(
        summary, ["figures/curves.png"]
    )


def test_the_tables_fit_a_terminal_of_80_columns(make_run):
    text = on_terminal(summarize(make_run(steps=60, accuracy=[AT_30, AT_30, AT_20] * 2)), width=80)
    assert "accuracy %" in text
    assert any("sqrt ×1/√d_k" in line and "30 (20–30)" in line for line in text.splitlines())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scale": ("0.2", "mup"), "learning_rate": (1e-4, 0.5)},
        {"optimizer": "sgd", "task": "recall", "clip_norm": 1.5, "d_model": 32, "d_k": 128},
        {"num_layers": 3, "seed": 7, "d_v": 5, "norm": "post", "dropout_rate": 0.1},
    ],
)
def test_the_command_makes_the_same_run_again(settings):
    config = resolve(TrainConfig(**settings))
    words = train_command(config).removeprefix("python ").split()
    parsed = parse(words, TrainConfig)
    assert parsed is not None
    assert resolve(parsed.pick(TrainConfig)) == config


def test_the_plain_command_is_short():
    assert train_command(resolve(TrainConfig())) == "python train.py --scale=none,sqrt --task=sort"


def test_damaged_folders_are_refused_in_one_line(make_run, tmp_path):
    folder = make_run()
    rows = (folder / METRICS).read_text().splitlines(keepends=True)
    (folder / METRICS).write_text("".join([rows[1], rows[0], *rows[2:]]))
    with pytest.raises(RunFolderError, match=r"not those of config\.json"):
        read_arms([folder])
    (folder / METRICS).write_text("".join(rows[6:12] + rows[:6]))
    with pytest.raises(RunFolderError, match="not in step order"):
        read_arms([folder])
    (folder / METRICS).write_text("".join(rows))
    (folder / "environment.json").write_text("[]")
    with pytest.raises(RunFolderError, match=r"environment\.json can't be read"):
        summarize(folder)
    with pytest.raises(RunFolderError, match="not a run folder"):
        summarize(tmp_path / "nothing")
    with pytest.raises(ValueError, match="is given twice"):
        read_arms([folder, folder / ".." / folder.name])
    with pytest.raises(ValueError, match="at least one run folder"):
        read_arms([])


def test_labels_say_what_differs(make_run):
    def labels(*folders):
        return [arm.label for arm in read_arms(folders)]

    a = make_run("a", scale=("sqrt",))
    b = make_run("b", scale=("sqrt",), d_k=16, steps=20, eval_every=5)
    c = make_run("c", scale=("sqrt",), d_model=128)
    d = make_run("d", scale=("none",))
    again = make_run("[red]", scale=("sqrt",))
    assert labels(a, d) == ["sqrt ×1/√d_k", "none ×1"]
    assert labels(a, b) == ["sqrt ×1/√d_k, d_k 64", "sqrt ×1/√d_k, d_k 16"]
    assert labels(a, c) == ["sqrt ×1/√d_k, d_model 64", "sqrt ×1/√d_k, d_model 128"]
    assert labels(a, again) == ["sqrt ×1/√d_k (a)", "sqrt ×1/√d_k ([red])"]
    assert "([red])" in on_terminal(summarize_arms(read_arms([a, again])))
