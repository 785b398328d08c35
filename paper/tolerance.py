"""How much packet loss does a small model bear in fine-tuning? The curve of accuracy against the loss rate."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lossyprobe.expected_cost import loss_budget, rate_of_drop
from lossytp.study.statistics import ONE_POINT, t_interval
from lossytp.study.style import COLUMN, marker_of
from lossytp.study.tables import newer_settings, with_lossless
from paper.study import (
    HEADLINE,
    POINTS,
    TASK_NAMES,
    Claim,
    Results,
    Study,
    claim,
    json_rows,
    label_ends,
    loss_rate_axis,
    shown,
)

OTHERS = ("01_tolerance_of_both_phases", "03_rings")  # curves of other networks
VARIED = {"loss_type", "loss_rate", "mean_burst_packets", "ge_config", "seed"}  # between the runs of one curve
BELOW = 2.6  # points below 0, with room for the budgets' labels
FARTHEST = 10  # points: the figure is about what lies below


def answer(study: Study) -> dict[str, Any]:
    """Return how much loss is borne: curves, loss budgets, the tasks and the model.

    Raises:
        ValueError: if no seed of the headline has all its records.
    """
    headline, records = study.complete(HEADLINE)
    if headline.empty:
        fault = f"no seed of {HEADLINE} has all its records in {study.results}"
        raise ValueError(f"{fault}: run ./run_all.sh {study.profile} first")
    curves = pd.concat([with_lossless(study.complete(name)[0]) for name in (HEADLINE, *OTHERS)], ignore_index=True)
    study.draw(fall_against_loss(curves), "tolerance")
    return {
        "tasks": task_settings(records),
        "tolerance": tolerance_curves(curves),
        "tolerance_contrasts": json_rows(study.compared(HEADLINE)),
    }


def task_settings(records: list[dict]) -> dict[str, Any]:
    """Return each task's data, and the settings that all runs of its curve share.

    Args:
        records: the records of the tolerance experiment.

    Raises:
        ValueError: if a task's runs differ in data or in more than loss process, rate and seed. They could not share a
            figure.
    """
    found: dict[str, Any] = {}
    for name in dict.fromkeys(record["config"]["dataset"] for record in records):
        ours = [record for record in records if record["config"]["dataset"] == name]
        newest, newer = ours[-1], newer_settings(ours)
        found[name] = {
            "settings": {each: value for each, value in newest["config"].items() if each not in VARIED | newer},
            "data": {each: newest["data"][each] for each in ("train_examples", "test_examples", "sha256", "subsets")},
        }
        for record in ours:
            if names := differing_settings(record, found[name]):
                raise ValueError(f"the records of {name} differ in {', '.join(names)}: draw them in separate figures")
    return found


def differing_settings(record: dict, shared: dict[str, Any]) -> list[str]:
    """Return the settings that keep a run off a curve of `task_settings`, and "data" if its data differ."""
    settings = [name for name, value in shared["settings"].items() if record["config"].get(name, value) != value]
    return settings + ["data"] * (record["data"]["sha256"] != shared["data"]["sha256"])


def tolerance_curves(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the loss budget, and the fall at the largest rate, of each task's and arm's curve.

    Args:
        table: from `with_lossless`: every arm has the lossless runs as its rate 0.

    Returns:
        One mapping for each task and arm. The fall is paired by seed.
    """
    return [
        {"task": str(task), **_curve(str(arm), runs)}
        for (task, arm), runs in table.groupby(["task", "arm"], sort=False)
    ]


def _curve(arm: str, runs: pd.DataFrame) -> dict[str, Any]:
    matrix = runs.pivot(index="seed", columns="loss_rate", values="accuracy_lossy")
    complete = matrix.dropna(axis=0)  # a seed that lacks a rate cannot be paired
    rates = complete.columns.to_numpy(dtype=float)
    largest = float(rates[-1])
    return {
        "name": arm,
        "seeds": len(complete),
        "largest_rate": largest,
        "budget": loss_budget(rates, complete.to_numpy()).as_json(),
        "fall_at_largest_rate": t_interval((complete[0.0] - complete[largest]).to_numpy()).as_json(),
    }


def fall_against_loss(table: pd.DataFrame) -> Figure:
    """Draw the fall in accuracy against the loss rate: one panel per task, one line per arm, and a line at one point.

    Points are means over seeds, paired with the lossless run of the seed; bands are Student's 95 % intervals. Dotted
    lines mark the loss budgets. Falls above `FARTHEST` points leave the panel.

    Args:
        table: from `with_lossless`.
    """
    number = table["task"].nunique()
    figure, axes_1T = plt.subplots(1, number, figsize=(COLUMN, 2.0), layout="constrained", squeeze=False, sharey=True)
    axes = list(axes_1T[0])
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
        ax.axhline(POINTS * ONE_POINT, color="0.5", linewidth=0.8, linestyle="--", zorder=0)
        loss_rate_axis(ax, runs["loss_rate"])
        ax.set(title=TASK_NAMES.get(str(task), str(task)), ylim=(-BELOW, FARTHEST))
    label_ends(axes[-1], ends)
    axes[0].annotate("one point", (0, POINTS * ONE_POINT), xytext=(0, 2), textcoords="offset points", fontsize=6)
    axes[0].set_ylabel("fall in accuracy, points")
    figure.supxlabel("packet loss rate, %", fontsize="medium")
    return figure


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


# Claims.


@claim
def small_losses_cost_nothing(results: Results) -> Claim:
    """Require that no fall is shown up to 1 % loss, and that its interval ends below one point there, in each task."""
    rows = [row for row in results["tolerance_contrasts"] if 0 < row["loss_rate"] <= 0.01]
    numbers = {f"{row['task']} at {row['loss_rate']:g}": -POINTS * row["low"] for row in rows}
    holds = all(not shown(row["p_holm"]) and -row["low"] < ONE_POINT for row in rows)
    return Claim(holds and {row["task"] for row in rows} == set(results["tasks"]), numbers)
