"""Figures, drawn from tables alone. Statistics live in `lossytp.study.statistics`."""

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from lossytp.study.statistics import t_interval

NAMED_APART = 1.7  # times: labels would overlap
COLUMN = 3.5  # inches, of a column of the paper
MARKERS = "osD^vPX*<>"  # arms differ by colour and marker, so that they can be told apart in grey


def set_style() -> None:
    """Colour-blind-safe colours, text as text, and files that do not differ from run to run."""
    sns.set_theme(style="ticks", palette="colorblind", font_scale=0.62)  # 7 points, in a column of the paper
    mpl.rcParams.update({"svg.hashsalt": "lossytp", "svg.fonttype": "path", "axes.spines.top": False})
    mpl.rcParams.update({"axes.spines.right": False, "figure.dpi": 200, "legend.frameon": False})
    mpl.rcParams.update({"axes.linewidth": 0.8, "xtick.major.size": 3, "ytick.major.size": 3, "lines.linewidth": 1})


def save(figure: Figure, folder: Path, name: str) -> None:
    """Write NAME.svg and NAME.png."""
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    figure.set_layout_engine("none")  # laid out by now, which takes as long as drawing
    figure.savefig(folder / f"{name}.png", dpi=300, metadata={"Software": None})


def accuracy_against_loss(table: pd.DataFrame) -> Figure:
    """Accuracy against loss rate, evaluated with losses (left) and without (right), a row a task.

    Args:
        table: a row a run, with `task`, `arm`, `loss_rate`, `accuracy_lossy`, `accuracy_clean`; every arm has the runs
            without losses at `loss_rate` 0.

    Points are means over seeds, bands Student's 95 % intervals.
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
                number = arms.index(str(arm))
                marker = MARKERS[number % len(MARKERS)]
                band(ax, runs, "loss_rate", column, label=str(arm), color=f"C{number}", marker=marker)
            ax.set_title(f"{task}, {how}" if len(tasks) > 1 else how, fontsize=6)
            loss_rate_axis(ax, table["loss_rate"])
        axes[0].set_ylabel("test accuracy")
    for ax in axes_TP[-1]:
        ax.set_xlabel("packet loss rate")
    handles, labels = axes_TP[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def accuracy_against_evaluated_loss(table: pd.DataFrame) -> Figure:
    """Accuracy against the loss rate in evaluation, a line for each rate in training, a panel a task.

    Args:
        table: a row an evaluation, with `task`, `trained_at`, `evaluated_at`, `seed` and `accuracy`.

    Points are means over seeds, bands Student's 95 % intervals.
    """
    tasks, trained_at = list(dict.fromkeys(table["task"])), sorted(table["trained_at"].unique())
    figure, axes_1T = plt.subplots(1, len(tasks), figsize=(COLUMN, 2.2), layout="constrained", squeeze=False)
    for ax, task in zip(axes_1T[0], tasks, strict=True):
        ours = table[table["task"] == task].rename(columns={"evaluated_at": "loss_rate"})
        for number, rate in enumerate(trained_at):
            label = f"{100 * rate:g} % loss" if rate else "no loss"
            runs, marker = ours[ours["trained_at"] == rate], MARKERS[number % len(MARKERS)]
            band(ax, runs, "loss_rate", "accuracy", label=label, color=f"C{number}", marker=marker)
        ax.set_title(task)
        ax.set_xlabel("loss rate in evaluation")
        loss_rate_axis(ax, table["evaluated_at"])
    axes_1T[0, 0].set_ylabel("test accuracy")
    handles, labels = axes_1T[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, title="trained with", loc="outside lower center", ncols=len(labels))
    return figure


def burst_distribution(table: pd.DataFrame) -> Figure:
    """Share of bursts of each length: points measured, lines the closed form.

    Args:
        table: columns process, burst_packets, measured, expected.
    """
    figure, ax = plt.subplots(figsize=(COLUMN, 1.9), layout="constrained")
    for number, (process, rows) in enumerate(table.groupby("process", sort=False)):
        color, marker = f"C{number}", MARKERS[number % len(MARKERS)]
        ax.plot(rows["burst_packets"], rows["expected"], color=color, linewidth=1)
        ax.plot(rows["burst_packets"], rows["measured"], marker, color=color, markersize=2.5, label=str(process))
    ax.set(yscale="log", xlabel="burst length, packets", ylabel="share of bursts")
    ax.set_ylim(1e-4, 1.5)
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def price_against_loss(price: pd.DataFrame, step_ratios: pd.DataFrame | None = None) -> Figure:
    """How many times longer reliable steps take (lines), and how many times the steps losing needs (black).

    A panel a transport, a line for each product of bandwidth and round trip, on which alone the price depends. Below a
    line losing wins, above it retransmitting: break-even is where they cross.

    Args:
        price: from `break_even.price_of_reliability`.
        step_ratios: from `break_even.step_ratios`: means and 95 % intervals, a hollow mark where some run never reached
            the accuracy, so that it is a lower bound.
    """
    in_flight_kb = price["bandwidth_gbits"] * price["round_trip_us"] / 8
    transports, products = list(price["transport"].unique()), sorted(in_flight_kb.unique())
    figure, axes_1T = plt.subplots(
        1, len(transports), figsize=(COLUMN, 2.7), sharex=True, layout="constrained", squeeze=False
    )
    for ax, transport in zip(axes_1T[0], transports, strict=True):
        ours = price["transport"] == transport
        for number, product in enumerate(products):
            rows = price[ours & (in_flight_kb == product)].drop_duplicates("loss_rate")
            label = f"{product / 1000:g} MB" if product >= 1000 else f"{product:g} kB"
            marker = MARKERS[number % len(MARKERS)]
            ax.plot(rows["loss_rate"], rows["price"], marker=marker, color=f"C{number}", label=label, markersize=2.5)
        ax.set_title(transport)
        ax.set_yscale("log")
        loss_rate_axis(ax, price["loss_rate"])
        smallest, largest = 1.0, price.loc[ours, "price"].max()
        if step_ratios is not None:
            smallest = max(0.5, step_ratios["low"].min())
            largest = max(largest, step_ratios["ratio"].max())
            _step_ratios(ax, step_ratios)
        ax.set_ylim(0.8 * smallest, 1.3 * largest)  # an interval without end leaves the panel
        ax.set_xlabel("packet loss rate")
    axes_1T[0, 0].set_ylabel("reliable / best effort")
    handles, labels = axes_1T[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, title="bandwidth x round trip", loc="outside lower center", ncols=3)
    return figure


def _step_ratios(ax: Axes, step_ratios: pd.DataFrame) -> None:
    for number, (task, rows) in enumerate(step_ratios[step_ratios["loss_rate"] > 0].groupby("task", sort=False)):
        rate, ratio = rows["loss_rate"].to_numpy(), rows["ratio"].to_numpy()
        marker = MARKERS[::-1][number % len(MARKERS)]  # not those of the first lines
        errors = np.abs(rows[["low", "high"]].to_numpy(dtype=float).clip(1e-3, 1e6).T - ratio)
        ax.errorbar(rate, ratio, yerr=errors, fmt="none", ecolor="0.15", elinewidth=1, capsize=2)
        ax.plot(rate, ratio, linestyle=":", color="0.15", marker=marker, markersize=4, label=f"steps, {task}")
        bound = rows["never"].to_numpy() > 0
        ax.plot(rate[bound], ratio[bound], marker, color="0.15", markerfacecolor="white", markersize=4)


def band(ax: Axes, runs: pd.DataFrame, x: str, y: str, *, label: str, color: str, marker: str) -> None:
    """The mean of column `y` over seeds, and its 95 % interval, against column `x`."""
    estimates = runs.groupby(x)[y].apply(lambda values: t_interval(values.to_numpy()))
    where = estimates.index.to_numpy()
    mean, low, high = np.array(estimates.tolist()).T
    ax.plot(where, mean, marker=marker, color=color, label=label, markersize=3)
    if np.isfinite(low).all():  # one seed has no interval
        ax.fill_between(where, low, high, color=color, alpha=0.2, linewidth=0)


def loss_rate_axis(ax: Axes, rates: pd.Series) -> None:
    """Logarithmic, with room for zero at its left end; a rate just below another that is named has no name."""
    values = sorted(rates.unique())
    named = values[-1:]
    for value in values[-2::-1]:
        if named[-1] > NAMED_APART * value:
            named.append(value)
    smallest = min((value for value in values if value > 0), default=0.01)
    ax.set_xscale("symlog", linthresh=smallest, linscale=0.6)
    ax.set_xlim(-0.1 * smallest, 1.15 * max(values))
    ax.xaxis.set_major_locator(FixedLocator(values))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %" if value in named else ""))
    ax.tick_params(axis="x", labelsize=6, rotation=90 if len(values) > 5 else 0)
