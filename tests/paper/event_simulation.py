"""One message on one link, packet by packet in simpy: a sender, a receiver, and every packet's timer and
acknowledgement as events of their own. Shares no code with `paper.timing`, and knows no gaps.

Times are fractions: of events that coincide, rounding would let now one, now the other be first.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from fractions import Fraction

import simpy


class Simulation(ABC):
    """`lost` tells for each packet the link carries, in order, whether it is lost; it is read on by later messages."""

    def __init__(self, lost: Iterator[bool], num_packets: int, packet_s: float, round_trip_s: float) -> None:
        self.env = simpy.Environment(Fraction(0))
        self.lost, self.num_packets = lost, num_packets
        self.packet_s, self.round_trip_s = Fraction(packet_s), Fraction(round_trip_s)
        self.received: set[int] = set()
        self.done = self.env.event()

    def run(self) -> float:
        """Seconds until the receiver is done."""
        self.env.process(self.sender())
        self.env.run(self.done)
        return float(self.env.now)

    @abstractmethod
    def sender(self):
        """Sends all packets, as a simpy process."""

    def cross(self, packet: int):
        """Packet by packet: on the wire, then half a round trip to the receiver, unless it is lost."""
        if next(self.lost):
            return
        yield self.env.timeout(self.packet_s + self.round_trip_s / 2)
        self.receive(packet)

    def receive(self, packet: int) -> None:
        self.received.add(packet)
        if len(self.received) == self.num_packets and not self.done.triggered:
            self.done.succeed()


class Reliable(Simulation):
    """What both ARQs share: a window of sequence numbers, timers, and a sender woken by what may let it send.

    It starts a packet at most every (packet + round trip) / window seconds.
    """

    def __init__(self, *args, window: int, timeout_s: float) -> None:
        super().__init__(*args)
        self.window, self.timeout_s = window, Fraction(timeout_s)
        self.pause_s = max(self.packet_s, (self.packet_s + self.round_trip_s) / window)
        self.acknowledged: set[int] = set()
        self.next = 0
        self.wake = self.env.event()

    @property
    def base(self) -> int:
        return next((n for n in range(self.num_packets) if n not in self.acknowledged), self.num_packets)

    def sender(self):
        while len(self.acknowledged) < self.num_packets:
            packet = self.choose()
            if packet is None:
                self.wake = self.env.event()
                yield self.wake
            else:
                self.env.process(self.cross(packet))
                self.env.process(self.timer(packet))
                yield self.env.timeout(self.pause_s)
                yield self.env.timeout(0)  # what else happens at this instant happens first

    def woken(self) -> None:
        if not self.wake.triggered:
            self.wake.succeed()

    def acknowledge(self, packet: int):
        yield self.env.timeout(self.round_trip_s / 2)
        self.acknowledged.add(packet)
        self.woken()

    def choose(self) -> int | None:
        """The packet to send next; None where there is none to send now."""
        if self.next < min(self.num_packets, self.base + self.window):
            self.next += 1
            return self.next - 1
        return None

    @abstractmethod
    def timer(self, packet: int):
        """What the sender does once `packet` is on the wire, as a simpy process."""


class SelectiveRepeatEvents(Reliable):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.due: list[int] = []

    def choose(self) -> int | None:
        return self.due.pop(0) if self.due else super().choose()

    def timer(self, packet: int):
        yield self.env.timeout(self.timeout_s)
        if packet not in self.acknowledged and packet not in self.received:  # an acknowledgement is never late
            self.due.append(packet)
            self.woken()

    def receive(self, packet: int) -> None:
        super().receive(packet)
        self.env.process(self.acknowledge(packet))


class GoBackNEvents(Reliable):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.expected = 0
        self.latest: dict[int, int] = {}  # packet: which of its transmissions its timer is about

    def timer(self, packet: int):
        number = self.latest[packet] = self.latest.get(packet, 0) + 1
        yield self.env.timeout(self.timeout_s)
        if packet == self.base and packet not in self.received and number == self.latest[packet]:
            self.next = packet
            self.woken()

    def receive(self, packet: int) -> None:
        if packet == self.expected:
            self.expected += 1
            super().receive(packet)
            self.env.process(self.acknowledge(packet))


class BestEffortEvents(Simulation):
    def __init__(self, *args, deadline_s: float) -> None:
        super().__init__(*args)
        self.deadline_s = Fraction(deadline_s)

    def sender(self):
        self.env.process(self.leave())
        for packet in range(self.num_packets):
            self.env.process(self.cross(packet))
            yield self.env.timeout(self.packet_s)

    def leave(self):
        yield self.env.timeout(self.deadline_s)
        yield self.env.timeout(0)  # a packet that arrives at this instant is in time
        if not self.done.triggered:
            self.done.succeed()

    def receive(self, packet: int) -> None:
        if self.done.triggered:
            return
        self.received.add(packet)
        if packet == self.num_packets - 1:
            self.done.succeed()
