"""Draw curves against the loss rate, and the distribution of bursts."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lossytp.study.figures.style import (
    COLUMN,
    MARKERS,
    band,
    estimates,
    loss_rate_axis,
    marker_of,
    shared_legend,
    task_name,
)
from lossytp.study.records import LOSSLESS


def accuracy_against_loss(table: pd.DataFrame) -> Figure:
    """Draw accuracy against loss rate, evaluated with losses (left) and without (right), one row per task.

    Points are means over seeds, bands Student's 95 % intervals.

    Args:
        table: from `records.with_lossless`, with `task`, `arm`, `loss_rate`, `accuracy_lossy` and `accuracy_clean`.
    """
    tasks = list(dict.fromkeys(table["task"]))
    height = 0.6 + 1.35 * len(tasks)
    figure, axes_TP = plt.subplots(
        len(tasks), 2, figsize=(COLUMN, height), sharex=True, sharey="row", layout="constrained", squeeze=False
    )
    outcomes = {"accuracy_lossy": "evaluated with losses", "accuracy_clean": "evaluated without"}
    arms = list(dict.fromkeys(table["arm"]))
    for task, axes in zip(tasks, axes_TP, strict=True):
        ours = table[table["task"] == task]
        for ax, (column, how) in zip(axes, outcomes.items(), strict=True):
            for arm, runs in ours.groupby("arm", sort=False):
                band(ax, runs, "loss_rate", column, label=str(arm), number=arms.index(str(arm)))
            ax.set_title(f"{task_name(task)}, {how}" if len(tasks) > 1 else how, fontsize=6)
            loss_rate_axis(ax, table["loss_rate"])
        axes[0].set_ylabel("test accuracy")
    for ax in axes_TP[-1]:
        ax.set_xlabel("packet loss rate, %")
    shared_legend(figure, axes_TP[0, 0])
    return figure


def accuracy_against_evaluated_loss(table: pd.DataFrame) -> Figure:
    """Draw accuracy against the loss rate in evaluation, one line per loss rate in training, one panel per task.

    Points are means over seeds, bands Student's 95 % intervals.

    Args:
        table: one row per evaluation, with `task`, `trained_at`, `evaluated_at`, `seed` and `accuracy`.
    """
    tasks, trained_at = list(dict.fromkeys(table["task"])), sorted(table["trained_at"].unique())
    figure, axes_1T = plt.subplots(1, len(tasks), figsize=(COLUMN, 2.2), layout="constrained", squeeze=False)
    for ax, task in zip(axes_1T[0], tasks, strict=True):
        ours = table[table["task"] == task].rename(columns={"evaluated_at": "loss_rate"})
        for number, rate in enumerate(trained_at):
            label = f"{100 * rate:g} % loss" if rate else LOSSLESS
            band(ax, ours[ours["trained_at"] == rate], "loss_rate", "accuracy", label=label, number=number)
        ax.set_title(task_name(task))
        ax.set_xlabel("loss rate in evaluation, %")
        loss_rate_axis(ax, table["evaluated_at"])
    axes_1T[0, 0].set_ylabel("test accuracy")
    shared_legend(figure, axes_1T[0, 0], title="trained with")
    return figure


def burst_distribution(table: pd.DataFrame) -> Figure:
    """Draw the share of bursts of each length: points measured, lines the closed form.

    Args:
        table: columns process, burst_packets, measured, expected.
    """
    figure, ax = plt.subplots(figsize=(COLUMN, 1.9), layout="constrained")
    for number, (process, rows) in enumerate(table.groupby("process", sort=False)):
        color, marker = f"C{number}", marker_of(number)
        ax.plot(rows["burst_packets"], rows["expected"], color=color, linewidth=1)
        ax.plot(rows["burst_packets"], rows["measured"], marker, color=color, markersize=2.5, label=str(process))
    ax.set(yscale="log", xlabel="burst length, packets", ylabel="share of bursts")
    ax.set_ylim(1e-4, 1.5)
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def price_against_loss(price: pd.DataFrame, step_ratios: pd.DataFrame | None = None) -> Figure:
    """Draw the ratios by which reliable steps take longer (lines), and by which lossy runs need more steps (black).

    Losing wins where black lies below a line, retransmitting wins where it lies above.
    There is one panel per transport, and one line for each product of bandwidth and round trip, which sets the price.

    Args:
        price: from `break_even.price_of_reliability`.
        step_ratios: from `break_even.step_ratios`, drawn with 95 % intervals. A hollow mark is a lower bound: some run
            never reached the target.
    """
    transports, products = list(price["transport"].unique()), sorted(price["kilobytes"].unique())
    figure, axes_1T = plt.subplots(
        1, len(transports), figsize=(COLUMN, 2.7), sharex=True, layout="constrained", squeeze=False
    )
    for ax, transport in zip(axes_1T[0], transports, strict=True):
        ours = price["transport"] == transport
        for number, product in enumerate(products):
            rows = price[ours & (price["kilobytes"] == product)].drop_duplicates("loss_rate")
            label = f"{product / 1000:g} MB" if product >= 1000 else f"{product:g} kB"
            marker = marker_of(number)
            ax.plot(rows["loss_rate"], rows["price"], marker=marker, color=f"C{number}", label=label, markersize=2.5)
        ax.set_title(transport)
        ax.set_yscale("log")
        loss_rate_axis(ax, price["loss_rate"])
        smallest, largest = 1.0, price.loc[ours, "price"].max()
        if step_ratios is not None:
            smallest = max(0.5, step_ratios["low"].min())
            largest = max(largest, step_ratios["ratio"].max())
            _step_ratios(ax, step_ratios)
        ax.set_ylim(0.8 * smallest, 1.3 * largest)
        ax.set_xlabel("packet loss rate, %")
    axes_1T[0, 0].set_ylabel("reliable / best effort")
    shared_legend(figure, axes_1T[0, 0], title="bandwidth × round trip", max_columns=3)
    return figure


def _step_ratios(ax: Axes, step_ratios: pd.DataFrame) -> None:
    """Plot each task's ratios in black, with intervals."""
    for number, (task, rows) in enumerate(step_ratios[step_ratios["loss_rate"] > 0].groupby("task", sort=False)):
        rate, ratio = rows["loss_rate"].to_numpy(), rows["ratio"].to_numpy()
        marker = MARKERS[::-1][number % len(MARKERS)]  # unlike those of the first lines
        values = rows[["ratio", "low", "high"]].clip(1e-3, 1e6)  # an infinite interval leaves the panel
        estimates(ax, rate, values, number, fmt="none", color="0.15", elinewidth=1, capsize=2)
        ax.plot(
            rate, ratio, linestyle=":", color="0.15", marker=marker, markersize=4, label=f"steps, {task_name(task)}"
        )
        bound = rows["never"].to_numpy() > 0
        ax.plot(rate[bound], ratio[bound], marker, color="0.15", markerfacecolor="white", markersize=4)
