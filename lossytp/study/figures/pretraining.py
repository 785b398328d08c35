"""Draw what losses cost in pretraining."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lossytp.study.figures.style import COLUMN, MILLION, POINTS, estimates, label_ends
from lossytp.study.records import LOSSLESS

LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)))  # arms differ in grey, too
HIGHEST = 8.2  # nats: all networks share the first steps, which leave the panel


def nats_against_tokens(arms: pd.DataFrame) -> Figure:
    """Draw the cross-entropy of pretrained models: a line over tokens without losses, and one mark per lossy arm.

    A dotted line joins each lossy arm to the number of lossless tokens that are as good. Vertical bars are intervals of
    the rise against the lossless runs of the same seeds. Horizontal bars are intervals of that number of tokens.

    Args:
        arms: from `analysis.pretraining.nats_lost`, evaluated without losses.
    """
    figure, ax = plt.subplots(figsize=(COLUMN, 2.0), layout="constrained")
    lossless = arms[arms["loss_rate"] == 0].sort_values("tokens")
    ax.plot(lossless["tokens"] / MILLION, lossless["clean_mean"], color="0.2", marker="o", markersize=3)
    ends = [(float(lossless["clean_mean"].iloc[-1]), LOSSLESS, "0.2")]
    lossy = arms[arms["loss_rate"] > 0]
    for number, row in enumerate(lossy.to_dict("records")):
        color, mean = f"C{number}", row["clean_mean"]
        tokens = row["tokens"] / MILLION
        low, high = (mean + row[f"clean_{end}"] - row["clean"] for end in ("low", "high"))
        estimates(ax, [tokens], [[mean, low, high]], number + 1, color=color, markersize=4)
        if np.isfinite(row["clean_times_tokens"]):
            as_good = [tokens / row[f"clean_times_tokens{end}"] for end in ("", "_low", "_high")]
            ax.plot([as_good[0], tokens], [mean, mean], color=color, linewidth=0.8, linestyle=":")
            estimates(ax, [mean], [as_good], number, across=True, fmt="none")
        ends.append((float(mean), _network(row), color))
    ax.set_xscale("log")
    ax.set_xticks(ticks := sorted(lossless["tokens"] / MILLION), [f"{each:.3g}" for each in ticks])
    ax.minorticks_off()
    ax.set(xlabel="tokens of pretraining, millions", ylabel="cross-entropy, nats a token")
    label_ends(ax, ends)
    return figure


def _network(row: Mapping[Any, Any]) -> str:
    """Return the loss rate, the phases and the repair of an arm."""
    phases = "reduce phase" if row["reliable_gather"] else "both phases"
    phases += ",\nsharded stream" if row["sequence_parallel"] else ""
    name = f"{POINTS * row['loss_rate']:g} %, {phases}"
    return name if row["repair"] == "zero" else f"{name},\n{row['repair']}"


def losses_over_steps(panels: Mapping[str, pd.DataFrame]) -> Figure:
    """Draw the training loss over the steps: a panel for each model, a style for each network, a line for each seed.

    Losses above `HIGHEST` leave the panel.

    Args:
        panels: from `analysis.pretraining.training_curves`, by the model's name.
    """
    figure, axes_1P = plt.subplots(1, len(panels), figsize=(COLUMN, 1.7), layout="constrained", squeeze=False)
    networks = list(dict.fromkeys(network for curves in panels.values() for network in curves["network"]))
    for ax, (model, curves) in zip(axes_1P[0], panels.items(), strict=True):
        ends = []
        for network, ours in curves.groupby("network", sort=False):
            number = networks.index(str(network))
            color = f"C{number}" if number else "0.2"
            look: dict[str, Any] = {"linestyle": LINES[number % len(LINES)], "color": color, "linewidth": 0.7}
            for _, of_seed in ours.groupby("seed"):
                ax.plot(of_seed["step"], of_seed["loss"], **look)
            last = ours[ours["step"] == ours["step"].max()]
            ends.append((float(last["loss"].mean()), str(network), color))
        ax.set(title=model, xlabel="training steps")
        ax.set_ylim(top=HIGHEST)
        label_ends(ax, ends)
    axes_1P[0, 0].set_ylabel("training loss, nats a token")
    return figure
