"""Write the fate of every packet of a measurement to a Parquet file, and read it back.

The file has one row per packet, sorted by flow, then by sequence number. A flow is a stream of packets from one machine
to another. Its sequence numbers start at 0 and have no gaps.

| column | type | meaning |
|---|---|---|
| `flow` | int32 | number of the flow |
| `sequence` | int64 | number of the packet in its flow, in the order of sending |
| `sent_s` | float64 | time of sending, in seconds from the first packet that this machine sent; null if unknown |
| `lost` | bool | whether no copy of the packet arrived |
| `delay_s` | float64 | seconds from sending to the first arrival; null if lost or unknown; see `clocks` |
| `reordered` | bool | whether it arrived after a packet with a larger sequence number (RFC 4737, 3.3); false if lost |
| `duplicates` | int32 | copies that arrived after the first |

Every file has every column. An imported trace, such as a list of zeros and ones, has null in `sent_s` and `delay_s`.

The schema's metadata holds JSON under the key `lossytp.probe`:

- `version`: 1.
- `clocks`: "same" if both ends read one clock, so that `delay_s` is the one-way delay. "different" if not: `delay_s`
  then counts from the flow's fastest packet, whose delay is 0. "none" if times are unknown.
- `own_losses`: how many of the lost packets an end of the measurement dropped because it was too slow; null if unknown.
- `complete`: false if the measurement ended early, for example because the other machine vanished.
- `flows`: a list with one object per flow: `flow`, `src` and `dst` (names of the machines), `packet_bytes` (the whole
  IP packet) and `rate_packets_per_s`. The last two are null if unknown.
- `source`: a few words on what made the trace.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Literal

import numpy as np

from lossytp.network.bounded_files import parquet_in
from lossytp.network.checks import check_at_least, check_is, check_known, printable, shown
from lossytp.network.trace import Trace

METADATA = b"lossytp.probe"
VERSION = 1
MOST_PACKETS = 10**8  # that a file may hold
FATES = {"lost": np.bool_, "sent_s": np.float64, "delay_s": np.float64, "reordered": np.bool_, "duplicates": np.int32}
COLUMNS = {"flow": np.int32, "sequence": np.int64} | FATES
UNKNOWN = {"sent_s": np.nan, "delay_s": np.nan}  # fill these columns if they are left out; 0 fills the others
COUNT = (int, NoneType)
SETTINGS: dict[str, Any] = {"src": str, "dst": str, "packet_bytes": COUNT, "rate_packets_per_s": (float, *COUNT)}
ABOUT: dict[str, Any] = {"clocks": str, "complete": bool, "own_losses": COUNT, "source": str}
SMALL = {"compression": "zstd", "use_dictionary": False, "column_encoding": {"sequence": "DELTA_BINARY_PACKED"}}
CLOCKS = ("same", "different", "none")
LEFT_OUT = np.empty(0)


@dataclass(frozen=True, kw_only=True, eq=False)
class FlowTrace:
    """The fates of one flow's packets, in the order of sending.

    Args:
        lost: bool, (packets,): whether no copy arrived.
        sent_s: float64, (packets,): seconds from the sending machine's first packet; NaN if unknown. All unknown
            if left out.
        delay_s: float64, (packets,): seconds to the first arrival; NaN if lost or unknown. All unknown if left out.
        reordered: bool, (packets,): whether a packet with a larger number arrived earlier; none if left out.
        duplicates: int32, (packets,): copies that arrived after the first; none if left out.
        src: name of the sending machine.
        dst: name of the receiving machine.
        packet_bytes: size of a whole IP packet, or None if unknown.
        rate_packets_per_s: planned rate, or None if unknown.

    Raises:
        TypeError: if a setting has the wrong type.
        ValueError: if a column has the wrong shape.
    """

    lost: np.ndarray
    sent_s: np.ndarray = field(default_factory=lambda: LEFT_OUT)
    delay_s: np.ndarray = field(default_factory=lambda: LEFT_OUT)
    reordered: np.ndarray = field(default_factory=lambda: LEFT_OUT)
    duplicates: np.ndarray = field(default_factory=lambda: LEFT_OUT)
    src: str = "0"
    dst: str = "1"
    packet_bytes: int | None = None
    rate_packets_per_s: float | None = None

    def __post_init__(self) -> None:
        for name, kind in FATES.items():
            values: np.ndarray = getattr(self, name)
            if values is LEFT_OUT:
                values = np.full(len(self.lost), UNKNOWN.get(name, 0))
            values = np.array(values, kind)
            if values.shape != (len(self.lost),):
                raise ValueError(f"{name} has shape {values.shape}, not ({len(self.lost)},): give one value per packet")
            values.setflags(write=False)
            object.__setattr__(self, name, values)
        for name, kinds in SETTINGS.items():
            check_is(name, getattr(self, name), kinds, "one")

    @property
    def num_packets(self) -> int:
        """Return how many packets were sent."""
        return len(self.lost)

    def losses(self) -> Trace:
        """Return the losses, as a loss process that replays them."""
        return Trace.from_indicators(self.lost)


@dataclass(frozen=True, kw_only=True, eq=False)
class ProbeTrace:
    """The fates of all packets of a measurement. The module explains each field."""

    flows: dict[int, FlowTrace]
    clocks: Literal["same", "different", "none"] = "none"
    complete: bool = True
    own_losses: int | None = None
    source: str = ""

    def __post_init__(self) -> None:
        check_known("clocks", self.clocks, CLOCKS)
        for name, kinds in ABOUT.items():
            check_is(name, getattr(self, name), kinds, "one")

    def all_lost(self) -> np.ndarray:
        """Return which packets were lost, flow after flow: bool (packets of all flows,)."""
        return np.concatenate([np.empty(0, np.bool_), *(flow.lost for _, flow in sorted(self.flows.items()))])


def write_trace(path: Path, trace: ProbeTrace) -> None:
    """Write the trace to a Parquet file, which appears whole or not at all.

    Raises:
        OSError: if the operating system refuses to write.
    """
    import pyarrow  # slow to import, and only the file needs it
    import pyarrow.parquet

    flows = sorted(trace.flows.items())
    parts: dict[str, list[np.ndarray]] = {
        "flow": [np.full(flow.num_packets, number, np.int32) for number, flow in flows],
        "sequence": [np.arange(flow.num_packets) for _, flow in flows],
    }
    parts |= {name: [getattr(flow, name) for _, flow in flows] for name in FATES}
    arrays = {
        name: pyarrow.array(np.concatenate([np.empty(0, kind), *parts[name]]), from_pandas=True)  # NaN becomes null
        for name, kind in COLUMNS.items()
    }
    about: dict[str, Any] = {"version": VERSION} | {name: getattr(trace, name) for name in ABOUT}
    about["flows"] = [{"flow": number} | {name: getattr(flow, name) for name in SETTINGS} for number, flow in flows]
    table = pyarrow.table(arrays).replace_schema_metadata({METADATA: json.dumps(about)})
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        pyarrow.parquet.write_table(table, part, **SMALL)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read_trace(path: Path) -> ProbeTrace:
    """Read the trace in a file that `write_trace` wrote.

    Raises:
        ValueError: if the file cannot be read, is truncated, is too large, or is not such a trace.
    """
    try:
        table = parquet_in(path, list(COLUMNS), 40 * MOST_PACKETS)
        about = table.schema.metadata[METADATA]
    except (KeyError, TypeError) as error:  # TypeError: it has no metadata
        other = f"trace {path} is a Parquet file, but lossytp.probe did not write it"
        raise ValueError(f"{other}: read it with python -m lossytp.probe import {path}") from error
    try:
        return _trace_of(table, json.loads(about))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"trace {path} is damaged ({printable(error)}): measure again, or copy it again") from error


def _trace_of(table: Any, about: dict) -> ProbeTrace:
    if about["version"] != VERSION:
        raise ValueError(f"it has version {shown(about['version'])}, but this program reads version {VERSION}")
    columns = {name: table[name].to_numpy() for name in COLUMNS}  # of another type if there are nulls
    for name, kind in COLUMNS.items():
        if columns[name].dtype != kind:
            raise ValueError(f"{name} holds {table[name].type}, or nulls, not {kind.__name__}")
    if any(np.isinf(columns[name]).any() for name in UNKNOWN) or (columns["duplicates"] < 0).any():
        raise ValueError("a time is infinite, or a number of duplicates is negative")
    if (np.diff(columns["flow"]) < 0).any():
        raise ValueError("its rows are not sorted by flow")
    flows, rows = {}, 0
    for settings in about["flows"]:
        number = settings.pop("flow")
        check_at_least("flow", number, 0)
        first, end = columns["flow"].searchsorted([number, number + 1])
        mine = slice(first, end)
        if not np.array_equal(columns["sequence"][mine], np.arange(end - first)):
            raise ValueError(f"the sequence numbers of flow {number} have gaps")
        rows += int(end - first)
        flows[number] = FlowTrace(**{name: columns[name][mine] for name in FATES}, **settings)
    if rows != len(table):
        raise ValueError(f"{len(table) - rows} rows belong to no flow")
    return ProbeTrace(flows=flows, **{name: about[name] for name in ABOUT})
