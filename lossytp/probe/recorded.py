"""Read the trace that a command names."""

from dataclasses import replace
from pathlib import Path

from lossytp.network.traces import ProbeTrace, Trace, read_trace


def read(path: Path) -> ProbeTrace:
    """Return the trace in a Parquet file, without flows that have no packets.

    Raises:
        ValueError: if the file does not exist, is of another kind, or holds no packets.
    """
    if path.is_file() and path.suffix != ".parquet":
        raise ValueError(f"trace {path} is not a .parquet file: convert it with python -m lossytp.probe import {path}")
    trace = read_trace(path)
    flows = {number: flow for number, flow in trace.flows.items() if flow.num_packets}
    if not flows:
        raise ValueError(f"trace {path} holds no packets: measure again")
    return replace(trace, flows=flows)


def flows_of(trace: ProbeTrace) -> list[Trace]:
    """Return the losses of each flow."""
    return [flow.losses() for _, flow in sorted(trace.flows.items())]


def first_word_as(flag: str, words: list[str]) -> list[str]:
    """Return a command's words with `flag` before the first one, unless that is a flag itself.

    Raises:
        ValueError: if there are no words.
    """
    if not words:
        raise ValueError(f"{flag} is missing: name the file first")
    return words if words[0].startswith("-") else [flag, *words]
