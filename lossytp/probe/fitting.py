"""Fit loss processes to recorded losses: maximum likelihood, choice by BIC, intervals, goodness of fit.

`fit` returns one `Fit` per family, the best first. `intervals` and `goodness` tell how far to trust it.
Schwarz, "Estimating the dimension of a model", 1978.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import stats
from scipy.optimize import minimize
from scipy.special import expit, logit

from lossytp.network import traces as trace
from lossytp.network.losses import IS_LOST, Bernoulli, FourState, GilbertElliott, LossProcess
from lossytp.network.traces import Trace

# Describe recorded flows by gaps and bursts, so that the cost of a fit grows with the losses, not with the packets.


@dataclass(frozen=True)
class Blocks:
    """Flows one after another, in blocks: a gap of received packets, then one loss or the end of the flow.

    Attributes:
        gaps: number of received packets in each block, int64 (num_blocks,).
        ends: whether the flow ends after the gap, bool (num_blocks,).
    """

    gaps: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, flows: Sequence[Trace]) -> "Blocks":
        """Return the blocks of independent flows.

        Raises:
            ValueError: if there are no flows.
        """
        check_flows(flows)
        marks = [np.append(flow.lost, flow.num_packets) for flow in flows]
        gaps = np.concatenate([np.diff(mark, prepend=-1) - 1 for mark in marks])
        ends = np.zeros(len(gaps), dtype=bool)
        ends[np.cumsum([len(mark) for mark in marks]) - 1] = True
        return cls(gaps, ends)


def check_flows(flows: Sequence[Trace]) -> None:
    """Raise ValueError unless there is at least one flow."""
    if not len(flows):
        raise ValueError("flows is empty: give at least one recorded flow")


def num_packets(flows: Sequence[Trace]) -> int:
    """Return the number of packets in all flows."""
    return sum(flow.num_packets for flow in flows)


def num_lost(flows: Sequence[Trace]) -> int:
    """Return the number of lost packets in all flows."""
    return sum(len(flow.lost) for flow in flows)


def burst_lengths(flows: Sequence[Trace]) -> np.ndarray:
    """Return the lengths of the runs of consecutive losses, int64. The start or end of a flow may cut a run short."""
    return np.concatenate([trace.burst_lengths(flow.lost) for flow in flows])


def gap_lengths(flows: Sequence[Trace]) -> np.ndarray:
    """Return the lengths of the runs of received packets between two bursts of a flow, int64."""
    gaps = np.concatenate([np.diff(flow.lost) - 1 for flow in flows])
    return gaps[gaps > 0]


# Describe a loss process as a hidden Markov chain.
#
# Shapes: K states.


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


# Compute the likelihood of recorded flows under a hidden Markov chain, and its expected transitions.
#
# Baum, Petrie, Soules and Weiss, "A maximization technique occurring in the statistical analysis of probabilistic
# functions of Markov chains", 1970. A gap of g received packets contributes the g-th power of one matrix. So the passes
# visit blocks of a gap and a loss, not packets. The expected counts are derivatives of the log-likelihood (Fisher's
# identity). The derivative of a power is computed once for each distinct gap.
#
# Shapes: K states, B blocks, U distinct blocks.


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


# Define the families of loss processes that can be fitted, as chains with free parameters.
#
# A parameter is the probability of one choice: to step to another state, or to lose a packet. A `Tally` counts how
# often the choice is expected, and on how many occasions. Baum and Welch's maximisation step divides one by the other,
# and the likelihood's gradient follows from both.
#
# Shapes: P parameters, K states.


class Tally(NamedTuple):
    """Expected counts of each parameter's choice, and of the occasions to choose, (P,) each."""

    chosen: np.ndarray
    occasions: np.ndarray


@dataclass(frozen=True)
class Family:
    """A family of loss processes.

    Attributes:
        name: name in messages and tables.
        parameters: names of the parameters, (P,).
        rows: a number per parameter, (P,). Parameters with the same number belong to one choice, and add up to 1 or
            less.
        build: returns the process with given values of the parameters.
        chain: returns the chain with given values of the parameters.
        tally: returns the parameters' tally.
    """

    name: str
    parameters: tuple[str, ...]
    rows: tuple[int, ...]
    build: Callable[..., LossProcess]
    chain: Callable[[np.ndarray], Chain]
    tally: Callable[[Expected], Tally]

    @property
    def same_row(self) -> np.ndarray:
        """Return 1.0 where two parameters belong to the same choice, (P, P)."""
        rows = np.array(self.rows)
        return (rows[:, None] == rows).astype(float)

    def process(self, values: np.ndarray) -> LossProcess:
        """Return the process with these values of the parameters, (P,)."""
        return self.build(*(float(value) for value in values))


def _bernoulli_chain(values: np.ndarray) -> Chain:
    return Chain(np.ones((1, 1)), values, np.ones(1))


def _bernoulli_tally(expected: Expected) -> Tally:
    return Tally(expected.lost[0], expected.transitions[0])


def _two_states(leave: float, back: float, loss: np.ndarray) -> Chain:
    share_bad = leave / (leave + back)
    return Chain(np.array([[1 - leave, leave], [back, 1 - back]]), loss, np.array([1 - share_bad, share_bad]))


def _gilbert_chain(values: np.ndarray) -> Chain:
    return _two_states(values[0], values[1], np.array([0.0, 1.0]))


def _gilbert_tally(expected: Expected) -> Tally:
    steps = expected.transitions
    return Tally(np.array([steps[0, 1], steps[1, 0]]), steps.sum(axis=1))


def _gilbert_elliott_chain(values: np.ndarray) -> Chain:
    return _two_states(values[0], values[1], np.array([values[3], values[2]]))


def _gilbert_elliott_tally(expected: Expected) -> Tally:
    steps, visits, lost = _gilbert_tally(expected), expected.transitions.sum(axis=1), expected.lost.sum(axis=1)
    return Tally(np.concatenate([steps.chosen, lost[::-1]]), np.concatenate([steps.occasions, visits[::-1]]))


def _four_state_chain(values: np.ndarray) -> Chain:
    process = FourState(*values)
    return Chain(process.transition, IS_LOST, process.shares)


_FROM, _TO = np.array([0, 2, 2, 1, 0]), np.array([2, 0, 1, 2, 3])  # p13, p31, p32, p23, p14


def _four_state_tally(expected: Expected) -> Tally:
    steps = expected.transitions
    return Tally(steps[_FROM, _TO], steps.sum(axis=1)[_FROM])


BERNOULLI = Family(
    "Bernoulli", ("loss_rate",), (0,), lambda rate: Bernoulli(loss_rate=rate), _bernoulli_chain, _bernoulli_tally
)
GILBERT = Family(
    "simple Gilbert",
    ("p_good_to_bad", "p_bad_to_good"),
    (0, 1),
    lambda leave, back: GilbertElliott(p_good_to_bad=leave, p_bad_to_good=back),
    _gilbert_chain,
    _gilbert_tally,
)
GILBERT_ELLIOTT = Family(
    "Gilbert-Elliott",
    ("p_good_to_bad", "p_bad_to_good", "loss_bad", "loss_good"),
    (0, 1, 2, 3),
    lambda leave, back, bad, good: GilbertElliott(
        p_good_to_bad=leave, p_bad_to_good=back, loss_bad=bad, loss_good=good
    ),
    _gilbert_elliott_chain,
    _gilbert_elliott_tally,
)
FOUR_STATE = Family(
    "four-state Markov", ("p13", "p31", "p32", "p23", "p14"), (0, 2, 2, 1, 0), FourState, _four_state_chain,
    _four_state_tally,
)  # fmt: skip
FAMILIES = {family.name: family for family in (BERNOULLI, GILBERT, GILBERT_ELLIOTT, FOUR_STATE)}


# Compute the parameters, in closed form, from which maximisation of the likelihood starts.


EDGE = 1e-6  # starts stay this far from 0 and 1, where maximisation would be stuck
GOOD_SHARES = (0.01, 0.5)  # candidates for the good state's loss rate, as shares of the overall one
ALONE_SHARES = (0.05, 0.9)  # candidates for the share of one-packet bursts that are in state 4
LEAST_VARIANCE = 1e-3  # of equal counts in all windows, as a share of the variance of independent losses
MEMORIES = np.logspace(-5, -0.01, 200)  # candidates for p_good_to_bad + p_bad_to_good


def starts(family: Family, flows: Sequence[Trace]) -> list[np.ndarray]:
    """Return parameters from which to start, (P,) each. The flows have both lost and received packets."""
    rate = num_lost(flows) / num_packets(flows)
    bursts = burst_lengths(flows)
    if family is BERNOULLI:
        found = [np.array([rate])]
    elif family is GILBERT:
        back = 1 / bursts.mean()
        found = [np.array([back * rate / (1 - rate), back])]
    elif family is GILBERT_ELLIOTT:
        found = [gilbert_elliott_moments(flows, good_share) for good_share in GOOD_SHARES]
    else:
        assert family is FOUR_STATE, family
        found = [_four_state(flows, alone) for alone in ALONE_SHARES]
    return [np.clip(values, EDGE, 1 - EDGE) for values in found]


def gilbert_elliott_moments(flows: Sequence[Trace], good_share: float) -> np.ndarray:
    """Match the loss rate and the variance of the losses in windows of several lengths.

    Hasslinger and Hohlfeld, "The Gilbert-Elliott model for packet loss in real time services on the Internet", 2008:
    the number of losses in w packets has the variance w m (1 - m) (1 + 2 c s(w)), with the loss rate m, the losses'
    autocorrelation c x^lag, x = 1 - p - r, and s(w) = sum_lag (1 - lag / w) x^lag. The variance fixes x and c, by
    least squares over w = 2, 4, 8, ..., weighted by the number of windows, since a variance of n values has a relative
    error of about sqrt(2 / n). One parameter stays free: the good state's loss rate.

    Args:
        flows: flows with lost and received packets.
        good_share: the good state's loss rate, as a share of all packets' loss rate; below 1.

    Returns:
        p_good_to_bad, p_bad_to_good, loss_bad and loss_good, (4,).
    """
    windows, counts, excess = _excess_variance(flows)
    rate = num_lost(flows) / num_packets(flows)
    good = good_share * rate
    memory, correlation = 0.5, 0.0
    if len(windows):
        shape = 2 * np.array([_lag_sums(1 - each, windows) for each in MEMORIES])
        weights = counts / np.maximum(1 + excess, LEAST_VARIANCE) ** 2
        amounts = np.maximum(shape @ (weights * excess) / (shape**2 @ weights), 0.0)
        misfit = (amounts[:, None] * shape - excess) ** 2 @ weights
        memory, correlation = MEMORIES[misfit.argmin()], amounts[misfit.argmin()]
    bad = min(rate + max(correlation, 0.01) * rate * (1 - rate) / (rate - good), 1 - EDGE)
    share_bad = (rate - good) / (bad - good)
    return np.array([share_bad * memory, (1 - share_bad) * memory, bad, good])


def _lag_sums(decay: float, windows: np.ndarray) -> np.ndarray:
    """Return sum over lags from 1 to w - 1 of (1 - lag / w) decay^lag, for each window w."""
    step = 1 - decay
    return decay / step * (1 - (1 - decay**windows) / (windows * step))


def _excess_variance(flows: Sequence[Trace]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return window lengths, numbers of windows, and the excess variances of their losses.

    The excess is the variance relative to that of independent losses, minus 1. A length is used while there are at
    least 30 such windows.
    """
    rate = num_lost(flows) / num_packets(flows)
    found = []
    window = 2
    while (count := sum(flow.num_packets // window for flow in flows)) >= 30:
        squares = 0
        for flow in flows:
            inside = np.asarray(flow.lost) // window
            inside = inside[inside < flow.num_packets // window]
            squares += int((np.unique(inside, return_counts=True)[1] ** 2).sum())
        variance = squares / count - (window * rate) ** 2
        found.append((window, count, variance / (window * rate * (1 - rate)) - 1))
        window *= 2
    windows, counts, excess = np.array(found, dtype=float).reshape(-1, 3).T
    return windows, counts, excess


def _four_state(flows: Sequence[Trace], alone: float) -> np.ndarray:
    """Split gaps into pauses within a burst and gaps between bursts, and give state 4 a share of the single losses.

    Args:
        flows: flows with lost and received packets.
        alone: share of one-packet bursts that are in state 4.
    """
    bursts, gaps = burst_lengths(flows), gap_lengths(flows)
    if not len(gaps):
        gaps = np.array([num_packets(flows)])
    pauses, within = _two_geometrics(gaps)
    single = (bursts == 1).mean() * alone
    leave = 1 / max((bursts.mean() - single) / max(1 - single, EDGE), 1.0)
    leave_gap = min(1.0, 1 / pauses[1])
    back = leave * (1 - within)
    return np.array([leave_gap * (1 - single), back, leave - back, min(1.0, 1 / pauses[0]), leave_gap * single])


def _two_geometrics(lengths: np.ndarray) -> tuple[np.ndarray, float]:
    """Fit two mixed geometric distributions by a few EM steps; return their means, ascending, and the first's share."""
    values, counts = np.unique(lengths, return_counts=True)
    means = np.array([max(1.01, np.median(lengths) / 2), max(2.0, 2 * lengths.mean())])
    short = 0.5
    for _ in range(50):
        logs = -np.log(means) + (values[:, None] - 1) * np.log1p(-1 / means) + np.log([short, 1 - short])
        weight = np.exp(logs - logs.max(axis=1, keepdims=True))
        weight = weight / weight.sum(axis=1, keepdims=True) * counts[:, None]
        totals = np.maximum(weight.sum(axis=0), EDGE)
        means = np.maximum(weight.T @ values / totals, 1 + EDGE)
        short = float(np.clip(totals[0] / totals.sum(), EDGE, 1 - EDGE))
    return np.sort(means), short if means[0] <= means[1] else 1 - short


# Maximise the likelihood of recorded flows: EM from several starts, then a quasi-Newton method.
#
# Baum and Welch's EM climbs from any start, but it is slow near the maximum, and its maximisation step ignores that
# flows start in the stationary state. L-BFGS on the exact likelihood climbs the rest. EM's expected counts give its
# gradient (Fisher's identity; Lange, "A quasi-Newton acceleration of the EM algorithm", 1995).
#
# Shapes: P parameters, K states.


FIRST_STEPS, MOST_STEPS = 5, 60  # EM steps from every start, and EM steps in all
SMALL_GAIN = 0.05  # nats: EM stops at a step that gains less
FARTHEST = 30.0  # log odds of a parameter that is practically 0 or 1
PRECISION = 1e-5  # nats: L-BFGS stops at a step that gains less ...
SMALL_SLOPE = 0.01  # ... or where all slopes are smaller, in expected events
STEP = 1e-5  # of log odds, for differences


class Maximum(NamedTuple):
    """The maximum of the likelihood.

    Attributes:
        values: values of the parameters there, (P,).
        log_likelihood: log-likelihood there, in nats.
    """

    values: np.ndarray
    log_likelihood: float


class Likelihood:
    """The likelihood of flows under one family, on the scale of log odds.

    The log odds of a parameter compare its choice with the last one, which has no parameter of its own.
    """

    def __init__(self, family: Family, flows: Sequence[Trace]) -> None:
        self.family = family
        self.passes = Passes(Blocks.of(flows))

    def odds(self, values: np.ndarray) -> np.ndarray:
        """Return the log odds of the parameters, (P,)."""
        rest = 1 - self.family.same_row @ values
        with np.errstate(divide="ignore"):
            odds = np.log(values) - np.log(np.maximum(rest, 0.0))
        return np.clip(odds, -FARTHEST, FARTHEST)

    def values(self, odds: np.ndarray) -> np.ndarray:
        """Return the parameters with these log odds, (P,)."""
        weights = np.exp(odds)
        return weights / (1 + self.family.same_row @ weights)

    def at(self, odds: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the log-likelihood and its gradient with respect to the log odds, (P,)."""
        expected = self.passes.expected(self.family.chain(self.values(odds)))
        tally = self.family.tally(expected)
        gradient = tally.chosen - tally.occasions * self.values(odds) + self._start_gradient(odds, expected.starts)
        return expected.log_likelihood, gradient

    def _start_gradient(self, odds: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return the gradient of sum_k starts[k] log(stationary share of k), by central differences, (P,)."""

        def value(odds: np.ndarray) -> float:
            return float(starts @ np.log(np.maximum(self.family.chain(self.values(odds)).start, 1e-300)))

        return np.array([value(odds + step) - value(odds - step) for step in STEP * np.eye(len(odds))]) / (2 * STEP)

    def em_step(self, values: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the log-likelihood of these values, and EM's next values."""
        expected = self.passes.expected(self.family.chain(values))
        return expected.log_likelihood, self.maximisation(expected)

    def maximisation(self, expected: Expected) -> np.ndarray:
        """Return how often each parameter's choice is expected per occasion; 0.5 without occasions."""
        tally = self.family.tally(expected)
        shares = np.divide(
            tally.chosen, tally.occasions, out=np.full(len(tally.chosen), 0.5), where=tally.occasions > 0
        )
        return self.values(self.odds(shares))


def maximise(likelihood: Likelihood, flows: Sequence[Trace]) -> Maximum:
    """Maximise the likelihood of flows that have both lost and received packets."""
    best = None
    for values in starts(likelihood.family, flows):
        for _ in range(FIRST_STEPS):
            reached, values = likelihood.em_step(values)
        if best is None or reached > best[0]:
            best = reached, values
    assert best is not None
    reached, values = best
    for _ in range(MOST_STEPS - FIRST_STEPS):
        now, following = likelihood.em_step(values)
        if now - reached < SMALL_GAIN:
            break
        reached, values = now, following
    found = minimize(
        _negative,
        likelihood.odds(values),
        (likelihood,),
        jac=True,
        method="L-BFGS-B",
        bounds=[(-FARTHEST, FARTHEST)] * len(values),
        options={"ftol": PRECISION / max(abs(reached), 1.0), "gtol": SMALL_SLOPE, "maxiter": 200},
    )
    return Maximum(likelihood.values(found.x), -float(found.fun))


def _negative(odds: np.ndarray, likelihood: Likelihood) -> tuple[float, np.ndarray]:
    value, gradient = likelihood.at(odds)
    return -value, -gradient


FEWEST_PACKETS = 10  # lost ones, and received ones, that it takes to tell families apart


@dataclass(frozen=True)
class Fit:
    """The member of a family that makes the recorded flows most likely.

    Attributes:
        family: the family.
        values: values of the family's parameters, in order.
        log_likelihood: log-likelihood of all flows, in nats.
        num_packets: number of packets in all flows.
    """

    family: Family
    values: tuple[float, ...]
    log_likelihood: float
    num_packets: int

    @property
    def process(self) -> LossProcess:
        """Return the fitted loss process."""
        return self.family.process(np.array(self.values))

    @property
    def bic(self) -> float:
        """Return the Bayesian information criterion, with packets as observations; smaller is better."""
        return len(self.values) * math.log(self.num_packets) - 2 * self.log_likelihood

    @property
    def netem(self) -> str:
        """Return the process in the notation of Linux ``tc netem``."""
        return self.process.to_netem()  # type: ignore[attr-defined]  # every family of `FAMILIES` has it

    @property
    def loss_type(self) -> str:
        """Return the process in the notation of `--loss_type`."""
        return f"netem('{self.netem}')"


def applicable(flows: Sequence[Trace]) -> list[Family]:
    """Return the families that the flows can tell apart: only Bernoulli if few packets are lost, or few received.

    Raises:
        ValueError: if there are no flows.
    """
    check_flows(flows)
    lost = num_lost(flows)
    enough = min(lost, num_packets(flows) - lost) >= FEWEST_PACKETS
    return list(FAMILIES.values()) if enough else [BERNOULLI]


def fit_family(family: Family, flows: Sequence[Trace]) -> Fit:
    """Fit one family by maximum likelihood, taking the flows for independent and stationary from the start.

    Args:
        family: an `applicable` family.
        flows: the recorded flows.

    Raises:
        ValueError: if the flows lost none of their packets, or all, and the family is not Bernoulli.
    """
    packets, lost = num_packets(flows), num_lost(flows)
    if family is BERNOULLI:
        rate = lost / packets
        log_likelihood = sum(part * math.log(part / packets) for part in (lost, packets - lost) if part)
        return Fit(family, (rate,), log_likelihood, packets)
    if lost in (0, packets):
        raise ValueError(
            f"{lost} of {packets} packets are lost, which shows no {family.name} process: give flows with lost and "
            "received packets, or fit Bernoulli"
        )
    found = maximise(Likelihood(family, flows), flows)
    values = tuple(found.values.tolist())
    if family is GILBERT_ELLIOTT and values[3] > values[2]:  # the bad state is the one that loses more
        values = (values[1], values[0], values[3], values[2])
    return Fit(family, values, found.log_likelihood, packets)


def fit(flows: Sequence[Trace], families: Iterable[Family] | None = None) -> list[Fit]:
    """Fit several families.

    Args:
        flows: the recorded flows.
        families: families to fit; all `applicable` ones if None.

    Returns:
        The fits, the one with the smallest BIC first.

    Raises:
        ValueError: if there are no flows.
    """
    tried = applicable(flows) if families is None else families
    return sorted((fit_family(family, flows) for family in tried), key=lambda each: each.bic)


# Compute confidence intervals of a fit's parameters, loss rate and mean burst from the observed information.
#
# The information is the negative second derivative of the log-likelihood on the scale of log odds. Intervals are
# symmetric on that scale (the mean burst's on a log scale), by the delta method. There are two exceptions:
#
# - Bernoulli's interval is exact (Clopper and Pearson 1934).
# - A parameter that is fitted as 0 or 1 has no curvature there. Its interval ends where the log-likelihood, with the
#   other parameters held fixed, is `DROP` nats lower. The intervals of loss rate and mean burst include their values at
#   that end.
#
# All intervals assume that the family is the true one and that flows are independent. Shapes: P parameters.


CONFIDENCE = 0.95
QUANTILE = float(stats.norm.ppf((1 + CONFIDENCE) / 2))
DROP = float(stats.chi2.ppf(CONFIDENCE, 1)) / 2
FEWEST = 0.5  # with fewer expected events a parameter counts as 0 or 1, and a direction as flat
NEGLIGIBLE = 0.01  # smallest change of a parameter's log odds that counts, in a flat direction
RELATIVE_STEP = 1e-3  # of log odds, for differences of gradients


class Interval(NamedTuple):
    """A 95 % confidence interval."""

    low: float
    high: float


def intervals(fit: Fit, flows: Sequence[Trace]) -> dict[str, Interval]:
    """Return the intervals of the parameters by name, of `loss_rate` and of `mean_burst_packets`.

    A parameter that the flows do not determine has the interval (0, 1).

    Args:
        fit: a fit of the flows.
        flows: the recorded flows.
    """
    if fit.family is BERNOULLI:
        return _exact(num_lost(flows), fit.num_packets)
    likelihood = Likelihood(fit.family, flows)
    values = np.array(fit.values)
    odds = likelihood.odds(values)
    covariance, flat = _covariance(likelihood, odds)
    at_edge = _at_edge(likelihood, values)
    found, moved = {}, [values]
    for number, name in enumerate(fit.family.parameters):

        def log_odds(odds: np.ndarray, number: int = number) -> float:
            return float(logit(likelihood.values(odds)[number]))

        slope = _slope(log_odds, odds)
        if at_edge[number]:
            found[name] = _by_likelihood(likelihood, values, number)
            far = found[name].high if values[number] < 0.5 else found[name].low
            moved.append(np.where(np.arange(len(values)) == number, far, values))
        elif np.abs(slope @ flat).max(initial=0) > NEGLIGIBLE:
            found[name] = Interval(0.0, 1.0)
        else:
            found[name] = _between(expit, log_odds(odds), math.sqrt(slope @ covariance @ slope))
    for name, scale, back in (("loss_rate", logit, expit), ("mean_burst_packets", np.log, np.exp)):

        def measure(odds: np.ndarray, name: str = name, scale: Callable = scale) -> float:
            return float(scale(getattr(fit.family.process(likelihood.values(odds)), name)))

        slope = _slope(measure, odds)
        inner = _between(back, measure(odds), math.sqrt(slope @ covariance @ slope))
        at_ends = [getattr(fit.family.process(each), name) for each in moved]
        found[name] = Interval(min(inner.low, *at_ends, math.inf), max(inner.high, *at_ends, 0.0))
    return found


def _exact(lost: int, packets: int) -> dict[str, Interval]:
    """Return Bernoulli's intervals."""
    rate = stats.binomtest(lost, packets).proportion_ci(CONFIDENCE)
    ends = float(rate.low), float(rate.high)
    bursts = [Bernoulli(loss_rate=each).mean_burst_packets for each in ends]
    return {"loss_rate": Interval(*ends), "mean_burst_packets": Interval(*bursts)}


def _between(back: Callable[[float], float], centre: float, error: float) -> Interval:
    return Interval(float(back(centre - QUANTILE * error)), float(back(centre + QUANTILE * error)))


def _covariance(likelihood: Likelihood, odds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the inverse of the observed information, (P, P), and the flat directions, (P, directions)."""
    steps = RELATIVE_STEP * np.eye(len(odds))
    second = np.array([likelihood.at(odds + step)[1] - likelihood.at(odds - step)[1] for step in steps]) / (
        2 * RELATIVE_STEP
    )
    curvature, directions = np.linalg.eigh(-(second + second.T) / 2)
    seen = curvature > FEWEST
    return directions[:, seen] / curvature[seen] @ directions[:, seen].T, directions[:, ~seen]


def _at_edge(likelihood: Likelihood, values: np.ndarray) -> np.ndarray:
    """Return which parameters are less than `FEWEST` expected events away from 0 or 1, bool (P,)."""
    tally = likelihood.family.tally(likelihood.passes.expected(likelihood.family.chain(values)))
    return np.minimum(tally.chosen, tally.occasions - tally.chosen) < FEWEST


def _by_likelihood(likelihood: Likelihood, values: np.ndarray, number: int) -> Interval:
    """Return the interval of one parameter in which the log-likelihood is at most `DROP` below that of `values`."""
    best = likelihood.passes.log_likelihood(likelihood.family.chain(values))
    others = float(likelihood.family.same_row[number] @ values - values[number])  # parameters of the same choice
    inside, outside = float(values[number]), 1 - others if values[number] < 0.5 else 0.0
    for _ in range(40):
        tried = (inside + outside) / 2
        moved = np.where(np.arange(len(values)) == number, tried, values)
        dropped = best - likelihood.passes.log_likelihood(likelihood.family.chain(moved))
        inside, outside = (inside, tried) if dropped > DROP else (tried, outside)
    return Interval(0.0, outside) if values[number] < 0.5 else Interval(outside, 1.0)


def _slope(measure: Callable[[np.ndarray], float], odds: np.ndarray) -> np.ndarray:
    """Return the gradient of a function of the log odds, by central differences, (P,)."""
    steps = RELATIVE_STEP * np.eye(len(odds))
    return np.array([measure(odds + step) - measure(odds - step) for step in steps]) / (2 * RELATIVE_STEP)


# Test how well a fit describes recorded flows, by the lengths of their bursts and gaps.
#
# The fitted process simulates recordings with flows of the same lengths. The statistic is Kolmogorov and Smirnov's: the
# largest distance between the distribution functions of the recorded lengths and of all simulated ones together. The
# p-value is the share of simulated recordings that are at least as far off. So it allows for runs that depend on each
# other, and for runs that the end of a flow cuts short. The simulated recordings are not fitted again, which makes
# p-values too large rather than too small: a small one is safe evidence against the fit.


SIMULATIONS, FEWEST_SIMULATIONS = 99, 19
MOST_FLOWS = 20_000  # to simulate in all: each costs 0.05 to 0.2 ms
MEASURES = (burst_lengths, gap_lengths)


class Law(NamedTuple):
    """The distinct lengths of runs in packets, ascending, and how often each occurs: int64 (num_lengths,) each."""

    lengths: np.ndarray
    counts: np.ndarray

    def share_up_to(self, lengths: np.ndarray) -> np.ndarray:
        """Return the share of runs that are no longer than each of these lengths; 0 without runs."""
        total = np.concatenate([[0], self.counts.cumsum()])
        return total[self.lengths.searchsorted(lengths, side="right")] / max(int(total[-1]), 1)


class Comparison(NamedTuple):
    """A comparison of recorded lengths with those under the fit.

    Attributes:
        recorded: lengths in the recorded flows.
        fitted: lengths in all simulated flows together.
        statistic: largest difference between the distribution functions, in [0, 1].
        p: share of simulated recordings that are at least as far off.
    """

    recorded: Law
    fitted: Law
    statistic: float
    p: float


class Goodness(NamedTuple):
    """How well a fit describes recorded flows.

    Attributes:
        bursts: comparison of the runs of losses.
        gaps: comparison of the runs of received packets between two losses.
        simulations: number of simulated recordings, which give the p-values.
    """

    bursts: Comparison
    gaps: Comparison
    simulations: int


def goodness(fit: Fit, flows: Sequence[Trace], seed: int = 0, watch: Callable[[], object] = lambda: None) -> Goodness:
    """Return how well the fit describes the flows.

    Args:
        fit: a fit of the flows.
        flows: the recorded flows.
        seed: seed of the simulated recordings.
        watch: called after every simulated recording.
    """
    simulations = num_simulations(flows)
    process = fit.process
    laws: tuple[list[Law], list[Law]] = ([], [])
    for number in range(simulations):
        simulated = [
            Trace(
                lost=process.losses((seed, "goodness", number, place)).take(flow.num_packets),
                num_packets=flow.num_packets,
            )
            for place, flow in enumerate(flows)
        ]
        for law, measure in zip(laws, MEASURES, strict=True):
            law.append(_law(measure(simulated)))
        watch()
    bursts, gaps = (_compare(_law(measure(flows)), law) for law, measure in zip(laws, MEASURES, strict=True))
    return Goodness(bursts, gaps, simulations)


def num_simulations(flows: Sequence[Trace]) -> int:
    """Return how many recordings to simulate: the more flows, the fewer."""
    return max(FEWEST_SIMULATIONS, min(SIMULATIONS, MOST_FLOWS // len(flows)))


def _law(lengths: np.ndarray) -> Law:
    return Law(*np.unique(lengths, return_counts=True))


def _compare(recorded: Law, simulated: list[Law]) -> Comparison:
    lengths, place = np.unique(np.concatenate([law.lengths for law in simulated]), return_inverse=True)
    counts = np.bincount(place, np.concatenate([law.counts for law in simulated]), minlength=len(lengths))
    fitted = Law(lengths, counts.astype(np.int64))
    statistic = _distance(recorded, fitted)
    as_far = sum(_distance(law, fitted) >= statistic for law in simulated)
    return Comparison(recorded, fitted, statistic, (1 + as_far) / (1 + len(simulated)))


def _distance(one: Law, other: Law) -> float:
    lengths = np.union1d(one.lengths, other.lengths)
    return float(np.abs(one.share_up_to(lengths) - other.share_up_to(lengths)).max(initial=0.0))


# Measure whether flows lose packets together, as they do if they share a queue. Fits assume independent flows.


WINDOWS = 100  # per flow


def correlation_between(flows: Sequence[Trace]) -> float:
    """Return the mean correlation between the losses of two flows, over 100 windows of equal length per flow.

    Flows without losses, or with fewer than 10 packets per window, are left out. With fewer than two flows, return 0.
    """
    counts = []
    for flow in flows:
        edges = np.linspace(0, flow.num_packets, WINDOWS + 1).round()
        lost = np.histogram(flow.lost, edges)[0]
        if flow.num_packets >= WINDOWS * FEWEST_PACKETS and np.ptp(lost):
            counts.append(lost)
    if len(counts) < 2:
        return 0.0
    correlations = np.corrcoef(counts)
    return float(correlations[np.triu_indices(len(counts), 1)].mean())
