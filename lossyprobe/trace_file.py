"""Keep the fate of every packet of a measurement in a Parquet file.

It has one row per packet, sorted by flow, then by sequence number, which counts a flow's packets from 0 without gaps.
The other columns are those of `FlowTrace`; unknown times are null. The schema's metadata holds, as JSON under
`METADATA`, the version, the fields of `ProbeTrace`, and in `flows` each flow's number and settings.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lossytp.network.checks import check_known
from lossytp.network.traces import METADATA, VERSION, Trace, measured

FATES = {"lost": np.bool_, "sent_s": np.float64, "delay_s": np.float64, "reordered": np.bool_, "duplicates": np.int32}
COLUMNS = {"flow": np.int32, "sequence": np.int64} | FATES
UNKNOWN = {"sent_s": np.nan, "delay_s": np.nan}  # fill these columns if they are left out; 0 fills the others
SETTINGS = ("src", "dst", "packet_bytes", "rate_packets_per_s")
ABOUT = ("clocks", "complete", "own_losses", "source")
SMALL = {"compression": "zstd", "use_dictionary": False, "column_encoding": {"sequence": "DELTA_BINARY_PACKED"}}
CLOCKS = ("same", "different", "none")
LEFT_OUT = np.empty(0)


@dataclass(frozen=True, kw_only=True, eq=False)
class FlowTrace:
    """The fates of the packets that one machine sent to another, in the order of sending.

    Args:
        lost: bool, (packets,): whether no copy arrived.
        sent_s: float64, (packets,): seconds from the sending machine's first packet; NaN if unknown, as if left out.
        delay_s: float64, (packets,): seconds to the first arrival; NaN if lost or unknown, as if left out.
        reordered: bool, (packets,): whether a packet with a larger number arrived earlier (RFC 4737, 3.3).
        duplicates: int32, (packets,): copies that arrived after the first.
        src: name of the sending machine.
        dst: name of the receiving machine.
        packet_bytes: size of a whole IP packet, or None if unknown.
        rate_packets_per_s: planned rate, or None if unknown.

    Raises:
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

    @property
    def num_packets(self) -> int:
        """Return how many packets were sent."""
        return len(self.lost)

    def losses(self) -> Trace:
        """Return the losses, as a loss process that replays them."""
        return Trace.from_indicators(self.lost)


@dataclass(frozen=True, kw_only=True, eq=False)
class ProbeTrace:
    """The fates of all packets of a measurement.

    Args:
        flows: each flow, by its number.
        clocks: "same" if both ends read one clock. If "different", a flow's delays count from its fastest packet.
        complete: False if the measurement ended early, for example because the other machine vanished.
        own_losses: how many of the lost packets an end dropped because it was too slow; None if unknown.
        source: a few words on what made the trace.
    """

    flows: dict[int, FlowTrace]
    clocks: Literal["same", "different", "none"] = "none"
    complete: bool = True
    own_losses: int | None = None
    source: str = ""

    def __post_init__(self) -> None:
        check_known("clocks", self.clocks, CLOCKS)

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
    with measured(path, COLUMNS) as (columns, about):
        flows = {}
        for settings in about["flows"]:
            number = settings.pop("flow")
            mine = slice(*columns["flow"].searchsorted([number, number + 1]))
            flows[number] = FlowTrace(**{name: columns[name][mine] for name in FATES}, **settings)
        if sum(flow.num_packets for flow in flows.values()) != len(columns["flow"]):
            raise ValueError("its metadata lack a flow of its rows: name each")
        return ProbeTrace(flows=flows, **{name: about[name] for name in ABOUT})
