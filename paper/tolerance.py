"""How much packet loss does a small model tolerate? Curves, budgets, longer training, robustness."""

import json
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lossyprobe.expected_cost import loss_budget, rate_of_drop
from lossytp.study.statistics import ONE_POINT, t_interval
from lossytp.study.style import COLUMN, marker_of, shared_legend
from lossytp.study.tables import newer_settings, with_lossless
from lossytp.training.models import MODELS
from lossytp.training.shapes import shape_of
from paper.comparisons import json_rows
from paper.study import (
    HEADLINE,
    POINTS,
    Claim,
    Results,
    Study,
    band,
    claim,
    label_ends,
    loss_rate_axis,
    one_point,
    panels,
    row_of,
    shown,
    task_name,
    tasks,
)

VARIED = {"loss_type", "loss_rate", "mean_burst_packets", "ge_config", "seed"}  # between the runs of one curve


def task_settings(records: list[dict], baselines: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return each task's data, the settings that all runs of its curve share, and its baseline.

    Args:
        records: the records of the tolerance experiment.
        baselines: by task, what notebooks/15_task_baseline.ipynb measured.

    Raises:
        ValueError: if a task's runs differ in data or in more than loss process, rate and seed, or if its baseline was
            measured with other data. They could not share a figure.
    """
    found: dict[str, Any] = {}
    for name in dict.fromkeys(record["config"]["dataset"] for record in records):
        ours = [record for record in records if record["config"]["dataset"] == name]
        newest, baseline, newer = ours[-1], baselines[name], newer_settings(ours)
        shared = {
            "settings": {each: value for each, value in newest["config"].items() if each not in VARIED | newer},
            "data": {each: newest["data"][each] for each in ("train_examples", "test_examples", "sha256", "subsets")},
        }
        for record in ours:
            if names := differing_settings(record, shared):
                raise ValueError(f"the records of {name} differ in {', '.join(names)}: draw them in separate figures")
        expected = {"test_examples": newest["data"]["test_examples"], **newest["config"]}
        for each in ("test_examples", "model_name", "max_length"):
            if baseline.get(each) != expected[each]:
                raise ValueError(
                    f"the baseline of {name} has {each} = {baseline.get(each)!r}, the runs have {expected[each]!r}: "
                    "delete baseline.json and run again"
                )
        found[name] = {**shared, "baseline": baseline}
    return found


def differing_settings(record: dict, shared: dict[str, Any]) -> list[str]:
    """Return the settings that keep a run off a tolerance curve, and "data" if its data differ.

    Args:
        record: the run's record.
        shared: what `task_settings` returns for the curve's task.
    """
    settings = [name for name, value in shared["settings"].items() if record["config"].get(name, value) != value]
    return settings + ["data"] * (record["data"]["sha256"] != shared["data"]["sha256"])


def tolerance_curves(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the loss budget, the fall at the largest rate and all points of each task's and arm's curve.

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
        "points": [
            {"loss_rate": rate, "accuracy_clean": t_interval(ours["accuracy_clean"].to_numpy()).as_json()}
            for rate, ours in runs[runs["loss_rate"].isin(rates)].groupby("loss_rate")
        ],
    }


def tune_learning_rates(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return each task's drop in accuracy at the largest rate if every loss rate has its best learning rate.

    The best learning rate has the largest mean accuracy on the test sample, both with and without losses.

    Args:
        table: runs of equal length, without losses and at one loss rate, over the same learning rates.

    Returns:
        One mapping a task: `loss_rate`, `learning_rate_lossless`, `learning_rate_lossy`, `at_edge` (whether either is
        the smallest or largest tried) and `fall`, paired by seed.
    """
    found = []
    for task, runs in table.groupby("task", sort=False):
        by_rate = {}
        for rate, ours in runs.groupby("loss_rate"):
            matrix = ours.pivot_table(index="seed", columns="learning_rate", values="accuracy_lossy")
            best = matrix.columns[int(matrix.mean().argmax())]
            by_rate[float(str(rate))] = float(best), matrix[best]
        (_, lossless), *_, (largest, lossy) = sorted(by_rate.items())
        found.append(
            {
                "task": str(task),
                "loss_rate": largest,
                "learning_rate_lossless": lossless[0],
                "learning_rate_lossy": lossy[0],
                "at_edge": bool({lossless[0], lossy[0]} & {runs["learning_rate"].min(), runs["learning_rate"].max()}),
                "fall": t_interval((lossless[1] - lossy[1]).dropna().to_numpy()).as_json(),
            }
        )
    return found


# Answer whether losses only delay learning: falls in accuracy, and lost steps, by the length of training.


# Answer whether training under packet loss makes a model robust to it, from evaluations at several loss rates.


# Draw curves against the loss rate, and the distribution of bursts.


def accuracy_against_loss(table: pd.DataFrame) -> Figure:
    """Draw accuracy against loss rate, evaluated with losses (left) and without (right), one row per task.

    Points are means over seeds, bands Student's 95 % intervals.

    Args:
        table: from `with_lossless`, with `task`, `arm`, `loss_rate`, `accuracy_lossy` and `accuracy_clean`.
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


# Draw the paper's main figures: one message each, with direct labels, legible in grey.


BELOW = 2.6  # points below 0, with room for the budgets' labels
FARTHEST = 10  # points: the tolerance figure is about what lies below
APART = 1.05  # between marks of equal x on a logarithmic axis


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


def tolerance(study: Study) -> dict[str, Any]:
    """Return how much loss is borne: curves, loss budgets, the tasks and the model."""
    headline, records = study.complete(HEADLINE, 1)
    curves = with_lossless(headline)
    for name in ("01_tolerance_of_both_phases", "03_rings"):
        other, _ = study.complete(name)
        curves = pd.concat([curves, with_lossless(other)], ignore_index=True)
    study.draw(fall_against_loss(curves), "tolerance")
    study.draw(accuracy_against_loss(curves), "accuracy_vs_loss")
    model_name = records[0]["config"]["model_name"]
    shape, pretraining = shape_of(model_name), MODELS / model_name / "pretrain.json"
    pretrained = None
    if pretraining.is_file():
        measured = json.loads(pretraining.read_text(encoding="utf-8"))
        pretrained = {"tokens": measured["tokens"]}
    return {
        "tasks": task_settings(records, study.baselines),
        "shape": shape and {name: getattr(shape, name) for name in ("width", "layers")},
        "pretrained": pretrained,
        "tolerance": tolerance_curves(curves),
        "tolerance_contrasts": json_rows(study.comparisons[HEADLINE]),
    }


# Claims about how much loss the small model bears, where it hurts, and what training does about it.


@claim
def small_losses_cost_nothing(results: Results) -> Claim:
    """Require that no fall is shown up to 1 % loss, and that its interval ends below one point there, in each task."""
    rows = [row for row in results["tolerance_contrasts"] if 0 < row["loss_rate"] <= 0.01]
    numbers = {f"{row['task']} at {row['loss_rate']:g}": -POINTS * row["low"] for row in rows}
    holds = all(not shown(row["p_holm"]) and -row["low"] < ONE_POINT for row in rows)
    return Claim(holds and {row["task"] for row in rows} == set(tasks(results)), numbers)


@claim
def one_learning_rate_is_best(results: Results) -> Claim:
    """Require that in docstrings a larger learning rate than the usual is best with and without losses.

    It must not be the largest that was tried.
    """
    tuned = row_of(results["retuned"], task="docstrings")
    usual = float(results["tasks"]["docstrings"]["settings"]["learning_rate"])
    numbers = {"lossless": tuned["learning_rate_lossless"], "lossy": tuned["learning_rate_lossy"], "usual": usual}
    return Claim(bool(not tuned["at_edge"] and numbers["lossless"] == numbers["lossy"] > usual), numbers)


def fall_against_loss(table: pd.DataFrame) -> Figure:
    """Draw the fall in accuracy against the loss rate: one panel per task, one line per arm, and a line at one point.

    Points are means over seeds, paired with the lossless run of the seed; bands are Student's 95 % intervals. Dotted
    lines mark the loss budgets. Falls above `FARTHEST` points leave the panel.

    Args:
        table: from `with_lossless`.
    """
    figure, axes = panels(table["task"], 2.0, equal_falls=True)
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
        one_point(ax)
        loss_rate_axis(ax, runs["loss_rate"])
        ax.set(title=task_name(task), ylim=(-BELOW, FARTHEST))
    label_ends(axes[-1], ends)
    axes[0].annotate("one point", (0, POINTS * ONE_POINT), xytext=(0, 2), textcoords="offset points", fontsize=6)
    axes[0].set_ylabel("fall in accuracy, points")
    figure.supxlabel("packet loss rate, %", fontsize="medium")
    return figure
