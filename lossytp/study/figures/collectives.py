"""Draw what `measurements.collectives` measures."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lossytp.study.figures.style import estimates, marker_of, shared_legend

WIDTH = 5.5  # inches
GREYS = {"aspect": "auto", "cmap": "Greys", "vmin": 0, "interpolation": "nearest"}  # dark is more


def lost_pieces(lacks: dict[str, dict[str, np.ndarray]]) -> Figure:
    """Draw who lacks what: one row per algorithm, the reduce phase left, the gather phase right.

    Dark elements are missing: from a rank's contribution on the left, from the result on a rank on the right.

    Args:
        lacks: by algorithm, from `who_lacks_what`.
    """
    figure, axes = plt.subplots(
        len(lacks), 2, figsize=(WIDTH, 0.75 * len(lacks) + 0.6), sharex=True, sharey=True, layout="constrained"
    )
    titles = {"reduce": "contributions, as they reach the sum", "gather": "the sum, as it reaches the ranks"}
    for row, (algorithm, phases) in zip(axes, lacks.items(), strict=True):
        for ax, (phase, lacks_RN) in zip(row, phases.items(), strict=True):
            ranks, elements = lacks_RN.shape
            ax.imshow(lacks_RN, vmax=1.3, extent=(0, elements, ranks - 0.5, -0.5), **GREYS)
            for rank in range(1, ranks):
                ax.axhline(rank - 0.5, color="0.8", linewidth=0.5)
                ax.axvline(rank * elements / ranks, color="0.8", linewidth=0.5, linestyle=":")
            ax.set(yticks=range(ranks), title=titles[phase] if algorithm == next(iter(lacks)) else "")
        row[0].set_ylabel(f"{algorithm}\nrank")
    for ax in axes[-1]:
        ax.set_xlabel("element of the message (dotted: chunks)")
    return figure


def error_maps(errors: dict[tuple[str, str], np.ndarray]) -> Figure:
    """Draw where a sum is wrong, and on which rank: one column per algorithm, one row per repair.

    Args:
        errors: by (algorithm, repair), from `errors_by_rank`; without the pairs that are impossible.
    """
    algorithms, repairs = (list(dict.fromkeys(pair[place] for pair in errors)) for place in (0, 1))
    figure, axes = plt.subplots(
        len(repairs), len(algorithms), figsize=(WIDTH, 0.5 * len(repairs) + 0.6), layout="constrained", squeeze=False
    )
    worst = max(error.max() for error in errors.values())
    for row, repair in zip(axes, repairs, strict=True):
        for ax, algorithm in zip(row, algorithms, strict=True):
            ax.set(xticks=[], yticks=[])
            if (algorithm, repair) not in errors:
                ax.text(0.5, 0.5, "cannot be", ha="center", va="center", transform=ax.transAxes, color="0.5")
                continue
            image = ax.imshow(errors[algorithm, repair], vmax=worst, **GREYS)
    for ax, algorithm in zip(axes[0], algorithms, strict=True):
        ax.set_title(algorithm)
    for ax, repair in zip(axes[:, 0], repairs, strict=True):
        ax.set_ylabel(repair, rotation=0, ha="right", va="center", fontsize=7)
    figure.colorbar(image, ax=axes, label="error", shrink=0.6)
    return figure


def errors_of_sums(table: pd.DataFrame) -> Figure:
    """Draw the sums' relative squared error by repair (rows) and algorithm (markers), with the theory as bars.

    Args:
        table: from `squared_errors`; each coherence has a panel.
    """
    coherences = sorted(table["coherence"].unique())
    repairs, algorithms = list(table["repair"].unique()), list(table["algorithm"].unique())
    figure, axes = plt.subplots(
        1, len(coherences), figsize=(WIDTH, 3.2), sharey=True, sharex=True, layout="constrained", squeeze=False
    )
    for ax, coherence in zip(axes[0], coherences, strict=True):
        for number, algorithm in enumerate(algorithms):
            rows = table[(table["algorithm"] == algorithm) & (table["coherence"] == coherence)]
            y = rows["repair"].map(repairs.index) + (number - (len(algorithms) - 1) / 2) * 0.8 / len(algorithms)
            ax.plot(rows["expected"], y, "|", color="0.3", markersize=9, label="theory" if not number else None)
            values_A3 = rows[["measured"]].to_numpy() + np.outer(rows["standard_error"], (0, -2, 2))
            estimates(ax, y, values_A3, number, across=True, label=algorithm, capsize=0)  # caps would look like theory
        ax.set(xscale="log", xlabel="squared error / squared sum", title=f"coherence of the parts {coherence:g}")
        ax.set_yticks(range(len(repairs)), repairs)
    axes[0, 0].invert_yaxis()
    shared_legend(figure, axes[0, 0])
    return figure


def completion_tails(table: pd.DataFrame) -> Figure:
    """Draw completion times: a mark at the median, a line to the 99th percentile, a cross at the 99.9th.

    Args:
        table: from `completion_times`; each loss process has a panel.
    """
    processes, algorithms = list(table["process"].unique()), list(table["algorithm"].unique())
    transports = list(table["transport"].unique())
    figure, axes = plt.subplots(
        1, len(processes), figsize=(WIDTH, 2.8), sharey=True, sharex=True, layout="constrained", squeeze=False
    )
    for ax, process in zip(axes[0], processes, strict=True):
        for number, transport in enumerate(transports):
            rows = table[(table["process"] == process) & (table["transport"] == transport)]
            x = rows["algorithm"].map(algorithms.index) + (number - (len(transports) - 1) / 2) * 0.6 / len(transports)
            color, (p50, p99, p999) = f"C{number}", 1e6 * rows[["p50_s", "p99_s", "p999_s"]].to_numpy().T
            ax.vlines(x, p50, p99, color=color, linewidth=1.2)
            ax.plot(x, p50, marker_of(number), color=color, markersize=4, linestyle="", label=transport)
            ax.plot(x, p999, "x", color=color, markersize=4)
        ax.set(yscale="log", title=process)
        ax.set_xticks(range(len(algorithms)), algorithms)
    axes[0, 0].set_ylabel("completion, microseconds")
    shared_legend(figure, axes[0, 0])
    return figure
