"""Describe recorded flows by gaps and bursts, so that the cost of a fit grows with the losses, not with the packets."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lossytp.network import trace
from lossytp.network.trace import Trace


@dataclass(frozen=True)
class Blocks:
    """Flows one after another, in blocks: a gap of received packets, then one loss or the end of the flow.

    Attributes:
        gaps: number of received packets in each block, int64 (num_blocks,).
        ends: whether the flow ends after the gap, bool (num_blocks,).
    """

    gaps: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, flows: Sequence[Trace]) -> "Blocks":
        """Return the blocks of independent flows.

        Raises:
            ValueError: if there are no flows.
        """
        check_flows(flows)
        marks = [np.append(flow.lost, flow.num_packets) for flow in flows]
        gaps = np.concatenate([np.diff(mark, prepend=-1) - 1 for mark in marks])
        ends = np.zeros(len(gaps), dtype=bool)
        ends[np.cumsum([len(mark) for mark in marks]) - 1] = True
        return cls(gaps, ends)


def check_flows(flows: Sequence[Trace]) -> None:
    """Raise ValueError unless there is at least one flow."""
    if not len(flows):
        raise ValueError("flows is empty: give at least one recorded flow")


def num_packets(flows: Sequence[Trace]) -> int:
    """Return the number of packets in all flows."""
    return sum(flow.num_packets for flow in flows)


def num_lost(flows: Sequence[Trace]) -> int:
    """Return the number of lost packets in all flows."""
    return sum(len(flow.lost) for flow in flows)


def burst_lengths(flows: Sequence[Trace]) -> np.ndarray:
    """Return the lengths of the runs of consecutive losses, int64. The start or end of a flow may cut a run short."""
    return np.concatenate([trace.burst_lengths(flow.lost) for flow in flows])


def gap_lengths(flows: Sequence[Trace]) -> np.ndarray:
    """Return the lengths of the runs of received packets between two bursts of a flow, int64."""
    gaps = np.concatenate([np.diff(flow.lost) - 1 for flow in flows])
    return gaps[gaps > 0]
