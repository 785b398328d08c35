"""Collective algorithms as packet routes: which part of a message crosses which link, and what a loss there destroys.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009, split an
all-reduce into a reduce-scatter and an all-gather of chunks. Here the reduce phase alone is lossy.
"""

from functools import lru_cache
from typing import NamedTuple, Protocol

from lossytp.network.checks import check_known

SWITCH = -1


class Hop(NamedTuple):
    """Elements [start, stop) of a message crossing the directed link `src` -> `dst`, packetised on their own.

    `src` and `dst` are global ranks or `SWITCH`; `carries` are the positions in the group of the ranks whose
    contributions ride on the hop, so whose elements are missing from the sum when a packet is lost.
    """

    src: int
    dst: int
    start: int
    stop: int
    carries: tuple[int, ...]


class LostSpans(NamedTuple):
    """What a collective's losses took: the contribution at position `rows[i]` lacks elements [starts[i], stops[i]).

    `reliable` says that the network was reliable, so that there was nothing to repair.
    """

    rows: list[int]
    starts: list[int]
    stops: list[int]
    reliable: bool = False


class ReduceRoutes(Protocol):
    def __call__(self, num_elements: int, ranks: tuple[int, ...], /) -> tuple[Hop, ...]: ...


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


ALGORITHMS: dict[str, ReduceRoutes] = {"sender": sender, "direct": direct}


def reduce_routes(algorithm: str) -> ReduceRoutes:
    """The routes of the named algorithm's reduce phase; ValueError lists the names when there is none."""
    check_known("algorithm", algorithm, ALGORITHMS)
    return ALGORITHMS[algorithm]
