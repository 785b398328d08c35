"""Describe the packets that a measurement sends."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from lossytp.network.checks import check_at_least, check_at_most, check_bool, check_is, check_positive, shown
from lossytp.network.datagrams import HEADER, IP_AND_UDP_BYTES

LEAST_BYTES = IP_AND_UDP_BYTES + HEADER.size
MOST_BYTES = 65_535
MOST_FLOWS = 256
MOST_PACKETS = 2**31


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Numbered packets to send in several flows at once, in one direction or both.

    Args:
        packets: number of packets in each flow.
        flows: number of flows. Each has its own port, as a rank has one per peer in a collective. With
            `both_directions`, as many flows come back.
        packet_bytes: size of a whole IP packet: 20 bytes of IP, 8 of UDP, a header of 16, and payload.
        rate_packets_per_s: largest mean rate of each flow.
        burst_packets: number of packets that leave back to back. Pauses between bursts keep the mean rate.
        both_directions: whether the receiver sends too. It never sends more bytes than it has received.

    Raises:
        TypeError: if a value has the wrong type.
        ValueError: if a value is out of bounds.
    """

    packets: int
    flows: int = 1
    packet_bytes: int = 1500
    rate_packets_per_s: float = 1000.0
    burst_packets: int = 1
    both_directions: bool = False

    def __post_init__(self) -> None:
        for name, least, most in (
            ("packets", 1, MOST_PACKETS),
            ("flows", 1, MOST_FLOWS),
            ("packet_bytes", LEAST_BYTES, MOST_BYTES),
            ("burst_packets", 1, MOST_PACKETS),
        ):
            check_at_least(name, getattr(self, name), least)
            check_at_most(name, getattr(self, name), most)
        check_positive("rate_packets_per_s", self.rate_packets_per_s, "packets a second")
        check_bool("both_directions", self.both_directions)

    @property
    def datagram_bytes(self) -> int:
        """Return the bytes of a datagram, without the headers of IP and UDP."""
        return self.packet_bytes - IP_AND_UDP_BYTES

    @property
    def mbits_per_s(self) -> float:
        """Return the Mbit/s of all flows of one direction together."""
        return self.flows * self.rate_packets_per_s * self.packet_bytes * 8 / 1e6

    @property
    def seconds(self) -> float:
        """Return the shortest time that sending can take."""
        return self.packets / self.rate_packets_per_s

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """Return the plan that another machine describes.

        Raises:
            TypeError: if a value has the wrong type.
            ValueError: if the names are not a plan's, or a value is out of bounds.
        """
        check_is("plan", values, Mapping, "names with values")
        assert isinstance(values, Mapping)
        if set(values) != {field.name for field in fields(cls)}:
            raise ValueError(
                f"plan = {shown(dict(values))} does not have this version's fields: run the same version on both ends"
            )
        return cls(**values)

    def check_rate(self, max_mbits: float) -> None:
        """Raise ValueError if one direction is faster than `max_mbits`."""
        if self.mbits_per_s > max_mbits:
            raise ValueError(
                f"{self.flows} x {self.rate_packets_per_s:g} packets/s of {self.packet_bytes} bytes are "
                f"{self.mbits_per_s:.0f} Mbit/s, above max_mbits = {max_mbits:g}: send slower, or raise max_mbits"
            )
