"""How a message becomes packets."""

from dataclasses import dataclass
from numbers import Integral

from lossytp.network.checks import check_at_least, check_at_most

MOST = 2**40  # keeps the number of an element inside int64


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Packet geometry.

    Args:
        mtu_bytes: size of a whole packet, at most `MOST`.
        header_bytes: bytes of it that the header takes. The default, 44, is IP 20, UDP 8, and 16 for the key, sequence
            number and offset that let a receiver see what is missing.
        elements: elements that a packet carries, whatever their size. If left out, they follow from the bytes.

    Raises:
        ValueError: if a packet has no room for an element of 8 bytes, or a value is above `MOST`.
    """

    mtu_bytes: int = 1500
    header_bytes: int = 44
    elements: int | None = None

    def __post_init__(self) -> None:
        check_at_least("header_bytes", self.header_bytes, 0)
        least = self.header_bytes + 8
        if isinstance(self.mtu_bytes, Integral) and self.mtu_bytes < least:
            raise ValueError(
                f"mtu_bytes = {self.mtu_bytes} leaves no room for an 8-byte element after a header of "
                f"{self.header_bytes} bytes: give at least {least}"
            )
        check_at_least("mtu_bytes", self.mtu_bytes, least)
        check_at_most("mtu_bytes", self.mtu_bytes, MOST)
        if self.elements is not None:
            check_at_least("elements", self.elements, 1)
            check_at_most("elements", self.elements, MOST)

    def elements_per_packet(self, itemsize: int) -> int:
        """Return how many whole elements of `itemsize` bytes a packet carries: 364 in fp32 at the default MTU."""
        if self.elements is not None:
            return self.elements
        return (self.mtu_bytes - self.header_bytes) // itemsize

    def num_packets(self, num_elements: int, itemsize: int) -> int:
        """Return how many packets `num_elements` elements fill; the last one may be partly empty."""
        return -(-num_elements // self.elements_per_packet(itemsize))
