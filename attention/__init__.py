"""Attention as pure functions of arrays, with everything it can tell about itself."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attention import theory
    from attention.dot_product import AttentionOutput, dot_product_attention
    from attention.scale import ScoreRule, score_rule
    from attention.statistics import (
        AttentionStatistics,
        HeadStatistics,
        attention_statistics,
        entropy,
        head_means,
    )

__all__ = [
    "AttentionOutput",
    "AttentionStatistics",
    "HeadStatistics",
    "ScoreRule",
    "attention_statistics",
    "dot_product_attention",
    "entropy",
    "head_means",
    "score_rule",
    "theory",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    # Late, because JAX takes more than a second to import, and the names of the score rules, which
    # need none of it, should be there at once: for --help, and for what is set before JAX starts.
    if name == "theory":
        return importlib.import_module("attention.theory")
    if name in __all__:
        for room in ("scale", "statistics", "dot_product"):
            module = importlib.import_module(f"attention.{room}")
            if name in vars(module):
                return vars(module)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
