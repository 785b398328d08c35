"""Send lost packets again."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lossytp.network.checks import check_at_least, check_at_most
from lossytp.network.repairs.repair import Send, Zero

MOST_BUDGET = 100


@dataclass(frozen=True)
class Retransmit(Zero):
    """Send lost packets again, at most `budget` times. Leave zero for packets that are still missing.

    This is selective repeat with a limit (Kurose and Ross, "Computer Networking", section 3.4). Over a Bernoulli link,
    the share p^(b + 1) stays missing, and p + ... + p^b is sent in addition. Retransmissions follow at once on the
    link, so one burst may take them too. Each costs a round trip.
    """

    name = "retransmit"
    stage = "deliver"
    sends_more: ClassVar[bool] = True

    budget: int

    def __post_init__(self) -> None:
        check_at_least("budget", self.budget, 1)
        check_at_most("budget", self.budget, MOST_BUDGET)

    def sent_again(self, num_packets: int, losses: int) -> int:
        return num_packets if losses <= self.budget else 0

    def deliver(self, num_packets: int, send: Send) -> np.ndarray:
        missing = send(num_packets)
        for _ in range(self.budget):
            if not len(missing):
                break
            missing = missing[send(len(missing), extra=len(missing))]
        return missing

    def missing_rate(self, loss_rate: float) -> float:
        return float(loss_rate ** (self.budget + 1))
