"""Whether flows lose packets at the same time, as they do if they share a queue. Fits take them for independent."""

from collections.abc import Sequence

import numpy as np

from lossytp.network.trace import Trace

WINDOWS, FEWEST_PACKETS = 100, 10  # of a flow; of a window


def correlation_between(flows: Sequence[Trace]) -> float:
    """Return the mean correlation of the losses of two flows, in 100 windows of equal shares of each flow.

    Flows that lose nothing, or have fewer than 10 packets a window, do not count. Without two flows it is 0.
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
