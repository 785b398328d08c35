"""Describe a loss process as a hidden Markov chain.

Shapes: K states.
"""

from typing import NamedTuple

import numpy as np


class Chain(NamedTuple):
    """A stationary chain. The state before a packet's transition decides the packet's loss.

    Attributes:
        transition: probabilities of stepping from a state (rows) to a state (columns), (K, K).
        loss: probability of a loss in each state, (K,).
        start: stationary probability of each state, (K,).
    """

    transition: np.ndarray
    loss: np.ndarray
    start: np.ndarray

    @property
    def received(self) -> np.ndarray:
        """Return the probability that a packet is received and the chain steps from row to column, (K, K)."""
        return (1 - self.loss)[:, None] * self.transition

    @property
    def lost(self) -> np.ndarray:
        """Return the probability that a packet is lost and the chain steps from row to column, (K, K)."""
        return self.loss[:, None] * self.transition


def powers(base: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Return the powers of one matrix, (..., K, K) for exponents of shape (...), by repeated squaring."""
    result = np.broadcast_to(np.eye(len(base)), (*exponents.shape, *base.shape)).copy()
    left = exponents.copy()
    while left.any():
        odd = left % 2 == 1
        result[odd] = result[odd] @ base
        base = base @ base
        left //= 2
    return result
