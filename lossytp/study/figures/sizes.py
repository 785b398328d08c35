"""Draw what losses cost models of several sizes, and models pretrained on several numbers of tokens."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from lossytp.study.analysis.sizes import of_equal_tokens, of_one_size
from lossytp.study.figures.style import COLUMN, MILLION, POINTS, estimates


def cost_of_models(rises: pd.DataFrame, falls: pd.DataFrame) -> Figure:
    """Draw the rise in inference and the fall after fine-tuning, one line per loss rate.

    They are drawn against the number of parameters, at equal tokens. If a size was pretrained on several numbers of
    tokens, they are also drawn against the number of tokens, at that size.

    Args:
        rises: from `analysis.sizes.rises_of_models`, of packets of one size.
        falls: from `analysis.sizes.falls_of_models`.
    """
    columns = [("parameters", of_equal_tokens, "parameters, millions"), ("tokens", of_one_size, "tokens, millions")]
    columns = [each for each in columns if len(each[1](rises))]
    figure, axes_CX = plt.subplots(
        2, len(columns), figsize=(COLUMN, 3.2), layout="constrained", squeeze=False, sharex="col", sharey="row"
    )
    rates = sorted({*rises["loss_rate"], *falls["loss_rate"]})
    costs = (
        (rises, "rise", 1, "rise in inference,\nnats a token"),
        (falls, "fall", POINTS, "fall, fine-tuned,\npoints"),
    )
    for axes_X, (table, cost, scale, name) in zip(axes_CX, costs, strict=True):
        for ax, (x, models, _) in zip(axes_X, columns, strict=True):
            ours = models(table)
            for number, rate in enumerate(rates):
                rows = ours[ours["loss_rate"] == rate].sort_values(x)
                if len(rows):
                    _line(ax, rows, x, cost, scale, number, f"{POINTS * rate:g} %")
            ax.set_xscale("log")
            ax.set_xticks(ticks := sorted(ours[x].unique()), [f"{each / MILLION:.2g}" for each in ticks])
            ax.minorticks_off()
            ax.margins(x=0.25)
        axes_X[0].set_ylabel(name)
    axes_CX[0, 0].set_yscale("log")
    axes_CX[0, 0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes_CX[0, 0].yaxis.set_major_formatter(FuncFormatter(lambda rise, _: f"{rise:g}"))
    axes_CX[0, 0].yaxis.set_minor_locator(NullLocator())
    axes_CX[1, 0].set_ylim(bottom=0)
    for ax, (_, _, name) in zip(axes_CX[1], columns, strict=True):
        ax.set_xlabel(name)
    return figure


def _line(ax: Axes, rows: pd.DataFrame, x: str, cost: str, scale: float, number: int, name: str) -> None:
    """Plot one loss rate's means with their intervals, and its name beside the last one."""
    values = scale * rows[[cost, "low", "high"]]
    estimates(ax, rows[x], values, number, linestyle="-")
    ax.annotate(
        name, (rows[x].iloc[-1], values[cost].iloc[-1]), xytext=(4, 0), textcoords="offset points", color=f"C{number}",
        fontsize=6, va="center",
    )  # fmt: skip
