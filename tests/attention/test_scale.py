"""Score rules: their factors in closed form, and errors that help."""

import math

import pytest

from attention import ScoreRule, score_rule
from attention.scale import SCORE_RULES


@pytest.mark.parametrize("key_dim", [1, 2, 64, 512, 1000])
def test_rules_that_have_a_name(key_dim):
    assert score_rule("none", key_dim) == ScoreRule("none", "×1", 1.0)
    assert score_rule("sqrt", key_dim) == ScoreRule("sqrt", "×1/√d_k", 1 / math.sqrt(key_dim))
    assert score_rule("mup", key_dim) == ScoreRule("mup", "×1/d_k", 1 / key_dim)


@pytest.mark.parametrize(
    ("name", "multiplier", "formula"),
    [("0.2", 0.2, "×0.2"), ("0", 0.0, "×0"), ("-1.5", -1.5, "×-1.5"), ("1e-3", 0.001, "×0.001")],
)
def test_a_number_multiplies_as_it_is(name, multiplier, formula):
    assert score_rule(name, 64) == ScoreRule(name, formula, multiplier)


@pytest.mark.parametrize("name", [*SCORE_RULES, "0.2"])
def test_multipliers_are_python_floats(name):
    assert type(score_rule(name, 64).multiplier) is float


@pytest.mark.parametrize(("name", "nearest"), [("sqr", "sqrt"), ("SQRT", "sqrt"), ("non", "none")])
def test_an_unknown_name_lists_the_choices_and_the_nearest(name, nearest):
    with pytest.raises(ValueError) as error:
        score_rule(name, 64)
    assert str(error.value) == (
        f"unknown score rule {name!r} (nearest: {nearest}); "
        "choose from none (×1), sqrt (×1/√d_k), mup (×1/d_k), or a number"
    )


@pytest.mark.parametrize(
    ("name", "key_dim", "message"),
    [
        ("zzz", 64, "unknown score rule 'zzz'; choose from none (×1), "),
        ("", 64, "unknown score rule ''; choose from none (×1), "),
        ("nan", 64, "a score rule that is a number must be finite, got 'nan'"),
        ("1e999", 64, "a score rule that is a number must be finite, got '1e999'"),
        ("sqrt", 0, "key_dim must be at least 1, got 0"),
    ],
)
def test_errors(name, key_dim, message):
    with pytest.raises(ValueError) as error:
        score_rule(name, key_dim)
    assert message in str(error.value)
