"""Share the figures' style, and the elements that several figures have."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from lossytp.study.statistics import t_interval

NAMED_APART = 4  # the least ratio of two labelled rates whose labels do not overlap
POINTS = 100  # in a share of 1
FALL = ["fall", "low", "high"]  # columns of a fall and its interval
MILLION = 1e6
COLUMN = 3.5  # inches, the width of the paper's column
TASK_NAMES = {"sst2_held_out": "SST-2", "sst2": "SST-2", "qnli": "QNLI", "mnli": "MNLI subset"}
MARKERS = "osD^vPX*<>"
LABEL_GAP = 0.09  # of a panel's height, between two labels


def marker_of(number: int) -> str:
    """Return the marker of an arm by its number, so that arms differ in grey too; after the last comes the first."""
    return MARKERS[number % len(MARKERS)]


def task_name(task: object) -> str:
    """Return a task's name as figures write it."""
    return TASK_NAMES.get(str(task), str(task))


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


def band(ax: Axes, runs: pd.DataFrame, x: str, y: str, *, label: str, number: int) -> None:
    """Plot the mean of column `y` over seeds, with its 95 % interval, against column `x`.

    Args:
        ax: the panel.
        runs: one row per run.
        x: a column's name.
        y: a column's name.
        label: the curve's name in the legend.
        number: the curve's number, which sets colour and marker.
    """
    color = f"C{number}"
    estimates = runs.groupby(x)[y].apply(lambda values: t_interval(values.to_numpy()))
    where = estimates.index.to_numpy()
    mean, low, high = np.array(estimates.tolist()).T
    ax.plot(where, mean, marker=marker_of(number), color=color, label=label, markersize=3)
    if np.isfinite(low).all():  # a single seed has no interval
        ax.fill_between(where, low, high, color=color, alpha=0.2, linewidth=0)


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


def loss_rate_axis(ax: Axes, rates: pd.Series) -> None:
    """Make the x axis logarithmic, with 0 at its left end.

    Rates are labelled in per cent where labels do not overlap: first powers of ten, then others from the largest.
    """
    values = sorted(rates.unique())
    named = [0.0]
    for value in sorted(values, key=lambda rate: (not f"{rate:e}".startswith("1.000000e"), -rate)):
        if all(max(value, other) > NAMED_APART * min(value, other) for other in named):
            named.append(value)
    smallest = min((value for value in values if value > 0), default=0.01)
    ax.set_xscale("symlog", linthresh=smallest, linscale=0.6)
    ax.set_xlim(-0.1 * smallest, 1.4 * max(values))
    ax.xaxis.set_major_locator(FixedLocator(values))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}" if value in named else ""))
    ax.tick_params(axis="x", labelsize=6)


def label_ends(ax: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Write each line's name in its colour right of the panel, at the height of its last point.

    Args:
        ax: the panel, with its final limits.
        ends: height, name and colour of each line.
    """
    low, high = ax.get_ylim()
    gap = LABEL_GAP * (high - low)
    free = -np.inf
    for y, name, color in sorted(ends):
        free = max(y, free + gap * (1 + name.count("\n")))
        ax.annotate(
            name, (1.03, free), xycoords=("axes fraction", "data"), color=color, fontsize=6, va="center",
            annotation_clip=False,
        )  # fmt: skip
