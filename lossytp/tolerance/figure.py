"""Draw the rise of cross-entropy against the loss rate, or by repair if there is only one rate."""

from collections.abc import Iterable
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from lossytp.study.figures.style import COLUMN, estimates, save, set_style
from lossytp.tolerance.advice import LARGE
from lossytp.tolerance.measure import HARMLESS, Row

FIGURE = "tolerance"
APART = 1.04  # ratio of the positions of two repairs at one rate


def draw(rows: list[Row], title: str, folder: Path) -> Figure:
    """Write tolerance.svg and tolerance.png, and return the figure: rises with their intervals.

    Each repair has a curve over the loss rates, or a line if there is only one rate, as for a trace.
    """
    set_style()
    rates = {row.setup.loss_rate for row in rows}
    if len(rates) == 1:
        figure = _by_repair(rows)
        figure.suptitle(f"{title}, packet loss rate {rates.pop():.3g}")
    else:
        figure = _against_rate(rows)
        figure.axes[0].set_title(title)
    save(figure, folder, FIGURE)
    plt.close(figure)  # a notebook shows what is returned
    return figure


def _against_rate(rows: list[Row]) -> Figure:
    figure, ax = plt.subplots(figsize=(COLUMN, 0.75 * COLUMN), layout="constrained")
    curves = dict.fromkeys(row.setup[:3] for row in rows)
    for number, curve in enumerate(curves):
        mine = sorted((row for row in rows if row.setup[:3] == curve), key=lambda row: row.setup.loss_rate)
        rates = [row.setup.loss_rate * APART**number for row in mine]
        estimates(ax, rates, [row.rise for row in mine], number, label=_name(curve, curves), linestyle="-")
    for bound in (HARMLESS, LARGE):
        ax.axhline(bound, color="grey", lw=0.6, ls=":")
    ax.set(xscale="log", xlabel="packet loss rate", ylabel="rise of cross-entropy (nats)")
    ax.set_yscale("symlog", linthresh=HARMLESS)
    ax.legend()
    return figure


def _by_repair(rows: list[Row]) -> Figure:
    figure, ax = plt.subplots(figsize=(COLUMN, 0.8 + 0.2 * len(rows)), layout="constrained")
    curves = dict.fromkeys(row.setup[:3] for row in rows)
    places = range(len(rows))
    estimates(ax, places, [row.rise for row in rows], 0, across=True)
    ax.axvline(0, color="0.45", lw=1, zorder=0)
    ax.set_yticks(places, [_name(row.setup[:3], curves) for row in rows])
    ax.invert_yaxis()
    ax.set_xlabel("rise (nats)")  # short: long repairs leave little room
    return figure


def _name(curve: tuple[str, ...], curves: Iterable[tuple[str, ...]]) -> str:
    """Return a curve's repair, with algorithm and phase if the curves have several."""
    return ", ".join(curve) if len({each[:2] for each in curves}) > 1 else curve[2]
