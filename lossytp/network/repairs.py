"""Repairs: what is sent again or in addition, what stays missing, and what it does to sums.

A repair says which packets are sent and stay missing. The values that replace missing packets need tensors: see `fills`
in `lossytp.parallel.collectives`. To add a repair, define a `Repair` and add it to `REPAIRS`.
"""

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import ClassVar

import numpy as np
from scipy.special import bdtrc

from lossytp.network.checks import (
    build,
    check_at_least,
    check_at_most,
    check_is,
    check_known,
    check_probability,
    split_outside_parentheses,
)
from lossytp.network.losses import Stream

MOST_TRIES = 10_000  # of a packet that is sent until it arrives
MOST_PACKETS = 2**16  # of interleaved blocks
MOST_BLOCK = 4096  # a product with a matrix of block x block
MOST_BUDGET = 100
CODES = ("mds", "xor")
CHOICES = ("norm", "random")
STAGES = {"layers": "protect_layers", "select": "protect", "deliver": "fec or retransmit"}
STAGES |= {"fill": "a repair of what is missing, such as stale"}

Send = Callable[..., np.ndarray]
"""`send(count, extra=0)` sends `count` packets, `extra` of them the repair's own; it returns the indices of losses."""


@dataclass(frozen=True)
class Repair:
    """The base class of repairs. Its methods describe a repair that does not change the transport."""

    name: ClassVar[str]
    """The repair's name in flags, YAML files and records."""
    stage: ClassVar[str] = "fill"
    """The stage at which it works: "layers", "select", "deliver" or "fill". `Chain` joins those of different stages."""
    remembers: ClassVar[bool] = False
    """Whether the receiver keeps the last arrived values until the next message."""
    uses_own_part: ClassVar[bool] = False
    """Whether the receiver needs a copy of its own contribution, made before the sum."""
    knows_model: ClassVar[bool] = False
    """Whether it depends on a message's tokens or layer."""

    def __str__(self) -> str:
        """Return the repair as a flag names it, such as ``fec(10, 8, 4, 'mds')``."""
        values = ", ".join(repr(getattr(self, each.name)) for each in fields(self) if each.init)
        return f"{self.name}({values})" if values else self.name

    def part(self, stage: str) -> "Repair":
        """Return the repair of this stage, or `ZERO`, which does nothing."""
        return self if self.stage == stage else ZERO

    def num_protected(self, num_packets: int) -> int:
        """Return how many of a hop's packets are sent until they arrive."""
        return 0

    def choosing(self, count: int) -> "Repair":
        """Return this repair for a hop of which `count` packets hold the positions that it protects."""
        return self

    def of_model(self, blocks: int) -> "Repair":
        """Return this repair for a model of this many transformer blocks, or raise ValueError if it has too few."""
        return self

    def deliver(self, num_packets: int, send: Send) -> np.ndarray:
        """Send a message of `num_packets` packets over one link; return the sorted indices that stay missing."""
        return send(num_packets)

    def carry(self, num_elements: int, elements_per_packet: int, send: Send) -> np.ndarray:
        """Send `num_elements` of a message over one link; return the sorted packets that stay missing.

        Protected packets go first, until they arrive. The others are numbered among themselves.
        """
        protected = missing = self.num_protected(-(-num_elements // elements_per_packet))
        tries = 0
        while missing:
            if tries == MOST_TRIES:
                fault = f"sent a packet {MOST_TRIES} times over a link that delivered none of them"
                raise ValueError(f"repair = '{self}' {fault}: give a loss rate below 1, or another repair")
            missing = len(send(missing, extra=missing if tries else 0))
            tries += 1
        num_packets = -(-self.elements_on_wire(num_elements, elements_per_packet) // elements_per_packet)
        return self.deliver(num_packets - protected, send)

    def elements_on_wire(self, num_elements: int, elements_per_packet: int) -> int:
        """Return how many elements the sender sends for `num_elements` of a message."""
        return num_elements

    def missing_rate(self, loss_rate: float) -> float:
        """Return the expected share of packets that stay missing over a Bernoulli link of this loss rate."""
        return loss_rate


@dataclass(frozen=True)
class Zero(Repair):
    """Leave missing elements at zero. On average, the sum shrinks by the loss rate."""

    name = "zero"


ZERO = Zero()


@dataclass(frozen=True)
class Rescale(Repair):
    """Divide what crossed a link by its delivery probability, so that the sum is unbiased.

    Horvitz and Thompson, "A generalization of sampling without replacement", JASA 1952, eq. 6. A path of several hops
    is divided once for each. An owner's own part crosses no link.
    """

    name = "rescale"

    def weight(self, loss_rate: float) -> float:
        """Return the factor that scales everything that crossed a link of this stationary loss rate."""
        return 1.0 if loss_rate == 1 else 1 / (1 - loss_rate)  # a link that delivers nothing has nothing to scale


@dataclass(frozen=True)
class RescaleCounted(Repair):
    """Multiply each element of a sum by R / (contributions that arrived), which the receiver counts.

    This is a ratio estimator (Cochran, "Sampling Techniques", 1977, section 6). It is biased if some contributions are
    more likely to arrive than others, as an owner's own is. An element is zero if no contribution arrived. In a gather
    phase there is nothing to count, and missing elements are zero.
    """

    name = "rescale_counted"


@dataclass(frozen=True)
class Stale(Repair):
    """Fill each gap, at the receiver, with the value that last arrived at the same site and position, and pass it on.

    A site is a layer, direction and hop. The value is zero at first, and again after the message has changed its size.
    "Distributed training under packet loss" (arXiv 2507.07114) fills parameters this way. The receiver keeps a copy of
    everything that crosses a hop. Training's checkpoints contain this copy; `LossyNetwork.state_dict` does not.
    """

    name = "stale"
    remembers: ClassVar[bool] = True


@dataclass(frozen=True)
class Local(Repair):
    """Fill in the receiver's own contribution.

    In a reduce phase it does so once for everything that a hop did not deliver, in addition to adding its own part as
    usual. In a gather phase each rank replaces the result that it lacks with its own contribution, as layers without
    synchronisation do (Lamprecht et al., "CAAT-Net", NeurIPS 2025). A switch has no part of its own and leaves zero.
    """

    name = "local"
    uses_own_part: ClassVar[bool] = True


@dataclass(frozen=True)
class Fec(Zero):
    """Forward error correction: send `n` packets for each block of `k` packets of a message.

    The receiver restores lost packets exactly, from parity packets, without asking the sender (Rizzo, "Effective
    erasure codes for reliable computer communication protocols", CCR 1997). A shorter last block also gets n - k parity
    packets.

    Args:
        n, k: packets of a block, and how many of them are the message's own.
        depth: number of interleaved blocks. Neighbours on the wire belong to different blocks, so that a burst of up
            to `depth` packets takes one of each. A message's last packets form as few blocks as can hold them.
        code: "mds", maximum distance separable, such as Reed and Solomon's (1960), restores any n - k losses of a
            block. "xor" adds every (n - k)-th packet modulo two into each parity packet, which restores one packet of
            those that it covers (RFC 5109). For n = k + 1 both are the same.

    It sends (n - k) / k extra packets for each packet of the message. A block may take the time of depth * n packets.
    """

    name = "fec"
    stage = "deliver"

    n: int
    k: int
    depth: int = 1
    code: str = "mds"

    def __post_init__(self) -> None:
        for name in ("k", "depth"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("n", self.n, self.k + 1)
        check_known("code", self.code, CODES)
        check_at_most("n * depth", self.n * self.depth, MOST_PACKETS, "fewer packets")
        if self.code == "xor":
            check_at_most("n", self.n, 2 * self.k, "at most 2 k, or each parity packet covers none")

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
    groups_of_block = 1 if code.code == "mds" else parity
    packets, groups, first_group = [], [], 0
    for start in range(0, num_packets, code.depth * code.k):
        own = np.arange(start, min(start + code.depth * code.k, num_packets))
        blocks = min(code.depth, -(-len(own) // code.k))
        member, block = np.divmod(np.arange(len(own)), blocks)
        parity_number = np.arange(parity * blocks) // blocks
        parity_block = (len(own) + np.arange(parity * blocks)) % blocks  # on from where the own packets end
        packets += [own, np.full(parity * blocks, -1)]
        groups += [
            first_group + block * groups_of_block + member % groups_of_block,
            first_group + parity_block * groups_of_block + parity_number % groups_of_block,
        ]
        first_group += blocks * groups_of_block
    return np.concatenate(packets), np.concatenate(groups)


@dataclass(frozen=True)
class Hadamard(Zero):
    """Send the randomised Hadamard coefficients of each block, spread so that a packet carries at most one of a block.

    A lost packet then takes a little from every element of a block, instead of everything from some elements. The
    expected squared error equals that of `zero`: a hop projects a block by P, with E[P] = q and E[PP] = E[P]. The error
    of the worst element is smaller (Suresh et al., "Distributed mean estimation with limited communication", ICML 2017,
    section 3; OptiReduce, NSDI 2025).

    Args:
        block: a power of two. A message with fewer packets gets smaller blocks, one with a single packet none.

    The padding is less than a block. Coefficient i of block j is number i * (number of blocks) + j on the wire.
    Element e of a hop has sign e.
    """

    name = "hadamard"

    block: int = 64

    def __post_init__(self) -> None:
        check_at_least("block", self.block, 2)
        check_known("block", self.block, [2**power for power in range(1, MOST_BLOCK.bit_length())])

    def block_for(self, num_elements: int, elements_per_packet: int) -> int:
        """Return the largest block up to `block` whose coefficients fit into packets of their own."""
        block = self.block
        while block > 1 and -(-num_elements // block) < elements_per_packet:
            block //= 2
        return block

    def elements_on_wire(self, num_elements: int, elements_per_packet: int) -> int:
        block = self.block_for(num_elements, elements_per_packet)
        return -(-num_elements // block) * block


@dataclass(frozen=True)
class Retransmit(Zero):
    """Send lost packets again, at most `budget` times. Leave zero for packets that are still missing.

    This is selective repeat with a limit (Kurose and Ross, "Computer Networking", section 3.4). Over a Bernoulli link,
    the share p^(b + 1) stays missing, and p + ... + p^b is sent in addition. Retransmissions follow at once on the
    link, so one burst may take them too. Each costs a round trip.
    """

    name = "retransmit"
    stage = "deliver"

    budget: int

    def __post_init__(self) -> None:
        check_at_least("budget", self.budget, 1)
        check_at_most("budget", self.budget, MOST_BUDGET)

    def deliver(self, num_packets: int, send: Send) -> np.ndarray:
        missing = send(num_packets)
        for _ in range(self.budget):
            if not len(missing):
                break
            missing = missing[send(len(missing), extra=len(missing))]
        return missing

    def missing_rate(self, loss_rate: float) -> float:
        return float(loss_rate ** (self.budget + 1))


@dataclass(frozen=True)
class Protect(Zero):
    """Send a share of each hop's packets reliably, before the others. Leave zero where other packets are lost.

    Deep pretrained models have a few tokens and channels with activations a thousand times the others' (Sun et al.,
    "Massive activations in large language models", COLM 2024). The packets that carry them have the largest norms.

    Args:
        share: share of a hop's packets to protect, rounded up to whole packets; above 0 and below 1.
        by: which packets. "norm" takes those of the largest Euclidean norm, as the sender holds them. "random" takes
            packets drawn once for each message length: a control.

    The sender repeats each of these packets until it arrives, which adds 1 / (1 - p) - 1 packets for each on average.
    Their number follows from the message's length alone, so what a link loses does not depend on what a message holds.
    """

    name = "protect"
    stage = "select"

    share: float
    by: str = "norm"

    def __post_init__(self) -> None:
        check_probability("share", self.share)
        if self.share in (0, 1):
            raise ValueError(f"share = {self.share} is not between 0 and 1: give a share of the packets, such as 0.01")
        check_known("by", self.by, CHOICES)

    def __str__(self) -> str:
        return f"protect({self.share})" if self.by == "norm" else f"protect({self.share}, {self.by!r})"

    def num_protected(self, num_packets: int) -> int:
        return math.ceil(self.share * num_packets - 1e-9)  # 0.07 * 100 is above 7

    def protected(self, squares: np.ndarray, seed: int) -> np.ndarray:
        """Return the sorted numbers of the packets to protect, given each packet's sum of squares, (packets,)."""
        count = self.num_protected(len(squares))
        if self.by == "random":
            squares = Stream((seed, "protect", len(squares))).uniforms(len(squares))
        return np.sort(np.argsort(-squares, kind="stable")[:count])

    def missing_rate(self, loss_rate: float) -> float:
        return (1 - self.share) * loss_rate


@dataclass(frozen=True)
class Chosen(Zero):
    """Send `count` packets of a hop reliably, before the others. The network chooses them."""

    knows_model: ClassVar[bool] = True
    count: int = field(default=0, init=False)

    def choosing(self, count: int) -> Repair:
        return self._with("count", count)

    def num_protected(self, num_packets: int) -> int:
        return self.count

    def _with(self, name: str, value: int) -> Repair:
        object.__setattr__(changed := copy(self), name, value)
        return changed


@dataclass(frozen=True)
class ProtectFirst(Chosen):
    """Send the packets that hold a sequence's first `positions` reliably, before the others.

    In many models the first tokens have the massive activations that `protect` looks for. Padding has no position, and
    a cache's tokens count. Messages of no layer, such as data-parallel gradients, have no positions.
    """

    name = "protect_first"
    stage = "select"

    positions: int

    def __post_init__(self) -> None:
        check_at_least("positions", self.positions, 1)


@dataclass(frozen=True)
class ProtectLayers(Chosen):
    """Send all packets of the model's `first` and `last` transformer blocks reliably, forward and backward.

    In the language models that we measured, half of the damage or more is done there. Messages of other blocks, and
    those of no block, lose packets as they do without it.
    """

    name = "protect_layers"
    stage = "layers"

    first: int
    last: int
    blocks: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for name in ("first", "last"):
            check_at_least(name, getattr(self, name), 0)
        check_at_least("first + last", self.first + self.last, 1)

    def of_model(self, blocks: int) -> Repair:
        check_at_most(f"repair = '{self}': first + last", self.first + self.last, blocks, "at most the model's blocks")
        return self._with("blocks", blocks)

    def covers(self, layer: int) -> bool:
        """Return whether the packets of a block, counted from 0, are sent reliably."""
        if self.blocks is None:
            raise ValueError(f"repair = '{self}' needs the number of a model's blocks: send through a model")
        return layer < self.first or layer >= self.blocks - self.last


@dataclass(frozen=True)
class Chain(Repair):
    """Select packets to protect, then deliver the others, then fill in what is still missing.

    Args:
        repairs: at most one for each stage, in this order: ``protect(0.01) + fec(10, 8) + stale``. `protect_layers` may
            stand anywhere.

    Protected packets travel unchanged. The others form a shorter message, which the other repairs treat like any
    message. `hadamard` mixes, and `rescale` scales, only packets that are not protected. `rescale` goes by the loss
    rate that `fec` or `retransmit` leaves if losses are independent.

    Raises:
        ValueError: if two repairs are of one stage, the order is another, or a repair cannot follow `protect`.
    """

    name = "chain"

    repairs: tuple[Repair, ...]

    def __post_init__(self) -> None:
        order = sorted((list(STAGES).index(repair.stage) for repair in self.repairs), key=bool)  # layers first
        if order != sorted(set(order)):
            fix = f"give at most one of each kind, in the order {', '.join(STAGES.values())}"
            raise ValueError(f"repair = '{self}' cannot be joined: {fix}")
        if self.part("select") != ZERO and isinstance(self.part("fill"), Local | RescaleCounted):
            why = f"a receiver of {self.part('fill')} must know which packets other ranks protect"
            raise ValueError(f"repair = '{self}': {why}; join protect with rescale, stale or hadamard")
        for attribute in ("remembers", "uses_own_part", "knows_model"):
            object.__setattr__(self, attribute, any(getattr(repair, attribute) for repair in self.repairs))

    def __str__(self) -> str:
        return " + ".join(map(str, self.repairs))

    def part(self, stage: str) -> Repair:
        return next((repair for repair in self.repairs if repair.stage == stage), ZERO)

    def choosing(self, count: int) -> Repair:
        return Chain(tuple(repair.choosing(count) for repair in self.repairs))

    def of_model(self, blocks: int) -> Repair:
        return Chain(tuple(repair.of_model(blocks) for repair in self.repairs))

    def num_protected(self, num_packets: int) -> int:
        return self.part("select").num_protected(num_packets)

    def deliver(self, num_packets: int, send: Send) -> np.ndarray:
        return self.part("deliver").deliver(num_packets, send)

    def elements_on_wire(self, num_elements: int, elements_per_packet: int) -> int:
        num_packets = -(-num_elements // elements_per_packet)
        protected = self.num_protected(num_packets)
        others = (num_packets - protected) * elements_per_packet if protected else num_elements
        return protected * elements_per_packet + self.part("fill").elements_on_wire(others, elements_per_packet)

    def missing_rate(self, loss_rate: float) -> float:
        return self.part("select").missing_rate(self.part("deliver").missing_rate(loss_rate))


PLAIN = (Zero, Rescale, RescaleCounted, Stale, Local, Fec, Hadamard, Retransmit)
REPAIRS: dict[str, type[Repair]] = {kind.name: kind for kind in (*PLAIN, Protect, ProtectFirst, ProtectLayers)}


def repair_named(text: str) -> Repair:
    """Return the repair that `text` names, such as ``fec(10, 8, depth=4)`` or ``protect(0.01) + hadamard(64)``.

    Raises:
        ValueError: if a name is unknown, a value does not fit its repair, or the repairs cannot be joined.
    """
    check_is("repair", text, str, "a name, or name(1, option=2)")
    repairs = tuple(build("repair", part, REPAIRS) for part in split_outside_parentheses(text, "+"))
    return repairs[0] if len(repairs) == 1 else Chain(repairs)
