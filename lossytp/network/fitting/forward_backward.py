"""Compute the likelihood of recorded flows under a hidden Markov chain, and its expected transitions.

Baum, Petrie, Soules and Weiss, "A maximization technique occurring in the statistical analysis of probabilistic
functions of Markov chains", 1970. A gap of g received packets contributes the g-th power of one matrix. So the passes
visit blocks of a gap and a loss, not packets. The expected counts are derivatives of the log-likelihood (Fisher's
identity). The derivative of a power is computed once for each distinct gap.

Shapes: K states, B blocks, U distinct blocks.
"""

import math
from typing import NamedTuple

import numpy as np

from lossytp.network.fitting.chain import Chain, powers
from lossytp.network.fitting.runs import Blocks

SMALLEST = 1e-300  # keeps the logarithm of an impossible event finite


class Expected(NamedTuple):
    """The expected transitions of a chain, given the flows.

    Attributes:
        log_likelihood: log-likelihood of all flows, in nats.
        received: expected transitions at received packets, by state before and after, (K, K).
        lost: expected transitions at lost packets, (K, K).
        starts: expected number of flows that start in each state, (K,).
    """

    log_likelihood: float
    received: np.ndarray
    lost: np.ndarray
    starts: np.ndarray

    @property
    def transitions(self) -> np.ndarray:
        """Return the expected transitions at all packets, (K, K)."""
        return self.received + self.lost


class Passes:
    """The forward and the backward pass over the blocks of some flows.

    The B blocks form about sqrt(B) rows, whose products numpy computes side by side. So a pass takes about 3 sqrt(B)
    numpy steps instead of B.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._gaps, gap = np.unique(blocks.gaps, return_inverse=True)
        kinds, self._kind = np.unique(2 * gap + blocks.ends, return_inverse=True)
        self._gap_of_kind, self._kind_ends = kinds // 2, kinds % 2 == 1  # (U,)
        self._received = int(blocks.gaps.sum())
        count = len(self._kind)
        self._columns = math.isqrt(count - 1) + 1
        rows = -(-count // self._columns)
        padded = np.full(rows * self._columns, len(kinds))  # after all kinds, the table holds the identity
        padded[:count] = self._kind
        self._grid = padded.reshape(rows, self._columns)

    def log_likelihood(self, chain: Chain) -> float:
        """Return the log-likelihood of the flows, in nats."""
        table, _, scale = self._table(chain)
        _, log_likelihood = self._forward(table, chain.start, self._row_products(table))
        return log_likelihood + self._received * math.log(scale)

    def expected(self, chain: Chain) -> Expected:
        """Return the log-likelihood and the expected transitions."""
        table, gap_powers, scale = self._table(chain)
        products = self._row_products(table)
        forward, log_likelihood = self._forward(table, chain.start, products)
        backward = self._backward(table, products)
        slope = self._slope(table, forward, backward)  # of the log-likelihood in each distinct block (U, K, K)
        losses, ends = ~self._kind_ends, self._kind_ends
        at_loss = np.einsum("uji,ujk->ik", gap_powers[losses], slope[losses])
        start = np.einsum("uji,ujk->k", gap_powers[ends], slope[ends])
        # No start follows the last flow's end, and no end precedes the first flow's start.
        first = table[self._kind[0]] @ backward[0]
        start += first / (chain.start @ first) - 1
        after = np.where(ends[:, None, None], np.outer(chain.start, np.ones_like(chain.start)), chain.lost.T)
        in_gaps = _power_slope(chain.received / scale, self._gaps[self._gap_of_kind], slope @ after) / scale
        return Expected(
            log_likelihood=log_likelihood + self._received * math.log(scale),
            received=chain.received * in_gaps,
            lost=chain.lost * at_loss,
            starts=chain.start * start,
        )

    def _table(self, chain: Chain) -> tuple[np.ndarray, np.ndarray, float]:
        """Return the matrices of the distinct blocks and the identity, the powers of their gaps, and the scale.

        Each matrix is divided by scale**gap, so that long gaps neither vanish nor overflow. The scale is the largest
        eigenvalue of a received packet's matrix. The shapes are (U + 1, K, K) and (U, K, K).
        """
        scale = float(np.abs(np.linalg.eigvals(chain.received)).max()) or 1.0
        gap_powers = powers(chain.received / scale, self._gaps)[self._gap_of_kind]
        restart = np.outer(np.ones_like(chain.start), chain.start)
        after = np.where(self._kind_ends[:, None, None], restart, chain.lost)
        return np.concatenate([gap_powers @ after, np.eye(len(restart))[None]]), gap_powers, scale

    def _forward(self, table: np.ndarray, start: np.ndarray, products: np.ndarray) -> tuple[np.ndarray, float]:
        """Return the state probabilities before each block given all earlier ones, (B, K), and the log-likelihood."""
        rows, columns = self._grid.shape
        heads = np.empty((rows, len(start)))
        heads[0] = start
        for row in range(1, rows):
            heads[row] = _normalised(heads[row - 1] @ products[row - 1])
        before = np.empty((rows, columns, len(start)))
        log_likelihood = 0.0
        vectors = heads
        for column in range(columns):
            before[:, column] = vectors
            after = np.einsum("ri,rij->rj", vectors, table[self._grid[:, column]])
            total = np.maximum(after.sum(axis=1, keepdims=True), SMALLEST)
            log_likelihood += float(np.log(total).sum())
            vectors = after / total
        return before.reshape(rows * columns, -1)[: len(self._kind)], log_likelihood

    def _backward(self, table: np.ndarray, products: np.ndarray) -> np.ndarray:
        """Return the relative likelihood of all later blocks, given the state after each block, (B, K)."""
        rows, columns = self._grid.shape
        size = table.shape[-1]
        tails = np.ones((rows, size))
        for row in range(rows - 2, -1, -1):
            tails[row] = _normalised(products[row + 1] @ tails[row + 1])
        after = np.empty((rows, columns, size))
        vectors = tails
        for column in range(columns - 1, -1, -1):
            after[:, column] = vectors
            vectors = _normalised(np.einsum("rij,rj->ri", table[self._grid[:, column]], vectors))
        return after.reshape(rows * columns, size)[: len(self._kind)]

    def _row_products(self, table: np.ndarray) -> np.ndarray:
        """Return the product of each row's blocks, scaled, (rows, K, K)."""
        product = table[self._grid[:, 0]]
        for column in range(1, self._grid.shape[1]):
            product = product @ table[self._grid[:, column]]
            product /= np.maximum(product.sum(axis=(1, 2), keepdims=True), SMALLEST)
        return product

    def _slope(self, table: np.ndarray, forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
        """Return the derivatives of the log-likelihood by the entries of each distinct block, (U, K, K)."""
        kinds, size = len(table) - 1, table.shape[-1]
        by_state = np.einsum("bi,bij->bj", forward, table[self._kind])
        weight = forward / np.maximum((by_state * backward).sum(axis=1), SMALLEST)[:, None]
        slope = np.empty((kinds, size, size))
        for one in range(size):
            for other in range(size):
                slope[:, one, other] = np.bincount(self._kind, weight[:, one] * backward[:, other], minlength=kinds)
        return slope


def _normalised(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(vectors.sum(axis=-1, keepdims=True), SMALLEST)


def _power_slope(base: np.ndarray, exponents: np.ndarray, slopes: np.ndarray) -> np.ndarray:
    """Return the derivative of sum_u <slopes[u], base**exponents[u]> by the entries of `base`, (K, K).

    It is the upper right corner of [[base', slope], [0, base']] ** exponent, computed by repeated squaring.

    Args:
        base: (K, K).
        exponents: (U,).
        slopes: (U, K, K).
    """
    square, corner = base.T, slopes
    power = np.broadcast_to(np.eye(len(base)), slopes.shape).copy()
    result = np.zeros_like(slopes)
    left = exponents.copy()
    while left.any():
        odd = left % 2 == 1
        result[odd] = power[odd] @ corner[odd] + result[odd] @ square
        power[odd] = power[odd] @ square
        corner = square @ corner + corner @ square
        square = square @ square
        left //= 2
    return result.sum(axis=0)
