"""Score rules: their factors in closed form, and errors that help."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import score_rule
from attention.scale import SCORE_RULES, Site, rule_choices

NAMES = ["none", "sqrt", "mup", "power:-0.25", "learned", "0.2"]


@pytest.mark.parametrize("key_dim", [1, 2, 64, 512, 1000])
def test_rules_that_have_a_name(key_dim):
    found = {name: score_rule(name, key_dim) for name in ("none", "sqrt", "mup", "learned")}
    root = 1 / math.sqrt(key_dim)
    assert [rule[:3] for rule in found.values()] == [
        ("none", "×1", 1.0),
        ("sqrt", "×1/√d_k", root),
        ("mup", "×1/d_k", 1 / key_dim),
        ("learned", "×eˢ/√d_k, s learned", root),
    ]
    assert all(rule.source for rule in found.values())
    assert [name for name, rule in found.items() if rule.hooks] == ["learned"]


@pytest.mark.parametrize(
    ("name", "multiplier", "formula"),
    [
        ("0.2", 0.2, "×0.2"),
        ("0", 0.0, "×0"),
        ("-1.5", -1.5, "×-1.5"),
        ("1e-3", 0.001, "×0.001"),
        ("1/8", 0.125, "×0.125"),
        ("0.1234567890123", 0.1234567890123, "×0.1234567890123"),  # never shown as another number
    ],
)
def test_a_number_multiplies_as_it_is(name, multiplier, formula):
    rule = score_rule(name, 64)
    assert rule[:3] == (name, formula, multiplier)
    assert rule.hooks is None


@pytest.mark.parametrize(
    ("name", "multiplier", "formula"),
    [
        ("power:-0.5", 1 / 8, "×d_k^-0.5"),
        ("power:0", 1.0, "×d_k^0"),
        ("power:1", 64.0, "×d_k^1"),
        ("power:-1/3", 1 / 4, f"×d_k^{-1 / 3!r}"),
    ],
)
def test_powers_of_d_k(name, multiplier, formula):
    rule = score_rule(name, 64)
    assert rule[:2] == (name, formula)
    assert rule.multiplier == pytest.approx(multiplier, rel=1e-15)
    assert rule.hooks is None  # a number, which shares the program of the other numbers


@pytest.mark.parametrize("name", NAMES)
def test_multipliers_are_python_floats(name):
    assert type(score_rule(name, 64).multiplier) is float


def test_the_choices_are_the_table():
    assert list(rule_choices()) == ["none", "sqrt", "mup", "power:P", "learned"]
    assert {name.partition(":")[0] for name in NAMES} - {"0.2"} == SCORE_RULES.keys()


def test_learned_is_a_temperature_per_head_that_starts_at_one_over_the_root():
    hooks, site = score_rule("learned", 16).hooks, Site(layer=1, num_heads=3, key_dim=16)
    assert hooks is not None and hooks.decayed == ()
    parameters = hooks.init(jax.random.key(0), site)
    assert {name: p.shape for name, p in parameters.items()} == {"log_scale": (3,)}
    np.testing.assert_array_equal(hooks.scale(parameters, 0.25, site), [0.25] * 3)
    moved = {"log_scale": jnp.log(jnp.array([1.0, 2.0, 4.0]))}
    np.testing.assert_allclose(hooks.scale(moved, 0.25, site), [0.25, 0.5, 1], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("sqr", "sqrt"),
        ("SQRT", "sqrt"),
        ("non", "none"),
        ("learnt", "learned"),
        ("powr:1", "power"),
    ],
)
def test_an_unknown_name_lists_the_choices_and_the_nearest(name, nearest):
    with pytest.raises(ValueError) as error:
        score_rule(name, 64, also=("fold",))
    assert str(error.value) == (
        f"unknown score rule {name!r} (nearest: {nearest}); choose from none (×1), sqrt (×1/√d_k), "
        "mup (×1/d_k), power:P (×d_k^P), learned (×eˢ/√d_k, s learned), fold, "
        "or a number"
    )


@pytest.mark.parametrize(
    ("name", "key_dim", "message"),
    [
        ("zzz", 64, "unknown score rule 'zzz'; choose from none (×1), "),
        ("", 64, "unknown score rule ''; choose from none (×1), "),
        ("power", 64, "score rule 'power' must be written power:P with a number P"),
        ("sqrt:2", 64, "score rule 'sqrt:2' must be written sqrt alone"),
        ("power:", 64, "unknown score rule 'power:'"),
        ("power:x", 64, "unknown score rule 'power:x'"),
        ("power:nan", 64, "a score rule that is a number must be finite, got 'power:nan'"),
        ("power:200", 64, "score rule 'power:200' is too large for d_k 64"),
        ("1/0", 64, "unknown score rule '1/0'"),
        ("nan", 64, "a score rule that is a number must be finite, got 'nan'"),
        ("1e999", 64, "a score rule that is a number must be finite, got '1e999'"),
        ("sqrt", 0, "key_dim must be at least 1, got 0"),
    ],
)
def test_errors(name, key_dim, message):
    with pytest.raises(ValueError) as error:
        score_rule(name, key_dim)
    assert message in str(error.value)
