"""Join repairs that work on different stages of a message: ``protect(0.01) + fec(10, 8) + stale``."""

from dataclasses import dataclass

import numpy as np

from lossytp.network.repairs.local import Local
from lossytp.network.repairs.protect import Protect
from lossytp.network.repairs.repair import ZERO, Moments, Repair, Send
from lossytp.network.repairs.rescale import RescaleCounted

STAGES = {"select": "protect", "deliver": "fec or retransmit", "fill": "a repair of what is missing, such as stale"}


@dataclass(frozen=True)
class Chain(Repair):
    """Select packets to protect, then deliver the others, then fill in what is still missing.

    Args:
        repairs: at most one for each stage, in this order.

    Protected packets travel unchanged. The others form a shorter message, which the other repairs treat like any
    message. `hadamard` mixes, and `rescale` scales, only packets that are not protected. `rescale` goes by the loss
    rate that `fec` or `retransmit` leaves if losses are independent.

    Raises:
        ValueError: if two repairs are of one stage, the order is another, or a repair cannot follow `protect`.
    """

    name = "chain"

    repairs: tuple[Repair, ...]

    def __post_init__(self) -> None:
        order = [list(STAGES).index(repair.stage) for repair in self.repairs]
        if order != sorted(set(order)):
            raise ValueError(
                f"repair = '{self}' cannot be joined: give at most one of each kind, in the order "
                f"{', '.join(STAGES.values())}"
            )
        fill = self.part("fill")
        if self.repairs[0].stage == "select" and isinstance(fill, Local | RescaleCounted):
            raise ValueError(
                f"repair = '{self}': a receiver of {fill.name} must know which packets other ranks protect; join "
                "protect with rescale, stale or hadamard"
            )
        for attribute in ("remembers", "uses_own_part", "sends_more"):
            object.__setattr__(self, attribute, any(getattr(repair, attribute) for repair in self.repairs))

    def __str__(self) -> str:
        return " + ".join(map(str, self.repairs))

    def part(self, stage: str) -> Repair:
        """Return the repair of this stage, or `ZERO`, which does nothing."""
        return next((repair for repair in self.repairs if repair.stage == stage), ZERO)

    def elements_on_wire(self, num_elements: int, elements_per_packet: int) -> int:
        protected, others = self._split(num_elements, elements_per_packet)
        if not protected:
            return self.part("fill").elements_on_wire(num_elements, elements_per_packet)
        return protected + self.part("fill").elements_on_wire(others, elements_per_packet)

    def carry(self, num_elements: int, elements_per_packet: int, send: Send) -> np.ndarray:
        protected, _ = self._split(num_elements, elements_per_packet)
        num_packets = -(-self.elements_on_wire(num_elements, elements_per_packet) // elements_per_packet)
        select, deliver = self.part("select"), self.part("deliver")
        if isinstance(select, Protect):
            return select.deliver_with(deliver, num_packets, protected // elements_per_packet, send)
        return deliver.deliver(num_packets, send)

    def _split(self, num_elements: int, capacity: int) -> tuple[int, int]:
        """Return how many elements fit into the protected packets and into the others."""
        select, num_packets = self.part("select"), -(-num_elements // capacity)
        count = select.num_protected(num_packets) if isinstance(select, Protect) else 0
        return count * capacity, (num_packets - count) * capacity

    def sent_again(self, num_packets: int, losses: int) -> int:
        select = self.part("select")
        protected = select.sent_again(num_packets, losses)
        return protected + self.part("deliver").sent_again(num_packets - protected, losses)

    def weight(self, loss_rate: float) -> float:
        """Return the factor for packets that are not protected."""
        return self.part("fill").weight(self.part("deliver").missing_rate(loss_rate))

    def missing_rate(self, loss_rate: float) -> float:
        return self.part("select").missing_rate(self.part("deliver").missing_rate(loss_rate))

    def sum_moments(self, crosses_HR: np.ndarray, receivers: tuple[int, ...], rate: float) -> Moments:
        return self.part("fill").sum_moments(crosses_HR, receivers, rate)

    def result_moments(self, total: Moments, receiver: int, arrives: float) -> Moments:
        return self.part("fill").result_moments(total, receiver, arrives)


def stage_of(repair: Repair, stage: str) -> Repair:
    """Return the part of `repair` that works on a stage, or `ZERO`, which does nothing."""
    if isinstance(repair, Chain):
        return repair.part(stage)
    return repair if repair.stage == stage else ZERO


def without_protection(repair: Repair) -> Repair:
    """Return what `repair` does to packets that are not protected."""
    if not isinstance(repair, Chain):
        return ZERO if isinstance(repair, Protect) else repair
    others = tuple(part for part in repair.repairs if not isinstance(part, Protect))
    return others[0] if len(others) == 1 else Chain(others)
