"""Score rules: what is done to q·k before the softmax. The table imports no JAX, only the hooks do.

A rule is a value, not a branch in the model. One that is a number enters the compiled program as a
traced multiplier, so all of them share one program and two arms differ in one number only. One
that is more carries hooks, pure functions as optax's transformations are, and gets a program a
kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from attention.names import nearest

if TYPE_CHECKING:
    import jax

VASWANI = "Vaswani et al. 2017, §3.2.1, arxiv.org/abs/1706.03762"
TENSOR_PROGRAMS = "Yang et al. 2022, Tensor Programs V, arxiv.org/abs/2203.03466"


class Site(NamedTuple):
    """Where in a model a rule is at work."""

    layer: int  # from 0
    num_heads: int
    key_dim: int  # d_k


class ScoreHooks(NamedTuple):
    """What a rule does that one number can't say. Hashable: part of a compiled program's key.

    The hooks that the catalogue's later rules need have their places: on kernels before they are
    used, on q and k, and on the softmax's normaliser in `transformer._Attention`; on parameters
    after an update in `engine.training.guarded_update`. Each will be one more field here.
    """

    kind: str  # rules of one kind share a program
    init: Callable[[jax.Array, Site], dict[str, jax.Array]]
    """(key, site) to the parameters of one layer: name to float32 [H]."""
    scale: Callable[[dict[str, jax.Array], jax.Array | float, Site], jax.Array]
    """(parameters, multiplier, site) to what q·k is multiplied by: a number or [H]."""
    decayed: tuple[str, ...] = ()  # the parameters that weight decay applies to


class ScoreRule(NamedTuple):
    """A score rule for one key width."""

    name: str  # as typed: "none", "sqrt", "power:-0.25", a number, ...
    formula: str  # for people: "×1/√d_k"
    multiplier: float  # of q·k, dimensionless; where a rule learns it, the one it starts from
    source: str = ""  # who proposed it
    hooks: ScoreHooks | None = None  # None: the multiplier is all there is


class RuleEntry(NamedTuple):
    """A row of the table of rules."""

    formula: str  # for people; P stands for the argument
    multiplier: Callable[..., float]  # (d_k) or (d_k, P)
    source: str
    hooks: ScoreHooks | None = None
    argument: bool = False  # whether the name is typed with one, as NAME:P


def _log_scale_init(key: jax.Array, site: Site) -> dict[str, jax.Array]:
    import jax.numpy as jnp

    return {"log_scale": jnp.zeros(site.num_heads)}


def _exponential_scale(
    parameters: dict[str, jax.Array], multiplier: jax.Array | float, site: Site
) -> jax.Array:
    import jax.numpy as jnp

    return multiplier * jnp.exp(parameters["log_scale"])


LEARNED = ScoreHooks("learned", _log_scale_init, _exponential_scale)

SCORE_RULES: dict[str, RuleEntry] = {
    "none": RuleEntry("×1", lambda d_k: 1.0, "no scaling"),
    "sqrt": RuleEntry("×1/√d_k", lambda d_k: 1.0 / math.sqrt(d_k), VASWANI),
    "mup": RuleEntry("×1/d_k", lambda d_k: 1.0 / d_k, TENSOR_PROGRAMS),
    "power": RuleEntry("×d_k^P", lambda d_k, p: d_k**p, "the family of the three", argument=True),
    "learned": RuleEntry(
        "×eˢ/√d_k, s learned",
        lambda d_k: 1.0 / math.sqrt(d_k),
        "a temperature per head, s from 0: starts as sqrt",
        LEARNED,
    ),
}


def rule_choices() -> dict[str, str]:
    """What can be typed for a rule, to its formula."""
    return {name + ":P" * entry.argument: entry.formula for name, entry in SCORE_RULES.items()}


def score_rule(name: str, key_dim: int, *, also: tuple[str, ...] = ()) -> ScoreRule:
    """Look up a rule by name, or make one from a number.

    Args:
      name: a key of SCORE_RULES, with its argument if it takes one ("power:-0.25"), or a finite
        number such as "0.2" or "1/8", which multiplies q·k as it is.
      key_dim: d_k, the width of queries and keys; at least 1.
      also: further names that the error for an unknown one should list: those of a caller's arms.

    Returns:
      The rule with its multiplier for this d_k. "none" is exactly 1.0; zero is a rule like any
      other (uniform attention).

    Raises:
      ValueError: an unknown name (lists the choices and the nearest one), an argument that is
        missing, or not wanted, a number that is not finite, or key_dim < 1.
    """
    if key_dim < 1:
        raise ValueError(f"key_dim must be at least 1, got {key_dim}")
    base, colon, argument = name.partition(":")
    if entry := SCORE_RULES.get(base):
        if entry.argument != bool(colon):
            wanted = f"{base}:P with a number P" if entry.argument else f"{base} alone"
            raise ValueError(f"score rule {name!r} must be written {wanted}")
        if not entry.argument:
            multiplier = entry.multiplier(key_dim)
            return ScoreRule(name, entry.formula, multiplier, entry.source, entry.hooks)
        number = _number(argument, name, also)
        try:
            multiplier = float(entry.multiplier(key_dim, number))
        except OverflowError:
            raise ValueError(f"score rule {name!r} is too large for d_k {key_dim}") from None
        formula = entry.formula.replace("P", _text(number))
        return ScoreRule(name, formula, multiplier, entry.source, entry.hooks)
    number = _number(name, name, also)
    return ScoreRule(name, f"×{_text(number)}", number)


def _number(text: str, name: str, also: tuple[str, ...]) -> float:
    """A finite number as typed, a fraction such as 1/8 too."""
    try:
        number = float(Fraction(text)) if "/" in text else float(text)
    except (ValueError, ZeroDivisionError, OverflowError):
        rules = [f"{rule} ({formula})" for rule, formula in rule_choices().items()]
        raise ValueError(
            f"unknown score rule {name!r}{nearest(name, (*SCORE_RULES, *also))}; "
            f"choose from {', '.join([*rules, *also])}, or a number"
        ) from None
    if not math.isfinite(number):
        raise ValueError(f"a score rule that is a number must be finite, got {name!r}")
    return number


def _text(number: float) -> str:
    """A number as short as it can be without being another one."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)
