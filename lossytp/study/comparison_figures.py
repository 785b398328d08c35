"""Figures of an experiment's arms side by side, from `contrasts.falls_and_gains`."""

from textwrap import fill

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from lossytp.study.contrasts import TRAINING
from lossytp.study.figures import COLUMN, MARKERS, band
from lossytp.study.statistics import CONFIDENCE

LABEL = 24  # letters, beside two panels in a column
APART = 1.03  # ratio of the places of two arms that are set side by side
OUTCOMES = {  # of `falls_by_arm`: columns of value, interval and p, what is written at the axis, factor of its units
    "accuracy": (("difference", "low", "high", "p_holm"), "fall, points", -100.0),
    "cross-entropy": (("rise", "rise_low", "rise_high", "rise_p_holm"), "rise, nats", 1.0),
}


def falls_by_arm(compared: pd.DataFrame) -> Figure:
    """What each arm costs against the runs without losses, in accuracy and in cross-entropy, with 95 % intervals.

    One marker and colour a task; filled ones differ from 0 after Holm's correction. An arm of several loss rates has a
    row for each.
    """
    table = _lossy(compared)
    tasks, arms = list(dict.fromkeys(table["task"])), list(dict.fromkeys(table["label"]))
    wrapped = max(map(len, arms)) > LABEL  # two lines are not to touch the next arm's
    height = 0.23 if wrapped else 0.2
    figure, axes = plt.subplots(
        1, len(OUTCOMES), figsize=(COLUMN, 0.8 + height * len(arms)), sharey=True, layout="constrained"
    )
    for ax, (title, ((*estimate, p), text, scale)) in zip(axes, OUTCOMES.items(), strict=True):
        for number, task in enumerate(tasks):
            ours = table[table["task"] == task]
            places = [arms.index(label) + 0.3 * (number - (len(tasks) - 1) / 2) for label in ours["label"]]
            cost, errors = _scaled(ours[estimate], scale)
            color, marker = f"C{number}", MARKERS[number]
            ax.errorbar(cost, places, xerr=errors, fmt="none", ecolor=color, elinewidth=1, capsize=1.5)
            shown = np.where(ours[p].to_numpy(dtype=float) < 1 - CONFIDENCE, color, "white")
            ax.scatter(cost, places, c=shown, edgecolors=color, marker=marker, s=16, zorder=3)
            ax.plot([], [], marker, color=color, markersize=4, label=task)
        ax.axvline(0, color="0.45", linewidth=1, zorder=0)
        ax.set_title(title)
        ax.set_xlabel(text)
    axes[0].set_yticks(range(len(arms)), [fill(label, LABEL) for label in arms], linespacing=1.0)
    if wrapped:
        axes[0].tick_params(axis="y", labelsize=6)
    axes[0].set_ylim(len(arms) - 0.4, -0.6)  # the first on top
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(tasks))
    return figure


def falls_against(compared: pd.DataFrame, axes: dict[str, str], *, front: bool = False) -> Figure:
    """Each arm's fall in accuracy, with its 95 % interval, against columns of the table: a panel for each of them.

    Args:
        axes: what to write at the horizontal axis, by column.
        front: draw the Pareto front, the arms to which none is better in both.

    Arms of which a column is missing are left out.
    A line joins the loss rates of an arm that has several; the axis is then logarithmic. Marks of one loss rate are
    set side by side.
    """
    table = _lossy(compared).dropna(subset=list(axes))
    tasks, arms = list(dict.fromkeys(table["task"])), list(dict.fromkeys(table["arm"]))
    palette = sns.color_palette("colorblind", len(arms))
    figure, axes_TX = plt.subplots(
        len(tasks), len(axes), figsize=(COLUMN, 0.8 + 1.3 * len(tasks)), sharex="col", sharey="row",
        layout="constrained", squeeze=False,
    )  # fmt: skip
    for row, task in zip(axes_TX, tasks, strict=True):
        ours = table[table["task"] == task]
        for ax, column in zip(row, axes, strict=True):
            if front:
                _front(ax, ours[column].to_numpy(dtype=float), _points(ours)[0])
            for arm, points in ours.groupby("arm", sort=False):
                style = arms.index(str(arm))
                fall, errors = _points(points)
                chosen = column == "loss_rate"  # alike in all arms; what is measured is not moved
                aside = APART ** (style - (len(arms) - 1) / 2) if chosen else 1.0
                ax.errorbar(
                    aside * points[column], fall, yerr=errors, marker=MARKERS[style % len(MARKERS)],
                    linestyle="-", color=palette[style], label=str(arm), markersize=3.5, elinewidth=0.8, capsize=1.5,
                    markeredgecolor="0.2", markeredgewidth=0.4,  # the palette's light colours, in grey
                )  # fmt: skip
            ax.axhline(0, color="0.45", linewidth=1, zorder=0)
            ax.set_title(task)
            if len(ours) > ours["arm"].nunique():
                ax.set_xscale("log")
                ax.xaxis.set_minor_formatter(NullFormatter())
                if column == "loss_rate":
                    ax.set_xticks(sorted(ours[column].unique()))
                    ax.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{100 * rate:g} %"))
        row[0].set_ylabel("fall, points")
    for ax, text in zip(axes_TX[-1], axes.values(), strict=True):
        ax.set_xlabel(text, fontsize=6)
    handles, labels = axes_TX[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), fontsize=6, columnspacing=1)
    return figure


def divergence(streams: pd.DataFrame, copies: pd.DataFrame) -> Figure:
    """How far ranks are apart, with 95 % intervals: residual streams by layer, parameters' copies by step.

    Args:
        streams, copies: from `divergence.stream_distances` and `divergence.copy_distances`.
    """
    arms, tasks = list(dict.fromkeys(streams["arm"])), list(dict.fromkeys(streams["task"]))
    figure, axes_T2 = plt.subplots(
        len(tasks), 2, figsize=(COLUMN, 0.8 + 1.3 * len(tasks)), sharex="col", layout="constrained", squeeze=False
    )
    last = streams[streams["step"] == streams["step"].max()]
    for task, (left, right) in zip(tasks, axes_T2, strict=True):
        for number, arm in enumerate(arms):
            for ax, table, x, y in ((left, last, "layer", "distance"), (right, copies, "step", "spread")):
                runs = table[(table["task"] == task) & (table["arm"] == arm)].dropna(subset=[y])
                band(ax, runs, x, y, label=arm, color=f"C{number}", marker=MARKERS[number])
        left.set_xticks(sorted(last["layer"].unique()))
        left.set_ylabel("relative distance")
        right.set_ylabel("relative spread")
        left.set_title(f"{task}, residual streams")
        right.set_title(f"{task}, copies")
    axes_T2[-1, 0].set_xlabel("layer, at the last step")
    axes_T2[-1, 1].set_xlabel("step")
    handles, labels = axes_T2[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=1)
    return figure


def _lossy(compared: pd.DataFrame) -> pd.DataFrame:
    """The rows that have a difference, with a `label`: the arm, and its rate where it has several."""
    table = compared.dropna(subset=["difference"])
    several = table.groupby(["arm", *TRAINING])["loss_rate"].transform("nunique") > 1
    rates = table["loss_rate"].map(lambda rate: f", {100 * rate:g} %")
    return table.assign(label=table["arm"].where(~several, table["arm"] + rates))


def _points(table: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Falls in points, (A,), and how far below and above their intervals end, (2, A)."""
    return _scaled(table[["difference", "low", "high"]], -100.0)


def _scaled(estimates: pd.DataFrame, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Of (A, 3) values and ends of intervals, scaled: the values, (A,), and how far from them the ends are, (2, A)."""
    scaled = scale * estimates.to_numpy(dtype=float)
    return scaled[:, 0], np.abs(np.sort(scaled[:, 1:]) - scaled[:, :1]).T


def _front(ax: Axes, cost: np.ndarray, fall: np.ndarray) -> None:
    order = np.lexsort((fall, cost))
    best = fall[order] < np.minimum.accumulate(np.concatenate(([np.inf], fall[order][:-1])))
    ax.step(cost[order][best], fall[order][best], where="post", color="0.6", linewidth=1, zorder=0)
