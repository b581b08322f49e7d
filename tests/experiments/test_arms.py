"""The table of arms: what they are, what tells them apart, how they are shown."""

import pytest

from attention.scale import SCORE_RULES
from experiments.arms import ARMS, COLOURS, arm_choices, arm_colour, check_distinct, make_arm


def test_every_rule_is_an_arm_and_some_arms_are_more():
    assert list(arm_choices()) == ["none", "sqrt", "mup", "power:P", "learned", "fold", "hot"]
    for name in (*SCORE_RULES, *ARMS):
        arm = make_arm(name + ":-0.5" * (name == "power"), 16)
        assert arm.named and arm.source
        assert arm.label == f"{arm.name} {arm.formula}"
    number = make_arm("0.2", 16)
    assert (number.label, number.named, number.source) == ("×0.2", False, "")


@pytest.mark.parametrize("d_k", [1, 16, 64, 1000])
def test_fold_and_hot_move_the_scale_into_the_kernels(d_k):
    """The logits at the start: scale × W_q's factor × W_k's factor."""
    start = {
        name: arm.rule.multiplier * arm.query_key_init**2
        for name in ("none", "sqrt", "fold", "hot")
        for arm in [make_arm(name, d_k)]
    }
    assert start["fold"] == pytest.approx(start["sqrt"], rel=1e-15)
    assert start["hot"] == pytest.approx(start["none"], rel=1e-15)
    assert make_arm("fold", d_k).rule.multiplier == 1.0
    assert make_arm("hot", d_k).rule.multiplier == d_k**-0.5


@pytest.mark.parametrize(
    "names",
    [
        ("8", "8.0"),
        ("1e0", "none"),
        ("power:0.5", "power:1/2"),
        ("fold", "sqrt", "fold"),
        ("0.125", "1/8"),
    ],
)
def test_one_arm_under_two_names_is_refused(names):
    with pytest.raises(ValueError, match=f"scale: {names[-1]} is given twice"):
        check_distinct([make_arm(name, 64) for name in names])


def test_arms_are_told_apart_by_what_they_are_not_by_their_multiplier():
    """At d_k = 64 the first five multiply by 1/8, at 1 all are the same numbers."""
    names = ("sqrt", "0.125", "power:-0.5", "learned", "hot", "fold", "none", "mup", "power:0")
    for d_k in (1, 64):
        check_distinct([make_arm(name, d_k) for name in names])


def test_an_unknown_name_lists_all_that_can_be():
    with pytest.raises(ValueError, match=r"'hott' \(nearest: hot\).*sqrt \(×1/√d_k\).*fold, hot"):
        make_arm("hott", 64)


def test_every_named_arm_has_a_colour_of_its_own():
    assert COLOURS.keys() == (SCORE_RULES.keys() | ARMS.keys()) - {"power"}
    colours = [arm_colour(name) for name in COLOURS]
    assert len(set(colours)) == len(colours)
    assert not {arm_colour("0.2", 0), arm_colour("0.3", 1)} & set(colours)
    assert arm_colour("0.2", 0) != arm_colour("0.3", 1)
