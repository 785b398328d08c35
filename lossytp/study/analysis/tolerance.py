"""Answer how much packet loss is tolerated: tolerance curves, the loss budget, and learning rates.

All results are JSON-ready: null stands for infinite and missing values.
"""

from typing import Any

import pandas as pd

from lossytp.study.records import newer_settings
from lossytp.study.statistics import loss_budget, t_interval

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
    settings = [name for name, value in shared["settings"].items() if record["config"][name] != value]
    return settings + ["data"] * (record["data"]["sha256"] != shared["data"]["sha256"])


def tolerance_curves(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the loss budget, the fall at the largest rate and all points of each task's and arm's curve.

    Args:
        table: from `records.with_lossless`: every arm has the lossless runs as its rate 0.

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
