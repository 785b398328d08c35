"""Recorded packet losses, replayed without end."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from lossytp.network.bernoulli import NO_PACKETS
from lossytp.network.bounded_files import check_file
from lossytp.network.checks import check_at_least, shown
from lossytp.network.streams import Key, Stream

DOUBT = (
    "WARNING: {:.1%} of the packets count as lost. If a 1 stands for an arrival in the recording, import it with "
    "python -m lossytp.probe import FILE --ones arrived"
)


def burst_lengths(lost: np.ndarray | Sequence[int]) -> np.ndarray:
    """Return the lengths of the runs of consecutive losses in sorted indices of lost packets, int64 (bursts,)."""
    starts = np.flatnonzero(np.diff(lost, prepend=-2) > 1)
    return np.diff(starts, append=len(lost))


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """Replay a recording of `num_packets` packets; those at the sorted indices `lost`, int64 (num_lost,), were lost.

    Each link starts at its own random offset, and wraps from the last packet to the first. The closed forms are exact
    for this circle of packets. Traces with equal content are equal.
    """

    lost: np.ndarray | Sequence[int] = field(repr=False)
    num_packets: int

    def __post_init__(self) -> None:
        given = np.asarray(self.lost)
        numbers = given.dtype.kind in "iuf" and given.ndim == 1 and bool(np.isfinite(given).all())
        lost = given.astype(np.int64) if numbers else NO_PACKETS
        check_at_least("num_packets", self.num_packets, 1)
        if not numbers or not np.array_equal(lost, given) or (np.diff(lost, prepend=-1) < 1).any():
            raise ValueError(
                f"lost = {shown(self.lost)} is not a rising list of whole numbers from 0: give one, or use "
                "from_indicators for one 0 or 1 per packet"
            )
        if len(lost) and lost[-1] >= self.num_packets:
            raise ValueError(f"lost packet {lost[-1]} is not among num_packets = {self.num_packets}: give more packets")
        lost.setflags(write=False)
        object.__setattr__(self, "lost", lost)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    @property
    def _content(self) -> tuple[int, bytes]:
        return self.num_packets, np.asarray(self.lost).tobytes()

    @classmethod
    def from_indicators(cls, is_lost: np.ndarray | Sequence[int]) -> "Trace":
        """Return the trace of one number per packet, (num_packets,) or (num_packets, 1): 1 for a lost one, else 0."""
        indicators = np.asarray(is_lost)
        indicators = indicators[:, 0] if indicators.shape[1:] == (1,) else indicators
        if indicators.ndim != 1 or not np.isin(indicators, (0, 1)).all():
            raise ValueError(
                f"is_lost, of shape {indicators.shape}, is not a list of zeros and ones: give one 0 or 1 per packet"
            )
        return cls(lost=np.flatnonzero(indicators), num_packets=len(indicators))

    @classmethod
    def from_file(cls, path: str | Path) -> "Trace":
        """Return the trace in a file of 0 or 1 a packet: a .npy array, or text with or without commas and spaces.

        A .parquet file is a measurement of `lossytp.probe`. Flows follow one another.
        """
        file = Path(str(path))
        status = check_file(file)
        return cls._from_file(file, status.st_mtime_ns, status.st_size)

    @classmethod
    @lru_cache(maxsize=4)  # every row of a table reads the same file
    def _from_file(cls, file: Path, modified_ns: int, size: int) -> "Trace":
        """Read the file. Its time and size are arguments, so that a changed file is read again."""
        from lossytp.network.probe.importing import lists_in  # both build on this module
        from lossytp.network.probe.trace_file import read_trace

        flows = [read_trace(file).all_lost()] if file.suffix == ".parquet" else lists_in(file)
        lost = np.concatenate([np.empty(0, np.bool_), *flows])
        if not len(lost):
            raise ValueError(
                f"trace {file} holds no packets as zeros and ones: read it with python -m lossytp.probe import {file}"
            )
        trace = cls.from_indicators(lost)
        if trace.loss_rate > 0.5:
            print(f"trace {file}: {DOUBT.format(trace.loss_rate)}", file=sys.stderr)
        return trace

    @property
    def loss_rate(self) -> float:
        """Return the share of the packets that were lost."""
        return len(self.lost) / self.num_packets

    @property
    def mean_burst_packets(self) -> float:
        """Return the mean run of consecutive losses on the circle; 0 without losses, infinite if all were lost."""
        bursts = len(self.lost) - self.both_lost(1)
        return len(self.lost) / bursts if bursts else math.inf if len(self.lost) else 0.0

    def autocorrelation(self, lag: int) -> float:
        """Return the correlation of the losses of two packets `lag` apart on the circle; 0 if they never vary."""
        rate = self.loss_rate
        if lag == 0 or rate in (0, 1):
            return float(lag == 0)
        return (self.both_lost(lag) / self.num_packets - rate**2) / (rate * (1 - rate))

    def both_lost(self, lag: int) -> int:
        """Return for how many lost packets the packet `lag` later is lost too."""
        later = (np.asarray(self.lost) + lag) % self.num_packets
        return int(np.isin(later, self.lost).sum())

    def losses(self, key: Key) -> "TraceLosses":
        """Return the losses of one link, from an offset drawn from the stream of `key`."""
        return TraceLosses(self, key)


class TraceLosses:
    """Lose the packets that were lost in the recording, which repeats without end."""

    def __init__(self, trace: Trace, key: Key, offset: int | None = None) -> None:
        self._lost = np.asarray(trace.lost)
        self._length = trace.num_packets
        drawn = Stream((*key, "offset")).uniforms(1)[0] * self._length
        self._offset = int(drawn) if offset is None else offset
        self._packets = 0  # taken so far

    def _lost_before(self, packet: int) -> int:
        """Return the number of losses before `packet`, counting both from where the recording first began."""
        laps, packet_of_lap = divmod(packet, self._length)
        return laps * len(self._lost) + int(self._lost.searchsorted(packet_of_lap))

    def take(self, num_packets: int) -> np.ndarray:
        """Return the sorted indices of the losses among the next `num_packets` packets, from 0: int64 (num_lost,)."""
        first = self._offset + self._packets
        self._packets += num_packets
        numbers = np.arange(self._lost_before(first), self._lost_before(first + num_packets))
        if not len(numbers):
            return NO_PACKETS
        laps, number_of_lap = np.divmod(numbers, len(self._lost))
        return laps * self._length + self._lost[number_of_lap] - first

    @property
    def wraps(self) -> int:
        """Return how many times the recording has begun again from its first packet."""
        return max(self._offset + self._packets - 1, 0) // self._length

    def state_dict(self) -> dict:
        return {"packets": self._packets}

    def load_state_dict(self, state: dict) -> None:
        self._packets = state["packets"]
