"""Define the terms of a collective algorithm: the hops of a message, and what a loss on each of them destroys.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009, split an
all-reduce into a reduce-scatter (the reduce phase) and an all-gather (the gather phase) of chunks.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from lossytp.network.schedules import Schedule

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
            `protect`, and until `lossytp.parallel.missing` has chosen them.
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
        from lossytp.network.algorithms import algorithm_named  # the registry, which imports this module

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
