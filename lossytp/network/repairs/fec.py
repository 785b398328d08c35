"""Forward error correction: the receiver restores lost packets from parity packets, without asking the sender.

Rizzo, "Effective erasure codes for reliable computer communication protocols", CCR 1997. This module works out which
packets stay missing. Restored packets are exact, so it never computes any parity.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from scipy.special import bdtrc

from lossytp.network.checks import check_at_least, check_at_most, check_known
from lossytp.network.repairs.repair import Send, Zero

CODES = ("mds", "xor")
MOST_PACKETS = 2**16


@dataclass(frozen=True)
class Fec(Zero):
    """Send `n` packets for each block of `k` packets of a message. A shorter last block also gets n - k parity packets.

    Args:
        n, k: packets of a block, and how many of them are the message's own.
        depth: number of interleaved blocks. Neighbours on the wire belong to different blocks, so that a burst of up
            to `depth` packets takes one of each. A message's last packets form as few blocks as can hold them.
        code: "mds", maximum distance separable, such as Reed and Solomon's (1960), restores any n - k losses of a
            block. "xor" adds every (n - k)-th packet modulo two into each parity packet, which restores one packet of
            those that it covers (RFC 5109). For n = k + 1 both are the same.

    It sends (n - k) / k extra packets for each packet of the message. A block is complete after the time of up to
    depth * n packets.
    """

    name = "fec"
    stage = "deliver"
    sends_more: ClassVar[bool] = True

    n: int
    k: int
    depth: int = 1
    code: str = "mds"

    def __post_init__(self) -> None:
        for name in ("n", "k", "depth"):
            check_at_least(name, getattr(self, name), 1)
        if self.n <= self.k:
            raise ValueError(
                f"n = {self.n} leaves no parity packet in addition to k = {self.k}: give n of at least {self.k + 1}"
            )
        check_known("code", self.code, CODES)
        check_at_most("n * depth", self.n * self.depth, MOST_PACKETS, "fewer packets")
        if self.code == "xor" and self.n - self.k > self.k:
            raise ValueError(f"n - k = {self.n - self.k} parity packets cover k = {self.k}: give n of at most 2 k")

    def deliver(self, num_packets: int, send: Send) -> np.ndarray:
        if not num_packets:
            return send(0)
        packet, group = wire_order(self, num_packets)
        lost = send(len(packet), extra=len(packet) - num_packets)
        if not len(lost):
            return lost
        restored_at_most = self.n - self.k if self.code == "mds" else 1
        too_many = np.bincount(group[lost]) > restored_at_most
        missing = packet[lost[too_many[group[lost]]]]
        return missing[missing >= 0]

    def missing_rate(self, loss_rate: float) -> float:
        """Return p times the probability that too many other packets of a packet's group are lost, in whole blocks."""
        parity = self.n - self.k
        if self.code == "mds":
            return float(loss_rate * bdtrc(parity - 1, self.n - 1, loss_rate))
        covered = [len(range(first, self.k, parity)) for first in range(parity)]  # packets of each parity packet
        return float(sum(size * loss_rate * (1 - (1 - loss_rate) ** size) for size in covered) / self.k)


@lru_cache(maxsize=1024)
def wire_order(code: Fec, num_packets: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each packet's number in the message (-1 for parity) and its group, in the order of sending.

    A group restores its losses together. It is a block or, with "xor", a parity packet and the packets that it covers.
    The message's own packets keep their order. Each run of `depth` blocks sends first its own packets, dealt out to the
    blocks in turn, then its parity.
    """
    parity = code.n - code.k
    packets, groups, first_group = [], [], 0
    for start in range(0, num_packets, code.depth * code.k):
        own = np.arange(start, min(start + code.depth * code.k, num_packets))
        blocks = min(code.depth, -(-len(own) // code.k))
        member, block = np.divmod(np.arange(len(own)), blocks)
        parity_number = np.arange(parity * blocks) // blocks
        parity_block = (len(own) + np.arange(parity * blocks)) % blocks  # on from where the own packets end
        packets += [own, np.full(parity * blocks, -1)]
        if code.code == "mds":
            groups += [first_group + block, first_group + parity_block]
            first_group += blocks
        else:
            groups += [
                first_group + block * parity + member % parity,
                first_group + parity_block * parity + parity_number,
            ]
            first_group += blocks * parity
    return np.concatenate(packets), np.concatenate(groups)
