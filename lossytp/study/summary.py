"""What the paper says, computed from records and tables: every number in it is read from here.

All that is returned is JSON-ready: null stands for infinity, and for what is not there.
"""

import json
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from lossytp.study.contrasts import changes
from lossytp.study.records import repeated
from lossytp.study.statistics import Estimate, loss_budget, rank_correlation, t_interval

DROP = 0.01  # the loss budget's fall in accuracy: one point
FALLS = {
    "fall_at_largest_rate": "accuracy_lossy",
    "official_fall_at_largest_rate": "accuracy_official_lossy",  # of the part of the test sample that is official
}
VARIED = {"loss_type", "loss_rate", "mean_burst_packets", "ge_config", "seed"}  # in the runs of one tolerance curve


def how_it_ran(records: list[dict]) -> dict[str, Any]:
    """Runs, packets, hours and machines of all experiments together; a run that several have counts once.

    What controls lose are no packets, and not counted among them.
    """
    records = list({json.dumps([record["config"], record["processes"]]): record for record in records}.values())
    of_packets = [record["network"]["training"] for record in records if not record["config"]["control"]]
    return {
        "cells": len(records),
        "not_finite": sum(record["status"] == "not finite" for record in records),
        "packets": sum(traffic["packets"] for traffic in of_packets),
        "lost": sum(traffic["lost"] for traffic in of_packets),
        "seconds_a_cell": float(np.median([record["timing"]["total_seconds"] for record in records])),
        "hours": sum(record["timing"]["total_seconds"] for record in records) / 3600,
        "environments": _distinct([record["environment"] for record in records]),
        "devices": sorted({record["timing"]["device"] for record in records}),
        "threads": sorted({record["timing"]["threads"] for record in records}),
        "commits": len({record["commit"] for record in records}),
        "repeated": repeated(records),
    }


def tasks(records: list[dict], baselines: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Of each task its data, the settings that its tolerance curve's runs share, and what other methods reach.

    Args:
        records: of the tolerance experiment.
        baselines: by task, what `15_task_baseline` measured.

    ValueError where a task's runs differ in more than process, rate and seed, or in their data, or a baseline is of
    other data: they could not share a figure.
    """
    found: dict[str, Any] = {}
    for name in dict.fromkeys(record["config"]["dataset"] for record in records):
        ours = [record for record in records if record["config"]["dataset"] == name]
        first, baseline = ours[0], baselines[name]
        shared = {
            "settings": {each: value for each, value in first["config"].items() if each not in VARIED},
            "data": {each: first["data"][each] for each in ("train_examples", "test_examples", "sha256", "subsets")},
        }
        for record in ours:
            if names := differing(record, shared):
                raise ValueError(f"{name}: the records differ in {', '.join(names)}: draw them apart")
        told = {"test_examples": first["data"]["test_examples"], **first["config"]}
        for each in ("test_examples", "model_name", "max_length"):
            if baseline.get(each) != told[each]:
                raise ValueError(
                    f"baseline of {name} has {each} = {baseline.get(each)!r}, the runs have {told[each]!r}: delete "
                    "baseline.json, it is made again"
                )
        found[name] = {
            **shared,
            "real_token_share": min(record["data"]["real_token_share"] for record in ours),
            "baseline": baseline,
        }
    return found


def differing(record: dict, shared: dict[str, Any]) -> list[str]:
    """In what a run differs from a tolerance curve's, beyond process, rate and seed: such a run is no point of it.

    Args:
        shared: what `tasks` tells of the curve's task.
    """
    settings = [name for name, value in shared["settings"].items() if record["config"][name] != value]
    return settings + ["data"] * (record["data"]["sha256"] != shared["data"]["sha256"])


def tolerance(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Of each task and arm the loss budget, the falls at the largest rate, and every point of the curve.

    Args:
        table: from `records.with_lossless`: every arm has the runs without losses as its rate 0.

    Falls are paired by seed; `largest_deviation` is the largest of the rates' standard deviations of them.
    """
    return [
        {"task": str(task), **_arm(str(arm), runs)} for (task, arm), runs in table.groupby(["task", "arm"], sort=False)
    ]


def retuned(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Of each task, the fall in accuracy at the largest rate when every rate has its best learning rate.

    Args:
        table: runs of equal length without losses and at one loss rate, over the same learning rates.

    The best is the one of the largest mean accuracy over seeds, picked on the test sample, without losses and with
    them alike: `learning_rate_lossless` and `learning_rate_lossy`; `at_edge` tells whether one of them is the smallest
    or the largest tried. `fall` is paired by seed.
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
                "fall": estimate(t_interval((lossless[1] - lossy[1]).dropna().to_numpy())),
            }
        )
    return found


def regained(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Of each task, how much less accuracy the largest rate costs in the longest runs than in the shortest, by seed.

    Args:
        table: runs without losses and with them, of several lengths; of the learning rate that the longest have.

    `steps` and `longer_steps`, the lengths; `gain`, its mean and Student's interval over the seeds that have both.
    """
    found = []
    lossy = changes(table)
    learning_rate = lossy.sort_values("max_steps")["learning_rate"].iloc[-1]
    lossy = lossy[(lossy["loss_rate"] == lossy["loss_rate"].max()) & (lossy["learning_rate"] == learning_rate)]
    for task, runs in lossy.groupby("task", sort=False):
        by_length = runs.pivot_table(index="seed", columns="max_steps", values="change")
        short, long = by_length.columns.min(), by_length.columns.max()
        gain = t_interval((by_length[long] - by_length[short]).dropna().to_numpy())
        found.append({"task": str(task), "steps": int(short), "longer_steps": int(long), "gain": estimate(gain)})
    return found


def orders(table: pd.DataFrame, compared: pd.DataFrame, axes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Of each task, how well what the arms lack orders their falls.

    Args:
        table: runs with losses and without, as `contrasts.changes` takes them.
        compared: from `contrasts.falls_and_gains`, of the same, with the columns `axes`, such as the missing share;
            arms of which one is missing are left out.

    By name of an axis, Spearman's rank correlation of the mean falls with it, `value`, and the `least` that a single
    seed's falls have; `alike` tells whether all axes order the arms alike.
    """
    found: dict[str, dict[str, Any]] = {}
    known = compared.dropna(subset=["difference", *axes])
    falls = changes(table).pivot_table(index="arm", columns=["task", "seed"], values="change")
    for task, ours in known.groupby("task", sort=False):
        by_seed = -falls[task].loc[ours["arm"]].to_numpy().T
        row: dict[str, Any] = {"alike": all(ours[name].rank().equals(ours[axes[0]].rank()) for name in axes)}
        for name in axes:
            values = ours[name].to_numpy()
            row[name] = {
                "value": rank_correlation(values, -ours["difference"].to_numpy()),
                "least": min(rank_correlation(values, fall) for fall in by_seed),
            }
        found[str(task)] = row
    return found


def estimate(value: Estimate) -> dict[str, float | None]:
    """As JSON, which has no infinity."""
    return {name: each if math.isfinite(each) else None for name, each in value._asdict().items()}


def rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """A table's rows, what is missing or infinite as null."""
    values = table.replace([math.inf, -math.inf], math.nan).astype(object).to_dict("records")
    return [{str(name): None if pd.isna(value) else value for name, value in row.items()} for row in values]


def _arm(name: str, runs: pd.DataFrame) -> dict[str, Any]:
    matrix = runs.pivot_table(index="seed", columns="loss_rate", values="accuracy_lossy")
    whole = matrix.dropna(axis=0)  # a seed without all its rates cannot be paired
    rates = whole.columns.to_numpy(dtype=float)
    largest = float(rates[-1])
    return {
        "name": name,
        "seeds": len(whole),
        "largest_rate": largest,
        "budget": estimate(loss_budget(rates, whole.to_numpy(), drop=DROP)),
        "largest_deviation": float(whole.sub(whole[rates[0]], axis=0).std().max()) if len(whole) > 1 else None,
        **{
            name: estimate(t_interval(_fall(runs[runs["seed"].isin(whole.index)], outcome, largest)))
            for name, outcome in FALLS.items()
            if outcome in runs and runs[outcome].notna().all()
        },
        "points": [_point(rate, runs[runs["loss_rate"] == rate]) for rate in rates.tolist()],
    }


def _fall(runs: pd.DataFrame, outcome: str, rate: float) -> np.ndarray:
    by_rate = runs.set_index(["loss_rate", "seed"])[outcome]
    return (by_rate[0.0] - by_rate[rate]).to_numpy()


def _point(rate: float, runs: pd.DataFrame) -> dict[str, Any]:
    measured = [name for name in runs if re.fullmatch(r"(accuracy|cross_entropy)_(\w+_)?(lossy|clean)", str(name))]
    return {
        "loss_rate": rate,
        "observed_loss_rate": float(runs["lost"].sum() / runs["packets"].sum()),
        # a part of the test sample, such as the official one, has an outcome of its own in the tasks that have parts
        **{
            str(name): estimate(t_interval(runs[name].to_numpy(dtype=float)))
            for name in measured
            if runs[name].notna().all()
        },
    }


def _distinct(values: list[dict]) -> list[dict]:
    return [value for number, value in enumerate(values) if value not in values[:number]]
