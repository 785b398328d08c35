"""The packets of a message, and the links that they cross: direct, ring, tree, switch and sender.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009, split an
all-reduce into a reduce-scatter (the reduce phase) and an all-gather (the gather phase) of chunks. A hop says which
elements cross which link, and which ranks lack them if a packet is lost. To add an algorithm, define an `Algorithm` and
add it to `ALGORITHMS`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from numbers import Integral
from operator import index
from typing import NamedTuple, Protocol

import numpy as np

from lossytp.network.checks import check_at_least, check_at_most, check_known, shown

MOST = 2**40  # keeps the number of an element inside int64
SWITCH = -1
Link = tuple[int, int]
"""A directed link from `src` to `dst`: global ranks, or `SWITCH`."""


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
        check_at_least("mtu_bytes", self.mtu_bytes, self.header_bytes + 8)
        check_at_most("mtu_bytes", self.mtu_bytes, MOST)
        if self.elements is not None:
            check_at_least("elements", self.elements, 1)
            check_at_most("elements", self.elements, MOST)

    def elements_per_packet(self, itemsize: int, block: int = 1) -> int:
        """Return how many whole elements of `itemsize` bytes a packet carries: 364 in fp32 at the default MTU.

        If elements come in blocks, `itemsize` is the bytes of a block and its scale: 42 blocks, 1344 elements, in int8.
        """
        return self.elements or (self.mtu_bytes - self.header_bytes) // itemsize * block

    def num_packets(self, num_elements: int, itemsize: int, block: int = 1) -> int:
        """Return how many packets `num_elements` elements fill; the last one may be partly empty."""
        return -(-num_elements // self.elements_per_packet(itemsize, block))


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
        protected: for each hop, the sorted numbers of the packets that were sent reliably. `LossyNetwork.send` sets
            them for `protect_first`, and `apply_losses_` for `protect`; otherwise it is empty.
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


class Algorithm(NamedTuple):
    """The routes of every collective operation."""

    reduce: Routes
    """All-reduce, first phase: contributions on their way to the sum."""
    gather: Routes
    """All-reduce, second phase: the sum on its way to every rank."""
    reduce_scatter: Routes
    """Contributions on their way to the sum of each rank's own chunk."""
    all_gather: Routes
    """Each rank's chunk on its way to all others."""
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
        return any(hop.dst != SWITCH for routes in self.pair(False) for hop in routes(16, (0, 1, 2, 3)))

    def hops_carry_one(self, sequence_parallel: bool = False) -> bool:
        """Return whether every lost packet affects only one rank."""
        hops = (hop for routes in self.pair(sequence_parallel) for hop in routes(16, (0, 1, 2, 3)))
        return all(len(hop.positions) == 1 for hop in hops)


Bounds = tuple[int, int]
Route = Callable[[tuple[int, ...], list[Bounds]], Iterator[Hop]]


def cached(route: Route) -> Routes:
    """Make routes of a generator of hops from the ranks and the bounds of each rank's chunk.

    Hops are kept for the next message. Those that carry nothing, or affect nobody, are left out.
    """

    @lru_cache(maxsize=1024)
    @wraps(route)
    def hops(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
        chunks = chunk_bounds(num_elements, len(ranks), unit)
        return tuple(hop for hop in route(ranks, chunks) if hop.stop > hop.start and hop.positions)

    return hops


def no_hops(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
    """Return no hops, for a phase that is reliable or does not exist."""
    return ()


def chunk_bounds(num_elements: int, num_chunks: int, unit: int = 1) -> list[Bounds]:
    """Return the bounds of each chunk. Chunk c is [c * size, (c + 1) * size), clipped to `num_elements`.

    `size` is num_elements / num_chunks, rounded up to whole units.
    """
    size = -(-num_elements // (num_chunks * unit)) * unit
    return [(min(c * size, num_elements), min((c + 1) * size, num_elements)) for c in range(num_chunks)]


def first_spans(hops: Hops, num_elements: int) -> list[Bounds]:
    """Return the bounds of what the hops carry that no earlier hop carried; a message without hops is one span."""
    spans: list[Bounds] = []
    for start, stop in dict.fromkeys((hop.start, hop.stop) for hop in hops):
        if all(stop <= before or after <= start for before, after in spans):
            spans.append((start, stop))
    return spans or [(0, num_elements)]


def whole(chunks: list[Bounds]) -> Bounds:
    """Return the bounds of the message that these chunks make up."""
    return 0, chunks[-1][1]


def everyone(ranks: tuple[int, ...], but: int | None = None) -> tuple[int, ...]:
    """Return the positions of all ranks, or of all but one."""
    return tuple(position for position in range(len(ranks)) if position != but)


# Direct: every rank sends chunk c to rank c, which sums it and sends the sum to every other rank.
#
# The direct exchange of Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
# IJHPCA 2005, section 5 (reduce-scatter by pairwise exchange). An owner's own part crosses no link, so a fraction
# (R - 1) / R of the contributions is at risk.


@cached
def direct_reduce(ranks: tuple[int, ...], chunks: list[Bounds]) -> Iterator[Hop]:
    """Route rank r's part of chunk c over link r -> c. A loss there affects only this part."""
    for position, src in enumerate(ranks):
        yield from (Hop(src, dst, *chunk, (position,)) for dst, chunk in zip(ranks, chunks, strict=True) if dst != src)


@cached
def direct_gather(ranks: tuple[int, ...], chunks: list[Bounds]) -> Iterator[Hop]:
    """Route chunk c of the sum over link c -> r. A loss there affects only rank r."""
    for src, chunk in zip(ranks, chunks, strict=True):
        yield from (Hop(src, dst, *chunk, (position,)) for position, dst in enumerate(ranks) if dst != src)


DIRECT = Algorithm(direct_reduce, direct_gather, direct_reduce, direct_gather, "direct")


# Ring: every rank sends only to its neighbour. Chunks travel round it twice, first as growing sums, then as sums.
#
# Patarasuk and Yuan, section 4. Rank c owns the sum of chunk c: its partial sum starts at rank c + 1.


@cached
def ring_reduce(ranks: tuple[int, ...], chunks: list[Bounds]) -> Iterator[Hop]:
    """Route partial sums; a loss destroys the parts of all ranks upstream."""
    size = len(ranks)
    for step in range(size - 1):
        for position, src in enumerate(ranks):
            chunk = (position - step - 1) % size
            upstream = tuple((chunk + 1 + joined) % size for joined in range(step + 1))
            yield Hop(src, ranks[(position + 1) % size], *chunks[chunk], upstream)


@cached
def ring_gather(ranks: tuple[int, ...], chunks: list[Bounds]) -> Iterator[Hop]:
    """Route sums; a loss starves every rank downstream."""
    size = len(ranks)
    for step in range(size - 1):
        for position, src in enumerate(ranks):
            downstream = tuple((position + 1 + passed) % size for passed in range(size - 1 - step))
            yield Hop(src, ranks[(position + 1) % size], *chunks[(position - step) % size], downstream)


RING = Algorithm(ring_reduce, ring_gather, ring_reduce, ring_gather, "ring")


# Tree: a complete binary one, rooted at the first rank. Whole messages: sums on the way up, the sum on the way down.
#
# A reduction followed by a broadcast, as in Thakur, Rabenseifner and Gropp, section 6. The parent of position i is
# (i - 1) // 2. (NCCL runs two such trees on half the message each: Sanders, Speck and Träff, "Two-tree algorithms for
# full bandwidth broadcast, reduction and scan", Parallel Computing 2009.)


def _subtree(root: int, size: int) -> tuple[int, ...]:
    return (root, *(p for child in (2 * root + 1, 2 * root + 2) if child < size for p in _subtree(child, size)))


def _branch(position: int) -> list[int]:
    """Return the positions from this one up to the root's child: the lower ends of the links between."""
    return [position, *_branch((position - 1) // 2)] if position else []


def _up(child: int, ranks: tuple[int, ...], bounds: Bounds, positions: tuple[int, ...]) -> Hop:
    return Hop(ranks[child], ranks[(child - 1) // 2], *bounds, positions)


def _down(child: int, ranks: tuple[int, ...], bounds: Bounds, positions: tuple[int, ...]) -> Hop:
    return Hop(ranks[(child - 1) // 2], ranks[child], *bounds, positions)


def _sums_up(ranks: tuple[int, ...], chunks: list[Bounds]) -> Iterator[Hop]:
    """Route sums up, the deepest first; a loss destroys the sum of the subtree below."""
    for child in reversed(range(1, len(ranks))):
        yield _up(child, ranks, whole(chunks), _subtree(child, len(ranks)))


@cached
def tree_gather(ranks: tuple[int, ...], chunks: list[Bounds]) -> Iterator[Hop]:
    """Route the sum down; a loss starves the subtree below."""
    for child in range(1, len(ranks)):
        yield _down(child, ranks, whole(chunks), _subtree(child, len(ranks)))


@cached
def tree_reduce_scatter(ranks: tuple[int, ...], chunks: list[Bounds]) -> Iterator[Hop]:
    """Route sums to the root, then each rank's chunk down its branch, where a lost packet takes the sum along."""
    yield from _sums_up(ranks, chunks)
    for owner, chunk in enumerate(chunks):
        yield from (_down(position, ranks, chunk, everyone(ranks)) for position in reversed(_branch(owner)))


@cached
def tree_all_gather(ranks: tuple[int, ...], chunks: list[Bounds]) -> Iterator[Hop]:
    """Route each rank's chunk up its branch, where a loss starves all other ranks, then all chunks down the tree.

    A rank keeps its own chunk. It receives the other chunks from its parent, and passes all of them on.
    """
    for owner, chunk in enumerate(chunks):
        yield from (_up(position, ranks, chunk, everyone(ranks, but=owner)) for position in _branch(owner))
    for child in range(1, len(ranks)):
        below = _subtree(child, len(ranks))
        for owner, chunk in enumerate(chunks):
            yield _down(child, ranks, chunk, tuple(position for position in below if position != owner))


TREE = Algorithm(cached(_sums_up), tree_gather, tree_reduce_scatter, tree_all_gather, "tree")


# Switch: ranks send whole messages up to a switch, which sums them and sends the sum down to each.
#
# Sapio et al., "Scaling distributed machine learning with in-network aggregation" (SwitchML), NSDI 2021; Graham et al.,
# "Scalable Hierarchical Aggregation Protocol (SHArP)", COMHPC 2016.


def _to_switch(ranks: tuple[int, ...], chunks: list[Bounds]) -> Iterator[Hop]:
    """Route contributions up. A loss on a rank's uplink affects only its contribution."""
    yield from (Hop(rank, SWITCH, *whole(chunks), (position,)) for position, rank in enumerate(ranks))


@cached
def switch_gather(ranks: tuple[int, ...], chunks: list[Bounds]) -> Iterator[Hop]:
    """Route the sum down. A loss on a rank's downlink affects only this rank."""
    yield from (Hop(SWITCH, rank, *whole(chunks), (position,)) for position, rank in enumerate(ranks))


@cached
def switch_reduce_scatter(ranks: tuple[int, ...], chunks: list[Bounds]) -> Iterator[Hop]:
    """Route each rank's chunk of the sum down to this rank only. A packet lost there takes all contributions along."""
    yield from _to_switch(ranks, chunks)
    yield from (Hop(SWITCH, rank, *chunk, everyone(ranks)) for rank, chunk in zip(ranks, chunks, strict=True))


@cached
def switch_all_gather(ranks: tuple[int, ...], chunks: list[Bounds]) -> Iterator[Hop]:
    """Route each rank's chunk up, where a loss starves all other ranks, and down to each of them."""
    for owner, chunk in enumerate(chunks):
        yield Hop(ranks[owner], SWITCH, *chunk, everyone(ranks, but=owner))
    for position, rank in enumerate(ranks):
        yield from (Hop(SWITCH, rank, *chunk, (position,)) for owner, chunk in enumerate(chunks) if owner != position)


switch_reduce = cached(_to_switch)
SWITCH_ALGORITHM = Algorithm(switch_reduce, switch_gather, switch_reduce_scatter, switch_all_gather, "switch")


# Sender: each rank has one lossy link, and a packet lost there is lost for every rank, its sender included. No network
# works like this. It models earlier studies, which zero parts of a rank's message before a plain all-reduce.


@cached
def sender_all_gather(ranks: tuple[int, ...], chunks: list[Bounds]) -> Iterator[Hop]:
    """Route a rank's chunk; a loss starves every rank, its sender included."""
    yield from (Hop(rank, SWITCH, *chunk, everyone(ranks)) for rank, chunk in zip(ranks, chunks, strict=True))


SENDER = Algorithm(switch_reduce, no_hops, switch_reduce, sender_all_gather, "sender")


ALGORITHMS: dict[str, Algorithm] = {each.name: each for each in (DIRECT, RING, SENDER, SWITCH_ALGORITHM, TREE)}


def algorithm_named(name: str) -> Algorithm:
    """Return the algorithm of this name.

    Raises:
        ValueError: if no algorithm has this name; the message lists the names.
    """
    check_known("algorithm", name, ALGORITHMS)
    return ALGORITHMS[name]


def checked_link(key: object) -> Link:
    """Return `key` as a pair of Python's integers.

    Raises:
        ValueError: if `key` is not a pair of different ranks.
    """
    ends = key if isinstance(key, tuple) and len(set(key)) == len(key) == 2 else ()
    if not ends or not all(isinstance(end, Integral) and index(end) >= SWITCH for end in ends):
        raise ValueError(f"link = {shown(key)} is not a pair of different ranks from 0, or {SWITCH} for the switch")
    return index(ends[0]), index(ends[1])


def check_links_within(links: Iterable[Link], num_ranks: int) -> None:
    """Raise ValueError if an end of a link is a rank above the last of `num_ranks` ranks."""
    for src, dst in links:
        if max(src, dst) >= num_ranks:
            what = f"link {src}>{dst} names rank {max(src, dst)}, above the last of {num_ranks} ranks"
            raise ValueError(f"{what}: name links among ranks 0 to {num_ranks - 1}")
