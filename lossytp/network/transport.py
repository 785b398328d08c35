"""Time a message on one link, sent reliably or with a deadline, given the packets that the link loses.

Packets leave one after the other and arrive half a round trip after their last bit has left. Acknowledgements take the
other half, use no bandwidth, and are never lost. Every packet counts as a full one, even a message's last. A
retransmission is one more packet of its link, which loses it like any other.

The times are exact: they equal those of a packet-by-packet event simulation. One thing is a choice. If the window is
smaller than what one round trip holds, the sender is paced: it sends one packet every round trip / window (RFC 9002,
7.7). A sender without pacing sends each window in a burst. It finishes at most a round trip sooner without loss, and
about 3 to 12 % sooner at 1 to 5 % loss with windows of an eighth to a half of a round trip.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np

from lossytp.network.checks import check_at_least, check_not_negative, check_positive
from lossytp.network.loss_process import LinkLosses
from lossytp.network.packets import Wire
from lossytp.network.retransmissions import go_back_n, selective_repeat

STEPS_PER_GAP = 2**30  # times in gaps are rounded to this, so that sums of up to 2**23 gaps are exact
TIMEOUT_ROUND_TRIPS = 1.5  # RFC 8985 waits 1.25, and two for a message's last packets
TIMEOUT_PACKETS = 3  # RFC 9002, 6.1.1: that many packets may overtake one before it counts as lost
WORST_RATE = 0.9  # bounds the observed loss rate, from which the number of packets is predicted


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


def _check_messages(num_packets: int, num_messages: int) -> None:
    check_at_least("num_packets", num_packets, 1)
    check_at_least("num_messages", num_messages, 1)


@dataclass(frozen=True, kw_only=True)
class BestEffort:
    """Send each packet once, and give up the missing ones.

    The receiver finishes when the last packet arrives, or `deadline_s` after the message's start if that packet is lost
    or late. Packets that have not arrived by then are missing. There is no window, because nothing is acknowledged.

    This is a bounded transport as in OptiReduce (Warraich et al., NSDI 2025). A link keeps packets in order, so after
    the last one nothing more comes.
    """

    deadline_s: float

    def __post_init__(self) -> None:
        check_positive("deadline_s", self.deadline_s, "seconds")

    @classmethod
    def patient(cls, num_packets: int, path: Path) -> "BestEffort":
        """Return a transport whose receiver waits a round trip longer than `num_packets` packets take without loss.

        So every packet that is not lost is in time.
        """
        return cls(deadline_s=num_packets * path.packet_s + 1.5 * path.round_trip_s)

    def deliver(self, losses: Sequence[LinkLosses], num_packets: int, num_messages: int, path: Path) -> Deliveries:
        """Send `num_messages` messages of `num_packets` packets, one after the other, over each of the links."""
        _check_messages(num_packets, num_messages)
        if self.deadline_s < path.arrival_s:
            raise ValueError(
                f"deadline_s = {self.deadline_s!r} ends before the first packet arrives: "
                f"give at least {path.arrival_s:.4g} s"
            )
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
class _Reliable(ABC):
    window_packets: int
    timeout_s: float

    def __post_init__(self) -> None:
        check_at_least("window_packets", self.window_packets, 1)
        check_positive("timeout_s", self.timeout_s, "seconds")

    @classmethod
    def prompt(cls, path: Path, timeout_round_trips: float = TIMEOUT_ROUND_TRIPS) -> Self:
        """Return the transport with its best settings: no congestion control, and a known round trip.

        Its times are lower bounds. A packet that is not acknowledged is sent again after `timeout_round_trips` and the
        time of a few packets. A timer of RFC 6298 or of an RDMA adapter waits far longer. The window covers a loss and
        its repair, (timeout + round trip) x bandwidth, so it limits only if a packet is lost twice.
        """
        timeout_s = timeout_round_trips * path.round_trip_s + TIMEOUT_PACKETS * path.packet_s
        window = math.ceil((timeout_s + path.packet_s + path.round_trip_s) / path.packet_s)
        return cls(window_packets=window, timeout_s=timeout_s)

    def gap_s(self, path: Path) -> float:
        """Return the seconds between the starts of two packets: 1 / min(bandwidth, window / round trip)."""
        return max(path.packet_s, (path.packet_s + path.round_trip_s) / self.window_packets)

    def deliver(self, losses: Sequence[LinkLosses], num_packets: int, num_messages: int, path: Path) -> Deliveries:
        """Send `num_messages` messages of `num_packets` packets, one after the other, over each of the links.

        It does not return if a link loses all its packets; `collective_times` refuses such a process.
        """
        _check_messages(num_packets, num_messages)
        acknowledged_s = path.packet_s + path.round_trip_s
        if self.timeout_s < acknowledged_s:
            raise ValueError(
                f"timeout_s = {self.timeout_s!r} ends before an acknowledgement can come, so that every packet "
                f"would be sent twice: give at least {acknowledged_s:.4g} s"
            )
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
            starts, sent = self._starts(lost, num_packets, num_messages, timeout, acknowledged)
            if sent.max() <= drawn:
                missing = np.zeros(starts.shape, dtype=np.int64)
                return Deliveries(starts * gap_s + path.arrival_s, missing)
            needed = max(int(sent.max()), drawn + drawn // 4)  # a restart is costly, so take more than needed

    def _sent_a_loss(self, num_packets: int, timeout: float) -> float:
        """Return about how many packets a loss adds."""
        return 1.0

    @abstractmethod
    def _starts(
        self, lost: list[np.ndarray], num_packets: int, num_messages: int, timeout: float, acknowledged: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return when each message's last missing packet starts, and the packets sent.

        Returns:
            Starts in gaps, (links, messages), and packets, (links,).
        """


@dataclass(frozen=True, kw_only=True)
class SelectiveRepeat(_Reliable):
    """Send each lost packet again `timeout_s` after its start, before new packets.

    Packet n waits until all packets up to n - `window_packets` are acknowledged. The receiver has the message when its
    last missing packet arrives.
    """

    def _starts(
        self, lost: list[np.ndarray], num_packets: int, num_messages: int, timeout: float, acknowledged: float
    ) -> tuple[np.ndarray, np.ndarray]:
        return selective_repeat(
            lost, num_packets, num_messages, window=self.window_packets, timeout=timeout, acknowledged=acknowledged
        )


@dataclass(frozen=True, kw_only=True)
class GoBackN(_Reliable):
    """Send a lost packet and all packets after it again, `timeout_s` after its start.

    The receiver accepts packets only in order. Until the timeout the sender continues, up to `window_packets` from the
    lost packet, and the receiver discards what comes.
    """

    def _sent_a_loss(self, num_packets: int, timeout: float) -> float:
        return min(math.ceil(timeout), self.window_packets, num_packets)

    def _starts(
        self, lost: list[np.ndarray], num_packets: int, num_messages: int, timeout: float, acknowledged: float
    ) -> tuple[np.ndarray, np.ndarray]:
        return go_back_n(lost, num_packets, num_messages, window=self.window_packets, timeout=timeout)


Transport = SelectiveRepeat | GoBackN | BestEffort
