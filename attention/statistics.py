"""What one softmax row tells: entropy, saturation, Jacobian, spread of its logits.

Everything follows from a few sums over the row that leave its maximum m out. With

    A_k = Σ' exp(k (s - m)),  B = Σ' exp(s - m) (s - m),  Z = 1 + A_1

(Σ' leaves out one occurrence of the maximum) and p = exp(s - m) / Z,

    entropy      H      = log1p(A_1) - B / Z                                  [nats]
    max weight   max p  = 1 / Z
    trace        tr J   = 1 - Σp² = (2 A_1 + A_1² - A_2) / Z²
    norm         ‖J‖_F² = Σp² - 2 Σp³ + (Σp²)²
                        = [A_1² + 3 A_2 - 2 A_3 + 2 A_1 (A_2 - A_3) + A_1² A_2 + A_2²] / Z⁴

where J = diag(p) - p pᵀ is the softmax's Jacobian. The right-hand forms have no cancellation when
the row saturates (A_1 → 0), where the textbook forms lose every digit in float32. There is no
epsilon anywhere: a weight of zero contributes exactly zero.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from attention.head_statistics import HEAD_STATISTICS, SATURATED_ABOVE, HeadStatistics, OfRows


class RowSums(NamedTuple):
    """What a row's statistics are made of; each field has the row axes [..., T].

    A fixed number of floats a row, whatever the number of keys: sums over blocks of keys can be
    merged, which is how the streaming path gets the same statistics without the weights.
    """

    maximum: jax.Array  # m, the largest visible logit (0 where no key is visible)
    tail_1: jax.Array  # A_1
    tail_2: jax.Array  # A_2
    tail_3: jax.Array  # A_3
    tail_log: jax.Array  # B
    count: jax.Array  # number of visible keys, as a float
    mean: jax.Array  # mean of s - m over visible keys
    deviation: jax.Array  # Σ (s - m - mean)² over visible keys


class AttentionStatistics(NamedTuple):
    """Statistics of softmax rows; each field has the row axes [..., T] of logits [..., T, S].

    Rows that see no key hold zeros; means must leave them out (`head_means` does).
    """

    entropy: jax.Array  # -Σ p ln p, nats
    normalized_entropy: jax.Array  # entropy / ln(visible keys), 0 to 1; 0 where one key is visible
    max_weight: jax.Array  # largest weight
    saturated: jax.Array  # bool: largest weight > SATURATED_ABOVE
    jacobian_trace: jax.Array  # tr J = 1 - Σp²
    jacobian_norm: jax.Array  # ‖J‖_F, at most 1/2
    logit_std: jax.Array  # standard deviation of the visible logits (divisor: their number)
    logit_max: jax.Array  # largest visible logit
    visible_keys: jax.Array  # how many keys the row sees, as a float


def visible_logits(logits: jax.Array, where: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Logits in float32 or better, and which of them take part: where is True and s > -inf."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    visible = logits != -jnp.inf  # a NaN takes part: what is broken must be seen to be broken
    if where is not None:
        where = where.reshape((1,) * (logits.ndim - where.ndim) + where.shape)
        visible = visible & where
    return logits, visible


def shifted(logits: jax.Array, visible: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(s - m with 0 where hidden, m): m [..., T, 1] is the largest visible logit, 0 if none is."""
    maximum = jax.lax.stop_gradient(logits).max(
        axis=-1, keepdims=True, initial=-jnp.inf, where=visible
    )
    maximum = jnp.where(maximum == -jnp.inf, 0.0, maximum)
    # Two finite logits may differ by more than the largest float, but 0 · inf is no entropy.
    difference = jnp.maximum(logits - maximum, jnp.finfo(logits.dtype).min)
    return jnp.where(visible, difference, 0.0), maximum


def row_sums(logits: jax.Array, visible: jax.Array) -> RowSums:
    """Reduce logits [..., T, S], visible alike, over the keys."""
    difference, maximum = shifted(logits, visible)
    below = visible & ~(difference == 0)  # the tail: what is not the maximum
    tail = jnp.where(below, jnp.exp(difference), 0.0)
    count = jnp.sum(visible, axis=-1, dtype=logits.dtype)
    # A maximum that occurs r times leaves r - 1 of its terms, each exp(0) = 1, in the tail sums.
    ties = jnp.maximum(count - jnp.sum(below, axis=-1, dtype=logits.dtype) - 1, 0)
    mean = jnp.sum(difference, axis=-1) / jnp.maximum(count, 1)
    deviation = jnp.where(visible, difference - mean[..., None], 0.0)
    return RowSums(
        maximum=maximum[..., 0],
        tail_1=jnp.sum(tail, axis=-1) + ties,
        tail_2=jnp.sum(tail**2, axis=-1) + ties,
        tail_3=jnp.sum(tail**3, axis=-1) + ties,
        tail_log=jnp.sum(tail * difference, axis=-1),
        count=count,
        mean=mean,
        deviation=jnp.sum(deviation**2, axis=-1),
    )


def share_of_whole(part: RowSums, whole: RowSums) -> jax.Array:
    """exp(m_part - m_whole): the factor from sums under a part's maximum to the whole row's."""
    return jnp.where(part.count > 0, jnp.exp(part.maximum - whole.maximum), 0.0)


def merge_row_sums(left: RowSums, right: RowSums) -> RowSums:
    """Sums over two disjoint sets of keys of the same rows, as `row_sums` of both would give them.

    The part with the smaller maximum (low) is rescaled by r = exp(m_low - m_top) and, its maximum
    now being one term among others, gives r^k (1 + A_k) to the tail. Means and deviations merge
    after Chan, Golub & LeVeque 1983. Nothing is subtracted, so nothing cancels.
    """
    left_on_top = (right.count == 0) | ((left.count > 0) & ~(left.maximum < right.maximum))
    top = RowSums(*(jnp.where(left_on_top, a, b) for a, b in zip(left, right, strict=True)))
    low = RowSums(*(jnp.where(left_on_top, b, a) for a, b in zip(left, right, strict=True)))
    # jnp.maximum and not top's: it lets a NaN in either part through.
    maximum = jnp.where(low.count > 0, jnp.maximum(top.maximum, low.maximum), top.maximum)
    ratio = share_of_whole(low, top)
    gap = jnp.maximum(low.maximum - maximum, jnp.finfo(maximum.dtype).min)  # as in `shifted`
    gap = jnp.where(low.count > 0, gap, 0.0)
    count = top.count + low.count
    shift = low.mean + gap - top.mean
    weight = low.count / jnp.maximum(count, 1)
    return RowSums(
        maximum=maximum,
        tail_1=top.tail_1 + ratio * (1 + low.tail_1),
        tail_2=top.tail_2 + ratio**2 * (1 + low.tail_2),
        tail_3=top.tail_3 + ratio**3 * (1 + low.tail_3),
        tail_log=top.tail_log + ratio * low.tail_log + ratio * gap * (1 + low.tail_1),
        count=count,
        mean=top.mean + weight * shift,
        deviation=top.deviation + low.deviation + shift**2 * top.count * weight,
    )


def statistics_from_sums(sums: RowSums) -> AttentionStatistics:
    """The formulas at the top of this file; rows without visible keys give zeros."""
    maximum, a1, a2, a3, b, count, _, deviation = sums
    seen = count > 0
    z = 1 + a1
    entropy = jnp.log1p(a1) - b / z
    several = count > 1
    norm_squared = a1**2 + 3 * a2 - 2 * a3 + 2 * a1 * (a2 - a3) + a1**2 * a2 + a2**2
    max_weight = jnp.where(seen, 1 / z, 0.0)
    return AttentionStatistics(
        entropy=entropy,
        normalized_entropy=jnp.where(several, entropy / jnp.log(jnp.where(several, count, 2)), 0.0),
        max_weight=max_weight,
        saturated=max_weight > SATURATED_ABOVE,
        jacobian_trace=(2 * a1 + a1**2 - a2) / z**2,
        jacobian_norm=jnp.sqrt(norm_squared) / z**2,
        logit_std=jnp.sqrt(deviation / jnp.maximum(count, 1)),
        logit_max=jnp.where(seen, maximum, 0.0),
        visible_keys=count,
    )


def attention_statistics(
    logits: jax.Array, *, where: jax.Array | None = None
) -> AttentionStatistics:
    """Statistics of the softmax over the last axis of logits.

    Args:
      logits: [..., S], after scale and bias; -inf counts as hidden.
      where: boolean, True = visible, broadcastable to logits; default: all visible.

    Returns:
      AttentionStatistics with the axes [...], in float32 or better. For reading: no gradient
      flows back (differentiate `entropy` for that).
    """
    logits, visible = visible_logits(jax.lax.stop_gradient(logits), where)
    return statistics_from_sums(row_sums(logits, visible))


def entropy(logits: jax.Array, *, where: jax.Array | None = None) -> jax.Array:
    """Shannon entropy of softmax(logits) over the last axis, in nats.

        H = log Z - Σ p (s - m),    ∂H/∂s_i = -p_i (s_i - m - Σ p (s - m))

    Computed in log space without an epsilon: a weight of zero contributes zero and gets zero
    gradient; a row that sees no key has entropy 0.

    Args:
      logits: [..., S], after scale and bias; -inf counts as hidden.
      where: boolean, True = visible, broadcastable to logits; default: all visible.

    Returns:
      [...], float32 or better, 0 to ln S. Differentiable.
    """
    return _entropy(*visible_logits(logits, where))


@jax.custom_jvp
def _entropy(logits: jax.Array, visible: jax.Array) -> jax.Array:
    sums = row_sums(logits, visible)
    return jnp.log1p(sums.tail_1) - sums.tail_log / (1 + sums.tail_1)


@_entropy.defjvp
def _entropy_jvp(primals, tangents):
    logits, visible = primals
    difference, _ = shifted(logits, visible)
    exponential = jnp.where(visible, jnp.exp(difference), 0.0)
    total = jnp.sum(exponential, axis=-1, keepdims=True)
    weights = exponential / jnp.where(total == 0, 1.0, total)
    mean = jnp.sum(weights * difference, axis=-1, keepdims=True)
    slope = -weights * (difference - mean)
    # A tangent may be anything at a hidden logit, even NaN; it has no part in the sum.
    tangent = jnp.sum(jnp.where(weights == 0, 0.0, slope * tangents[0]), axis=-1)
    return _entropy(logits, visible), tangent


def head_means(statistics: AttentionStatistics) -> HeadStatistics:
    """Each head's number over all its rows, leaving out rows that have nothing to tell.

    Args:
      statistics: of logits [..., H, T, S], so fields [..., H, T].

    Returns:
      HeadStatistics with fields [H]: all axes but the heads' are reduced. A head none of whose
      rows counts gets NaN: there is no mean to report.
    """
    return HeadStatistics(*(_over_rows(statistics, how) for how in HEAD_STATISTICS.values()))


def _over_rows(statistics: AttentionStatistics, how: OfRows) -> jax.Array:
    """[..., H, T] to [H]: the largest, the mean, or the fraction past a threshold."""
    values = how.rows(statistics)
    axes = (*range(values.ndim - 2), values.ndim - 1)
    counted = statistics.visible_keys >= how.least_keys
    if how.largest:
        largest = jnp.max(values, axis=axes, initial=-jnp.inf, where=counted)
        return jnp.where(jnp.any(counted, axis=axes), largest, jnp.nan)
    threshold = how.above if how.below is None else how.below
    if threshold is not None:
        past = values > threshold if how.below is None else values < threshold
        values = jnp.where(jnp.isnan(values), jnp.nan, past.astype(values.dtype))  # NaN isn't False
    total = jnp.sum(jnp.where(counted, values, 0), axis=axes)
    return total / jnp.sum(counted, axis=axes, dtype=values.dtype)
