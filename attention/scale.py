"""Score rules: what is done to q·k before the softmax.

A rule is a value, not a branch in the model: its multiplier enters the compiled program as a traced
number, so that every rule shares one program and two arms differ in one number only.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from typing import NamedTuple


class ScoreRule(NamedTuple):
    """A score rule for one key width: logits = multiplier · q·k."""

    name: str  # as typed: "none", "sqrt", "mup" or a number
    formula: str  # for people: "×1/√d_k"
    multiplier: float  # the factor itself, dimensionless


# name: (formula, multiplier as a function of d_k)
SCORE_RULES: dict[str, tuple[str, Callable[[int], float]]] = {
    "none": ("×1", lambda key_dim: 1.0),
    "sqrt": ("×1/√d_k", lambda key_dim: 1.0 / math.sqrt(key_dim)),  # Vaswani et al. 2017, §3.2.1
    "mup": ("×1/d_k", lambda key_dim: 1.0 / key_dim),  # Yang et al. 2022, Tensor Programs V
}


def score_rule(name: str, key_dim: int) -> ScoreRule:
    """Look up a rule by name, or make one from a number.

    Args:
      name: a key of SCORE_RULES, or a finite number such as "0.2", which multiplies q·k as it is.
      key_dim: d_k, the width of queries and keys; at least 1.

    Returns:
      The rule with its multiplier for this d_k. "none" is exactly 1.0; zero is a rule like any
      other (uniform attention).

    Raises:
      ValueError: an unknown name (lists the choices and the nearest one), a number that is not
        finite, or key_dim < 1.
    """
    if key_dim < 1:
        raise ValueError(f"key_dim must be at least 1, got {key_dim}")
    if name in SCORE_RULES:
        formula, multiplier = SCORE_RULES[name]
        return ScoreRule(name, formula, multiplier(key_dim))
    try:
        number = float(name)
    except ValueError:
        nearest = difflib.get_close_matches(name.lower(), SCORE_RULES, n=1, cutoff=0.4)
        hint = f" (nearest: {nearest[0]})" if nearest else ""
        choices = ", ".join(f"{rule} ({formula})" for rule, (formula, _) in SCORE_RULES.items())
        raise ValueError(
            f"unknown score rule {name!r}{hint}; choose from {choices}, or a number"
        ) from None
    if not math.isfinite(number):
        raise ValueError(f"a score rule that is a number must be finite, got {name!r}")
    return ScoreRule(name, f"×{number:g}", number)
