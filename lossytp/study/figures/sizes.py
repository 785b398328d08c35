"""Draw what losses cost models of several sizes."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lossytp.study.figures.style import COLUMN, MARKERS

POINTS = 100  # in a share of 1
MILLION = 1e6


def cost_against_size(rises: pd.DataFrame, falls: pd.DataFrame) -> Figure:
    """Draw the rise in inference and the fall after fine-tuning against the number of parameters, a line a loss rate.

    Args:
        rises: from `analysis.sizes.rises_by_size`, of packets of one size.
        falls: from `analysis.sizes.falls_by_size`.
    """
    figure, axes = plt.subplots(1, 2, figsize=(COLUMN, 2.0), layout="constrained")
    rates = sorted({*rises["loss_rate"], *falls["loss_rate"]})
    for ax, table, column, scale in ((axes[0], rises, "rise", 1), (axes[1], falls, "fall", POINTS)):
        for number, rate in enumerate(rates):
            rows = table[table["loss_rate"] == rate].sort_values("parameters")
            if len(rows):
                _line(ax, rows, column, scale, number, f"{POINTS * rate:g} %")
        ax.set_xscale("log")
        ax.set_xticks(ticks := sorted(table["parameters"].unique()), [f"{each / MILLION:.3g}" for each in ticks])
        ax.minorticks_off()
        ax.margins(x=0.2)
    axes[0].set_yscale("log")
    axes[0].set_ylabel("rise in inference, nats a token")
    axes[1].set_ylabel("fall after fine-tuning, points")
    axes[1].set_ylim(bottom=0)
    figure.supxlabel("parameters, millions", fontsize="medium")
    return figure


def _line(ax: Axes, rows: pd.DataFrame, column: str, scale: float, number: int, name: str) -> None:
    """Plot one loss rate's means with their intervals, and its name above the last one."""
    x, y = rows["parameters"].to_numpy(), scale * rows[column].to_numpy()
    error = np.abs(scale * rows[["low", "high"]].to_numpy().T - y)
    color = f"C{number}"
    ax.errorbar(x, y, yerr=error, marker=MARKERS[number], color=color, markersize=3.5, elinewidth=0.8, capsize=1.5)
    ax.annotate(name, (x[-1], y[-1]), xytext=(4, 0), textcoords="offset points", color=color, fontsize=6, va="center")
