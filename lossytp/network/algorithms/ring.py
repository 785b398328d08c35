"""Every rank sends only to its neighbour. Chunks travel round the ring twice, first as growing sums, then as sums.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009, section 4.
Rank c owns the sum of chunk c: its partial sum starts at rank c + 1.
"""

from functools import lru_cache

from lossytp.network.routes import Algorithm, Hop, Hops, chunk_bounds
from lossytp.network.schedules import Schedule, around_ring


@lru_cache(maxsize=1024)
def reduce(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
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
def gather(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
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


SCHEDULE = Schedule(lambda ranks: ranks, lambda ranks: 2 * (ranks - 1), lambda ranks: 1, True, around_ring)
ALGORITHM = Algorithm(
    reduce=reduce, gather=gather, reduce_scatter=reduce, all_gather=gather, schedule=SCHEDULE, name="ring"
)
