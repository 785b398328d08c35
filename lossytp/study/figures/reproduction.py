"""Draw this machine's runs on the published curve."""

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from lossytp.study.figures.style import COLUMN, band, loss_rate_axis, marker_of


def reproduced_on_published(published: pd.DataFrame, here: pd.DataFrame) -> Figure:
    """Draw accuracy against loss rate: the published mean with its 95 % interval, and this machine's single runs.

    A hollow mark is the published run of the same cell. Where both agree, one covers the other.

    Args:
        published: one row per published run, with `loss_rate`, `seed` and `accuracy_lossy`.
        here: the same columns for this machine's runs.
    """
    figure, ax = plt.subplots(figsize=(COLUMN, 2.4), layout="constrained")
    seeds = published["seed"].nunique()
    band(ax, published, "loss_rate", "accuracy_lossy", label=f"published, {seeds} seeds", number=0)
    cells = here.merge(published, on=["loss_rate", "seed"], suffixes=("", "_published"))
    for number, (seed, runs) in enumerate(cells.groupby("seed"), 1):
        rates, marker = runs["loss_rate"], marker_of(number)
        style: dict[str, Any] = {"linestyle": "none", "marker": marker, "color": f"C{number}"}
        ax.plot(rates, runs["accuracy_lossy_published"], **style, markersize=7, markerfacecolor="none")
        ax.plot(rates, runs["accuracy_lossy"], **style, markersize=3.5, label=f"here, seed {seed}")
    loss_rate_axis(ax, published["loss_rate"])
    ax.set_xlabel("packet loss rate, %")
    ax.set_ylabel("test accuracy")
    ax.legend(loc="lower left")
    return figure
