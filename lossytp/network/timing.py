"""How long a collective takes over links that lose packets, hence a training step, hence training to an accuracy.

A collective is a schedule of messages: which of them wait for which (`SCHEDULES`). Each message's time is that of
`lossytp.network.transport`, from losses of the same processes that training's are drawn from. Adding costs no time.
On each link a message starts when the one before it is complete, so that without loss a message of m packets costs
alpha + beta: half a round trip, and m packets on the wire (Thakur, Rabenseifner and Gropp, "Optimization of
collective communication operations in MPICH", IJHPCA 2005, section 3). Chunks count as the largest, ceil(n / R).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lossytp.network.checks import check_at_least, check_known
from lossytp.network.process import LossProcess
from lossytp.network.transport import BestEffort, Path, Transport

LINKS_AT_ONCE = 2048  # amortises numpy's call overhead
LOSSES_AT_ONCE = 2**21  # keeps a portion of the samples within about 300 MB


class Schedule(NamedTuple):
    """Messages of an all-reduce among R ranks, and `complete`, which says when all ranks have the result.

    Each of `links(R)` links carries `messages(R)` messages, one after the other, each of `chunks(R)` chunks of
    ceil(n / R) elements if `split`, else of the n elements. `complete` takes their seconds, `(messages, samples,
    links)`, and gives those of the collectives, `(samples,)`.
    """

    links: Callable[[int], int]
    messages: Callable[[int], int]
    chunks: Callable[[int], int]
    split: bool
    complete: Callable[[np.ndarray], np.ndarray]


def in_steps(seconds: np.ndarray) -> np.ndarray:
    """Link r is rank r's, and each step ends with the slowest rank's message."""
    return seconds.max(axis=-1).sum(axis=0)


def around_ring(seconds: np.ndarray) -> np.ndarray:
    """Rank r's message k + 1 starts when its message k has arrived and rank r - 1's message k has reached it.

    2 (R - 1) steps of chunks (Patarasuk and Yuan, JPDC 2009). Only neighbours wait for each other, so that the time is
    a recursion in max and plus (Baccelli et al., "Synchronization and linearity", 1992), not the sum of slowest links.
    """
    arrived = np.zeros(seconds.shape[1:])
    for message in seconds:
        arrived = np.maximum(arrived, np.roll(arrived, 1, axis=-1)) + message
    return arrived.max(axis=-1)


def over_tree(seconds: np.ndarray) -> np.ndarray:
    """The binary tree of `lossytp.network.algorithms.tree`: rank r's link up to its parent is r - 1, down R - 2 + r.

    A rank sends its sum up once it has both children's, and the result down to both at once.
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
    """Rank r's link up to the switch is r, down R + r; the switch sends the sum when it has all of every rank's.

    In-network aggregation (Sapio et al., "Scaling distributed machine learning with in-network aggregation", NSDI
    2021) without their streaming, which would let the way down overlap the way up.
    """
    (ways,) = seconds
    up, down = np.split(ways, 2, axis=-1)
    return up.max(axis=-1) + down.max(axis=-1)


def _one(ranks: int) -> int:
    return 1


def _ranks(ranks: int) -> int:
    return ranks


SCHEDULES = {
    # The earlier studies' abstraction: each rank's whole contribution crosses its one lossy link; the rest is free
    "sender": Schedule(_ranks, _one, _one, False, in_steps),
    # A rank's R - 1 chunks share its port, one message to the eye of the transport; then as many come back. The gather
    # phase starts when the last rank's reduce phase is complete
    "direct": Schedule(_ranks, lambda ranks: 2, lambda ranks: ranks - 1, True, in_steps),
    "ring": Schedule(_ranks, lambda ranks: 2 * (ranks - 1), _one, True, around_ring),
    "tree": Schedule(lambda ranks: 2 * (ranks - 1), _one, _one, False, over_tree),
    "switch": Schedule(lambda ranks: 2 * ranks, _one, _one, False, through_switch),
}


class CollectiveTimes(NamedTuple):
    """Of each collective, `(samples,)`: its seconds, and the share of its packets that were missing in the end."""

    seconds: np.ndarray
    missing_share: np.ndarray


def collective_times(
    algorithm: str,
    *,
    num_elements: int,
    itemsize: int,
    ranks: int,
    path: Path,
    transport: Transport,
    process: LossProcess,
    samples: int,
    seed: int = 0,
) -> CollectiveTimes:
    """Time `samples` all-reduces of `num_elements` elements of `itemsize` bytes among `ranks` ranks.

    Every link has a copy of `process`, which carries over from message to message and from collective to collective
    (between portions that fit into memory, a few unused packets are skipped). Samples are spread over independent runs
    of such a network, so that many links are worked through together: two that follow each other come mostly, but not
    always, from one run. The same arguments give the same times. ValueError where the algorithm is unknown, or the
    transport can never deliver.
    """
    check_known("algorithm", algorithm, SCHEDULES)
    for name, value in {"num_elements": num_elements, "itemsize": itemsize, "ranks": ranks, "samples": samples}.items():
        check_at_least(name, value, 1)
    if process.loss_rate == 1 and not isinstance(transport, BestEffort):
        raise ValueError("loss_rate = 1 lets no retransmission through: give a rate below 1, or BestEffort")
    if ranks == 1:
        return CollectiveTimes(np.zeros(samples), np.zeros(samples))
    schedule = SCHEDULES[algorithm]
    links, messages = schedule.links(ranks), schedule.messages(ranks)
    elements = -(-num_elements // ranks) if schedule.split else num_elements
    num_packets = schedule.chunks(ranks) * path.wire.num_packets(elements, itemsize)
    runs = min(samples, max(1, LINKS_AT_ONCE // links))
    losses = [process.losses((seed, "timing", algorithm, run, link)) for run in range(runs) for link in range(links)]
    collectives = -(-samples // runs)  # in each run
    portion = max(1, int(LOSSES_AT_ONCE / (runs * links * messages * (1 + num_packets * process.loss_rate))))
    seconds, missing = [], []
    for done in range(0, collectives, portion):
        count = min(portion, collectives - done)
        delivered = transport.deliver(losses, num_packets, count * messages, path)
        shape = (runs, links, count, messages)
        by_message = delivered.seconds.reshape(shape).transpose(3, 0, 2, 1).reshape(messages, -1, links)
        seconds.append(schedule.complete(by_message))
        missing.append(delivered.missing_packets.reshape(shape).sum(axis=(1, 3)).ravel())
    share = np.concatenate(missing)[:samples] / (links * messages * num_packets)
    return CollectiveTimes(np.concatenate(seconds)[:samples], share)


class Tail(NamedTuple):
    """Mean and quantiles of a time, in seconds; a quantile q needs well over 1 / (1 - q) samples."""

    mean_s: float
    p50_s: float
    p99_s: float
    p999_s: float


def tail(seconds: np.ndarray) -> Tail:
    """The mean and the tail of `seconds`, `(samples,)`."""
    return Tail(float(seconds.mean()), *(float(q) for q in np.quantile(seconds, (0.5, 0.99, 0.999))))


def step_seconds(
    algorithm: str,
    *,
    num_layers: int,
    tokens: int,
    width: int,
    compute_s: float,
    itemsize: int,
    ranks: int,
    path: Path,
    transport: Transport,
    process: LossProcess,
    samples: int,
    seed: int = 0,
) -> np.ndarray:
    """Seconds of `samples` training steps of a tensor-parallel GPT-2, `(samples,)`: float64.

    Each layer all-reduces `tokens` x `width` elements four times, after attention and MLP, forward and backward
    (Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3), none of it overlapped with the `compute_s` seconds
    that one rank computes in a step.
    """
    for name, value in {"num_layers": num_layers, "tokens": tokens, "width": width, "samples": samples}.items():
        check_at_least(name, value, 1)
    if not (math.isfinite(compute_s) and compute_s >= 0):
        raise ValueError(f"compute_s = {compute_s!r} is negative or infinite: give 0 s or more")
    times = collective_times(
        algorithm,
        num_elements=tokens * width,
        itemsize=itemsize,
        ranks=ranks,
        path=path,
        transport=transport,
        process=process,
        samples=samples * 4 * num_layers,
        seed=seed,
    )
    return compute_s + times.seconds.reshape(samples, -1).sum(axis=1)


def simulated_seconds(num_steps: int | None, step_s: np.ndarray) -> float | None:
    """Expected seconds of `num_steps` steps that take `step_s`, `(samples,)`; None for steps never reached.

    With the steps at which a run first reached an accuracy it is the time to that accuracy.
    """
    return None if num_steps is None else num_steps * float(step_s.mean())
