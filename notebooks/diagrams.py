"""Draw how parallelisms split work, and the results of the labs."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from lossytp.study.style import shared_legend

SENDS = {
    "tensor parallelism": "sums of activations",
    "data parallelism": "averages of gradients",
    "fully sharded": "weights, averages of gradients",
    "pipeline": "activations between stages",
}
ABSENT, WEIGHTS, EXAMPLES = range(3)
BACKWARD_TIME = 2  # in forward passes: a backward pass computes two gradients
SMOOTHED_OVER = 10  # steps
WAYS = ("without_losses", "with_losses")


def holdings(ranks: int = 2, layers: int = 4) -> Figure:
    """Draw which part of each layer's weights and of a batch each rank holds. Each parallelism has a row of panels."""
    colors = ListedColormap(["0.93", *sns.color_palette()[:2]])
    size = (1.3 * ranks + 2, 1.15 * len(SENDS))
    figure, axes = plt.subplots(len(SENDS), ranks, figsize=size, squeeze=False, layout="constrained")
    for row, (parallelism, sent) in zip(axes, SENDS.items(), strict=True):
        for rank, ax in enumerate(row):
            sns.heatmap(
                _held(parallelism, rank, ranks, layers), ax=ax, cmap=colors, vmin=0, vmax=2, cbar=False, linewidths=1
            )
            ax.set(xticks=[], yticks=[layers / 2, layers + 0.5] if rank == 0 else [])
            if rank == 0:
                ax.set_yticklabels([f"{layers} layers", "batch"], rotation=0)
        row[0].set_title(f"{parallelism}: sends {sent}", loc="left")
    for rank, ax in enumerate(axes[-1]):
        ax.set_xlabel(f"rank {rank}")
    return figure


def _held(parallelism: str, rank: int, ranks: int, layers: int) -> np.ndarray:
    """Return what a rank holds of each layer and, in the last row, of the batch: (layers + 1, ranks)."""
    held = np.full((layers + 1, ranks), ABSENT)
    if parallelism == "pipeline":
        held[[layer for layer in range(layers) if layer * ranks // layers == rank]] = WEIGHTS
    else:
        held[:layers, slice(None) if parallelism == "data parallelism" else rank] = WEIGHTS
    held[layers, rank if parallelism in ("data parallelism", "fully sharded") else slice(None)] = EXAMPLES
    return held


def split_products(ranks: int = 2) -> Figure:
    """Draw the matrices of a column-parallel and a row-parallel layer, coloured by the rank that holds them."""
    widths = {"x": 1, "A": ranks, "y = relu(f(x) A)": ranks, "B": ranks, "z = g(y B)": 1}
    figure, axes = plt.subplots(1, len(widths), figsize=(7, 1.4), layout="constrained")
    colors = ListedColormap(["0.8", *sns.color_palette()[:ranks]])
    for ax, (name, parts) in zip(axes, widths.items(), strict=True):
        owners = np.arange(parts).reshape(1, -1) + 1 if parts > 1 else np.zeros((1, 1))
        sns.heatmap(owners.T if name == "B" else owners, ax=ax, cmap=colors, vmin=0, vmax=ranks, cbar=False)
        ax.set(title=name, xticks=[], yticks=[])
    for rank in range(ranks):
        axes[1].text(rank + 0.5, 0.5, f"rank {rank}", ha="center", va="center", rotation=90, color="white")
    return figure


def timeline(schedule: str, stages: int = 2, microbatches: int = 4) -> pd.DataFrame:
    """Time the passes of a batch through a pipeline. The unit is one microbatch's forward pass through a stage.

    Args:
        schedule: "gpipe" (all forwards, then all backwards) or "1f1b" (alternating, once the pipeline is full).
        stages: number of stages.
        microbatches: number of microbatches in the batch.

    Returns:
        One row per pass: `stage`, `direction`, `microbatch`, `start`, `time`.
    """
    left = {stage: _order(schedule, stage, stages, microbatches) for stage in range(stages)}
    ends: dict[tuple[int, str, int], int] = {}
    free = [0] * stages
    rows = []
    while any(left.values()):
        for stage, passes in left.items():
            if not passes:
                continue
            direction, microbatch = passes[0]
            forward = direction == "forward"
            before = (stage - 1 if forward else stage + 1, direction, microbatch)
            if before not in ends and 0 <= before[0] < stages:
                continue
            start, time = max(free[stage], ends.get(before, 0)), 1 if forward else BACKWARD_TIME
            free[stage] = ends[stage, direction, microbatch] = start + time
            rows.append((stage, direction, microbatch, start, time))
            passes.pop(0)
    return pd.DataFrame(rows, columns=["stage", "direction", "microbatch", "start", "time"])


def _order(schedule: str, stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """Return a stage's passes in order: some forwards, then backwards and forwards in turn, then the last backwards."""
    ahead = microbatches if schedule == "gpipe" else min(microbatches, stages - stage)
    order = [("forward", number) for number in range(ahead)]
    for number in range(microbatches):
        order.append(("backward", number))
        if ahead + number < microbatches:
            order.append(("forward", ahead + number))
    return order


def pipelines(stages: int = 2, microbatches: int = 4) -> Figure:
    """Draw when each stage works, for both schedules. White is the bubble, and numbers are microbatches."""
    figure, axes = plt.subplots(2, 1, figsize=(7, 0.5 + 0.5 * stages), sharex=True, layout="constrained")
    for ax, schedule in zip(axes, ("gpipe", "1f1b"), strict=True):
        table = timeline(schedule, stages, microbatches)
        for number, (direction, rows) in enumerate(table.groupby("direction", sort=False)):
            bars = ax.barh(
                rows["stage"], rows["time"], left=rows["start"], color=f"C{number}", ec="white", label=direction
            )
            ax.bar_label(bars, rows["microbatch"].astype(str), label_type="center", color="white")
        idle = 1 - table["time"].sum() / (stages * (table["start"] + table["time"]).max())
        ax.set(yticks=range(stages), yticklabels=[f"stage {stage}" for stage in range(stages)])
        ax.set_title(f"{schedule}: stages wait {idle:.0%} of the time", loc="left")
        ax.invert_yaxis()
    axes[-1].set_xlabel("time, in forward passes of a microbatch")
    axes[0].legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def training_losses(results: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw the smoothed training loss of each lab, without losses and with them.

    Args:
        results: results of `lab.train`, by the title of their panel.
    """
    figure, axes = plt.subplots(1, len(results), figsize=(1.5 * len(results), 2.1), squeeze=False, layout="constrained")
    for ax, (name, result) in zip(axes[0], results.items(), strict=True):
        for way in WAYS:
            if way in result:
                smooth = pd.Series(result[way]["losses"]).rolling(SMOOTHED_OVER, min_periods=1).mean()
                ax.plot(smooth, label=way.replace("_", " "))
        accuracies = [f"{result[way]['accuracy']:.2f}" for way in WAYS if way in result]
        ax.set(title=f"{name}\naccuracy {', '.join(accuracies)}", xlabel="step", ylim=(0, None))
    axes[0, 0].set_ylabel("training loss (nats)")
    shared_legend(figure, axes[0, 0])
    return figure
