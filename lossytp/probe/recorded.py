"""Read a trace for a command: its flows as recorded losses."""

from pathlib import Path

from lossytp.network.probe.trace_file import ProbeTrace, read_trace
from lossytp.network.trace import Trace


def read(path: Path) -> ProbeTrace:
    """Return the trace in a Parquet file.

    Raises:
        ValueError: if there is no such file, if it is another kind of file, or if it holds no packet.
    """
    if path.is_file() and path.suffix != ".parquet":
        raise ValueError(f"trace {path} is no .parquet file: python -m lossytp.probe import {path} makes one of it")
    trace = read_trace(path)
    if not any(flow.num_packets for flow in trace.flows.values()):
        raise ValueError(f"trace {path} holds no packet: measure again")
    return trace


def flows_of(trace: ProbeTrace) -> list[Trace]:
    """Return the losses of each flow that has packets."""
    return [flow.losses() for _, flow in sorted(trace.flows.items()) if flow.num_packets]


def first_word_as(flag: str, words: list[str]) -> list[str]:
    """Return a command's words with its first one as the value of a flag, unless it is a flag itself.

    Raises:
        ValueError: if there is no word.
    """
    if not words:
        raise ValueError(f"{flag} is missing: name the file first")
    return words if words[0].startswith("-") else [flag, *words]
