"""One binary tree, rooted at the first rank: whole messages, sums on the way up, the sum on the way down.

This is a reduction followed by a broadcast, as in Thakur, Rabenseifner and Gropp, "Optimization of collective
communication operations in MPICH", IJHPCA 2005, section 6. The tree is a complete binary one: the parent of position i
is (i - 1) // 2.
(NCCL runs two such trees on half the message each: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth
broadcast, reduction and scan", Parallel Computing 2009.)
"""

from functools import lru_cache

from lossytp.network.routes import Algorithm, Hop, Hops, chunk_bounds
from lossytp.network.schedules import Schedule, over_tree


@lru_cache(maxsize=1024)
def reduce(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
    """Route sums up; a loss destroys the sum of the subtree below."""
    children = reversed(range(1, len(ranks)))  # the deepest first
    return tuple(_up(child, ranks, 0, num_elements, _subtree(child, len(ranks))) for child in children if num_elements)


@lru_cache(maxsize=1024)
def gather(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
    """Route the sum down; a loss starves the subtree below."""
    children = range(1, len(ranks))
    return tuple(
        _down(child, ranks, 0, num_elements, _subtree(child, len(ranks))) for child in children if num_elements
    )


@lru_cache(maxsize=1024)
def reduce_scatter(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
    """Route sums to the root, then each rank's chunk down its branch, where a lost packet takes the sum along."""
    everyone = tuple(range(len(ranks)))
    down = [
        _down(position, ranks, start, stop, everyone)
        for owner, (start, stop) in enumerate(chunk_bounds(num_elements, len(ranks), unit))
        for position in reversed(_branch(owner))
        if stop > start
    ]
    return (*reduce(num_elements, ranks, unit), *down)


@lru_cache(maxsize=1024)
def all_gather(num_elements: int, ranks: tuple[int, ...], unit: int = 1) -> Hops:
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


SCHEDULE = Schedule(lambda ranks: 2 * (ranks - 1), lambda ranks: 1, lambda ranks: 1, False, over_tree)
ALGORITHM = Algorithm(
    reduce=reduce, gather=gather, reduce_scatter=reduce_scatter, all_gather=all_gather, schedule=SCHEDULE, name="tree"
)
