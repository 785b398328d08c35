"""Draw what losses cost a real model: in inference, by the error of its sums, and after training."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from lossytp.study.figures.style import COLUMN, FALL, POINTS, estimates, marker_of, shared_legend, task_name
from lossytp.study.records import LOSSLESS

EXTRA_MARKERS = "+x1"  # of kinds of repair, apart from those of networks
RISE = ["rise", "low", "high"]
COLLAPSED = ["collapsed", "collapsed_low", "collapsed_high"]
NAMES = {"zero": "nothing"}  # of repairs that figures name otherwise


def real_model_rises(table: pd.DataFrame) -> Figure:
    """Draw the rise of a pretrained model's cross-entropy and the share of collapsed blocks, by repair and loss rate.

    Bars are 95 % intervals.

    Args:
        table: from `analysis.real_model.rises`, of one model, algorithm and phase. Each repair has a row at the largest
            loss rate.
    """
    largest = table[table["loss_rate"] == table["loss_rate"].max()].sort_values("rise", ascending=False, kind="stable")
    repairs = sorted(largest["repair"], key=lambda repair: repair != "zero")  # nothing on top, then the best last
    figure, axes = plt.subplots(
        1, 2, figsize=(COLUMN, 0.8 + 0.19 * len(repairs)), sharey=True, layout="constrained", width_ratios=(2, 1)
    )
    rates = sorted(table["loss_rate"].unique())
    for number, rate in enumerate(rates):
        rows = table[table["loss_rate"] == rate]
        places = [repairs.index(repair) + 0.36 * (number - (len(rates) - 1) / 2) for repair in rows["repair"]]
        label = f"{POINTS * rate:g} % loss"
        for ax, values in zip(axes, (rows[RISE], POINTS * rows[COLLAPSED]), strict=True):
            estimates(ax, places, values, number, across=True, label=label)
    axes[0].set_yticks(range(len(repairs)), [NAMES.get(each, each) for each in repairs])
    axes[0].set_ylim(len(repairs) - 0.5, -0.5)
    axes[0].set(xlabel="rise, nats a token")
    axes[1].set(xlabel="collapsed, %")
    axes[1].margins(x=0.15)
    shared_legend(figure, axes[0])
    for ax in axes:
        ax.axvline(0, color="0.6", linewidth=0.8, zorder=0)
    return figure


def real_model_law(networks: pd.DataFrame, repaired: pd.DataFrame) -> Figure:
    """Draw the median block's rise against the error of the sums: unrepaired networks on one line, and repairs.

    Args:
        networks: from `analysis.real_model.against_predicted`. The line joins their predictions.
        repaired: rows of `analysis.real_model.times_law`.
    """
    figure, ax = plt.subplots(figsize=(COLUMN, 2.3), layout="constrained")
    law = networks.sort_values("stream_error")  # a power law is straight on these axes
    ax.plot(law["stream_error"], law["median_by_stream_error"], color="0.2", linewidth=1, zorder=0)
    kinds = networks["algorithm"].where(networks["phase"] == "reduce", networks["algorithm"] + ", both phases")
    for number, kind in enumerate(dict.fromkeys(kinds)):
        for fitted, rows in networks[kinds == kind].groupby("fitted"):
            color = f"C{number}"
            ax.plot(
                rows["stream_error"], rows["median"], marker=marker_of(number), color=color, linestyle="none",
                markersize=4, markerfacecolor=color if fitted else "white", label=None if fitted else kind,
            )  # fmt: skip
    by_kind = dict(list(repaired.groupby(repaired["repair"].map(_kind))))
    for marker, (kind, rows) in zip(EXTRA_MARKERS[: len(by_kind)], by_kind.items(), strict=True):
        ax.plot(
            rows["stream_error"],
            rows["median"],
            marker=marker,
            color="0.35",
            linestyle="none",
            markersize=4,
            label=kind,
        )
    ax.set(xscale="log", yscale="log", xlabel="squared error of a sum, relative to the stream")
    ax.set_ylabel("rise of the median block,\nnats a token")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=5.5, handletextpad=0.2, borderpad=0)
    return figure


def _kind(repair: str) -> str:
    """Return the kind of a repair: whether it spreads a message over its packets, and whether it protects some."""
    if "hadamard" not in repair:
        return "repairs that do not spread"
    return "spread, strongest protected" if "protect" in repair else "spread (Hadamard)"


def real_model_after_training(table: pd.DataFrame) -> Figure:
    """Draw the fall in accuracy by the repair in evaluation, one mark for each network that a model was trained over.

    Args:
        table: from `analysis.real_training.outcomes`. Tasks have a panel each.
    """
    repairs = list(dict.fromkeys(table["evaluated_with"]))
    trained = list(dict.fromkeys(table["trained_over"]))
    tasks = list(dict.fromkeys(table["task"]))
    height = 0.9 + 0.16 * len(repairs) * len(trained)
    figure, axes_X = plt.subplots(
        1, len(tasks), figsize=(COLUMN, height), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for ax, task in zip(axes_X[0], tasks, strict=True):
        for number, name in enumerate(trained):
            rows = table[(table["trained_over"] == name) & (table["task"] == task)]
            places = [repairs.index(each) + 0.2 * (number - (len(trained) - 1) / 2) for each in rows["evaluated_with"]]
            label = name if name == LOSSLESS else f"losses, {NAMES.get(name, name)}"
            estimates(ax, places, POINTS * rows[FALL], number, across=True, markersize=4, elinewidth=1, label=label)
        ax.axvline(0, color="0.6", linewidth=0.8, zorder=0)
        ax.set(title=task_name(task), xlabel="fall, points")
    first = axes_X[0, 0]
    first.set_yticks(range(len(repairs)), [NAMES.get(each, each).replace(" + ", "\n+ ") for each in repairs])
    first.set_ylim(len(repairs) - 0.5, -0.5)
    first.set_ylabel("repair in evaluation")
    shared_legend(figure, first, max_columns=2)
    figure.legends[0].set_title("trained over")
    return figure
