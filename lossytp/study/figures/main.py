"""Draw the paper's main figures: one message each, with direct labels, legible in grey."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lossytp.study.analysis.law import PowerLaw
from lossytp.study.figures.style import (
    COLUMN,
    FALL,
    POINTS,
    estimates,
    label_ends,
    loss_rate_axis,
    marker_of,
    task_name,
)
from lossytp.study.statistics import ONE_POINT, rate_of_drop, t_interval

BELOW = 2.6  # points below 0, with room for the budgets' labels
FARTHEST = 10  # points: the tolerance figure is about what lies below
APART = 1.05  # between marks of equal x on a logarithmic axis


def fall_against_loss(table: pd.DataFrame) -> Figure:
    """Draw the fall in accuracy against the loss rate: one panel per task, one line per arm, and a line at one point.

    Points are means over seeds, paired with the lossless run of the seed; bands are Student's 95 % intervals. Dotted
    lines mark the loss budgets. Falls above `FARTHEST` points leave the panel.

    Args:
        table: from `records.with_lossless`.
    """
    figure, axes = _panels(table["task"], 2.0, equal_falls=True)
    arms = list(dict.fromkeys(table["arm"]))
    for ax, (task, runs) in zip(axes, table.groupby("task", sort=False), strict=True):
        ends, budgets = [], []
        for arm, ours in runs.groupby("arm", sort=False):
            number = arms.index(str(arm))
            by_rate = ours.pivot(index="loss_rate", columns="seed", values="accuracy_lossy")
            falls = by_rate.loc[0.0] - by_rate
            rates = falls.index.to_numpy()
            estimates = np.array([t_interval(row.dropna().to_numpy()) for _, row in falls.iterrows()])
            value, low, high = POINTS * np.array(estimates).T
            color = f"C{number}"
            ax.plot(rates, value, marker=marker_of(number), color=color, markersize=3)
            if np.isfinite(low[1:]).all():  # a single seed has no interval
                ax.fill_between(rates[1:], low[1:], high[1:], color=color, alpha=0.2, linewidth=0)
            ends.append((min(value[-1], FARTHEST), str(arm), color))
            budgets.append((rate_of_drop(rates, value / POINTS), color))
        _mark_budgets(ax, budgets)
        _one_point(ax)
        loss_rate_axis(ax, runs["loss_rate"])
        ax.set(title=task_name(task), ylim=(-BELOW, FARTHEST))
    label_ends(axes[-1], ends)
    axes[0].annotate("one point", (0, POINTS * ONE_POINT), xytext=(0, 2), textcoords="offset points", fontsize=6)
    axes[0].set_ylabel("fall in accuracy, points")
    figure.supxlabel("packet loss rate, %", fontsize="medium")
    return figure


def collapse(arms: pd.DataFrame, laws: dict[str, PowerLaw]) -> Figure:
    """Draw the fall against the expected squared error of a sum: all arms on one curve, one panel per task.

    Args:
        arms: from `analysis.law.law_arms`.
        laws: the fitted law of each task.
    """
    figure, axes = _panels(arms["task"], 2.1, equal_falls=True, equal_x=True)
    every_kind = list(dict.fromkeys(map(str, _kinds(arms))))
    for ax, (task, ours) in zip(axes, arms.groupby("task", sort=False), strict=True):
        kinds = _kinds(ours)
        for kind in dict.fromkeys(kinds):
            number = every_kind.index(str(kind))
            rows = ours[kinds == kind]
            fill = "white" if kind == "both phases" else f"C{number}"
            estimates(ax, rows["squared_error"], POINTS * rows[FALL], number, label=str(kind), markerfacecolor=fill)
        errors = np.linspace(0, ours.loc[~ours["both_phases"], "squared_error"].max(), 200)
        law = laws[str(task)]
        ax.plot(errors, POINTS * law.fall(errors), color="0.2", linewidth=1, zorder=0)
        ax.set_title(f"{task_name(task)}: R² = {law.r_squared:.3f}")
    axes[0].set_ylabel("fall in accuracy, points")
    figure.supxlabel("expected squared error of a sum, relative", fontsize="medium")
    axes[-1].legend(loc="upper left", fontsize=5.5, handletextpad=0.2, borderpad=0)
    return figure


def cost_against_bytes(table: pd.DataFrame) -> Figure:
    """Draw the fall at one loss rate against the bytes that are lost together, one line per task.

    Args:
        table: from `analysis.together.lost_together`.
    """
    figure, ax = plt.subplots(figsize=(COLUMN, 2.0), layout="constrained")
    ends = []
    for number, (task, rows) in enumerate(table.groupby("task", sort=False)):
        estimates(ax, rows["bytes"], POINTS * rows[FALL], number, linestyle="-")
        last = rows.iloc[-1]
        name = f"{task_name(task)}\n{POINTS * last['loss_rate']:g} % loss"
        ends.append((POINTS * last["fall"], name, f"C{number}"))
    ax.set_xscale("log")
    ax.set_ylim(bottom=0)
    label_ends(ax, ends)
    ax.set(xlabel="bytes lost together (element, packet, burst, message)", ylabel="fall in accuracy, points")
    return figure


def delayed_or_lost(table: pd.DataFrame) -> Figure:
    """Draw the fall against the length of training: one line per network, one panel per task, a line at one point.

    Args:
        table: columns `task`, `network`, `max_steps`, `fall`, `low`, `high`.
    """
    figure, axes = _panels(table["task"], 2.1, equal_falls=True, equal_x=True)
    networks = list(dict.fromkeys(table["network"]))
    for ax, (task, rows) in zip(axes, table.groupby("task", sort=False), strict=True):
        for network, ours in rows.groupby("network", sort=False):
            number = networks.index(str(network))
            apart = APART ** (number - (len(networks) - 1) / 2)
            estimates(ax, apart * ours["max_steps"], POINTS * ours[FALL], number, label=str(network), linestyle="-")
        _one_point(ax)
        ax.set_xscale("log")
        ax.set_xticks(steps := sorted(table["max_steps"].unique()), [f"{each:g}" for each in steps])
        ax.minorticks_off()
        ax.set(title=task_name(task), xlabel="training steps")
    axes[0].set_ylabel("fall in accuracy, points")
    axes[-1].legend(*axes[0].get_legend_handles_labels(), loc="upper right", fontsize=5.5, borderpad=0)
    return figure


def _panels(
    tasks: pd.Series, height: float, *, equal_falls: bool = False, equal_x: bool = False
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel for each task, side by side."""
    number = tasks.nunique()
    figure, axes_1T = plt.subplots(
        1, number, figsize=(COLUMN, height), layout="constrained", squeeze=False,
        sharex=equal_x, sharey=equal_falls,
    )  # fmt: skip
    return figure, list(axes_1T[0])


def _kinds(arms: pd.DataFrame) -> pd.Series:
    """Return what sets each arm apart from the curve over loss rates, for the legend."""
    kinds = pd.Series("direct, 4 ranks", index=arms.index)
    kinds[arms["ranks"] != arms["ranks"].mode().iloc[0]] = "2 or 8 ranks"
    kinds[arms["algorithm"] != "direct"] = "ring, tree, switch"
    kinds[arms["repair"] != "zero"] = "FEC, retransmission"
    kinds[arms["both_phases"]] = "both phases"
    return kinds


def _mark_budgets(ax: Axes, budgets: list[tuple[float, str]]) -> None:
    """Drop a line from each budget to its label, at ever lower heights so that no line crosses a label.

    Args:
        ax: the panel.
        budgets: loss rate and colour of each curve; a budget beyond the tried rates is infinite, and has no line.
    """
    for number, (rate, color) in enumerate(sorted(each for each in budgets if np.isfinite(each[0]))):
        low = -0.75 * (number + 1)
        ax.vlines(rate, low, POINTS * ONE_POINT, color=color, linewidth=1, linestyle=":")
        ax.annotate(f"{POINTS * rate:.2g} % ", (rate, low), color=color, fontsize=5.5, ha="right", va="center")


def _one_point(ax: Axes) -> None:
    ax.axhline(POINTS * ONE_POINT, color="0.5", linewidth=0.8, linestyle="--", zorder=0)
