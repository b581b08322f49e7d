"""The one table of arms: what can stand behind --scale=.

An arm is a value: a score rule, how W_q and W_k start and move beside everything else, and how it
is shown. Every score rule is an arm; ARMS adds those that are more than a rule. Imports no JAX, so
that whoever reads run folders can ask for labels and colours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from attention.scale import SCORE_RULES, VASWANI, ScoreRule, rule_choices, score_rule

# Okabe & Ito (2008), "Color Universal Design": distinguishable with every common colour vision.
BLUE, VERMILLION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, YELLOW, GREY = "#E69F00", "#56B4E9", "#F0E442", "#666666"
BLACK = "#000000"

COLOURS = {
    "sqrt": BLUE,
    "none": VERMILLION,
    "mup": GREEN,
    "fold": SKY,
    "hot": PURPLE,
    "learned": ORANGE,
}
OTHER_COLOURS = (GREY, BLACK)  # of numbers and powers, in turn; not yellow: too light for a line


class Arm(NamedTuple):
    """What is compared: everything that differs between two lanes of one seed and rate."""

    name: str  # as typed
    formula: str  # for people: what q·k is multiplied by, and what else is done
    source: str
    rule: ScoreRule
    query_key_init: float = 1.0  # W_q and W_k start multiplied by this
    query_key_rate: float = 1.0  # and move at the learning rate times this

    @property
    def label(self) -> str:
        """Name and formula; a number is its own name."""
        return f"{self.name} {self.formula}" if self.named else self.formula

    @property
    def named(self) -> bool:
        """Whether the table has it, rather than it being a bare number."""
        return self.name.partition(":")[0] in {**SCORE_RULES, **ARMS}

    @property
    def identity(self) -> tuple[str, float]:
        """What tells arms apart, however they are written: 8 is 8.0, and 1e0 is none."""
        base, _, argument = self.name.partition(":")
        if not self.named or base == "none":
            return "number", self.rule.multiplier
        return base, float(Fraction(argument)) if argument else 0.0


def _fold(d_k: int) -> Arm:
    """No scale, folded into the initial weights: starts as sqrt does."""
    return Arm(
        name="fold",
        formula="×1, W_q,k start ×d_k^-¼",
        source="Raffel et al. 2020 (T5), arxiv.org/abs/1910.10683",
        rule=score_rule("none", d_k),
        query_key_init=d_k**-0.25,
    )


def _hot(d_k: int) -> Arm:
    """Scaled, but starting with logits as large as those of none."""
    return Arm(
        name="hot",
        formula="×1/√d_k, W_q,k start ×d_k^¼",
        source=f"the control to fold; {VASWANI}",
        rule=score_rule("sqrt", d_k),
        query_key_init=d_k**0.25,
    )


ARMS: dict[str, Callable[[int], Arm]] = {"fold": _fold, "hot": _hot}


def make_arm(name: str, d_k: int) -> Arm:
    """The arm of this name for one key width.

    Args:
      name: a key of ARMS, or whatever `score_rule` takes.
      d_k: width of a head's queries and keys.

    Raises:
      ValueError: an unknown name; lists the choices and the nearest one.
    """
    if name in ARMS:
        return ARMS[name](d_k)
    rule = score_rule(name, d_k, also=tuple(ARMS))
    return Arm(name, rule.formula, rule.source, rule)


def arm_choices() -> dict[str, str]:
    """What can be typed behind --scale=, to its formula; a number can too."""
    return rule_choices() | {name: make(64).formula for name, make in ARMS.items()}


def arm_colour(name: str, position: int = 0) -> str:
    """The colour of an arm, the same in every figure; `position` picks one for unnamed arms."""
    return COLOURS.get(name, OTHER_COLOURS[position % len(OTHER_COLOURS)])


def check_distinct(arms: Sequence[Arm]) -> None:
    """Refuse one arm under two names: its lanes could not be told apart.

    Raises:
      ValueError: names both.
    """
    first: dict[tuple[str, float], str] = {}
    for arm in arms:
        if arm.identity in first:
            same = first[arm.identity]
            also = f": it is the arm {same}" if same != arm.name else ""
            raise ValueError(f"scale: {arm.name} is given twice{also}")
        first[arm.identity] = arm.name
