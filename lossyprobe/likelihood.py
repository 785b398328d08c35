"""The likelihood of recorded losses under hidden Markov chains, and the loss processes that are such chains.

A flow is a row of blocks: a gap of received packets, then a loss or the flow's end. A gap of g received packets
contributes the g-th power of one matrix, so a likelihood costs what the losses cost, not what the packets cost.

Shapes: P parameters, K states, B blocks, U distinct blocks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

from lossytp.network import traces
from lossytp.network.losses import IS_LOST, Bernoulli, FourState, GilbertElliott, LossProcess
from lossytp.network.traces import Trace

SMALLEST = 1e-300  # keeps the logarithm of an impossible event finite
FARTHEST = 30.0  # log odds of a parameter that is practically 0 or 1
PRECISION = 1e-5  # nats: maximisation stops at a step that gains less ...
SMALL_SLOPE = 0.01  # ... or where all slopes are smaller, in expected events
STEP = 1e-3  # of log odds, for differences


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
    return np.concatenate([traces.burst_lengths(flow.lost) for flow in flows])


def gap_lengths(flows: Sequence[Trace]) -> np.ndarray:
    """Return the lengths of the runs of received packets between two bursts of a flow, int64."""
    gaps = np.concatenate([np.diff(flow.lost) - 1 for flow in flows])
    return gaps[gaps > 0]


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


@dataclass(frozen=True)
class Family:
    """A family of loss processes, as chains with free parameters.

    A parameter is the probability of one choice: to step to another state, or to lose a packet.

    Attributes:
        name: name in messages and tables.
        parameters: names of the parameters, (P,).
        rows: a number per parameter, (P,). Parameters with the same number belong to one choice, and add up to 1 or
            less.
        build: returns the process with given values of the parameters.
        chain: returns the chain with given values of the parameters.
    """

    name: str
    parameters: tuple[str, ...]
    rows: tuple[int, ...]
    build: Callable[..., LossProcess]
    chain: Callable[[np.ndarray], Chain]

    @property
    def same_row(self) -> np.ndarray:
        """Return 1.0 where two parameters belong to the same choice, (P, P)."""
        rows = np.array(self.rows)
        return (rows[:, None] == rows).astype(float)

    def process(self, values: np.ndarray) -> LossProcess:
        """Return the process with these values of the parameters, (P,)."""
        return self.build(*(float(value) for value in values))


def _two_states(leave: float, back: float, loss: np.ndarray) -> Chain:
    share_bad = leave / (leave + back)
    return Chain(np.array([[1 - leave, leave], [back, 1 - back]]), loss, np.array([1 - share_bad, share_bad]))


def _four_states(values: np.ndarray) -> Chain:
    process = FourState(*values)
    return Chain(process.transition, IS_LOST, process.shares)


BERNOULLI = Family(
    "Bernoulli",
    ("loss_rate",),
    (0,),
    lambda rate: Bernoulli(loss_rate=rate),
    lambda values: Chain(np.ones((1, 1)), values, np.ones(1)),
)
GILBERT = Family(
    "simple Gilbert",
    ("p_good_to_bad", "p_bad_to_good"),
    (0, 1),
    lambda leave, back: GilbertElliott(p_good_to_bad=leave, p_bad_to_good=back),
    lambda values: _two_states(values[0], values[1], np.array([0.0, 1.0])),
)
GILBERT_ELLIOTT = Family(
    "Gilbert-Elliott",
    ("p_good_to_bad", "p_bad_to_good", "loss_bad", "loss_good"),
    (0, 1, 2, 3),
    lambda leave, back, bad, good: GilbertElliott(
        p_good_to_bad=leave, p_bad_to_good=back, loss_bad=bad, loss_good=good
    ),
    lambda values: _two_states(values[0], values[1], values[[3, 2]]),
)
FOUR_STATE = Family("four-state Markov", ("p13", "p31", "p32", "p23", "p14"), (0, 2, 2, 1, 0), FourState, _four_states)
FAMILIES = {family.name: family for family in (BERNOULLI, GILBERT, GILBERT_ELLIOTT, FOUR_STATE)}


class Likelihood:
    """The likelihood of independent flows under one family, each flow stationary from its start.

    `odds` and `values` turn the parameters into log odds and back. The log odds of a parameter compare its choice with
    the last one, which has no parameter of its own.
    """

    def __init__(self, family: Family, flows: Sequence[Trace]) -> None:
        check_flows(flows)
        self.family = family
        stops = [np.append(flow.lost, flow.num_packets) for flow in flows]
        gaps = np.concatenate([np.diff(each, prepend=-1) - 1 for each in stops])
        ends = np.zeros(len(gaps), dtype=bool)
        ends[np.cumsum([len(each) for each in stops]) - 1] = True
        kinds, self._kind = np.unique(2 * gaps + ends, return_inverse=True)  # (B,)
        self._gaps, self._ends = kinds // 2, kinds % 2 == 1  # (U,)
        self._received = int(gaps.sum())

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

    def at(self, values: np.ndarray) -> float:
        """Return the log-likelihood of the flows for these values of the parameters, in nats.

        Pairs of neighbouring blocks are multiplied side by side until one matrix is left. Each matrix is scaled, so
        that long gaps neither vanish nor overflow.
        """
        chain = self.family.chain(values)
        received, lost = (1 - chain.loss)[:, None] * chain.transition, chain.loss[:, None] * chain.transition
        scale = float(np.abs(np.linalg.eigvals(received)).max()) or 1.0
        restart = np.outer(np.ones_like(chain.start), chain.start)
        table = powers(received / scale, self._gaps) @ np.where(self._ends[:, None, None], restart, lost)
        products, log_likelihood = table[self._kind], self._received * math.log(scale)
        while len(products) > 1:
            odd = products[len(products) // 2 * 2 :]
            products = np.concatenate([products[0:-1:2] @ products[1::2], odd])
            totals = np.maximum(products.sum(axis=(1, 2), keepdims=True), SMALLEST)
            log_likelihood += float(np.log(totals).sum())
            products /= totals
        return log_likelihood + math.log(max(float((chain.start @ products[0]).sum()), SMALLEST))

    def gradient(self, odds: np.ndarray) -> np.ndarray:
        """Return the gradient of the log-likelihood with respect to the log odds, by central differences, (P,)."""
        return gradient(lambda each: self.at(self.values(each)), odds)

    def maximise(self, flows: Sequence[Trace]) -> np.ndarray:
        """Return the most likely values of the parameters, (P,). The flows have both lost and received packets."""

        def negative(odds: np.ndarray) -> tuple[float, np.ndarray]:
            return -self.at(self.values(odds)), -self.gradient(odds)

        found: list[Any] = []
        for values in starts(self.family, flows):
            options: Any = {"ftol": PRECISION / max(abs(self.at(values)), 1.0), "gtol": SMALL_SLOPE, "maxiter": 200}
            bounds = [(-FARTHEST, FARTHEST)] * len(values)
            found.append(minimize(negative, self.odds(values), jac=True, bounds=bounds, options=options))
        return self.values(min(found, key=lambda each: each.fun).x)


def powers(base: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Return the powers of one matrix, (U, K, K) for exponents of shape (U,), by repeated squaring."""
    result = np.broadcast_to(np.eye(len(base)), (*exponents.shape, *base.shape)).copy()
    left = exponents.copy()
    while left.any():
        odd = left % 2 == 1
        result[odd] = result[odd] @ base
        base = base @ base
        left //= 2
    return result


def gradient(function: Callable[[np.ndarray], Any], at: np.ndarray) -> np.ndarray:
    """Return the derivatives of a function of log odds, by central differences, (P, ...)."""
    return np.array([function(at + step) - function(at - step) for step in STEP * np.eye(len(at))]) / (2 * STEP)


# Choose the parameters from which maximisation of the likelihood starts.


EDGE = 1e-6  # starts stay this far from 0 and 1, where maximisation would be stuck
MEMORIES = (0.003, 0.1)  # candidates for p_good_to_bad + p_bad_to_good
LONG_SHARES = (0.9, 0.2)  # candidates for the share of bursts that are longer than a packet


def starts(family: Family, flows: Sequence[Trace]) -> list[np.ndarray]:
    """Return parameters from which to start, (P,) each. The flows have both lost and received packets."""
    rate = num_lost(flows) / num_packets(flows)
    bursts = burst_lengths(flows)
    leave, begin = 1 / bursts.mean(), len(bursts) / num_packets(flows)
    if family is BERNOULLI:
        found = [np.array([rate])]
    elif family is GILBERT:
        found = [np.array([leave * rate / (1 - rate), leave])]
    elif family is GILBERT_ELLIOTT:
        good, bad = 0.1 * rate, max(min(0.9, rate + 0.3), (1 + rate) / 2 if rate > 0.6 else 0.0)
        share = (rate - good) / (bad - good)  # of packets in the bad state
        found = [np.array([share * memory, (1 - share) * memory, bad, good]) for memory in MEMORIES]
    else:
        assert family is FOUR_STATE, family
        found = [np.array([begin * share, leave / 2, leave * 0.49, 0.2, begin * (1 - share)]) for share in LONG_SHARES]
    return [np.clip(values, EDGE, 1 - EDGE) for values in found]
