"""Recorded losses: read traces, replay them, correlate links, and choose a loss process by its name."""

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from lossytp.network.bounded_files import check_file, content_of, parquet_in
from lossytp.network.checks import (
    build,
    check_at_least,
    check_at_most,
    check_known,
    check_probability,
    printable,
    refuse_if,
    shown,
)
from lossytp.network.losses import (
    NO_PACKETS,
    Bernoulli,
    ClosedForms,
    FourState,
    GilbertElliott,
    LinkLosses,
    LossProcess,
    Stream,
    check_process,
    from_netem,
)
from lossytp.network.random_numbers import Key

DOUBT = (
    "WARNING: {:.1%} of the packets count as lost. If a 1 stands for an arrival in the recording, import it with "
    "python -m lossyprobe import FILE --ones arrived"
)


def burst_lengths(lost: np.ndarray | Sequence[int]) -> np.ndarray:
    """Return the lengths of the runs of consecutive losses in sorted indices of lost packets, int64 (bursts,)."""
    starts = np.flatnonzero(np.diff(lost, prepend=-2) > 1)
    return np.diff(starts, append=len(lost))


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace(ClosedForms):
    """Replay a recording of `num_packets` packets; those at the sorted indices `lost`, int64 (num_lost,), were lost.

    Each link starts at its own random offset, and wraps from the last packet to the first. Traces with equal content
    are equal. The closed forms are exact, because the recording repeats as a circle.
    """

    lost: np.ndarray | Sequence[int] = field(repr=False)
    num_packets: int

    def __post_init__(self) -> None:
        check_at_least("num_packets", self.num_packets, 1)
        lost = np.asarray(self.lost)
        ends = np.concatenate(([-1], lost, [self.num_packets])) if lost.ndim == 1 else np.zeros(2)
        whole = not lost.size or (lost.dtype.kind in "iuf" and not (lost % 1).any())
        fault = f"is no rising list of numbers below num_packets = {self.num_packets}: give one, or use from_indicators"
        refuse_if(not whole or not (np.diff(ends) > 0).all(), "lost", self.lost, fault)
        lost = lost.astype(np.int64)
        lost.setflags(write=False)
        object.__setattr__(self, "lost", lost)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and hash(self) == hash(other)

    def __hash__(self) -> int:
        return hash((self.num_packets, np.asarray(self.lost).tobytes()))

    @property
    def loss_rate(self) -> float:
        return len(self.lost) / self.num_packets

    @property
    def mean_burst_packets(self) -> float:
        bursts = len(self.lost) - self._both_lost(1)
        return len(self.lost) / bursts if bursts else math.inf if len(self.lost) else 0.0

    def covariance(self, lag: int) -> float:
        return self._both_lost(lag) / self.num_packets - self.loss_rate**2

    def _both_lost(self, lag: int) -> int:
        lost = np.asarray(self.lost)
        return int(np.isin((lost + lag) % self.num_packets, lost).sum())

    @classmethod
    def from_indicators(cls, is_lost: np.ndarray | Sequence[int]) -> "Trace":
        """Return the trace of one number per packet, (num_packets,) or (num_packets, 1): 1 for a lost one, else 0."""
        indicators = np.asarray(is_lost)
        indicators = indicators[:, 0] if indicators.shape[1:] == (1,) else indicators
        wrong = indicators.ndim != 1 or not np.isin(indicators, (0, 1)).all()
        fault = "is not a list of zeros and ones: give one 0 or 1 per packet"
        refuse_if(wrong, "is_lost", is_lost, fault)
        return cls(lost=np.flatnonzero(indicators), num_packets=len(indicators))

    @classmethod
    def from_file(cls, path: str | Path) -> "Trace":
        """Return the trace in a file of 0 or 1 a packet: a .npy array, or text with or without commas and spaces.

        A .parquet file is a measurement of `lossyprobe`. Flows follow one another.
        """
        file = Path(str(path))
        status = check_file(file)
        return cls._from_file(file, status.st_mtime_ns, status.st_size)

    @classmethod
    @lru_cache(maxsize=4)  # every row of a table reads the same file
    def _from_file(cls, file: Path, modified_ns: int, size: int) -> "Trace":
        """Read the file. Its time and size are arguments, so that a changed file is read again."""
        if file.suffix == ".parquet":
            with measured(file) as (columns, _):
                lost = columns["lost"]
        else:
            lost = np.concatenate([np.empty(0, np.bool_), *lists_in(file)])
        if not len(lost):
            raise ValueError(f"trace {file} holds no packets: read it with python -m lossyprobe import {file}")
        trace = cls.from_indicators(lost)
        if trace.loss_rate > 0.5:
            print(f"trace {file}: {DOUBT.format(trace.loss_rate)}", file=sys.stderr)
        return trace

    def losses(self, key: Key) -> "TraceLosses":
        return TraceLosses(self, key)


class TraceLosses:
    """Lose the packets that were lost in the recording, which repeats without end."""

    def __init__(self, trace: Trace, key: Key) -> None:
        self._lost, self._length = np.asarray(trace.lost), trace.num_packets
        self._offset = int(Stream((*key, "offset")).uniforms(1)[0] * self._length)
        self._packets = 0  # taken so far

    def _lost_before(self, packet: int) -> int:
        """Return the number of losses before `packet`, counting both from where the recording first began."""
        laps, packet_of_lap = divmod(packet, self._length)
        return laps * len(self._lost) + int(self._lost.searchsorted(packet_of_lap))

    def take(self, num_packets: int) -> np.ndarray:
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
        self(np.arange(8), np.full(8, 0.5))

    def __call__(self, packets: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
        """Return which of these packets are lost, bool (num_packets,)."""
        lost = np.asarray(self.is_lost(packets, uniforms))
        if lost.shape != packets.shape or lost.dtype != bool:
            gave = f"is_lost gave {lost.dtype} of shape {lost.shape} for {len(packets)} packets"
            raise ValueError(f"{gave}: return a bool for each, shape ({len(packets)},)")
        return lost

    @cached_property
    def _measured(self) -> Trace:
        return Trace(lost=self.losses(("measured",)).take(MEASURED_PACKETS), num_packets=MEASURED_PACKETS)

    @property
    def loss_rate(self) -> float:
        return self._measured.loss_rate

    @property
    def mean_burst_packets(self) -> float:
        return self._measured.mean_burst_packets

    def autocorrelation(self, lag: int) -> float:
        return self._measured.autocorrelation(lag)

    def losses(self, key: Key) -> "PerPacketLosses":
        return PerPacketLosses(self, key)


class PerPacketLosses:
    """Ask the process about every packet."""

    def __init__(self, process: PerPacket, key: Key) -> None:
        self._process, self._uniforms = process, Stream((*key, "packets"))
        self._packets = 0  # taken so far

    def take(self, num_packets: int) -> np.ndarray:
        if num_packets == 0:
            return NO_PACKETS
        packets = np.arange(self._packets, self._packets + num_packets)
        self._packets += num_packets
        return np.flatnonzero(self._process(packets, self._uniforms.uniforms(num_packets)))

    def state_dict(self) -> dict:
        return {"packets": self._packets}

    def load_state_dict(self, state: dict) -> None:
        self._packets = state["packets"]
        self._uniforms.seek(self._packets)


# Read recordings: zeros and ones, or the Parquet file of `lossyprobe`, which has a row per packet, sorted by flow, then
# by sequence number, which counts a flow's packets from 0 without gaps. The schema's metadata holds JSON under
# `METADATA`, with the version.

METADATA = b"lossytp.probe"  # the probe's former name, in every file written so far
VERSION = 1
MOST_PACKETS = 10**8  # that a file may hold
MOST_BYTES, MOST_FLOWS = 2**29, 10**5  # of zeros and ones
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # spreadsheets begin with it
LOSSES = {"flow": np.int32, "sequence": np.int64, "lost": np.bool_}


@contextmanager
def measured(path: Path, columns: Mapping[str, type] = LOSSES) -> Iterator[tuple[dict[str, Any], dict]]:
    """Open a file that `lossyprobe` wrote: the columns with their types, which include `LOSSES`, and the metadata.

    Raises:
        ValueError: if the file cannot be read, is truncated, is too large, or is not such a trace. An error within the
            block says that it is damaged, too.
    """
    try:
        table = parquet_in(path, list(columns), 40 * MOST_PACKETS)
        metadata = table.schema.metadata[METADATA]
    except (KeyError, TypeError) as error:  # TypeError: it has no metadata
        other = f"trace {path} is a Parquet file, but lossyprobe did not write it"
        raise ValueError(f"{other}: read it with python -m lossyprobe import {path}") from error
    try:
        about = json.loads(metadata)
        check_known("version", about["version"], (VERSION,))
        found = {name: table[name].to_numpy() for name in columns}  # of another type if there are nulls
        flow, sequence = found["flow"], found["sequence"]
        first = np.flatnonzero(np.diff(flow, prepend=flow[:1] - 1))  # packets of each flow
        expected = np.arange(len(flow)) - np.repeat(first, np.diff(first, append=len(flow)))
        typed = all(found[name].dtype == kind for name, kind in columns.items())
        if not typed or not (np.diff(flow[first]) > 0).all() or not np.array_equal(sequence, expected):
            raise ValueError("its columns are of other types, have gaps or are not sorted by flow and sequence number")
        yield found, about
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"trace {path} is damaged ({printable(error)}): measure again, or copy it again") from error


def lists_in(path: Path) -> list[np.ndarray]:
    """Return the flows in an array, or in text of only zeros and ones: bool, (packets,). Other text has none."""
    flows: Any
    if path.suffix == ".npy":
        check_file(path)
        try:
            array: Any = np.load(path, mmap_mode="r")  # which believes no header that exceeds the file
            numbers = isinstance(array, np.ndarray) and array.dtype.kind in "biuf" and array.ndim in (1, 2)
            if not numbers or array.size > MOST_PACKETS or not np.isin(array, (0, 1)).all():
                raise ValueError(f"it holds {shown(array)}")
        except (ValueError, EOFError, BadZipFile) as error:  # the latter two of an empty .npy and of half an .npz
            fix = f"give what numpy.save wrote, of one or two axes and at most {MOST_PACKETS} packets"
            raise ValueError(f"{path} is not an array of zeros and ones ({error}): {fix}") from error
        flows = np.atleast_2d(array[:, 0] if array.shape[1:] == (1,) else array).astype(np.bool_)
    else:
        content = content_of(path, MOST_BYTES).removeprefix(BYTE_ORDER_MARK)
        if content.translate(None, b"01, \t\r\n"):
            return []
        check_at_most(f"the number of packets in {path}", content.count(b"0") + content.count(b"1"), MOST_PACKETS)
        text = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n").strip()
        parts = re.split(rb"\n\s*\n", text, maxsplit=MOST_FLOWS)
        flows = [bits_of(part.translate(None, b", \t\n")) for part in parts]
    check_at_most(f"the number of flows in {path}", len(flows), MOST_FLOWS)
    return [flow for flow in flows if len(flow)]


def bits_of(text: bytes) -> np.ndarray:
    """Return which characters are a 1: bool, (characters,)."""
    return np.frombuffer(text, np.uint8) == ord("1")


@dataclass(frozen=True, kw_only=True)
class Correlated(ClosedForms):
    """Lose a packet if its switch or its link loses it: `common` is drawn once per switch, `private` once per link.

    The links of one switch may share losses, for instance when its buffer overflows. All links of a group that have
    this process and the same `switch` see the same common losses at the same time. Time is the number of packets that a
    link has sent, so links that send unequal numbers of packets drift apart. Links of different groups share nothing,
    because each group has its own clocks.
    """

    common: LossProcess
    private: LossProcess
    switch: int | str = 0

    def __post_init__(self) -> None:
        check_process("common", self.common)
        check_process("private", self.private)

    @classmethod
    def from_loss_and_share(
        cls, *, loss_rate: float, shared: float, mean_burst_packets: float | None = None, switch: int | str = 0
    ) -> "Correlated":
        """Return a process with this loss rate. The switch loses the share `shared`, in [0, 1], of it.

        Both parts are Bernoulli. With a mean burst, both are simple Gilbert channels with equal bursts, and a link's
        runs of consecutive losses have that mean.

        Raises:
            ValueError: if no bursts are short enough.
        """
        check_probability("loss_rate", loss_rate)
        check_probability("shared", shared)
        common = shared * loss_rate
        private = (loss_rate - common) / (1 - common) if common < 1 else 0.0
        if mean_burst_packets is None:
            return cls(common=Bernoulli(loss_rate=common), private=Bernoulli(loss_rate=private), switch=switch)
        whole = GilbertElliott.from_loss_and_burst(loss_rate=loss_rate, mean_burst_packets=mean_burst_packets)
        # A link turns bad as often as `whole` if (1 - x r)(1 - y r) = 1 - whole.p_good_to_bad, with x and y the
        # parts' odds of loss and r their way out of a burst. The smaller root keeps both factors above 0.
        x, y = common / (1 - common), private / (1 - private)
        turn = whole.p_good_to_bad
        leave = 2 * turn / (x + y + math.sqrt((x + y) ** 2 - 4 * x * y * turn)) if turn else whole.p_bad_to_good
        if leave > 1 + 1e-12:
            shortest = loss_rate / ((1 - loss_rate) * (x + y - x * y))
            fault = f"is too short for loss_rate = {loss_rate:g} and shared = {shared:g}: give {shortest:.6g} or more"
            raise ValueError(f"mean_burst_packets = {mean_burst_packets!r} {fault}")
        leave = min(1.0, leave)
        parts = (GilbertElliott(p_good_to_bad=min(1.0, odds * leave), p_bad_to_good=leave) for odds in (x, y))
        return cls(common=next(parts), private=next(parts), switch=switch)

    @property
    def loss_rate(self) -> float:
        common, private = self.common.loss_rate, self.private.loss_rate
        return common + private - common * private

    def covariance(self, lag: int) -> float:
        """Return the covariance: a packet is delivered by both parts, so P(both delivered) is the product of theirs."""
        (common, common_covariance), (private, private_covariance) = (
            (part.loss_rate, part.autocorrelation(lag) * part.loss_rate * (1 - part.loss_rate))
            for part in (self.common, self.private)
        )
        return (
            (1 - common) ** 2 * private_covariance
            + (1 - private) ** 2 * common_covariance
            + common_covariance * private_covariance
        )

    def losses(self, key: Key) -> "CorrelatedLosses":
        """Return the losses of one link; the common ones do not depend on `key`'s src and dst."""
        private = (*key, "private")
        if isinstance(self.private, Correlated):  # which reads the link at the key's end
            private = (*key[:-3], "private", *key[-3:])
        return CorrelatedLosses(self.common.losses((*key[:-2], "switch", self.switch)), self.private.losses(private))


class CorrelatedLosses:
    """Lose the packets that the switch loses and those that the link loses."""

    def __init__(self, common: LinkLosses, private: LinkLosses) -> None:
        self._common, self._private = common, private

    def take(self, num_packets: int) -> np.ndarray:
        common, private = self._common.take(num_packets), self._private.take(num_packets)
        if not len(common) or not len(private):
            return common if len(common) else private
        lost = np.sort(np.concatenate([common, private]), kind="stable")  # merges two sorted arrays
        return lost[np.diff(lost, prepend=-1) > 0]

    @property
    def wraps(self) -> int | None:
        """Return the largest number of times that a trace has begun again; None if neither part replays one."""
        return most_wraps((self._common, self._private))

    def state_dict(self) -> dict:
        return {"common": self._common.state_dict(), "private": self._private.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self._common.load_state_dict(state["common"])
        self._private.load_state_dict(state["private"])


def most_wraps(links: Iterable[LinkLosses]) -> int | None:
    """Return the largest number of times that a link's trace has begun again; None if no link replays a trace."""
    found = [getattr(losses, "wraps", None) for losses in links]
    return max((wraps for wraps in found if wraps is not None), default=None)


LOSS_PROCESSES: dict[str, Callable[..., LossProcess]] = {
    "ber": Bernoulli,
    "g-e": GilbertElliott.from_loss_and_burst,
    "correlated": Correlated.from_loss_and_share,
    "four_state": FourState,
    "netem": from_netem,
    "trace": Trace.from_file,
}
"""Add your own, a class or a function that returns a process, and every configuration knows its name."""


def loss_process_named(text: str, **given: float | None) -> LossProcess:
    """Return the process that `text` names, as ``name`` or ``name(1, option=2)``, such as ``correlated(shared=0.5)``.

    Args:
        text: the name, with values if any.
        given: values of `loss_rate` and `mean_burst_packets`, for parameters with these names that the text leaves out.
            A 0 replaces no default, and None replaces nothing.

    Raises:
        ValueError: if a name is unknown, a value is missing, or values do not go together.
    """
    return build("loss_type", text, LOSS_PROCESSES, given)
