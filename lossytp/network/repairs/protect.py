"""Send the strongest packets reliably."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

import numpy as np

from lossytp.network.checks import check_known, check_number
from lossytp.network.repairs.repair import MOST_TRIES, ZERO, Repair, Send, Zero
from lossytp.network.streams import Stream

CHOICES = ("norm", "random")


@dataclass(frozen=True)
class Protect(Zero):
    """Send a share of each hop's packets reliably, before the others. Leave zero where other packets are lost.

    Deep pretrained models have a few tokens and channels with activations a thousand times the others' (Sun et al.,
    "Massive activations in large language models", COLM 2024). The packets that carry them have the largest norms.

    Args:
        share: share of a hop's packets to protect, rounded up to whole packets; above 0 and below 1.
        by: which packets. "norm" takes those of the largest Euclidean norm, as the sender holds them. "random" takes
            places drawn once for each message length: a control.

    The sender repeats each of these packets until it arrives, which adds 1 / (1 - p) - 1 packets for each on average.
    Their number follows from the message's length alone, so a link loses the same packets of its stream whatever the
    message holds.
    """

    name = "protect"
    stage = "select"
    sends_more: ClassVar[bool] = True

    share: float
    by: str = "norm"

    def __post_init__(self) -> None:
        check_number("share", self.share, Real, "a share of the packets, such as 0.01")
        if not 0 < self.share < 1:
            raise ValueError(
                f"share = {self.share!r} is not between 0 and 1: give a share of the packets, such as 0.01"
            )
        check_known("by", self.by, CHOICES)

    def __str__(self) -> str:
        return f"protect({self.share})" if self.by == "norm" else f"protect({self.share}, {self.by!r})"

    def num_protected(self, num_packets: int) -> int:
        """Return how many of a hop's packets are sent reliably."""
        return math.ceil(self.share * num_packets - 1e-9)  # 0.07 * 100 is above 7

    def protected(self, squares: np.ndarray, seed: int) -> np.ndarray:
        """Return the sorted numbers of the packets that are sent reliably.

        Args:
            squares: each packet's sum of squares, (packets,).
            seed: the network's seed, for random places.
        """
        count = self.num_protected(len(squares))
        if self.by == "random":
            squares = Stream((seed, "protect", len(squares))).uniforms(len(squares))
        return np.sort(np.argsort(-squares, kind="stable")[:count])

    def deliver(self, num_packets: int, send: Send) -> np.ndarray:
        """Return which packets stay missing, numbered among those that are not protected."""
        return self.deliver_with(ZERO, num_packets, self.num_protected(num_packets), send)

    def deliver_with(self, others: Repair, num_packets: int, count: int, send: Send) -> np.ndarray:
        """Send `count` packets until they have arrived, and let `others` deliver the remaining ones.

        Raises:
            ValueError: if the link seems to deliver nothing.
        """
        outstanding = send(count)
        for _ in range(MOST_TRIES):
            if not len(outstanding):
                return others.deliver(num_packets - count, send)
            outstanding = send(len(outstanding), extra=len(outstanding))
        raise ValueError(
            f"repair = '{self}' sent a packet {MOST_TRIES} times over a link that delivered none of them: give a "
            "loss rate below 1, or another repair"
        )

    def sent_again(self, num_packets: int, losses: int) -> int:
        return self.num_protected(num_packets)

    def missing_rate(self, loss_rate: float) -> float:
        return (1 - self.share) * loss_rate
