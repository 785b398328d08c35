"""The abstraction of earlier studies: each rank has one lossy link, and a packet lost there is lost for every rank.

No network works like this. It models studies that zero parts of a rank's message before a plain all-reduce.
"""

from functools import lru_cache

from lossytp.network.routes import SWITCH, Algorithm, Hop, Hops, chunk_bounds, no_hops
from lossytp.network.schedules import Schedule, in_steps


@lru_cache(maxsize=1024)
def reduce(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
    """Route a rank's whole contribution; a loss removes a packet for everyone, its sender included."""
    return tuple(Hop(rank, SWITCH, 0, num_elements, (position,)) for position, rank in enumerate(ranks) if num_elements)


@lru_cache(maxsize=1024)
def all_gather(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
    """Route a rank's chunk; a loss starves every rank, its sender included."""
    everyone = tuple(range(len(ranks)))
    chunks = zip(ranks, chunk_bounds(num_elements, len(ranks), unit), strict=True)
    return tuple(Hop(rank, SWITCH, start, stop, everyone) for rank, (start, stop) in chunks if stop > start)


# the sum returns in no time
SCHEDULE = Schedule(lambda ranks: ranks, lambda ranks: 1, lambda ranks: 1, False, in_steps)
ALGORITHM = Algorithm(
    reduce=reduce, gather=no_hops, reduce_scatter=reduce, all_gather=all_gather, schedule=SCHEDULE, name="sender"
)
