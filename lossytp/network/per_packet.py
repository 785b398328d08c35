"""A loss process from one function of the packets' numbers: the short way to one of your own."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lossytp.network.bernoulli import NO_PACKETS
from lossytp.network.checks import shown
from lossytp.network.streams import Key, Stream
from lossytp.network.trace import Trace

MEASURED_PACKETS = 2**20
IsLost = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class PerPacket:
    """A packet is lost where `is_lost(packets, uniforms)` says so, bool (num_packets,).

    `packets` are the packets' numbers on their link, counted from 0, int64 (num_packets,); `uniforms` as many
    independent numbers in [0, 1), the link's own. What happens to a packet must depend on its own two numbers alone:

    >>> every_tenth = PerPacket(lambda packets, uniforms: packets % 10 == 0)

    Cost is that of the packets, not of the losses. Loss rate, mean burst and autocorrelation are measured, over the
    first 2**20 packets of a link set apart for it: to about 0.001 at worst where losses are independent.
    """

    is_lost: IsLost

    def __post_init__(self) -> None:
        if not callable(self.is_lost):
            raise TypeError(
                f"is_lost = {shown(self.is_lost)} is no function: give one of (packets, uniforms) that returns a bool "
                "for each packet"
            )
        _lost(self.is_lost, np.arange(8), np.full(8, 0.5))

    @cached_property
    def _measured(self) -> Trace:
        return Trace(lost=self.losses(("measured",)).take(MEASURED_PACKETS), num_packets=MEASURED_PACKETS)

    @property
    def loss_rate(self) -> float:
        """Share of packets lost, measured."""
        return self._measured.loss_rate

    @property
    def mean_burst_packets(self) -> float:
        """Mean run of consecutive losses, measured."""
        return self._measured.mean_burst_packets

    def autocorrelation(self, lag: int) -> float:
        """Correlation of the loss indicators of two packets `lag` apart, measured."""
        return self._measured.autocorrelation(lag)

    def losses(self, key: Key) -> "PerPacketLosses":
        """The losses of one link, its numbers drawn from the stream below `key`."""
        return PerPacketLosses(self.is_lost, key)


def _lost(is_lost: IsLost, packets: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Return what `is_lost` says of these packets, bool (num_packets,); ValueError where it says something else."""
    lost = np.asarray(is_lost(packets, uniforms))
    if lost.shape != packets.shape or lost.dtype != bool:
        raise ValueError(
            f"is_lost gave {lost.dtype} of shape {lost.shape} for {len(packets)} packets: return a bool for each, "
            f"shape ({len(packets)},)"
        )
    return lost


class PerPacketLosses:
    """Which of a link's packets are lost: packet n is told by n and the n-th number of one stream."""

    def __init__(self, is_lost: IsLost, key: Key) -> None:
        self._is_lost = is_lost
        self._uniforms = Stream((*key, "packets"))
        self._packets = 0  # taken so far

    def take(self, num_packets: int) -> np.ndarray:
        """Sorted indices, counted from 0, of the losses among the next `num_packets` packets: int64 (num_lost,)."""
        if num_packets == 0:
            return NO_PACKETS
        packets = np.arange(self._packets, self._packets + num_packets)
        self._packets += num_packets
        return np.flatnonzero(_lost(self._is_lost, packets, self._uniforms.uniforms(num_packets)))

    def state_dict(self) -> dict:
        return {"packets": self._packets}

    def load_state_dict(self, state: dict) -> None:
        self._packets = state["packets"]
        self._uniforms.seek(self._packets)
