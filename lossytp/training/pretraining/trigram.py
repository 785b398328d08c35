"""Compute a baseline that a language model must beat: a trigram model with interpolated Kneser-Ney smoothing.

P(w | u v) = max(c(uvw) - D, 0) / c(uv) + D N(uv.) / c(uv) P(w | v), and so on down to the uniform distribution. Lower
orders count in how many contexts a word occurs, not how often (Chen and Goodman, "An empirical study of smoothing
techniques for language modeling", Computer Speech & Language 13, 1999, section 2.7). Each order has one discount,
D = n1 / (n1 + 2 n2) (Ney, Essen and Kneser, 1994).

Shapes: N tokens of running text.
"""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class _Order:
    """The n-grams of one order: their sorted codes and counts, and for each context the words that follow it."""

    codes: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray  # sum of the counts after each context
    distinct: np.ndarray  # number of distinct words after each context
    discount: float

    @classmethod
    def of(cls, codes: np.ndarray, counts: np.ndarray, vocabulary: int) -> "_Order":
        contexts, where, distinct = np.unique(codes // vocabulary, return_inverse=True, return_counts=True)
        once, twice = (int((counts == times).sum()) for times in (1, 2))
        discount = once / (once + 2 * twice) if once else 0.5  # positive, so that no word gets probability 0
        return cls(codes, counts, contexts, np.bincount(where, weights=counts), distinct, discount)

    def interpolate(self, codes: np.ndarray, lower: np.ndarray, vocabulary: int) -> np.ndarray:
        """Return the n-grams' probabilities from those of the lower order, which stand if a context is unknown."""
        counts = _look_up(self.codes, self.counts, codes)
        totals = _look_up(self.contexts, self.totals, codes // vocabulary)
        distinct = _look_up(self.contexts, self.distinct, codes // vocabulary)
        known = np.maximum(totals, 1)
        higher = (np.maximum(counts - self.discount, 0) + self.discount * distinct * lower) / known
        return np.where(totals > 0, higher, lower)


def trigram_perplexity(train: np.ndarray, held_out: np.ndarray, vocabulary: int) -> float:
    """Return the perplexity of held-out text, from its third token on, under a trigram model of the training text.

    Args:
        train: token ids (N,) of the training text, below `vocabulary`.
        held_out: token ids (N,) of the held-out text, below `vocabulary`.
        vocabulary: number of tokens in the vocabulary.

    Raises:
        ValueError: if either text has fewer than three tokens.
    """
    for name, tokens in {"train": train, "held_out": held_out}.items():
        if len(tokens) < 3:
            raise ValueError(f"{name} has {len(tokens)} tokens: give three or more")
    codes, counts = np.unique(_codes(train, 3, vocabulary), return_counts=True)
    orders = [_Order.of(codes, counts, vocabulary)]
    for size in (2, 1):  # continuation counts: the distinct words before an n-gram
        codes, counts = np.unique(orders[-1].codes % vocabulary**size, return_counts=True)
        orders.append(_Order.of(codes, counts, vocabulary))
    probabilities = np.full(len(held_out) - 2, 1 / vocabulary)
    wanted = _codes(held_out, 3, vocabulary)
    for size, order in zip((1, 2, 3), reversed(orders), strict=True):
        probabilities = order.interpolate(wanted % vocabulary**size, probabilities, vocabulary)
    return math.exp(-np.log(probabilities).mean())


def _codes(tokens: np.ndarray, size: int, vocabulary: int) -> np.ndarray:
    """Return each n-gram of running text as a number (N - size + 1,); its first word is the most significant digit."""
    tokens = tokens.astype(np.int64)
    count = len(tokens) - size + 1
    return sum(tokens[i : i + count] * vocabulary ** (size - 1 - i) for i in range(size))


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the value of each wanted key; 0 for keys that are not among the sorted `keys`."""
    where = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[where] == wanted, values[where], 0)
