"""What the best guess without attention that selects earns, exactly."""

from __future__ import annotations

import numpy as np
from scipy import special


def chance_given_own_token(
    below: np.ndarray, equal: np.ndarray, above: np.ndarray
) -> tuple[float, float]:
    """Loss and accuracy of the best guess that knows the own token, uniform over V.

    Args:
      below: [..., V], P(target = v | own token u) for v < u, which doesn't depend on u otherwise.
      equal: [..., V], the same for v = u.
      above: [..., V], the same for v > u.

    Returns:
      Conditional entropy (nats) and expected largest probability, averaged over u and leading axes.
    """
    below, equal, above = (np.maximum(p, 0) for p in (below, equal, above))  # rounding of -1e-17

    def of_all_smaller(reduction: np.ufunc, values: np.ndarray) -> np.ndarray:
        reduced = reduction.accumulate(values, axis=-1)[..., :-1]
        return np.concatenate([np.zeros_like(values[..., :1]), reduced], axis=-1)

    def of_all_larger(reduction: np.ufunc, values: np.ndarray) -> np.ndarray:
        return of_all_smaller(reduction, values[..., ::-1])[..., ::-1]

    entropy = (
        of_all_smaller(np.add, special.entr(below))
        + special.entr(equal)
        + of_all_larger(np.add, special.entr(above))
    )
    largest = np.maximum(of_all_smaller(np.maximum, below), of_all_larger(np.maximum, above))
    return float(entropy.mean()), float(np.maximum(largest, equal).mean())


def mode_given_own_token(length: int, vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """P(mode = v | own token u) for v < u, v = u and v > u: three arrays [V].

    The smallest mode is v with c occurrences iff smaller symbols occur fewer than c times, larger
    ones at most c times. Counts are Poisson(T/V) conditioned on their sum T, so the probability is
    a coefficient of a product of truncated Poisson generating functions.
    """
    counts = np.arange(length + 1)
    rate = length / vocab
    poisson = np.exp(counts * np.log(rate) - rate - special.gammaln(counts + 1))
    total = np.exp(length * np.log(length) - length - special.gammaln(length + 1))
    symbols = np.arange(vocab)
    below, equal, above = np.zeros((3, vocab))

    def powers(most: int) -> np.ndarray:
        """[V, T + 1]: the distribution of the sum of 0, 1, ..., V - 1 counts of at most `most`."""
        size = 4 * length + 64  # a Poisson(T) sum is never as large, so nothing wraps around
        spectra = np.tile(np.fft.rfft(poisson[: most + 1], size), (vocab, 1))
        spectra[0] = 1
        return np.fft.irfft(np.cumprod(spectra, axis=0), size)[:, : length + 1]

    fewest = -(-length // vocab)
    larger = powers(fewest - 1)
    for c in range(fewest, length + 1):
        if vocab * special.bdtrc(c - 1, length, 1 / vocab) < np.finfo(float).eps / length:
            break  # no symbol occurs this often
        smaller, larger = larger, powers(c)
        rest = counts[: length - c + 1]
        # [v, k]: the mode is v, with c occurrences, and k of the tokens are smaller than it.
        joint = smaller[:, rest] * larger[::-1][:, rest[::-1]] * poisson[c] / total
        equal += np.sum(joint * c, axis=-1)
        above += np.sum(joint * rest, axis=-1) / np.maximum(symbols, 1)
        below += np.sum(joint * rest[::-1], axis=-1) / np.maximum(symbols[::-1], 1)
    return below * vocab / length, equal * vocab / length, above * vocab / length
