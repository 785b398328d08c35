"""The packets of a message, and the links that they cross: direct, ring, tree, switch and sender.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009, split an
all-reduce into a reduce-scatter (the reduce phase) and an all-gather (the gather phase) of chunks. A hop says which
elements cross which link, and which ranks lack them if a packet is lost. To add an algorithm, define an `Algorithm` and
add it to `ALGORITHMS`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from operator import index
from typing import NamedTuple, Protocol

import numpy as np

from lossytp.network.checks import check_at_least, check_at_most, check_known, shown

MOST = 2**40  # keeps the number of an element inside int64


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Packet geometry.

    Args:
        mtu_bytes: size of a whole packet, at most `MOST`.
        header_bytes: bytes of it that the header takes. The default, 44, is IP 20, UDP 8, and 16 for the key, sequence
            number and offset that let a receiver see what is missing.
        elements: elements that a packet carries, whatever their size. If left out, they follow from the bytes.

    Raises:
        ValueError: if a packet has no room for an element of 8 bytes, or a value is above `MOST`.
    """

    mtu_bytes: int = 1500
    header_bytes: int = 44
    elements: int | None = None

    def __post_init__(self) -> None:
        check_at_least("header_bytes", self.header_bytes, 0)
        least = self.header_bytes + 8
        if isinstance(self.mtu_bytes, Integral) and self.mtu_bytes < least:
            raise ValueError(
                f"mtu_bytes = {self.mtu_bytes} leaves no room for an 8-byte element after a header of "
                f"{self.header_bytes} bytes: give at least {least}"
            )
        check_at_least("mtu_bytes", self.mtu_bytes, least)
        check_at_most("mtu_bytes", self.mtu_bytes, MOST)
        if self.elements is not None:
            check_at_least("elements", self.elements, 1)
            check_at_most("elements", self.elements, MOST)

    def elements_per_packet(self, itemsize: int) -> int:
        """Return how many whole elements of `itemsize` bytes a packet carries: 364 in fp32 at the default MTU."""
        if self.elements is not None:
            return self.elements
        return (self.mtu_bytes - self.header_bytes) // itemsize

    def num_packets(self, num_elements: int, itemsize: int) -> int:
        """Return how many packets `num_elements` elements fill; the last one may be partly empty."""
        return -(-num_elements // self.elements_per_packet(itemsize))


# Define which messages of a collective wait for which. `lossytp.network.timing` times them.


class Schedule(NamedTuple):
    """The messages of an all-reduce among R ranks, and when all ranks have the result.

    Each of `links(R)` links carries `messages(R)` messages, one after the other. A message has `chunks(R)` chunks of
    ceil(n / R) elements if `split`, else all n elements. A rank that sends to several ranks at once has one port for
    all of them (`direct`, whose chunks form one message) or one port for each (`tree`). `complete` computes the seconds
    of the collectives, `(samples,)`, from those of the messages, `(messages, samples, links)`.
    """

    links: Callable[[int], int]
    messages: Callable[[int], int]
    chunks: Callable[[int], int]
    split: bool
    complete: Callable[[np.ndarray], np.ndarray]

    def num_packets(self, num_elements: int, itemsize: int, ranks: int, wire: Wire) -> int:
        """Return the packets of each message of an all-reduce of `num_elements` elements of `itemsize` bytes."""
        elements = -(-num_elements // ranks) if self.split else num_elements
        return self.chunks(ranks) * wire.num_packets(elements, itemsize)


def in_steps(seconds: np.ndarray) -> np.ndarray:
    """Add up steps, each of which ends with the slowest rank's message; link r is rank r's."""
    return seconds.max(axis=-1).sum(axis=0)


def around_ring(seconds: np.ndarray) -> np.ndarray:
    """Time a ring: rank r's message k + 1 starts once its message k has arrived and rank r - 1's has reached it.

    2 (R - 1) steps of chunks (Patarasuk and Yuan, JPDC 2009). Only neighbours wait for each other, so the time is
    a recursion in max and plus (Baccelli et al., "Synchronization and linearity", 1992), not the sum of slowest links.
    """
    arrived = np.zeros(seconds.shape[1:])
    for message in seconds:
        arrived = np.maximum(arrived, np.roll(arrived, 1, axis=-1)) + message
    return arrived.max(axis=-1)


def over_tree(seconds: np.ndarray) -> np.ndarray:
    """Time the binary tree: rank r's uplink is r - 1, its downlink R - 2 + r.

    A rank sends its sum up once it has both children's, and sends the result down to both at once.
    """
    (ways,) = seconds
    up, down = np.split(ways, 2, axis=-1)
    ranks = up.shape[-1] + 1
    ready = np.zeros((len(ways), ranks))
    for child in range(ranks - 1, 0, -1):
        parent = (child - 1) // 2
        ready[:, parent] = np.maximum(ready[:, parent], ready[:, child] + up[:, child - 1])
    for child in range(1, ranks):
        ready[:, child] = ready[:, (child - 1) // 2] + down[:, child - 1]
    return ready.max(axis=-1)


def through_switch(seconds: np.ndarray) -> np.ndarray:
    """Time a switch that sends the sum once it has every rank's message. Rank r's uplink is r, its downlink R + r.

    In-network aggregation (Sapio et al., "Scaling distributed machine learning with in-network aggregation", NSDI
    2021) without their streaming, which would let the way down overlap the way up.
    """
    (ways,) = seconds
    up, down = np.split(ways, 2, axis=-1)
    return up.max(axis=-1) + down.max(axis=-1)


# Define the terms of a collective algorithm: the hops of a message, and what a loss on each of them destroys.
#
# Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009, split an
# all-reduce into a reduce-scatter (the reduce phase) and an all-gather (the gather phase) of chunks.


SWITCH = -1


class Hop(NamedTuple):
    """Elements [start, stop) of a message that cross the directed link `src` -> `dst` in packets of their own.

    `src` and `dst` are global ranks or `SWITCH`. If a packet is lost, the ranks at `positions` in the group lack its
    elements: in their contributions in a reduce phase, in their results in a gather phase.
    """

    src: int
    dst: int
    start: int
    stop: int
    positions: tuple[int, ...]

    def num_packets(self, capacity: int) -> int:
        """Return how many packets of `capacity` elements the hop's elements fill."""
        return -(-(self.stop - self.start) // capacity)


class Missing(NamedTuple):
    """The packets that a message lacks after each of its hops.

    Attributes:
        packets: for each hop, the sorted numbers of the missing packets among those that are not protected, int64.
        reliable: whether the network was reliable, so that there is nothing to repair.
        protected: for each hop, the sorted numbers of the packets that `protect` sent reliably. It is empty without
            `protect`, and until `lossytp.parallel.collectives` has chosen them.
    """

    packets: list[np.ndarray]
    reliable: bool = False
    protected: Sequence[np.ndarray] = ()

    def backwards(self) -> "Missing":
        """Return the same, with the last hop first."""
        return self._replace(packets=self.packets[::-1], protected=self.protected[::-1])

    @property
    def any(self) -> bool:
        return any(len(packets) for packets in self.packets)


Hops = tuple[Hop, ...]  # a hop comes after those whose data it carries


class Routes(Protocol):
    """Return the hops of a message of `num_elements` among `ranks`, in chunks of whole `unit`s of elements.

    A unit is one element or, if chunks are shards of a residual stream, all elements of a token.
    """

    def __call__(self, num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops: ...


def no_hops(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
    """Return no hops, for a phase that is reliable or does not exist."""
    return ()


class Algorithm(NamedTuple):
    """The routes of every collective operation, each cached."""

    reduce: Routes
    """All-reduce, first phase: contributions on their way to the sum."""
    gather: Routes
    """All-reduce, second phase: the sum on its way to every rank."""
    reduce_scatter: Routes
    """Contributions on their way to the sum of each rank's own chunk."""
    all_gather: Routes
    """Each rank's chunk on its way to all others."""
    schedule: Schedule | None = None
    """How long an all-reduce takes; None if it cannot be timed."""
    name: str = ""
    """What flags and records call it; pickles refer to it."""

    def __reduce__(self) -> tuple:

        return algorithm_named, (self.name,)

    def pair(self, sequence_parallel: bool) -> tuple[Routes, Routes]:
        """Return the two phases of an all-reduce, or reduce-scatter and all-gather if `sequence_parallel`."""
        return (self.reduce_scatter, self.all_gather) if sequence_parallel else (self.reduce, self.gather)

    @property
    def sum_reaches_all(self) -> bool:
        """Return whether the sum reaches every rank, because no link carries it back."""
        return self.gather is no_hops

    @property
    def has_receiving_ranks(self) -> bool:
        """Return whether a rank, and not only a switch, receives parts of an all-reduce."""
        return any(hop.dst != SWITCH for routes in (self.reduce, self.gather) for hop in routes(16, (0, 1, 2, 3)))

    def hops_carry_one(self, sequence_parallel: bool = False) -> bool:
        """Return whether every lost packet affects only one rank."""
        return all(
            len(hop.positions) == 1 for routes in self.pair(sequence_parallel) for hop in routes(16, (0, 1, 2, 3))
        )


def chunk_bounds(num_elements: int, num_chunks: int, unit: int = 1) -> list[tuple[int, int]]:
    """Return the bounds of each chunk. Chunk c is [c * size, (c + 1) * size), clipped to `num_elements`.

    `size` is num_elements / num_chunks, rounded up to whole units.
    """
    size = -(-num_elements // (num_chunks * unit)) * unit
    return [(min(c * size, num_elements), min((c + 1) * size, num_elements)) for c in range(num_chunks)]


# Names of directed links: a pair (src, dst) of global ranks, where `SWITCH` stands for the switch.


Link = tuple[int, int]  # src, dst


def checked_link(key: object) -> Link:
    """Return `key` as a pair of Python's integers.

    Raises:
        TypeError: if `key` is not a pair of whole numbers.
        ValueError: if an end is below `SWITCH`, or both are the same.
    """
    ends = key if isinstance(key, tuple) else ()
    if len(ends) != 2 or not all(isinstance(end, Integral) and not isinstance(end, bool) for end in ends):
        raise TypeError(f"link = {shown(key)} is not a pair of ranks: give (src, dst), such as (0, 1)")
    src, dst = index(ends[0]), index(ends[1])
    if min(src, dst) < SWITCH:
        raise ValueError(f"link = {key} names a rank below 0: give ranks from 0, or {SWITCH} for the switch")
    if src == dst:
        raise ValueError(f"link = {key} leads from {src} to itself: give two different ends")
    return src, dst


def check_links_within(links: Iterable[Link], num_ranks: int) -> None:
    """Raise ValueError if an end of a link is a rank above the last of `num_ranks` ranks."""
    for src, dst in links:
        if max(src, dst) >= num_ranks:
            raise ValueError(
                f"link {src}>{dst} names rank {max(src, dst)}, which is above {num_ranks - 1}, the last of "
                f"{num_ranks} ranks: name links among ranks 0 to {num_ranks - 1}"
            )


# Every rank sends chunk c to rank c, which sums it and sends the sum to every other rank: one hop per phase.
#
# The direct exchange of Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
# IJHPCA 2005, section 5 (reduce-scatter by pairwise exchange). An owner's own part crosses no link, so a fraction
# (R - 1) / R of the contributions is at risk.


@lru_cache(maxsize=1024)
def direct_reduce(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
    """Route rank r's part of chunk c over link r -> c. A loss there affects only this part."""
    return tuple(
        Hop(src, owner, start, stop, (position,))
        for position, src in enumerate(ranks)
        for owner, (start, stop) in zip(ranks, chunk_bounds(num_elements, len(ranks), unit), strict=True)
        if owner != src and stop > start
    )


@lru_cache(maxsize=1024)
def direct_gather(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
    """Route chunk c of the sum over link c -> r. A loss there affects only rank r."""
    return tuple(
        Hop(owner, dst, start, stop, (position,))
        for owner, (start, stop) in zip(ranks, chunk_bounds(num_elements, len(ranks), unit), strict=True)
        for position, dst in enumerate(ranks)
        if owner != dst and stop > start
    )


# A rank's R - 1 chunks share its port as one message. The sums come back once the last rank has sent its chunks.
DIRECT_SCHEDULE = Schedule(lambda ranks: ranks, lambda ranks: 2, lambda ranks: ranks - 1, True, in_steps)
DIRECT = Algorithm(
    reduce=direct_reduce,
    gather=direct_gather,
    reduce_scatter=direct_reduce,
    all_gather=direct_gather,
    schedule=DIRECT_SCHEDULE,
    name="direct",
)


# Every rank sends only to its neighbour. Chunks travel round the ring twice, first as growing sums, then as sums.
#
# Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009, section 4.
# Rank c owns the sum of chunk c: its partial sum starts at rank c + 1.


@lru_cache(maxsize=1024)
def ring_reduce(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
    """Route partial sums; a loss destroys the parts of all ranks upstream."""
    size = len(ranks)
    chunks = chunk_bounds(num_elements, size, unit)
    hops = []
    for step in range(size - 1):
        for position, src in enumerate(ranks):
            chunk = (position - step - 1) % size
            upstream = tuple((chunk + 1 + joined) % size for joined in range(step + 1))
            hops.append(Hop(src, ranks[(position + 1) % size], *chunks[chunk], upstream))
    return tuple(hop for hop in hops if hop.stop > hop.start)


@lru_cache(maxsize=1024)
def ring_gather(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
    """Route sums; a loss starves every rank downstream."""
    size = len(ranks)
    chunks = chunk_bounds(num_elements, size, unit)
    hops = []
    for step in range(size - 1):
        for position, src in enumerate(ranks):
            chunk = (position - step) % size
            downstream = tuple((position + 1 + passed) % size for passed in range(size - 1 - step))
            hops.append(Hop(src, ranks[(position + 1) % size], *chunks[chunk], downstream))
    return tuple(hop for hop in hops if hop.stop > hop.start)


RING_SCHEDULE = Schedule(lambda ranks: ranks, lambda ranks: 2 * (ranks - 1), lambda ranks: 1, True, around_ring)
RING = Algorithm(
    reduce=ring_reduce,
    gather=ring_gather,
    reduce_scatter=ring_reduce,
    all_gather=ring_gather,
    schedule=RING_SCHEDULE,
    name="ring",
)


# One binary tree, rooted at the first rank: whole messages, sums on the way up, the sum on the way down.
#
# This is a reduction followed by a broadcast, as in Thakur, Rabenseifner and Gropp, "Optimization of collective
# communication operations in MPICH", IJHPCA 2005, section 6. The tree is a complete binary one: the parent of position
# i is (i - 1) // 2. (NCCL runs two such trees on half the message each: Sanders, Speck and Träff, "Two-tree algorithms
# for full bandwidth broadcast, reduction and scan", Parallel Computing 2009.)


@lru_cache(maxsize=1024)
def tree_reduce(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
    """Route sums up; a loss destroys the sum of the subtree below."""
    children = reversed(range(1, len(ranks)))  # the deepest first
    return tuple(_up(child, ranks, 0, num_elements, _subtree(child, len(ranks))) for child in children if num_elements)


@lru_cache(maxsize=1024)
def tree_gather(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
    """Route the sum down; a loss starves the subtree below."""
    children = range(1, len(ranks))
    return tuple(
        _down(child, ranks, 0, num_elements, _subtree(child, len(ranks))) for child in children if num_elements
    )


@lru_cache(maxsize=1024)
def tree_reduce_scatter(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
    """Route sums to the root, then each rank's chunk down its branch, where a lost packet takes the sum along."""
    everyone = tuple(range(len(ranks)))
    down = [
        _down(position, ranks, start, stop, everyone)
        for owner, (start, stop) in enumerate(chunk_bounds(num_elements, len(ranks), unit))
        for position in reversed(_branch(owner))
        if stop > start
    ]
    return (*tree_reduce(num_elements, ranks, unit), *down)


@lru_cache(maxsize=1024)
def tree_all_gather(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
    """Route each rank's chunk up its branch, where a loss starves all other ranks, then all chunks down the tree.

    A rank keeps its own chunk. It receives the other chunks from its parent, and passes all of them on.
    """
    size = len(ranks)
    chunks = chunk_bounds(num_elements, size, unit)
    hops = []
    for owner, (start, stop) in enumerate(chunks):
        others = tuple(position for position in range(size) if position != owner)
        hops += [_up(position, ranks, start, stop, others) for position in _branch(owner)]
    for child in range(1, size):
        below = _subtree(child, size)
        for owner, (start, stop) in enumerate(chunks):
            starved = tuple(position for position in below if position != owner)
            hops.append(_down(child, ranks, start, stop, starved))
    return tuple(hop for hop in hops if hop.stop > hop.start and hop.positions)


def _subtree(root: int, size: int) -> tuple[int, ...]:
    return (root, *(p for child in (2 * root + 1, 2 * root + 2) if child < size for p in _subtree(child, size)))


def _branch(position: int) -> list[int]:
    """Return the positions from this one up to the root's child: the lower ends of the links between."""
    return [position, *_branch((position - 1) // 2)] if position else []


def _up(child: int, ranks: tuple[int, ...], start: int, stop: int, positions: tuple[int, ...]) -> Hop:
    return Hop(ranks[child], ranks[(child - 1) // 2], start, stop, positions)


def _down(child: int, ranks: tuple[int, ...], start: int, stop: int, positions: tuple[int, ...]) -> Hop:
    return Hop(ranks[(child - 1) // 2], ranks[child], start, stop, positions)


TREE_SCHEDULE = Schedule(lambda ranks: 2 * (ranks - 1), lambda ranks: 1, lambda ranks: 1, False, over_tree)
TREE = Algorithm(
    reduce=tree_reduce,
    gather=tree_gather,
    reduce_scatter=tree_reduce_scatter,
    all_gather=tree_all_gather,
    schedule=TREE_SCHEDULE,
    name="tree",
)


# In-network reduction: ranks send whole messages up to a switch, which sums them and sends the sum down to each.
#
# Sapio et al., "Scaling distributed machine learning with in-network aggregation" (SwitchML), NSDI 2021; Graham et al.,
# "Scalable Hierarchical Aggregation Protocol (SHArP)", COMHPC 2016.


@lru_cache(maxsize=1024)
def switch_reduce(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
    """Route contributions up. A loss on a rank's uplink affects only its contribution."""
    return tuple(Hop(rank, SWITCH, 0, num_elements, (position,)) for position, rank in enumerate(ranks) if num_elements)


@lru_cache(maxsize=1024)
def switch_gather(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
    """Route the sum down. A loss on a rank's downlink affects only this rank."""
    return tuple(Hop(SWITCH, rank, 0, num_elements, (position,)) for position, rank in enumerate(ranks) if num_elements)


@lru_cache(maxsize=1024)
def switch_reduce_scatter(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
    """Route each rank's chunk of the sum down to this rank only. A packet lost there takes all contributions along."""
    everyone = tuple(range(len(ranks)))
    chunks = zip(ranks, chunk_bounds(num_elements, len(ranks), unit), strict=True)
    down = (Hop(SWITCH, rank, start, stop, everyone) for rank, (start, stop) in chunks if stop > start)
    return (*switch_reduce(num_elements, ranks, unit), *down)


@lru_cache(maxsize=1024)
def switch_all_gather(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
    """Route each rank's chunk up, where a loss starves all other ranks, and down to each of them."""
    chunks = chunk_bounds(num_elements, len(ranks), unit)
    positions = range(len(ranks))
    up = [Hop(ranks[c], SWITCH, *chunks[c], tuple(p for p in positions if p != c)) for c in positions]
    down = [Hop(SWITCH, ranks[p], *chunks[c], (p,)) for p in positions for c in positions if c != p]
    return tuple(hop for hop in up + down if hop.stop > hop.start and hop.positions)


SWITCH_SCHEDULE = Schedule(lambda ranks: 2 * ranks, lambda ranks: 1, lambda ranks: 1, False, through_switch)
SWITCH_ALGORITHM = Algorithm(
    reduce=switch_reduce,
    gather=switch_gather,
    reduce_scatter=switch_reduce_scatter,
    all_gather=switch_all_gather,
    schedule=SWITCH_SCHEDULE,
    name="switch",
)


# The abstraction of earlier studies: each rank has one lossy link, and a packet lost there is lost for every rank.
#
# No network works like this. It models studies that zero parts of a rank's message before a plain all-reduce.


@lru_cache(maxsize=1024)
def sender_reduce(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
    """Route a rank's whole contribution; a loss removes a packet for everyone, its sender included."""
    return tuple(Hop(rank, SWITCH, 0, num_elements, (position,)) for position, rank in enumerate(ranks) if num_elements)


@lru_cache(maxsize=1024)
def sender_all_gather(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
    """Route a rank's chunk; a loss starves every rank, its sender included."""
    everyone = tuple(range(len(ranks)))
    chunks = zip(ranks, chunk_bounds(num_elements, len(ranks), unit), strict=True)
    return tuple(Hop(rank, SWITCH, start, stop, everyone) for rank, (start, stop) in chunks if stop > start)


# the sum returns in no time
SENDER_SCHEDULE = Schedule(lambda ranks: ranks, lambda ranks: 1, lambda ranks: 1, False, in_steps)
SENDER = Algorithm(
    reduce=sender_reduce,
    gather=no_hops,
    reduce_scatter=sender_reduce,
    all_gather=sender_all_gather,
    schedule=SENDER_SCHEDULE,
    name="sender",
)


ALGORITHMS: dict[str, Algorithm] = {each.name: each for each in (DIRECT, RING, SENDER, SWITCH_ALGORITHM, TREE)}


def algorithm_named(name: str) -> Algorithm:
    """Return the algorithm of this name.

    Raises:
        ValueError: if no algorithm has this name; the message lists the names.
    """
    check_known("algorithm", name, ALGORITHMS)
    return ALGORITHMS[name]
