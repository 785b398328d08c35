"""Draw the losses of a measured network: over its packets, and the lengths of its runs beside a fit's."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lossytp.network.fitting import Comparison, Goodness
from lossytp.network.trace import Trace
from lossytp.study.figures.style import COLUMN

WINDOWS = 100  # of a flow's packets
MOST_FLOWS = 8  # drawn


def loss_over_packets(flows: Sequence[Trace]) -> Figure:
    """Draw the loss rate of consecutive packets of the first flows, in 100 windows of each."""
    figure, ax = plt.subplots(figsize=(COLUMN, 0.5 * COLUMN), layout="constrained")
    for number, flow in enumerate(flows[:MOST_FLOWS]):
        edges = np.linspace(0, flow.num_packets, min(WINDOWS, flow.num_packets) + 1).round()
        lost = np.histogram(flow.lost, edges)[0] / np.diff(edges)
        ax.stairs(lost, edges, label=f"flow {number}", color=f"C{number}", linewidth=0.8)
    ax.set(xlabel="packet of the flow", ylabel="loss rate")
    ax.legend()
    plt.close(figure)  # a notebook shows what is returned
    return figure


def run_lengths(goodness: Goodness) -> Figure:
    """Draw the shares of bursts and of gaps that are at least as long as a length, recorded and fitted."""
    figure, axes = plt.subplots(1, 2, figsize=(COLUMN, 0.55 * COLUMN), sharey=True, layout="constrained")
    for ax, name, runs in zip(axes, ("bursts", "gaps"), (goodness.bursts, goodness.gaps), strict=True):
        _survival(ax, runs)
        ax.set(xscale="log", yscale="log", xlabel="packets", title=f"{name}, p = {runs.p:.2f}")
    axes[0].set_ylabel("share at least as long")
    axes[0].legend()
    plt.close(figure)
    return figure


def _survival(ax: Axes, runs: Comparison) -> None:
    """Draw both laws down to the share of half a recorded run."""
    smallest = 0.5 / max(int(runs.recorded.counts.sum()), 1)
    for label, law in (("fitted", runs.fitted), ("recorded", runs.recorded)):
        lengths = np.append(1, law.lengths)
        share = np.maximum(1 - law.share_up_to(lengths - 0.5), smallest)
        ax.step(np.append(lengths, lengths[-1]), np.append(share, smallest), where="pre", label=label, linewidth=1)
    ax.set_ylim(bottom=smallest)
