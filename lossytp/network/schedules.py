"""Define which messages of a collective wait for which. `lossytp.network.timing` times them."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lossytp.network.packets import Wire


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
    """Time the binary tree of `lossytp.network.algorithms.tree`: rank r's uplink is r - 1, its downlink R - 2 + r.

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
