"""The studies' measurements against exact theory, closed forms and float64 NumPy."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from attention import theory
from experiments.analysis.tables import Table
from experiments.figures import style
from experiments.studies import (
    STUDIES,
    common,
    gradient_flow,
    head_dimension,
    length,
    saturation,
    score_variance,
)
from experiments.studies.common import Findings, Request

KEY = jax.random.key(7)
NOWHERE = Path("nowhere")


def drawn(stream, seed, shape):
    """What `measure` draws for one seed, as float64."""
    return np.asarray(common.normal(jax.random.fold_in(KEY, seed), stream, shape), np.float64)


# --- common ---------------------------------------------------------------------------------------


def test_a_seed_is_the_same_whatever_was_drawn_beside_it():
    def measure(key):
        return {"x": common.normal(key, "query", (3,))}

    many = common.over_seeds(measure, KEY, seeds=7, chunk=3)["x"]
    few = common.over_seeds(measure, KEY, seeds=2, chunk=100)["x"]
    assert many.shape == (7, 3)
    np.testing.assert_array_equal(many[:2], few)
    assert len(np.unique(many)) == 21


def test_streams_and_studies_have_their_own_draws():
    query, key = (common.normal(KEY, stream, (4,)) for stream in ("query", "key"))
    assert not np.any(np.asarray(query == key))
    assert common.study_key("length") != common.study_key("article")


@pytest.mark.parametrize("seeds", [0, 1, -5, 10**6 + 1])
def test_seeds_out_of_range(seeds):
    with pytest.raises(ValueError, match=rf"seeds: {seeds}, must be from 2 to 1000000"):
        Request(NOWHERE, seeds=seeds).number_of_seeds(100, 10)


def test_number_of_seeds():
    assert Request(NOWHERE).number_of_seeds(100, 10) == 100
    assert Request(NOWHERE, quick=True).number_of_seeds(100, 10) == 10
    assert Request(NOWHERE, seeds=3, quick=True).number_of_seeds(100, 10) == 3


def test_spread():
    sample = common.spread(np.arange(101.0))
    assert sample[:4] == (50, 5, 95, 50)
    assert common.with_interval(sample) == "50.0 [5.00, 95.0]"
    assert sample.standard_error == pytest.approx(np.sqrt(101 * 102 / 12) / np.sqrt(101))


def findings():
    figure, ((axis,),) = style.new_figure()
    axis.plot([0, 1], [1, 0])
    return Findings(
        title="Title",
        answer="The answer.",
        tables=(Table("A table", ("a", "b"), [("1", "2")]),),
        figures={"picture": figure},
        captions={"picture": "What it shows."},
        settings={"seeds": 3},
        numbers={"x": np.array([1.0, np.nan])},
    )


def test_the_same_findings_write_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        common.write(findings(), tmp_path / name, "the command", quick=False)
    files = [p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*.*")]
    assert {str(f) for f in files} == {
        "report.md",
        "summary.json",
        "figures/picture.png",
        "figures/picture.svg",
    }
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_a_report_says_what_made_it(tmp_path):
    common.write(findings(), tmp_path, "the command", quick=True)
    report = (tmp_path / "report.md").read_text()
    for part in ("# Title", "quick run", "The answer.", "| 1 | 2 |", "figures/picture.png",
                 "the command", "seeds 3", f"jax {jax.__version__}"):  # fmt: skip
        assert part in report
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["numbers"] == {"x": [1.0, None]}
    assert summary["quick"] is True
    assert summary["environment"]["versions"]["jax"] == jax.__version__


def test_every_study_is_listed_with_its_file():
    from experiments.studies import load

    for name in ("score_variance", "saturation", "gradient_flow", "head_dimension", "length"):
        assert name in STUDIES
        assert callable(load(name))


# --- score_variance -------------------------------------------------------------------------------


def test_score_variance():
    seeds, pairs = 40, 500
    result = score_variance.measure(KEY, key_dims=(4, 64), pairs=pairs, seeds=seeds)
    assert result.variance.shape == (2, 2, seeds)
    for i, d in enumerate((4, 64)):
        error = theory.variance_standard_error(d, pairs)
        assert abs(result.variance[i, 0].mean() - d) < 5 * error / np.sqrt(seeds)
        assert result.variance[i, 0].std() == pytest.approx(error, rel=0.4)
        np.testing.assert_allclose(result.variance[i, 1], result.variance[i, 0] / d, rtol=1e-5)
        kurtosis = result.excess_kurtosis[i, 0]
        assert kurtosis.mean() == pytest.approx(6 / d, abs=5 * kurtosis.std() / np.sqrt(seeds))
    slopes = score_variance.slopes(result)
    assert slopes[0].mean() == pytest.approx(1, abs=0.02)
    assert slopes[1].mean() == pytest.approx(0, abs=0.02)


# --- saturation -----------------------------------------------------------------------------------


def test_saturation_rows_by_their_definitions():
    rows = saturation.measure(
        KEY, keys=6, key_dim=8, scales=(0.3, 2.0), queries=3, batch=2, seeds=2
    )
    q, k = drawn("query", 1, (2, 3, 1, 8)), drawn("key", 1, (2, 6, 1, 8))
    logits = 2.0 * np.einsum("bqhd,bkhd->bqk", q, k)
    p = special.softmax(logits, axis=-1)
    jacobian = p[..., None] * np.eye(6) - p[..., None] * p[..., None, :]
    expected = {
        "entropy": special.entr(p).sum(-1),
        "max_weight": p.max(-1),
        "saturated": p.max(-1) > 0.9,
        "jacobian_trace": np.trace(jacobian, axis1=-2, axis2=-1),
        "jacobian_norm_squared": (jacobian**2).sum((-2, -1)),
        "logit_mean": logits.mean(-1),
        "logit_std": logits.std(-1),
        "logit_min": logits.min(-1),
        "logit_max": logits.max(-1),
        "logit_second": np.sort(logits, -1)[..., -2],
    }
    for name, value in expected.items():
        measured = getattr(rows, name)
        assert measured.shape == (2, 2, 2, 3)
        np.testing.assert_allclose(measured[1, 1], value, rtol=2e-5, atol=2e-5, err_msg=name)


def test_saturation_points_lie_on_exact_curves():
    found = saturation.curve(KEY, 50, seeds=40, ratios=(0.25, 1.0, 4.0))
    for quantity, mean, error, exact in zip(
        saturation.QUANTITIES, found.mean, found.error, found.exact_at_std, strict=True
    ):
        np.testing.assert_array_less(np.abs(mean - exact), 5 * error + 1e-3, quantity.label)
    # The spline in ln σ loses nothing against the quadrature itself.
    scale = found.std / np.sqrt(saturation.KEY_DIM)
    direct = theory.averaged_over_queries(theory.expected_entropy, 50, saturation.KEY_DIM, scale)
    np.testing.assert_allclose(found.exact_at_std[0], direct, atol=1e-5)


# --- gradient_flow and head_dimension -------------------------------------------------------------


def test_gradients_against_the_formula():
    n, d = 5, 16
    rows = gradient_flow.measure(KEY, length=n, key_dim=d, seeds=3, value_dim=4)
    q, k = (drawn(stream, 2, (n, 1, d))[:, 0] for stream in ("query", "key"))
    g = 2 * drawn("value", 2, (n, 1, 1))[:, 0, 0]
    for r, scale in enumerate((1.0, d**-0.5)):
        p = special.softmax(scale * q @ k.T, axis=-1)
        to_logits = p * (g - (p @ g)[:, None])
        to_query = scale * to_logits @ k
        np.testing.assert_allclose(
            rows.logits_norm[2, r], np.linalg.norm(to_logits, axis=-1), rtol=1e-4, atol=1e-7
        )
        np.testing.assert_allclose(
            rows.query_norm[2, r], np.linalg.norm(to_query, axis=-1), rtol=1e-4, atol=1e-7
        )
        assert rows.query_std[2, r] == pytest.approx(to_query.std(ddof=1), rel=1e-4)


def test_flow_pools_rows_and_seeds_as_it_says():
    rng, shape = np.random.default_rng(0), (500, 2, 4)
    norm = np.abs(rng.standard_normal(shape)) * np.array([3.0, 1.0])[:, None]
    jacobian = np.broadcast_to(np.array([[1e-4, 1.0, 1.0, 1e-4], [1.0] * 4]), shape)
    rows = gradient_flow.GradientRows(norm, norm, norm[..., 0], jacobian, norm, norm)
    found = gradient_flow.flow(rows, 64)
    rms = np.sqrt((norm[:, 0] ** 2).mean() / (norm[:, 1] ** 2).mean())
    assert found.rms_query.value == pytest.approx(rms)
    medians = np.median(np.median(norm, axis=-1), axis=0)
    assert found.typical_logits.value == pytest.approx(medians[0] / medians[1])
    assert found.rms_query.low < 3 < found.rms_query.high
    assert found.dead_rows == (0.5, 0.0)
    assert found.rms_query_of[1] == pytest.approx(np.sqrt((norm[:, 1] ** 2).mean() / 64))


def test_width_one_is_the_null():
    (rows,) = head_dimension.measure(KEY, key_dims=[1], seeds=20).values()
    np.testing.assert_allclose(head_dimension.gradient_ratio(rows), 1, rtol=1e-6)
    largest = head_dimension.largest_of_all(rows)
    np.testing.assert_allclose(largest[:, 0], largest[:, 1], rtol=1e-6)


# --- length ---------------------------------------------------------------------------------------


def test_needle():
    needle = length.measure(KEY, length=512, seeds=40)
    for g, growth in enumerate(length.GROWTHS.values()):
        weight = needle.weight[:, g]
        law = length.needle_law(512, growth(512))
        assert weight.mean() == pytest.approx(law, abs=0.02)
        exact = theory.averaged_over_queries(theory.expected_entropy, 512, 64, growth(512) / 8)
        assert needle.haystack_entropy[:, g].mean() == pytest.approx(exact, rel=0.03)
    assert needle.found.min() >= 0 and needle.found.max() <= 1


def test_growths_agree_at_the_reference_length():
    assert all(growth(length.REFERENCE) == 1 for growth in length.GROWTHS.values())
    assert jnp.isclose(length.GROWTHS["log"](length.REFERENCE**2), 2)
