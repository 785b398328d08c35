"""Time collectives over lossy links, and training steps.

A collective is a schedule of messages, some of which wait for others (`lossytp.network.schedules`).
`lossytp.network.transport` times each message, with losses from the same processes as in training. Adding takes no
time. Repairs send no packets here: time them as longer messages or more round trips. On each link, a message starts
when the previous one is complete. Without loss a message of m packets takes alpha + beta: half a round trip, and m
packets on the wire (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
IJHPCA 2005, section 3). All chunks count as the largest, ceil(n / R).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lossytp.network.algorithms import algorithm_named
from lossytp.network.checks import check_at_least, check_not_negative
from lossytp.network.loss_process import LossProcess
from lossytp.network.packets import Wire
from lossytp.network.schedules import Schedule
from lossytp.network.transport import BestEffort, Path, Transport

LINKS_AT_ONCE = 2048  # amortises numpy's call overhead
LOSSES_AT_ONCE = 2**22  # keeps what is computed at once, a sample at least, within about 600 MB


class CollectiveTimes(NamedTuple):
    """Each collective's seconds, and the share of its packets that stayed missing, both `(samples,)`."""

    seconds: np.ndarray
    missing_share: np.ndarray


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """One kind of all-reduce to time.

    Args:
        algorithm: name of the algorithm.
        num_elements: number of elements in the message.
        itemsize: bytes per element.
        ranks: number of ranks.

    Raises:
        ValueError: if the algorithm is unknown or has no schedule, or a number is below 1.
    """

    algorithm: str
    num_elements: int
    itemsize: int = 4
    ranks: int

    def __post_init__(self) -> None:
        for name in ("num_elements", "itemsize", "ranks"):
            check_at_least(name, getattr(self, name), 1)
        _ = self.schedule

    @property
    def schedule(self) -> Schedule:
        """Return which message waits for which.

        Raises:
            ValueError: if the algorithm is unknown or has no schedule.
        """
        schedule = algorithm_named(self.algorithm).schedule
        if schedule is None:
            raise ValueError(
                f"algorithm = {self.algorithm!r} has no schedule: give its ALGORITHM one, or choose another"
            )
        return schedule

    def num_packets(self, wire: Wire) -> int:
        """Return the packets of each message."""
        return self.schedule.num_packets(self.num_elements, self.itemsize, self.ranks, wire)


@dataclass(frozen=True, kw_only=True)
class Channel:
    """The properties of every link: its speed, its transport and its losses.

    Raises:
        ValueError: if the transport can never deliver.
    """

    path: Path
    transport: Transport
    process: LossProcess

    def __post_init__(self) -> None:
        if self.process.loss_rate == 1 and not isinstance(self.transport, BestEffort):
            raise ValueError("loss_rate = 1 lets no retransmission through: give a rate below 1, or BestEffort")


def collective_times(all_reduce: AllReduce, channel: Channel, *, samples: int, seed: int = 0) -> CollectiveTimes:
    """Time `samples` all-reduces.

    Every link has its own copy of the channel's process, whose state carries over from message to message and from
    collective to collective. Between groups of samples that fit into memory, some unused packets are skipped. Samples
    come from several independent runs, so that many links are computed together. Neighbouring samples are usually, but
    not always, from one run. The same arguments give the same times.
    """
    check_at_least("samples", samples, 1)
    schedule, ranks = all_reduce.schedule, all_reduce.ranks
    transport, process = channel.transport, channel.process
    if ranks == 1:
        return CollectiveTimes(np.zeros(samples), np.zeros(samples))
    links, messages = schedule.links(ranks), schedule.messages(ranks)
    num_packets = all_reduce.num_packets(channel.path.wire)
    rate = process.loss_rate
    losses_a_packet = rate if isinstance(transport, BestEffort) else rate / (1 - rate)  # and what is sent again
    losses_of_one = links * messages * (1 + num_packets * losses_a_packet)
    runs = min(samples, max(1, min(LINKS_AT_ONCE // links, int(LOSSES_AT_ONCE / losses_of_one))))
    # a key ends in source and destination, which links that share losses leave out
    keys = [(seed, "timing", all_reduce.algorithm, run, link, link) for run in range(runs) for link in range(links)]
    losses = [process.losses(key) for key in keys]
    collectives = -(-samples // runs)  # in each run
    portion = max(1, int(LOSSES_AT_ONCE / (runs * losses_of_one)))
    seconds, missing = [], []
    for done in range(0, collectives, portion):
        count = min(portion, collectives - done)
        delivered = transport.deliver(losses, num_packets, count * messages, channel.path)
        shape = (runs, links, count, messages)
        by_message = delivered.seconds.reshape(shape).transpose(3, 0, 2, 1).reshape(messages, -1, links)
        seconds.append(schedule.complete(by_message))
        missing.append(delivered.missing_packets.reshape(shape).sum(axis=(1, 3)).ravel())
    share = np.concatenate(missing)[:samples] / (links * messages * num_packets)
    return CollectiveTimes(np.concatenate(seconds)[:samples], share)


class Tail(NamedTuple):
    """The mean and quantiles of a time, in seconds. A quantile q needs well over 1 / (1 - q) samples."""

    mean_s: float
    p50_s: float
    p99_s: float
    p999_s: float


def tail(seconds: np.ndarray) -> Tail:
    """Return the mean and the quantiles of `seconds`, `(samples,)`."""
    return Tail(float(seconds.mean()), *(float(q) for q in np.quantile(seconds, (0.5, 0.99, 0.999))))


def step_seconds(
    all_reduce: AllReduce, channel: Channel, *, num_layers: int, compute_s: float, samples: int, seed: int = 0
) -> np.ndarray:
    """Return the seconds of `samples` training steps of a tensor-parallel GPT-2, `(samples,)`: float64.

    Each layer has four all-reduces of tokens x width elements, after attention and MLP, forward and backward (Shoeybi
    et al., "Megatron-LM", arXiv:1909.08053, section 3). Nothing overlaps with the `compute_s` seconds that one rank
    computes in a step.
    """
    for name, value in {"num_layers": num_layers, "samples": samples}.items():
        check_at_least(name, value, 1)
    check_not_negative("compute_s", compute_s, "s")
    times = collective_times(all_reduce, channel, samples=samples * 4 * num_layers, seed=seed)
    return compute_s + times.seconds.reshape(samples, -1).sum(axis=1)
