"""Make a loss process of one function of the packets' numbers: the short way to a process of your own."""

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
    """Lose a packet if `is_lost(packets, uniforms)` is True for it; it returns bool (num_packets,).

    `packets` are the packets' numbers on their link, from 0, int64 (num_packets,). `uniforms` are as many independent
    numbers in [0, 1), drawn for this link. A packet's loss must depend only on its own two numbers:

    >>> every_tenth = PerPacket(lambda packets, uniforms: packets % 10 == 0)

    The cost grows with the packets, not with the losses. Loss rate, mean burst and autocorrelation are measured over
    the first 2**20 packets of a separate link: within about 0.001 for independent losses.
    """

    is_lost: IsLost

    def __post_init__(self) -> None:
        if not callable(self.is_lost):
            raise TypeError(
                f"is_lost = {shown(self.is_lost)} is not a function: give a function of (packets, uniforms) that "
                "returns a bool for each packet"
            )
        _lost(self.is_lost, np.arange(8), np.full(8, 0.5))

    @cached_property
    def _measured(self) -> Trace:
        return Trace(lost=self.losses(("measured",)).take(MEASURED_PACKETS), num_packets=MEASURED_PACKETS)

    @property
    def loss_rate(self) -> float:
        """Return the measured share of lost packets."""
        return self._measured.loss_rate

    @property
    def mean_burst_packets(self) -> float:
        """Return the measured mean run of consecutive losses."""
        return self._measured.mean_burst_packets

    def autocorrelation(self, lag: int) -> float:
        """Return the measured correlation of the loss indicators of two packets `lag` apart."""
        return self._measured.autocorrelation(lag)

    def losses(self, key: Key) -> "PerPacketLosses":
        """Return the losses of one link, with uniform numbers from a stream below `key`."""
        return PerPacketLosses(self.is_lost, key)


def _lost(is_lost: IsLost, packets: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Return `is_lost` of these packets, bool (num_packets,).

    Raises:
        ValueError: if it returns anything else.
    """
    lost = np.asarray(is_lost(packets, uniforms))
    if lost.shape != packets.shape or lost.dtype != bool:
        raise ValueError(
            f"is_lost gave {lost.dtype} of shape {lost.shape} for {len(packets)} packets: return a bool for each, "
            f"shape ({len(packets)},)"
        )
    return lost


class PerPacketLosses:
    """Packet n's loss depends only on n and its uniform draw."""

    def __init__(self, is_lost: IsLost, key: Key) -> None:
        self._is_lost = is_lost
        self._uniforms = Stream((*key, "packets"))
        self._packets = 0  # taken so far

    def take(self, num_packets: int) -> np.ndarray:
        """Return the sorted indices of the losses among the next `num_packets` packets, from 0: int64 (num_lost,)."""
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
