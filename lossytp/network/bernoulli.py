"""Bernoulli packet loss, sampled by gaps, so that the cost grows with the losses and not with the packets."""

import math
from dataclasses import dataclass

import numpy as np

from lossytp.network.checks import check_probability
from lossytp.network.loss_process import mean_burst
from lossytp.network.streams import Key, Stream

NEVER = 2**62  # a packet index no run reaches
LONGEST_GAP = 2.0**45  # keeps the sum of a block of gaps inside int64 ...
RAREST = 1e-11  # ... and only rates below this can reach it, since log(2**-52) is -36
SMALLEST_BLOCK = 64  # gaps drawn at once: amortises numpy's call overhead over several messages
LARGEST_BLOCK = 2**13  # keeps the working set inside the processor's cache

NO_PACKETS = np.empty(0, dtype=np.int64)
NO_PACKETS.setflags(write=False)


@dataclass(frozen=True, kw_only=True)
class Bernoulli:
    """Each packet is lost independently with probability `loss_rate`, in [0, 1]."""

    loss_rate: float

    def __post_init__(self) -> None:
        check_probability("loss_rate", self.loss_rate)

    @property
    def mean_burst_packets(self) -> float:
        """Return the mean run of consecutive losses: 1 / (1 - p), or 0 if nothing is lost."""
        return mean_burst(self.loss_rate, 0.0)

    def autocorrelation(self, lag: int) -> float:
        """Return the correlation of the losses of two packets `lag` apart: 0, except at lag 0."""
        return float(lag == 0)

    def to_netem(self) -> str:
        """Return the process in the notation of Linux ``tc netem``."""
        return f"loss random {100 * self.loss_rate:.10g}%"

    def losses(self, key: Key) -> "BernoulliLosses":
        """Return the losses of one link, drawn from the streams below `key`."""
        return BernoulliLosses(self.loss_rate, key)


def geometric(probability: float, uniforms: np.ndarray) -> np.ndarray:
    """Return the trials up to and including the first success, by inversion: int64, at least 1, shape of `uniforms`.

    P(X > n) = (1 - p)^n, hence X = floor(log(1 - u) / log(1 - p)) + 1 (Devroye 1986, X.2).
    """
    if probability == 1:
        return np.ones(uniforms.shape, dtype=np.int64)
    trials = np.subtract(1.0, uniforms)
    np.log(trials, out=trials)
    trials *= 1 / math.log1p(-probability)
    if probability < RAREST:
        np.minimum(trials, LONGEST_GAP, out=trials)
    whole = trials.astype(np.int64)
    whole += 1
    return whole


def block_size(expected: float) -> int:
    """Return how many numbers to draw at once if about `expected` are needed."""
    return int(min(max(expected + 3 * math.sqrt(max(expected, 0)), SMALLEST_BLOCK), LARGEST_BLOCK))


class BernoulliLosses:
    """Find a link's lost packets by drawing the gaps between losses.

    Taking n packets at once or in any pieces gives the same losses: the gaps come in order from one stream, whatever
    the size of the blocks in which they are drawn.
    """

    def __init__(self, loss_rate: float, key: Key) -> None:
        self._loss_rate = loss_rate
        self._gaps = Stream((*key, "gaps"))
        self._restart(packets=0, losses=0, last_lost=-1)

    def _restart(self, *, packets: int, losses: int, last_lost: int) -> None:
        self._packets = packets  # taken so far
        self._losses = losses  # of these, lost
        self._last_lost = last_lost
        self._gaps.seek(losses)
        self._next_lost = NEVER
        if 0 < self._loss_rate < 1:
            self._draw_block(after=last_lost, needed_packets=0)
            self._next_lost = int(self._upcoming[0])

    def _draw_block(self, *, after: int, needed_packets: int) -> None:
        """Set `_upcoming` to the next sorted losses after packet `after`, counted from the link's first packet."""
        block = block_size(needed_packets * self._loss_rate)
        self._upcoming = geometric(self._loss_rate, self._gaps.uniforms(block))
        np.cumsum(self._upcoming, out=self._upcoming)
        self._upcoming += after
        self._cursor = 0  # how many of `_upcoming` were taken

    def take(self, num_packets: int) -> np.ndarray:
        """Return the sorted indices of the losses among the next `num_packets` packets, from 0: int64 (num_lost,)."""
        first = self._packets
        end = self._packets = first + num_packets
        if self._loss_rate == 1:
            return np.arange(num_packets)
        if self._next_lost >= end:
            return NO_PACKETS
        pieces = []
        while (last := int(self._upcoming[-1])) < end:
            pieces.append(self._upcoming[self._cursor :])
            self._draw_block(after=last, needed_packets=end - last)
        stop = int(self._upcoming.searchsorted(end))
        pieces.append(self._upcoming[self._cursor : stop])
        lost = np.concatenate(pieces)
        self._losses += len(lost)
        self._last_lost = int(lost[-1])
        self._cursor = stop
        self._next_lost = int(self._upcoming[stop])
        lost -= first
        return lost

    def state_dict(self) -> dict:
        """Return all that resuming needs besides the process and the key, as JSON-ready values."""
        return {"packets": self._packets, "losses": self._losses, "last_lost": self._last_lost}

    def load_state_dict(self, state: dict) -> None:
        """Go on from `state_dict()`."""
        self._restart(**state)
