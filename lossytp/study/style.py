"""Share the figures' style, and marks with intervals."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLUMN = 3.5  # inches, the width of the paper's column
MARKERS = "osD^vPX*<>"


def marker_of(number: int) -> str:
    """Return the marker of an arm by its number, so that arms differ in grey too; after the last comes the first."""
    return MARKERS[number % len(MARKERS)]


def set_style() -> None:
    """Set colour-blind-safe colours and sizes that fit a column, and make files equal from run to run."""
    sns.set_theme(style="ticks", palette="colorblind", font_scale=0.62)  # 7 points in the paper
    mpl.rcParams.update({"svg.hashsalt": "lossytp", "svg.fonttype": "path", "axes.spines.top": False})
    mpl.rcParams.update({"axes.spines.right": False, "figure.dpi": 200, "legend.frameon": False})
    mpl.rcParams.update({"axes.linewidth": 0.8, "xtick.major.size": 3, "ytick.major.size": 3, "lines.linewidth": 1})


def save(figure: Figure, folder: Path, name: str) -> None:
    """Write the figure to `name`.svg and `name`.png in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    figure.set_layout_engine("none")  # keeps the layout: computing it anew takes as long as drawing
    figure.savefig(folder / f"{name}.png", dpi=300, metadata={"Software": None})


def estimates(ax: Axes, where: Any, values_A3: Any, number: int, *, across: bool = False, **style: Any) -> None:
    """Plot values with their intervals.

    Args:
        ax: the panel.
        where: (A,) places on the x axis, or on the y axis if `across`.
        values_A3: (A, 3) values, and the ends of their intervals in any order. A bar with an infinite end is not drawn.
        number: the marks' number, which sets colour and marker.
        across: whether values lie on the x axis.
        style: settings of `Axes.errorbar`.
    """
    values_A3 = np.asarray(values_A3, dtype=float)
    values = values_A3[:, 0]
    errors = np.abs(np.sort(values_A3[:, 1:]).T - values)
    looks: dict[str, Any] = {"xerr" if across else "yerr": errors}
    looks |= {"marker": marker_of(number), "color": f"C{number}", "linestyle": "none"}
    looks |= {"markersize": 3.5, "elinewidth": 0.8, "capsize": 1.5}
    x, y = (values, where) if across else (where, values)
    ax.errorbar(x, y, **(looks | style))


def shared_legend(figure: Figure, ax: Axes, *, max_columns: int = 99, **settings: Any) -> None:
    """Put one panel's legend below the whole figure, or where the settings of `Figure.legend` say."""
    handles, labels = ax.get_legend_handles_labels()
    place: dict[str, Any] = {"loc": "outside lower center", "ncols": min(max_columns, len(labels))}
    figure.legend(handles, labels, **(place | settings))
