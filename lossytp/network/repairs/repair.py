"""The base class of repairs, and the simplest repair.

A repair has four sides. This package holds three of them: the transport (which packets a message takes, and which stay
missing), the theory (the moments of the contributions' weights in a result) and the waiting time. The fourth, what
replaces missing packets, needs tensors: `lossytp.parallel.missing`.

Suffixes: R ranks, H hops that carry an element.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np

Send = Callable[..., np.ndarray]
"""`send(count, extra=0)` sends `count` packets, of which the repair adds `extra`; it returns the lost ones' indices."""

Moments = tuple[np.ndarray, np.ndarray]
"""E[a_r], (R,), and E[a_r a_s], (R, R), of the weights a_r that the ranks' contributions have in a result."""


@dataclass(frozen=True)
class Repair:
    """The base class of repairs. Its methods describe a repair that does not change the transport."""

    name: ClassVar[str]
    """Its name in flags, YAML files and records."""
    stage: ClassVar[str] = "fill"
    """When it works: "select", "deliver" or "fill". `Chain` joins repairs of different stages."""
    remembers: ClassVar[bool] = False
    """Whether the receiver keeps what last arrived until the next message."""
    uses_own_part: ClassVar[bool] = False
    """Whether the receiver needs its own contribution from before the sum."""
    sends_more: ClassVar[bool] = False
    """Whether it sends additional packets, which `lossytp.network.timing` does not time."""

    def __str__(self) -> str:
        """Return the repair as a flag names it, such as ``fec(10, 8, 4, 'mds')``."""
        values = ", ".join(repr(getattr(self, field.name)) for field in fields(self))
        return f"{self.name}({values})" if values else self.name

    def round_trips(self, loss_rate: float, num_packets: int) -> float:
        """Return how many round trips a message of `num_packets` packets may wait for retransmissions."""
        return 0

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
        """Return the factor by which to scale what crossed a link of this stationary loss rate."""
        return 1.0

    def missing_rate(self, loss_rate: float) -> float:
        """Return the share of a message's packets that stay missing over a Bernoulli link of this loss rate."""
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
        """Return the moments in a receiver's result from those in the sum, which arrives with probability `arrives`."""
        mean_R, second_RR = total
        return arrives * mean_R, arrives * second_RR


@dataclass(frozen=True)
class Zero(Repair):
    """Leave missing elements at zero. On average, the sum shrinks by the loss rate."""

    name = "zero"

    def sum_moments(self, crosses_HR: np.ndarray, receivers: tuple[int, ...], rate: float) -> Moments:
        """E[a_r] = q^n(r) and E[a_r a_s] = q^(n(r) + n(s) - c(r, s)).

        Hop h delivers (d_h = 1) with probability q = 1 - p, and a_r is the product of d_h over the n(r) hops that carry
        rank r's contribution; c(r, s) of them carry that of s too.
        """
        delivered, crossed_R, common_RR = 1.0 - rate, crosses_HR.sum(0), crosses_HR.T @ crosses_HR
        return delivered**crossed_R, delivered ** (crossed_R[:, None] + crossed_R - common_RR)


ZERO = Zero()
