"""Define what both ends of a measurement share: constants, traces and the outcome."""

from typing import NamedTuple

import numpy as np

from lossytp.network.probe.plan import Plan
from lossytp.network.probe.receiving import fates
from lossytp.network.probe.trace_file import FlowTrace, ProbeTrace

PROTOCOL = "lossytp.probe 1"
PORT = 29470
BEAT_S = 0.5
"""Seconds between the sender's requests for a report of which packets have arrived."""
LATE_S = 1.0
"""Seconds for which the sender waits for the last packets to arrive."""
PATIENCE_S = 10.0
"""Seconds of silence after which the other end counts as vanished."""


class Outcome(NamedTuple):
    """The outcome of a measurement."""

    trace: ProbeTrace
    ended_early: str
    """Why the measurement ended before all packets were sent; "" if it did not."""

    @classmethod
    def of(
        cls, flows: list[FlowTrace], *, same: bool, ended_early: str, own_losses: int | None, source: str
    ) -> "Outcome":
        """Return the outcome for the flows that have packets. `same` says whether both ends read the same clock."""
        trace = ProbeTrace(
            flows={number: flow for number, flow in enumerate(flows) if flow.num_packets},
            clocks="same" if same else "different",
            complete=not ended_early,
            own_losses=own_losses,
            source=source,
        )
        return cls(trace, ended_early)


class Log(NamedTuple):
    """Arrivals in order; each array has the shape (arrivals,)."""

    flow: np.ndarray
    sequence: np.ndarray
    time_ns: np.ndarray
    """Arrival times by the receiver's clock; 0 if unknown."""


def flow_traces(
    plan: Plan, log: Log, counts: list[int], sent_ns: np.ndarray | None, ends: tuple[str, str], same: bool
) -> list[FlowTrace]:
    """Return the traces of all flows in one direction.

    Args:
        plan: the measurement's plan.
        log: the arrivals.
        counts: (flows,) number of packets sent in each flow.
        sent_ns: (packets of all flows,) departure times, flow after flow; None if unknown.
        ends: names of the sending and the receiving machine.
        same: whether both machines read the same clock.
    """
    bounds = np.cumsum([0, *counts])
    firsts = [] if sent_ns is None else [sent_ns[at] for at, count in zip(bounds, counts, strict=False) if count]
    traces = []
    for flow, count in enumerate(counts):
        found = fates(log.sequence[log.flow == flow], log.time_ns[log.flow == flow], count)
        delay_s = sent_s = np.full(count, np.nan)
        if sent_ns is not None:
            times_ns = sent_ns[bounds[flow] : bounds[flow + 1]]
            sent_s = (times_ns - min(firsts, default=0)) * 1e-9
            delay_s = np.where(found.arrived_ns == 0, np.nan, (found.arrived_ns - times_ns) * 1e-9)
            if not same and not np.isnan(delay_s).all():
                delay_s = delay_s - np.nanmin(delay_s)
        traces.append(
            FlowTrace(
                lost=found.lost,
                sent_s=sent_s,
                delay_s=delay_s,
                reordered=found.reordered,
                duplicates=found.duplicates,
                src=ends[0],
                dst=ends[1],
                packet_bytes=plan.packet_bytes,
                rate_packets_per_s=plan.rate_packets_per_s,
            )
        )
    return traces
