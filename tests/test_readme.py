"""Every number of README that a command has measured is the one in results/."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = " ".join((ROOT / "README.md").read_text().split())
ARTICLE_ROWS = {  # in README: in the audit, its section and quantity
    "variance of q·k, d_k = 64": ("3", "Var(q·k) at d_k = 64"),
    "mean largest weight, n = 50, d_k = 64": ("2.1", "mean largest weight"),
    "mean entropy, the same": ("2.1", "mean entropy"),
    "saturated rows, the same": ("2.1", "rows with largest weight > 0.9"),
    "entropy scaled, n = 5, d_k = 512": ("4.2", "mean entropy, scaled"),
    "std of ∂/∂Q, unscaled / scaled, d_k = 512": ("5", "∂/∂Q, unscaled/scaled, d_k 512"),
    "largest of all weights scaled, d_k = 1024": ("5", "largest of all, scaled, d_k 1024"),
}


def results(study):
    return json.loads((ROOT / "results" / study / "summary.json").read_text())


def against_sqrt(cell, choice, arm="none"):
    """A comparison of the convergence study."""
    for found in results("convergence")["numbers"]["against_sqrt"]:
        if (found["cell"], found["arm"], found["choice"]) == (cell, arm, choice):
            return found
    raise AssertionError(f"{cell} was not run")


def test_the_tally_of_the_audit():
    numbers = results("article")["numbers"]
    tally = numbers["tally"]
    assert (
        f"of {len(numbers['claims'])} claims, {tally['reproduced']} are reproduced, "
        f"{tally['possible']} possible, {tally['unlikely']} unlikely, "
        f"{tally['not from this code']} can't come from its code"
    ) in README


@pytest.mark.parametrize("label", ARTICLE_ROWS)
def test_a_row_of_the_audit(label):
    row = re.search(rf"\| {re.escape(label)} \|([^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\|", README)
    assert row is not None
    printed, measured, exact, verdict = (cell.strip() for cell in row.groups())
    (claim,) = (
        claim
        for claim in results("article")["numbers"]["claims"]
        if (claim["section"], claim["quantity"]) == ARTICLE_ROWS[label]
    )
    assert float(printed) == float(claim["printed"])
    assert verdict == claim["verdict"]
    sample = claim["measured"]
    # Three digits, as every number of a report, or fewer where the report has rounded a whole one.
    wanted = [sample[name] for name in ("median", "low", "high")]
    found = [float(text) for text in re.findall(r"[\d.]+", measured)]
    assert found == pytest.approx(wanted, rel=5.1e-3)
    if claim["exact"] is not None:
        assert float(exact.removeprefix("rms ")) == pytest.approx(claim["exact"], rel=1e-3)


def test_recall_at_the_common_rate():
    found = against_sqrt("recall-adam-64", "common")
    times = found["times"]
    mean, low, high = (round(times[name]) for name in ("mean_difference", "low", "high"))
    assert (
        f"unscaled needed at least {found['ratio']:.1f} times as many (+{mean} steps, "
        f"95 % interval +{low} to +{high}, p = {times['p_value']:.4f}, "
        f"by Holm over all comparisons {found['holm_p_value']:.3f}; "
        f"{times['pairs']} paired seeds, Adam at 1e-3; "
        f"{found['never']} of the {times['pairs']} never got there in {found['budget']} steps)"
    ) in README
    scaled = times["mean_difference"] / (found["ratio"] - 1)  # the mean of the scaled times
    assert f"accuracy in {round(scaled)} steps on average" in README
    own = against_sqrt("recall-adam-64", "own")
    assert f"own still at least {own['ratio']:.1f} times as many" in README


def test_sorting_and_sgd():
    sort, own = (against_sqrt("sort-adam-64", choice) for choice in ("common", "own"))
    times = sort["times"]
    mean, low, high = (round(times[name]) for name in ("mean_difference", "low", "high"))
    assert sort["never"] == 0
    assert (
        f"{sort['ratio']:.1f} times as many (+{mean} [+{low}, +{high}] of {sort['budget']} steps), "
        f"or {own['ratio']:.1f} with tuned rates"
    ) in README
    times = against_sqrt("recall-sgd-64", "common")["times"]
    mean, low, high = (round(times[name]) for name in ("mean_difference", "low", "high"))
    assert f"SGD says the same of recall (at least +{mean} [+{low}, +{high}])" in README


def test_the_default_run():
    none, sqrt = (
        round(100 * arm["held_out"]["accuracy"]["median"]) for arm in results("default")["arms"]
    )
    assert f"is at {none} % when scaled attention is at {sqrt} %" in README


def test_the_table_of_speeds():
    measured = (ROOT / "results" / "benchmarks" / "throughput.md").read_text()
    names = {
        "this project, all rows written": "this project, all rows written",
        "PyTorch, eager": "PyTorch, eager",
        "PyTorch, torch.compile": "PyTorch, torch.compile",
    }
    for ours, theirs in names.items():
        said = re.search(rf"\| {re.escape(ours)} \| (\d+) \|", README)
        found = re.search(rf"^\| {re.escape(theirs)}[^|]*\| (\d+) ", measured, re.MULTILINE)
        assert said is not None and found is not None
        assert said[1] == found[1]
