"""Draw an experiment's arms side by side, from `comparisons.drops_and_gains`."""

from textwrap import fill

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from lossytp.study.figures.style import COLUMN, POINTS, band, estimates, marker_of, shared_legend, task_name
from lossytp.study.records import TRAINING
from lossytp.study.statistics import CONFIDENCE

LABEL = 24  # letters a line, beside two panels in a column
APART = 1.03  # ratio of the positions of two arms side by side
BESIDE = 0.022  # of a panel's width, between arms with one measured value
NAMED_FALLS = (0, 1, 2, 5, 10, 20, 40)  # points, with a label on a logarithmic axis
LINEAR_TO = 2  # points: where falls of several loss rates turn to a logarithmic axis
DIFFERENCE = ["difference", "low", "high"]
OUTCOMES = {  # of `drops_by_arm`: columns of value, interval and p, axis label, factor to its units
    "accuracy": (("difference", "low", "high", "p_holm"), "fall, points", -100.0),
    "cross-entropy": (("rise", "rise_low", "rise_high", "rise_p_holm"), "rise, nats an example", 1.0),
}


def drops_by_arm(compared: pd.DataFrame) -> Figure:
    """Draw what each arm costs in accuracy and cross-entropy against the lossless arm, with 95 % intervals.

    Each task has a colour and marker; a filled one differs from 0 after Holm's correction. An arm with several loss
    rates has a row for each.
    """
    table = _lossy(compared)
    tasks, arms = list(dict.fromkeys(table["task"])), list(dict.fromkeys(table["label"]))
    wrapped = max(map(len, arms)) > LABEL  # so that two lines do not touch the next label
    height = 0.23 if wrapped else 0.2
    figure, axes = plt.subplots(
        1, len(OUTCOMES), figsize=(COLUMN, 0.8 + height * len(arms)), sharey=True, layout="constrained"
    )
    for ax, (title, ((*estimate, p), text, scale)) in zip(axes, OUTCOMES.items(), strict=True):
        for number, task in enumerate(tasks):
            ours = table[table["task"] == task]
            places = [arms.index(label) + 0.3 * (number - (len(tasks) - 1) / 2) for label in ours["label"]]
            color, marker = f"C{number}", marker_of(number)
            estimates(ax, places, scale * ours[estimate], number, across=True, fmt="none", elinewidth=1)
            cost = scale * ours[estimate[0]]
            shown = np.where(ours[p].to_numpy(dtype=float) < 1 - CONFIDENCE, color, "white")
            ax.scatter(cost, places, c=shown, edgecolors=color, marker=marker, s=16, zorder=3)
            ax.plot([], [], marker, color=color, markersize=4, label=task_name(task))
        ax.axvline(0, color="0.45", linewidth=1, zorder=0)
        ax.set_title(title)
        ax.set_xlabel(text)
    axes[0].set_yticks(range(len(arms)), [fill(label, LABEL) for label in arms], linespacing=1.0)
    if wrapped:
        axes[0].tick_params(axis="y", labelsize=6)
    axes[0].set_ylim(len(arms) - 0.4, -0.6)  # the first on top
    shared_legend(figure, axes[0], loc="outside upper right")
    return figure


def drops_against(compared: pd.DataFrame, axes: dict[str, str], *, front: bool = False) -> Figure:
    """Draw each arm's drop in accuracy, with its 95 % interval, against columns of the table, one panel per column.

    A line joins the loss rates of an arm with several; axes are then logarithmic, except near a fall of 0. Arms of one
    loss rate stand side by side.

    Args:
        compared: from `comparisons.drops_and_gains`, with the columns. Arms that lack one are left out.
        axes: the horizontal axes' labels, by column.
        front: whether to draw the Pareto front, the arms that no other beats in both drop and column.
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
                _front(ax, ours[column].to_numpy(dtype=float), -POINTS * ours["difference"].to_numpy(dtype=float))
            beside = _side_by_side(ours[column]) if ours["arm"].is_unique else pd.Series(0.0, ours.index)
            for arm, points in ours.groupby("arm", sort=False):
                style = arms.index(str(arm))
                chosen = column == "loss_rate"  # equal in all arms; measured values keep their place
                aside = APART ** (style - (len(arms) - 1) / 2) if chosen else 1.0
                where = aside * points[column] + beside[points.index]
                estimates(
                    ax, where, -POINTS * points[DIFFERENCE], style, linestyle="-", color=palette[style], label=str(arm),
                    markeredgecolor="0.2", markeredgewidth=0.4,  # keeps light colours visible in grey
                )  # fmt: skip
            ax.axhline(0, color="0.45", linewidth=1, zorder=0)
            ax.set_title(task_name(task))
            if len(ours) > ours["arm"].nunique():
                ax.set_xscale("log")
                ax.set_yscale("symlog", linthresh=LINEAR_TO)
                ax.set_yticks(NAMED_FALLS, [f"{each:g}" for each in NAMED_FALLS])
                falls, ends = -POINTS * ours["difference"], -POINTS * ours["low"]
                ax.set_ylim(-LINEAR_TO / 2, 1.2 * falls.max() + (ends - falls).max())
                ax.yaxis.set_minor_locator(NullLocator())
                ax.xaxis.set_minor_formatter(NullFormatter())
                if column == "loss_rate":
                    ax.set_xticks(sorted(ours[column].unique()))
                    ax.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{100 * rate:g} %"))
        row[0].set_ylabel("fall, points")
    for ax, text in zip(axes_TX[-1], axes.values(), strict=True):
        ax.set_xlabel(text, fontsize=6)
    shared_legend(figure, axes_TX[0, 0], max_columns=3, fontsize=6, columnspacing=1)
    return figure


def replica_divergence(streams: pd.DataFrame, copies: pd.DataFrame) -> Figure:
    """Draw how far ranks diverge, with 95 % intervals: residual streams by layer, copies of parameters by step.

    Args:
        streams: from `run_measures.stream_distances`.
        copies: from `run_measures.copy_spreads`.
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
                band(ax, runs, x, y, label=arm, number=number)
        left.set_xticks(sorted(last["layer"].unique()))
        left.set_ylabel("relative distance")
        right.set_ylabel("relative spread")
        left.set_title(f"{task_name(task)}, residual streams")
        right.set_title(f"{task_name(task)}, copies")
    axes_T2[-1, 0].set_xlabel("layer, at the last step")
    axes_T2[-1, 1].set_xlabel("step")
    shared_legend(figure, axes_T2[0, 0], max_columns=1)
    return figure


def _lossy(compared: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with a difference, and add a `label`: the arm, and its rate if it has several."""
    table = compared.dropna(subset=["difference"])
    several = table.groupby(["arm", *TRAINING])["loss_rate"].transform("nunique") > 1
    rates = table["loss_rate"].map(lambda rate: f", {100 * rate:g} %")
    return table.assign(label=table["arm"].where(~several, table["arm"] + rates))


def _side_by_side(values: pd.Series) -> pd.Series:
    """Return by how much to move each of (A,) marks aside so that equal values do not hide each other."""
    groups = values.groupby(values.round(3))
    place = groups.cumcount() - (groups.transform("size") - 1) / 2
    return BESIDE * (values.max() - values.min()) * place


def _front(ax: Axes, cost: np.ndarray, drop: np.ndarray) -> None:
    """Plot the Pareto front of (A,) costs and drops."""
    order = np.lexsort((drop, cost))
    best = drop[order] < np.minimum.accumulate(np.concatenate(([np.inf], drop[order][:-1])))
    ax.step(cost[order][best], drop[order][best], where="post", color="0.6", linewidth=1, zorder=0)
