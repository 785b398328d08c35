"""Time collectives over lossy links, and training steps.

A collective is a schedule of messages, some of which wait for others (`SCHEDULES`). A transport times each message,
with losses from the same processes as in training. Adding takes no time. Repairs send no packets here: time them as
longer messages or more round trips. On each link, a message starts when the previous one is complete. Without loss a
message of m packets takes alpha + beta: half a round trip, and m packets on the wire (Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH", IJHPCA 2005, section 3). All chunks count as the
largest, ceil(n / R).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Self

import numpy as np

from lossytp.network.checks import check_at_least, check_known, check_positive, is_finite, refuse_if
from lossytp.network.losses import LinkLosses, LossProcess
from lossytp.network.random_numbers import NEVER
from lossytp.network.routes import Wire

STEPS_PER_GAP = 2**30  # times in gaps are rounded to this, so that sums of up to 2**23 gaps are exact
TIMEOUT_ROUND_TRIPS = 1.5  # RFC 8985 waits 1.25, and two for a message's last packets
TIMEOUT_PACKETS = 3  # RFC 9002, 6.1.1: that many packets may overtake one before it counts as lost
WORST_RATE = 0.9  # bounds the observed loss rate, from which the number of packets is predicted
LINKS_AT_ONCE = 2048  # amortises numpy's call overhead
LOSSES_AT_ONCE = 2**22  # keeps what is computed at once, a sample at least, within about 600 MB

# When senders that retransmit lost packets finish, by selective repeat or go-back-N, on many links at once.
#
# The unit of time is a gap, the time between the starts of two consecutive packets. A sender starts at most one packet
# per gap. It idles only while it may send nothing, and only losses cause that. So a message takes the time of its
# packets plus the idle time, and the functions step from loss to loss, not from packet to packet. Their arguments:
#     lost: for each link, the sorted indices of its lost packets among all that it sends; int64 (num_lost,).
#     num_packets, num_messages: each link carries `num_messages` messages of `num_packets` packets, one after another.
#         A message starts when the one before it is complete, and its times count from its start.
#     window: packet n may leave only after all packets up to n - window are acknowledged.
#     timeout: gaps from the start of a lost packet until it is due again, at least 1.
# They return:
#     starts: time at which the packet that completes each message starts, in gaps: float64 (links, messages).
#     sent: number of packets that each link sent, with retransmissions: float64 (links,).
# Whole and dyadic times are exact, so rounding never decides which of two simultaneous events is first.


def check_not_negative(name: str, value: object, unit: str) -> None:
    """Raise ValueError unless `value` is a finite number of at least 0."""
    wrong = not is_finite(value) or value < 0
    refuse_if(wrong, name, value, f"is not a finite number of 0 or more: give 0 {unit} or more")


class _Links:
    """The links that are not done. A link has sent `sent` packets, and its next loss is `lost[cursor]`."""

    def __init__(self, lost: list[np.ndarray], num_packets: int, num_messages: int) -> None:
        never = np.array([NEVER], dtype=np.float64)  # ends each link's losses, so that the cursor always points at one
        self.lost = np.concatenate([piece for losses in lost for piece in (losses, never)])
        self.num_losses = np.array([len(losses) + 1 for losses in lost])
        self.cursor = np.cumsum(self.num_losses) - self.num_losses
        self.row = np.arange(len(lost))
        self.message = np.zeros(len(lost), dtype=np.int64)
        self.sent = np.zeros(len(lost))
        self.time = np.zeros(len(lost))  # when the next packet may start, from the message's start
        self.next = np.zeros(len(lost))  # selective repeat: first packet not sent yet; go-back-N: not yet accepted
        self.starts = np.full((len(lost), num_messages), num_packets - 1.0)
        self.all_sent = np.zeros(len(lost))
        self.num_packets, self.num_messages = num_packets, num_messages
        self.begin(self.row)
        self.oldest = self.cursor.copy()  # selective repeat: the loss that is retransmitted next
        self.base = self.cursor.copy()  # selective repeat: the loss that holds the window's start back, if it occurred

    def begin(self, which: np.ndarray) -> None:
        """Begin the next message that loses a packet. Skip the messages before it, which take one gap per packet."""
        unharmed = (self.lost[self.cursor[which]] - self.sent[which]) // self.num_packets
        unharmed = np.minimum(unharmed, self.num_messages - self.message[which])
        self.message[which] += unharmed.astype(np.int64)
        self.sent[which] += unharmed * self.num_packets
        self.time[which] = self.next[which] = 0

    def finish(self, which: np.ndarray, starts: np.ndarray) -> None:
        """Record the ends of these links' messages, and begin the next ones."""
        self.starts[self.row[which], self.message[which]] = starts
        self.message[which] += 1
        self.begin(which)

    def at_work(self) -> bool:
        """Drop the links that have no messages left. Return whether others have."""
        working = self.message < self.num_messages
        if not working.all():
            self.all_sent[self.row[~working]] = self.sent[~working]
            for name in ("cursor", "sent", "message", "row", "time", "next", "oldest", "base"):
                setattr(self, name, getattr(self, name)[working])
        return len(self.row) > 0


def go_back_n(
    lost: list[np.ndarray], num_packets: int, num_messages: int, *, window: int, timeout: float, acknowledged: float
) -> tuple[np.ndarray, np.ndarray]:
    """Time go-back-N (Bertsekas and Gallager, "Data networks", 2nd ed. 1992, 2.4.2): receivers take packets in order.

    After a lost packet, the sender continues until that packet's timeout or the end of the window, and the receiver
    discards all of it. The sender then finishes the current packet, and sends everything again from the lost packet on.
    """
    links = _Links(lost, num_packets, num_messages)
    in_vain = min(np.ceil(timeout), window) - 1
    apart = links.lost[links.lost < NEVER].max(initial=0) + 2  # offset between links, so that one array sorts them all
    in_order = np.minimum(links.lost, apart - 1) + np.repeat(links.row * apart, links.num_losses)
    while links.at_work():
        run = links.lost[links.cursor] - links.sent  # packets that arrive before the next loss
        left = num_packets - links.next
        ends = np.flatnonzero(run >= left)
        breaks = np.flatnonzero(run < left)
        run, first = run[breaks], links.next[breaks]
        wasted = np.minimum(in_vain, left[breaks] - run - 1)
        links.sent[breaks] += run + 1 + wasted
        links.time[breaks] += run + np.maximum(timeout, wasted + 1)
        links.next[breaks] = first + run
        # skip this loss, and the losses among the discarded packets
        sent = np.minimum(links.sent[breaks], apart - 1)
        links.cursor[breaks] = np.searchsorted(in_order, links.row[breaks] * apart + sent)
        links.sent[ends] += left[ends]
        links.finish(ends, links.time[ends] + left[ends] - 1)
    return links.starts, links.all_sent


def selective_repeat(
    lost: list[np.ndarray], num_packets: int, num_messages: int, *, window: int, timeout: float, acknowledged: float
) -> tuple[np.ndarray, np.ndarray]:
    """Time selective repeat (Bertsekas and Gallager, "Data networks", 2nd ed. 1992, 2.4.3): senders repeat losses only.

    Each packet has its own timer. A packet that is due again goes before new ones, even outside the window. The
    acknowledgement of a delivered packet comes `acknowledged` gaps after its start, at most `window` and `timeout`.

    All timeouts are equal, so packets fall due in the order of their losses: retransmission k repeats loss k. In each
    round, every link sends new packets until one of three events: its next loss occurs, its oldest loss is due again,
    or the window ends at a packet that is not acknowledged.
    """
    links = _Links(lost, num_packets, num_messages)
    losses = len(links.lost)
    due = np.full(losses, np.inf)  # when the retransmission of each loss may start; inf before the loss occurs
    packet = np.full(losses, np.inf)  # which packet of the message was lost
    first_loss = np.arange(losses)  # the loss in which the same packet was lost first
    # When a packet is acknowledged, at its first loss; inf while unknown. At its later losses: -inf
    heard = np.full(losses, np.inf)
    while links.at_work():
        oldest, base = links.oldest, links.base
        due_next, limit = due[oldest], packet[base] + window
        new = np.minimum(limit, num_packets) - links.next
        np.minimum(new, np.ceil(due_next - links.time), out=new)
        np.minimum(new, links.lost[links.cursor] + 1 - links.sent, out=new)
        np.maximum(new, 0, out=new)
        links.sent += new
        links.next += new
        links.time += new
        meets_loss = links.lost[links.cursor] < links.sent
        exhausted = links.next == num_packets
        ends = exhausted & (due_next == np.inf) & ~meets_loss
        waits = (links.next >= limit) & ~exhausted & (heard[base] <= due_next) & ~meets_loss
        repeats = np.flatnonzero(~(meets_loss | ends | waits))

        which = np.flatnonzero(meets_loss)
        loss = links.cursor[which]
        due[loss] = links.time[which] - 1 + timeout
        packet[loss] = links.next[which] - 1
        links.cursor[which] += 1

        which = np.flatnonzero(waits)
        links.time[which] = np.maximum(links.time[which], heard[base[which]])
        base[which] += 1

        loss, again = oldest[repeats], links.cursor[repeats]
        start = np.maximum(links.time[repeats], due[loss])
        fails = links.lost[again] == links.sent[repeats]
        heard[first_loss[loss[~fails]]] = start[~fails] + acknowledged
        loss, again = loss[fails], again[fails]
        due[again] = start[fails] + timeout
        packet[again], first_loss[again], heard[again] = packet[loss], first_loss[loss], -np.inf
        links.cursor[repeats] += fails
        links.sent[repeats] += 1
        links.time[repeats] = start + 1
        oldest[repeats] += 1

        which = np.flatnonzero(ends)
        links.finish(which, links.time[which] - 1)
        base[which] = links.cursor[which]
    return links.starts, links.all_sent


# Time a message on one link, sent reliably or with a deadline, given the packets that the link loses.
#
# Packets leave one after the other and arrive half a round trip after their last bit has left. Acknowledgements take
# the other half, use no bandwidth, and are never lost. Every packet counts as a full one, even a message's last. A
# retransmission is one more packet of its link, which loses it like any other. The times are exact: they equal those of
# a packet-by-packet event simulation. If the window is smaller than what one round trip holds, the sender is paced: it
# sends one packet every round trip / window (RFC 9002, 7.7).


class Deliveries(NamedTuple):
    """The fate of messages, `(links, messages)`."""

    seconds: np.ndarray  # from a message's start until the receiver has it, or gives up
    missing_packets: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Path:
    """A directed link's speed. `round_trip_s` is propagation there and back, without transmission."""

    bandwidth_bits_per_s: float
    round_trip_s: float
    wire: Wire = field(default_factory=Wire)

    def __post_init__(self) -> None:
        check_positive("bandwidth_bits_per_s", self.bandwidth_bits_per_s, "bits a second")
        check_not_negative("round_trip_s", self.round_trip_s, "s")

    @property
    def packet_s(self) -> float:
        """Return the seconds that a full packet occupies the link."""
        return 8 * self.wire.mtu_bytes / self.bandwidth_bits_per_s

    @property
    def arrival_s(self) -> float:
        """Return the seconds from the start of a packet to its arrival."""
        return self.packet_s + self.round_trip_s / 2


@dataclass(frozen=True, kw_only=True)
class BestEffort:
    """Send each packet once, and give up the missing ones, as OptiReduce does (Warraich et al., NSDI 2025).

    The receiver finishes when the last packet arrives, or `deadline_s` after the message's start if that packet is lost
    or late. Packets that have not arrived by then are missing. A link keeps packets in order.
    """

    deadline_s: float

    def __post_init__(self) -> None:
        check_positive("deadline_s", self.deadline_s, "seconds")

    @classmethod
    def patient(cls, num_packets: int, path: Path) -> "BestEffort":
        """Return a transport that waits a round trip longer than a lossless message: only losses are missing."""
        return cls(deadline_s=num_packets * path.packet_s + 1.5 * path.round_trip_s)

    def deliver(self, losses: Sequence[LinkLosses], num_packets: int, num_messages: int, path: Path) -> Deliveries:
        """Send `num_messages` messages of `num_packets` packets, one after the other, over each of the links."""
        fault = f"ends before the first packet arrives: give at least {path.arrival_s:.4g} s"
        refuse_if(self.deadline_s < path.arrival_s, "deadline_s", self.deadline_s, fault)
        # 1e-6: a packet that arrives at the deadline, up to rounding, is in time
        in_time = min(num_packets, int((self.deadline_s - path.arrival_s) / path.packet_s + 1e-6) + 1)
        shape = (len(losses), num_messages)
        last_lost = np.full(shape, in_time < num_packets)
        missing = np.full(shape, num_packets - in_time)
        for row, link in enumerate(losses):
            message, packet = np.divmod(link.take(num_packets * num_messages), num_packets)
            last_lost[row, message[packet == num_packets - 1]] = True
            missing[row] += np.bincount(message[packet < in_time], minlength=num_messages)
        seconds = np.where(last_lost, self.deadline_s, (num_packets - 1) * path.packet_s + path.arrival_s)
        return Deliveries(seconds, missing)


@dataclass(frozen=True, kw_only=True)
class _Reliable:
    starts: ClassVar[Callable[..., tuple[np.ndarray, np.ndarray]]]
    window_packets: int
    timeout_s: float

    def __post_init__(self) -> None:
        check_at_least("window_packets", self.window_packets, 1)
        check_positive("timeout_s", self.timeout_s, "seconds")

    @classmethod
    def prompt(cls, path: Path, timeout_round_trips: float = TIMEOUT_ROUND_TRIPS) -> Self:
        """Return the transport with its best settings: no congestion control, and a known round trip.

        Its times are lower bounds: a timer of RFC 6298 or of an RDMA adapter waits far longer. The window covers a loss
        and its repair, (timeout + round trip) x bandwidth, so it limits only if a packet is lost twice.
        """
        timeout_s = timeout_round_trips * path.round_trip_s + TIMEOUT_PACKETS * path.packet_s
        window = math.ceil((timeout_s + path.packet_s + path.round_trip_s) / path.packet_s)
        return cls(window_packets=window, timeout_s=timeout_s)

    def gap_s(self, path: Path) -> float:
        """Return the seconds between the starts of two packets: 1 / min(bandwidth, window / round trip)."""
        return max(path.packet_s, (path.packet_s + path.round_trip_s) / self.window_packets)

    def deliver(self, losses: Sequence[LinkLosses], num_packets: int, num_messages: int, path: Path) -> Deliveries:
        """Send messages as `BestEffort.deliver` does. It does not return if a link loses all its packets."""
        acknowledged_s = path.packet_s + path.round_trip_s
        fault = "ends before an acknowledgement can come, so that every packet would be sent twice"
        fix = f"give at least {acknowledged_s:.4g} s"
        refuse_if(self.timeout_s < acknowledged_s, "timeout_s", self.timeout_s, f"{fault}: {fix}")
        gap_s = self.gap_s(path)
        timeout, acknowledged = (
            round(seconds / gap_s * STEPS_PER_GAP) / STEPS_PER_GAP for seconds in (self.timeout_s, acknowledged_s)
        )
        drawn = needed = num_packets * num_messages
        lost = [link.take(drawn) for link in losses]
        worst = min(max(map(len, lost)) / drawn, WORST_RATE)
        needed += math.ceil(needed * worst / (1 - worst) * self._sent_a_loss(num_packets, timeout))
        while True:
            more = [link.take(needed - drawn) + drawn for link in losses]
            lost = [np.append(*pieces) for pieces in zip(lost, more, strict=True)]
            drawn = needed
            starts, sent = type(self).starts(
                lost, num_packets, num_messages, window=self.window_packets, timeout=timeout, acknowledged=acknowledged
            )
            if sent.max() <= drawn:
                missing = np.zeros(starts.shape, dtype=np.int64)
                return Deliveries(starts * gap_s + path.arrival_s, missing)
            needed = max(int(sent.max()), drawn + drawn // 4)  # a restart is costly, so take more than needed

    def _sent_a_loss(self, num_packets: int, timeout: float) -> float:
        """Return about how many packets a loss adds."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class SelectiveRepeat(_Reliable):
    """Send each lost packet again `timeout_s` after its start, before new packets.

    Packet n waits until all packets up to n - `window_packets` are acknowledged. The receiver has the message when its
    last missing packet arrives.
    """

    starts = staticmethod(selective_repeat)


@dataclass(frozen=True, kw_only=True)
class GoBackN(_Reliable):
    """Send a lost packet and all packets after it again, `timeout_s` after its start.

    The receiver accepts packets only in order. Until the timeout the sender continues, up to `window_packets` from the
    lost packet, and the receiver discards what comes.
    """

    starts = staticmethod(go_back_n)

    def _sent_a_loss(self, num_packets: int, timeout: float) -> float:
        return min(math.ceil(timeout), self.window_packets, num_packets)


Transport = SelectiveRepeat | GoBackN | BestEffort


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

    def num_packets(self, num_elements: int, itemsize: int, ranks: int, wire: Wire, block: int = 1) -> int:
        """Return the packets of each message of an all-reduce; an item of `itemsize` bytes has `block` elements."""
        elements = -(-num_elements // ranks) if self.split else num_elements
        return self.chunks(ranks) * wire.num_packets(elements, itemsize, block)


def in_steps(seconds: np.ndarray) -> np.ndarray:
    """Add up steps, each of which ends with the slowest rank's message; link r is rank r's."""
    return seconds.max(axis=-1).sum(axis=0)


def around_ring(seconds: np.ndarray) -> np.ndarray:
    """Time a ring: rank r's message k + 1 starts once its message k has arrived and rank r - 1's has reached it.

    Only neighbours wait for each other, so the time is a recursion in max and plus (Baccelli et al., "Synchronization
    and linearity", 1992), not the sum of slowest links.
    """
    arrived = np.zeros(seconds.shape[1:])
    for message in seconds:
        arrived = np.maximum(arrived, np.roll(arrived, 1, axis=-1)) + message
    return arrived.max(axis=-1)


def over_tree(seconds: np.ndarray) -> np.ndarray:
    """Time the binary tree: rank r's uplink is r - 1, its downlink R - 2 + r.

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

    This leaves out SwitchML's streaming, which would let the way down overlap the way up.
    """
    (ways,) = seconds
    up, down = np.split(ways, 2, axis=-1)
    return up.max(axis=-1) + down.max(axis=-1)


SCHEDULES = {
    # A rank's R - 1 chunks share its port as one message. The sums come back once the last rank has sent its chunks.
    "direct": Schedule(lambda ranks: ranks, lambda ranks: 2, lambda ranks: ranks - 1, True, in_steps),
    "ring": Schedule(lambda ranks: ranks, lambda ranks: 2 * (ranks - 1), lambda ranks: 1, True, around_ring),
    # The sum returns in no time.
    "sender": Schedule(lambda ranks: ranks, lambda ranks: 1, lambda ranks: 1, False, in_steps),
    "switch": Schedule(lambda ranks: 2 * ranks, lambda ranks: 1, lambda ranks: 1, False, through_switch),
    "tree": Schedule(lambda ranks: 2 * (ranks - 1), lambda ranks: 1, lambda ranks: 1, False, over_tree),
}
"""The schedule of each algorithm's all-reduce."""


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
        itemsize: bytes per element, or per block of elements with its scale.
        ranks: number of ranks.
        block: elements of a block.

    Raises:
        ValueError: if the algorithm is unknown, or a number is below 1.
    """

    algorithm: str
    num_elements: int
    itemsize: int = 4
    ranks: int
    block: int = 1

    def __post_init__(self) -> None:
        for name in ("num_elements", "itemsize", "ranks", "block"):
            check_at_least(name, getattr(self, name), 1)
        _ = self.schedule

    @property
    def schedule(self) -> Schedule:
        """Return which message waits for which."""
        check_known("algorithm", self.algorithm, SCHEDULES)
        return SCHEDULES[self.algorithm]

    def num_packets(self, wire: Wire) -> int:
        """Return the packets of each message."""
        return self.schedule.num_packets(self.num_elements, self.itemsize, self.ranks, wire, self.block)


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
    collective to collective. Samples come from several independent runs, so that many links are computed together.
    Between portions that fit into memory, some unused packets are skipped.
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
