"""Draw the rise of cross-entropy against the loss rate."""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from lossytp.study.figures.style import COLUMN, MARKERS, save, set_style
from lossytp.tolerance.advice import LARGE, SMALL
from lossytp.tolerance.measure import Row

FIGURE = "tolerance"
APART = 1.04  # ratio of the positions of two repairs at one rate


def draw(rows: list[Row], title: str, folder: Path) -> Figure:
    """Write tolerance.svg and tolerance.png, and return the figure: a curve for each repair, with intervals."""
    set_style()
    figure, ax = plt.subplots(figsize=(COLUMN, 0.75 * COLUMN), layout="constrained")
    curves = dict.fromkeys(row.cell[:3] for row in rows)
    several = len({curve[:2] for curve in curves}) > 1
    for number, curve in enumerate(curves):
        mine = sorted((row for row in rows if row.cell[:3] == curve), key=lambda row: row.cell.loss_rate)
        rates = [row.cell.loss_rate * APART**number for row in mine]
        values = [row.rise.value for row in mine]
        spread = [[row.rise.value - row.rise.low for row in mine], [row.rise.high - row.rise.value for row in mine]]
        label = ", ".join(curve) if several else curve[2]
        ax.errorbar(
            rates, values, spread, label=label, marker=MARKERS[number % len(MARKERS)], markersize=3, capsize=2, lw=1
        )
    for bound in (SMALL, LARGE):
        ax.axhline(bound, color="grey", lw=0.6, ls=":")
    ax.set(xscale="log", xlabel="packet loss rate", ylabel="rise of cross-entropy (nats)", title=title)
    ax.set_yscale("symlog", linthresh=SMALL)
    ax.legend()
    save(figure, folder, FIGURE)
    plt.close(figure)  # a notebook shows what is returned
    return figure
