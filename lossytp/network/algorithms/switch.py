"""In-network reduction: ranks send whole messages up to a switch, which sums them and sends the sum down to each.

Sapio et al., "Scaling distributed machine learning with in-network aggregation" (SwitchML), NSDI 2021; Graham et al.,
"Scalable Hierarchical Aggregation Protocol (SHArP)", COMHPC 2016.
"""

from functools import lru_cache

from lossytp.network.routes import SWITCH, Algorithm, Hop, Hops, chunk_bounds
from lossytp.network.schedules import Schedule, through_switch


@lru_cache(maxsize=1024)
def reduce(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
    """Route contributions up. A loss on a rank's uplink affects only its contribution."""
    return tuple(Hop(rank, SWITCH, 0, num_elements, (position,)) for position, rank in enumerate(ranks) if num_elements)


@lru_cache(maxsize=1024)
def gather(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
    """Route the sum down. A loss on a rank's downlink affects only this rank."""
    return tuple(Hop(SWITCH, rank, 0, num_elements, (position,)) for position, rank in enumerate(ranks) if num_elements)


@lru_cache(maxsize=1024)
def reduce_scatter(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
    """Route each rank's chunk of the sum down to this rank only. A packet lost there takes all contributions along."""
    everyone = tuple(range(len(ranks)))
    chunks = zip(ranks, chunk_bounds(num_elements, len(ranks), unit), strict=True)
    down = (Hop(SWITCH, rank, start, stop, everyone) for rank, (start, stop) in chunks if stop > start)
    return (*reduce(num_elements, ranks, unit), *down)


@lru_cache(maxsize=1024)
def all_gather(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
    """Route each rank's chunk up, where a loss starves all other ranks, and down to each of them."""
    chunks = chunk_bounds(num_elements, len(ranks), unit)
    positions = range(len(ranks))
    up = [Hop(ranks[c], SWITCH, *chunks[c], tuple(p for p in positions if p != c)) for c in positions]
    down = [Hop(SWITCH, ranks[p], *chunks[c], (p,)) for p in positions for c in positions if c != p]
    return tuple(hop for hop in up + down if hop.stop > hop.start and hop.positions)


SCHEDULE = Schedule(lambda ranks: 2 * ranks, lambda ranks: 1, lambda ranks: 1, False, through_switch)
ALGORITHM = Algorithm(
    reduce=reduce, gather=gather, reduce_scatter=reduce_scatter, all_gather=all_gather, schedule=SCHEDULE, name="switch"
)
