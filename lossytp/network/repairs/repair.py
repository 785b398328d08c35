"""Define the base class of repairs, and the simplest repair.

A repair has four sides. This package holds three: transport (which packets are sent, and which stay missing), theory
(the moments of the contributions' weights in a result) and waiting time. The fourth, the values that replace missing
packets, needs tensors and lives in `lossytp.parallel.missing`.

Suffixes: R ranks, H hops that carry an element.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np

MOST_TRIES = 10_000

Send = Callable[..., np.ndarray]
"""`send(count, extra=0)` sends `count` packets, `extra` of them the repair's own; it returns the indices of losses."""

Moments = tuple[np.ndarray, np.ndarray]
"""E[a_r], (R,), and E[a_r a_s], (R, R). A result is sum_r a_r x_r: a_r is the weight of rank r's contribution x_r."""


@dataclass(frozen=True)
class Repair:
    """The base class of repairs. Its methods describe a repair that does not change the transport."""

    name: ClassVar[str]
    """The repair's name in flags, YAML files and records."""
    stage: ClassVar[str] = "fill"
    """The stage at which it works: "select", "deliver" or "fill". `Chain` joins repairs of different stages."""
    remembers: ClassVar[bool] = False
    """Whether the receiver keeps the last arrived values until the next message."""
    uses_own_part: ClassVar[bool] = False
    """Whether the receiver needs a copy of its own contribution, made before the sum."""
    sends_more: ClassVar[bool] = False
    """Whether it sends extra packets, which `lossytp.network.timing` does not time."""

    def __str__(self) -> str:
        """Return the repair as a flag names it, such as ``fec(10, 8, 4, 'mds')``."""
        values = ", ".join(repr(getattr(self, field.name)) for field in fields(self))
        return f"{self.name}({values})" if values else self.name

    def sent_again(self, num_packets: int, losses: int) -> int:
        """Return how many packets the repair would send again if each had been lost `losses` times."""
        return 0

    def round_trips(self, loss_rate: float, num_packets: int) -> float:
        """Return how many round trips a message waits for retransmissions, on average over a Bernoulli link.

        Each round sends again, side by side, what the round before lost. Round j takes place unless all k packets that
        it could send again have arrived, so with probability 1 - (1 - p^j)^k.
        """
        rounds = 0.0
        for losses in range(1, MOST_TRIES):
            count, lost = self.sent_again(num_packets, losses), loss_rate**losses
            chance = -math.expm1(count * math.log1p(-lost)) if lost < 1 else float(count > 0)
            if chance < 1e-9:
                return rounds
            rounds += chance
        return math.inf if loss_rate == 1 else rounds

    def elements_on_wire(self, num_elements: int, elements_per_packet: int) -> int:
        """Return how many elements the sender sends for `num_elements` of a message."""
        return num_elements

    def deliver(self, num_packets: int, send: Send) -> np.ndarray:
        """Send a message of `num_packets` packets over one link; return the sorted indices that stay missing."""
        return send(num_packets)

    def carry(self, num_elements: int, elements_per_packet: int, send: Send) -> np.ndarray:
        """Send `num_elements` of a message over one link; return the sorted packets that stay missing."""
        return self.deliver(-(-self.elements_on_wire(num_elements, elements_per_packet) // elements_per_packet), send)

    def weight(self, loss_rate: float) -> float:
        """Return the factor that scales everything that crossed a link of this stationary loss rate."""
        return 1.0

    def missing_rate(self, loss_rate: float) -> float:
        """Return the expected share of packets that stay missing over a Bernoulli link of this loss rate."""
        return loss_rate

    def sum_moments(self, crosses_HR: np.ndarray, receivers: tuple[int, ...], rate: float) -> Moments:
        """Return the moments of the contributions' weights in one element of the sum.

        Args:
            crosses_HR: 1 where hop h of the reduce phase carries rank r's contribution, else 0.
            receivers: for each hop, the rank at its end, or `SWITCH`.
            rate: share of packets that stay missing, from `missing_rate`.

        Raises:
            ValueError: if the repair has no closed form.
        """
        raise ValueError(f"repair = {self} has no expected squared error: give {type(self).__name__} sum_moments")

    def result_moments(self, total: Moments, receiver: int, arrives: float) -> Moments:
        """Return the moments in a receiver's result, given those in the sum.

        Args:
            total: the moments in the sum.
            receiver: the rank that receives the sum.
            arrives: probability that the sum reaches it.
        """
        mean_R, second_RR = total
        return arrives * mean_R, arrives * second_RR


@dataclass(frozen=True)
class Zero(Repair):
    """Leave missing elements at zero. On average, the sum shrinks by the loss rate."""

    name = "zero"

    def sum_moments(self, crosses_HR: np.ndarray, receivers: tuple[int, ...], rate: float) -> Moments:
        """Return E[a_r] = q^n(r) and E[a_r a_s] = q^(n(r) + n(s) - c(r, s)).

        Hop h delivers a packet (d_h = 1) with probability q = 1 - p. The weight a_r is the product of d_h over the n(r)
        hops that carry rank r's contribution. Of these hops, c(r, s) also carry rank s's.
        """
        delivered, crossed_R, common_RR = 1.0 - rate, crosses_HR.sum(0), crosses_HR.T @ crosses_HR
        return delivered**crossed_R, delivered ** (crossed_R[:, None] + crossed_R - common_RR)


ZERO = Zero()
