"""Draw where losses damage a model, each figure from a table of `damage` or `strong_packets`."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from lossytp.study.figures.style import COLUMN, estimates, marker_of, shared_legend
from lossytp.tolerance.strong_packets import BINS, summary

RISE = "rise of cross-entropy (nats)"
ESTIMATE = ["rise", "low", "high"]
APART = 0.12  # of a layer, between the marks of its modules
NOTHING = 1e-3  # nats: below this, the axis of single packets is linear


def sites(table: pd.DataFrame) -> Figure:
    """Draw the rise if only one layer's attention or MLP loses packets, with intervals.

    Args:
        table: table from `damage.by_site`.
    """
    figure, ax = _panel()
    for number, (module, rows) in enumerate(table.groupby("module")):
        where = rows["layer"] + (2 * number - 1) * APART
        estimates(ax, where, rows[ESTIMATE], number, label=str(module))
    ax.axhline(0, color="grey", lw=0.6, ls=":")
    ax.set(xlabel="layer that loses packets", ylabel=RISE)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend()
    return figure


def positions(table: pd.DataFrame) -> Figure:
    """Draw the rise against a token's position in its block, with intervals.

    Args:
        table: table from `damage.by_position`.
    """
    figure, ax = _panel()
    estimates(ax, range(len(table)), table[ESTIMATE], 0, linestyle="-")
    bins = table[["first", "last"]].to_numpy().tolist()
    names = [str(first) if first == last else f"{first}-{last}" for first, last in bins]
    ax.set_xticks(range(len(table)), names, rotation=45, ha="right")
    ax.axhline(0, color="grey", lw=0.6, ls=":")
    ax.set(xlabel="position of the token in its block", ylabel=RISE)
    return figure


def single_packets(table: pd.DataFrame) -> Figure:
    """Draw the rise if exactly one packet is lost, against the packet's norm: one mark per packet.

    Args:
        table: table from `strong_packets.by_norm`.
    """
    figure, ax = _panel()
    for number, name in enumerate(BINS):
        rows = table[table["bin"].isin([name])]
        if len(rows):
            ax.plot(rows["norm"], rows["rise"], marker_of(number), color=f"C{number}", label=name, ms=3.5, alpha=0.7)
    ax.axhline(0, color="grey", lw=0.6, ls=":")
    ax.set_yscale("symlog", linthresh=NOTHING)
    ax.margins(y=0.08)
    place = " and ".join(f"layer {layer}, {module}" for layer, module in _places(table))
    ax.set(xscale="log", xlabel="L2 norm of the lost packet", ylabel=RISE, title=f"one packet lost in {place}")
    shared_legend(figure, ax)
    return figure


def strongest(norms: pd.DataFrame) -> Figure:
    """Draw the norm of each sum's strongest packet, relative to the median packet's.

    Args:
        norms: table from `strong_packets.packet_norms`.
    """
    figure, ax = _panel()
    for number, (module, rows) in enumerate(summary(norms).groupby("module")):
        ax.plot(rows["layer"], rows["ratio"], f"{marker_of(number)}-", color=f"C{number}", label=module, ms=3)
    ax.set(yscale="log", xlabel="layer", ylabel="strongest packet's norm / median")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.legend()
    return figure


def _panel() -> tuple[Figure, Axes]:
    return plt.subplots(figsize=(COLUMN, 0.7 * COLUMN), layout="constrained")


def _places(table: pd.DataFrame) -> list[tuple[int, str]]:
    return list(table[["layer", "module"]].drop_duplicates().itertuples(index=False, name=None))
