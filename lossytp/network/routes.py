"""Collective algorithms as packet routes: which part of a message crosses which link, and what a loss there destroys.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009, split an
all-reduce into a reduce-scatter (the reduce phase) and an all-gather (the gather phase) of chunks.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from lossytp.network.checks import check_known

SWITCH = -1


class Hop(NamedTuple):
    """Elements [start, stop) of a message crossing the directed link `src` -> `dst`, packetised on their own.

    `src` and `dst` are global ranks or `SWITCH`; `positions` are those in the group of the ranks that lack the
    elements of a lost packet: in a reduce phase their contribution lacks them, in a gather phase their result.
    """

    src: int
    dst: int
    start: int
    stop: int
    positions: tuple[int, ...]


class LostSpans(NamedTuple):
    """What a collective's losses took: the rank at position `rows[i]` lacks elements [starts[i], stops[i]).

    `reliable` says that the network was reliable, so that there was nothing to repair.
    """

    rows: list[int]
    starts: list[int]
    stops: list[int]
    reliable: bool = False


Routes = Callable[[int, tuple[int, ...]], tuple[Hop, ...]]  # of num_elements among ranks


class Algorithm(NamedTuple):
    """The routes of a sum's contributions (all-reduce, reduce-scatter), and those of an all-gather.

    In an all-reduce the gather phase is reliable so far; an all-gather of its own is as lossy as its routes.
    """

    reduce: Routes
    gather: Routes


def chunk_bounds(num_elements: int, num_chunks: int) -> list[tuple[int, int]]:
    """Chunk c of R: [c * ceil(n / R), (c + 1) * ceil(n / R)), clipped to n."""
    size = -(-num_elements // num_chunks)
    return [(min(c * size, num_elements), min((c + 1) * size, num_elements)) for c in range(num_chunks)]


@lru_cache(maxsize=1024)
def sender(num_elements: int, ranks: tuple[int, ...]) -> tuple[Hop, ...]:
    """Earlier studies' abstraction: each rank's whole contribution crosses one lossy link of its own.

    A loss removes the contribution for everyone, its sender included.
    """
    return tuple(Hop(rank, SWITCH, 0, num_elements, (position,)) for position, rank in enumerate(ranks))


@lru_cache(maxsize=1024)
def sender_gather(num_elements: int, ranks: tuple[int, ...]) -> tuple[Hop, ...]:
    """Each rank's chunk crosses its one lossy link, and a loss there starves every rank, its sender included."""
    everyone = tuple(range(len(ranks)))
    chunks = zip(ranks, chunk_bounds(num_elements, len(ranks)), strict=True)
    return tuple(Hop(rank, SWITCH, start, stop, everyone) for rank, (start, stop) in chunks if stop > start)


@lru_cache(maxsize=1024)
def direct(num_elements: int, ranks: tuple[int, ...]) -> tuple[Hop, ...]:
    """Every rank sends chunk c to rank c, which sums it (a direct reduce-scatter).

    An owner's own part crosses no link, so a fraction (R - 1) / R of the contributions is at risk.
    """
    return tuple(
        Hop(src, owner, start, stop, (position,))
        for position, src in enumerate(ranks)
        for owner, (start, stop) in zip(ranks, chunk_bounds(num_elements, len(ranks)), strict=True)
        if owner != src and stop > start
    )


@lru_cache(maxsize=1024)
def direct_gather(num_elements: int, ranks: tuple[int, ...]) -> tuple[Hop, ...]:
    """Rank c sends its chunk to every other rank, each of which may lose other packets of it."""
    return tuple(
        Hop(owner, dst, start, stop, (position,))
        for owner, (start, stop) in zip(ranks, chunk_bounds(num_elements, len(ranks)), strict=True)
        for position, dst in enumerate(ranks)
        if owner != dst and stop > start
    )


ALGORITHMS = {"sender": Algorithm(sender, sender_gather), "direct": Algorithm(direct, direct_gather)}


def algorithm_named(name: str) -> Algorithm:
    """The algorithm of this name; ValueError lists the names when there is none."""
    check_known("algorithm", name, ALGORITHMS)
    return ALGORITHMS[name]
