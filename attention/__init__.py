"""Attention as pure functions of arrays, with everything it can tell about itself."""

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
]
