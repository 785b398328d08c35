"""Every rank sends chunk c to rank c, which sums it and sends the sum to every other rank: one hop per phase.

The direct exchange of Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
IJHPCA 2005, section 5 (reduce-scatter by pairwise exchange). An owner's own part crosses no link, so a fraction
(R - 1) / R of the contributions is at risk.
"""

from functools import lru_cache

from lossytp.network.routes import Algorithm, Hop, Hops, chunk_bounds
from lossytp.network.schedules import Schedule, in_steps


@lru_cache(maxsize=1024)
def reduce(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
    """Route rank r's part of chunk c over link r -> c. A loss there affects only this part."""
    return tuple(
        Hop(src, owner, start, stop, (position,))
        for position, src in enumerate(ranks)
        for owner, (start, stop) in zip(ranks, chunk_bounds(num_elements, len(ranks), unit), strict=True)
        if owner != src and stop > start
    )


@lru_cache(maxsize=1024)
def gather(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
    """Route chunk c of the sum over link c -> r. A loss there affects only rank r."""
    return tuple(
        Hop(owner, dst, start, stop, (position,))
        for owner, (start, stop) in zip(ranks, chunk_bounds(num_elements, len(ranks), unit), strict=True)
        for position, dst in enumerate(ranks)
        if owner != dst and stop > start
    )


# A rank's R - 1 chunks share its port as one message. The sums come back once the last rank has sent its chunks.
SCHEDULE = Schedule(lambda ranks: ranks, lambda ranks: 2, lambda ranks: ranks - 1, True, in_steps)
ALGORITHM = Algorithm(
    reduce=reduce, gather=gather, reduce_scatter=reduce, all_gather=gather, schedule=SCHEDULE, name="direct"
)
