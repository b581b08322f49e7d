"""The audit: its rule on data with known answers, its claims, and its agreement with the known."""

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from experiments.studies import article, common, gradient_flow
from experiments.studies.article import CLAIMS, COUNT, MAXIMUM, MINIMUM, NORMAL, Claim
from experiments.studies.common import Request, study_key

SUBSET = ("scores", "five", "d512")
SEEDS = {"scores": 20, "five": 2000, "d512": 600}


@pytest.fixture(scope="module")
def audited():
    key = study_key("test")
    measured = {name: article.SETTINGS[name].measure(key, SEEDS[name]) for name in SUBSET}
    claims = tuple(c for c in CLAIMS if c.setting in SUBSET)
    return {
        (a.claim.section, a.claim.quantity): a for a in article.audit(measured, claims)
    }, measured


def settle(printed, values, **claim):
    claim = Claim("0", "a number", printed, "data", lambda data: data, **claim)
    (found,) = article.audit({"data": np.asarray(values)}, (claim,))
    assert found.probability is not None and found.sample is not None
    return found


# --- The rule -------------------------------------------------------------------------------------


def test_counting_allows_for_rounding_and_is_two_sided():
    values = np.arange(999) / 1000  # 0 to .998
    assert settle("0.50", values).probability == 1
    # 50 values are at most .049, so .0449 + half a digit: (1 + 50)/1000, doubled.
    assert settle("0.044", values).probability == pytest.approx(2 * (1 + 45) / 1000)
    found = settle("7", values)
    assert found.probability == pytest.approx(2 / 1000)
    assert (found.verdict, found.wrong_in) == ("unlikely", "")


def test_levels():
    values = np.linspace(0, 1, 40_000)
    for printed, verdict, wrong_in in (
        ("0.5", "possible", ""),
        ("0.0051", "unlikely", ""),
        ("3.0", "not from this code", "size"),
    ):
        found = settle(printed, values)
        assert (found.verdict, found.wrong_in) == (verdict, wrong_in)
    assert settle("0.5", values, law=True).verdict == "reproduced"


def test_normal_tail():
    values = np.random.default_rng(0).normal(10, 2, 100_000)
    found = settle("18.0", values, tail=NORMAL)
    assert found.probability == pytest.approx(2 * stats.norm.sf((18 - 0.05 - 10) / 2), rel=0.1)


@pytest.mark.parametrize("tail, sign", [(MAXIMUM, 1), (MINIMUM, -1)])
def test_extremes_of_independent_grids(tail, sign):
    # Uniform maxima of 32 grids: P(the largest ≤ .8) = .8³².
    values = sign * np.random.default_rng(1).uniform(size=(500, 32))
    found = settle("0.8000" if sign > 0 else "-0.8000", values, tail=tail)
    assert found.probability is not None
    assert np.log(found.probability / 2) == pytest.approx(32 * np.log(0.8), rel=0.05)
    assert settle("0.98" if sign > 0 else "-0.98", values, tail=tail).verdict == "possible"


def test_direction_and_contradiction():
    pairs = np.stack([np.full(30_000, 6.0), np.linspace(0.9, 1.1, 30_000)], axis=-1)
    found = settle("0.02", pairs, sides_of_one=True)
    assert (found.verdict, found.wrong_in) == ("not from this code", "direction")
    assert found.sample is not None
    assert found.sample.median == pytest.approx(6, rel=1e-3)
    assert settle("42", pairs, sides_of_one=True).wrong_in == "size"
    assert settle("42", pairs, contradicts=True).wrong_in == "its own sums"


def test_averages():
    values = np.array([1.0, 2.0, 3.0, 10.0])
    for average, expected in (("mean", 4), ("median", 2.5), ("rms", np.sqrt(114 / 4))):
        assert settle("1", values, average=average).average == pytest.approx(expected)
    pairs = np.stack([values, values / 2], axis=-1)
    assert settle("1", pairs, average="rms").average == pytest.approx(2)


# --- The claims -----------------------------------------------------------------------------------


def test_claims_are_complete():
    assert len(CLAIMS) >= 40
    for claim in CLAIMS:
        assert claim.why
        assert claim.tail in (COUNT, NORMAL, MAXIMUM, MINIMUM)
        if claim.read is not None:
            assert claim.setting in article.SETTINGS
            float(claim.printed)
        else:
            assert claim.verdict or claim.exact_p
    assert {c.section for c in CLAIMS} >= {"2.1", "2.2", "3", "4.2", "5", "6.1", "6.2"}
    for setting in article.SETTINGS.values():
        assert setting.seeds >= 400
    counted = {c.setting for c in CLAIMS if c.read and c.tail == COUNT}
    assert all(2 / (article.SETTINGS[name].seeds + 1) < article.NEVER for name in counted)


# Medians [5 %, 95 %] of an independent implementation, and how far ours may be from the median.
KNOWN = {
    ("2.1", "smallest logit"): (-36.4, 1.5),
    ("2.1", "largest logit"): (36.1, 1.5),
    ("2.1", "standard deviation of the logits"): (8.00, 0.03),
    ("2.1", "mean largest weight"): (0.800, 0.005),
    ("2.1", "mean entropy"): (0.555, 0.012),
    ("2.1", "rows with largest weight > 0.9"): (0.458, 0.012),
    ("2.2", "std of ∂/∂Q, unscaled"): (1.97, 0.3),
    ("2.2", "std of ∂/∂Q, scaled"): (0.329, 0.015),
    ("2.2", "unscaled / scaled, as printed"): (6.5, 1.0),
    ("4.2", "largest weight of row 0, unscaled"): (1.0, 0.001),
    ("4.2", "largest weight of row 0, scaled"): (0.436, 0.015),
    ("4.2", "mean entropy, unscaled"): (0.065, 0.012),
    ("4.2", "mean entropy, scaled"): (1.315, 0.012),
    ("4.2", "entropy, scaled / unscaled"): (20, 4),
    ("5", "largest of all, unscaled, d_k 512"): (1.0, 0.001),
    ("5", "largest of all, scaled, d_k 512"): (0.51, 0.015),
    ("5", "∂/∂Q, unscaled/scaled, d_k 512"): (6.4, 1.0),
}


def test_the_known_is_found_again(audited):
    found, _ = audited
    for name, (median, tolerance) in KNOWN.items():
        assert found[name].sample.median == pytest.approx(median, abs=tolerance), name


def test_averages_agree_with_exact_theory(audited):
    found, _ = audited
    for name, a in found.items():
        if a.exact is not None and a.claim.average == "mean" and a.average is not None:
            tolerance = 5 * a.sample.standard_error
            if "/" not in name[1]:  # a ratio's error is not that of its average
                assert abs(a.average - a.exact) < tolerance, name
        if a.claim.average == "rms":
            assert a.average == pytest.approx(a.exact, rel=0.15), name


def test_verdicts_that_do_not_need_many_seeds(audited):
    found, _ = audited
    for name in ("mean entropy", "rows with largest weight > 0.9", "largest logit"):
        assert found["2.1", name].verdict == "not from this code"
    assert found["2.1", "standard deviation of the logits"].verdict == "unlikely"
    assert found["4.2", "largest weight of row 0, unscaled"].verdict == "possible"
    assert found["2.2", "unscaled / scaled, from those two"].wrong_in == "direction"
    assert found["2.2", "unscaled / scaled, as printed"].wrong_in == "its own sums"


def test_gradients_known_elsewhere(audited):
    _, measured = audited
    found = gradient_flow.flow(measured["d512"], 512)
    # Two independent measurements of the medians: 6.8e-4 and 5.7e-4; .015 and .013.
    assert found.typical_logits.low < 1.5e-3 and found.typical_logits.high > 3e-4
    assert found.typical_query.low < 0.03 and found.typical_query.high > 0.006
    assert found.rms_logits.low < 0.42 < found.rms_logits.high
    assert found.rms_query.low < 9.6 < found.rms_query.high


def test_pooled_std_is_that_of_all_logits():
    rng = np.random.default_rng(2)
    logits = rng.normal(1, 3, (2, 1, 4, 7, 50))  # [seeds, scales, batch, queries, keys]
    rows = article.saturation.Rows(*[logits.mean(-1)] * 10)._replace(logit_std=logits.std(-1))
    expected = [logits[s].std(ddof=1) for s in range(2)]
    np.testing.assert_allclose(article._pooled_std(rows), expected, rtol=1e-12)


def test_drawn_curves():
    # By hand for the first: residuals over .02 are -3.65, -3.65, -3.6, -3.6, -3.55.
    assert 1e-16 < article._curve_probability() < 1e-12


def test_implied_spreads():
    stds = article.implied_stds()
    expected = {"largest weight": 9.5, "entropy": 6.7, "saturated rows": 5.5, "range": 5.4}
    for name, value in expected.items():
        assert stds["2.1"][name] == pytest.approx(value, abs=0.15), name
    assert stds["4.2 scaled"]["largest weight"] == pytest.approx(0.055, abs=0.003)
    assert stds["4.2 scaled"]["entropy"] == pytest.approx(0.146, abs=0.003)
    assert len(article.contradictions(stds)) >= 5


def test_the_whole_audit_of_a_few_claims(tmp_path, monkeypatch):
    chosen = tuple(c for c in CLAIMS if c.setting in ("variance", ""))
    monkeypatch.setattr(article, "CLAIMS", chosen)
    settings = {name: article.SETTINGS[name] for name in ("variance",)}
    monkeypatch.setattr(article, "SETTINGS", settings)
    monkeypatch.setattr(article.audit, "__defaults__", (chosen,))
    lines = []
    findings = article.run(Request(tmp_path, seeds=50, quick=True, say=lines.append))
    common.write(findings, tmp_path, "command", quick=True)
    assert len(lines) == 1
    report = (tmp_path / "report.md").read_text()
    for part in (
        "§3 Var(q·k) at d_k = 64",
        "reproduced",
        "not measurable",
        "inherits §5",
        "contradicts",
    ):
        assert part in report
    assert (tmp_path / "figures" / "article.svg").stat().st_size < 300_000


def test_seeds_out_of_range():
    with pytest.raises(ValueError, match="seeds: 1, must be from 2"):
        article.run(Request(Path("nowhere"), seeds=1))
