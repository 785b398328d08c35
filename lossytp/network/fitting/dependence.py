"""Measure whether flows lose packets together, as they do if they share a queue. Fits assume independent flows."""

from collections.abc import Sequence

import numpy as np

from lossytp.network.trace import Trace

WINDOWS = 100  # per flow
FEWEST_PACKETS = 10  # per window


def correlation_between(flows: Sequence[Trace]) -> float:
    """Return the mean correlation between the losses of two flows, over 100 windows of equal length per flow.

    Flows without losses, or with fewer than 10 packets per window, are left out. With fewer than two flows, return 0.
    """
    counts = []
    for flow in flows:
        edges = np.linspace(0, flow.num_packets, WINDOWS + 1).round()
        lost = np.histogram(flow.lost, edges)[0]
        if flow.num_packets >= WINDOWS * FEWEST_PACKETS and np.ptp(lost):
            counts.append(lost)
    if len(counts) < 2:
        return 0.0
    correlations = np.corrcoef(counts)
    return float(correlations[np.triu_indices(len(counts), 1)].mean())
