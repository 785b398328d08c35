"""What the paper says of the accuracy-against-loss experiment, computed from its records.

Every number in the paper is read from what `summarise` returns.
"""

import math
from typing import Any

import numpy as np
import pandas as pd

from lossytp.study.statistics import Estimate, loss_budget, t_interval

DROP = 0.01  # the loss budget's fall in accuracy: one point
VARIED = {
    "loss_type",
    "loss_rate",
    "mean_burst_packets",
    "ge_config",
    "seed",
}  # what the runs of one curve may differ in


def with_arms(table: pd.DataFrame) -> pd.DataFrame:
    """The tidy table with a column `arm`, the runs without losses repeated in every arm, which they are part of."""
    bursts = "Gilbert-Elliott, mean burst " + table["mean_burst_packets"].map("{:g}".format) + " packets"
    names = np.select(
        [table["loss_type"] == "ber", table["loss_type"] == "g-e"],
        ["Bernoulli", bursts],
        default=table["loss_type"],
    )
    table = table.assign(arm=names)
    lossless, lossy = table[table["loss_rate"] == 0], table[table["loss_rate"] > 0]
    arms = [pd.concat([lossless.assign(arm=arm), runs]) for arm, runs in lossy.groupby("arm", sort=True)]
    return pd.concat(arms or [lossless], ignore_index=True)


def summarise(table: pd.DataFrame, records: list[dict], baseline: dict[str, Any]) -> dict[str, Any]:
    """Figures and statements for the paper, JSON-ready.

    Args:
        table: from `with_arms`.
        records: the same runs' records.
        baseline: what the task's notebook measured: majority share and bag of words.

    ValueError where the runs differ in anything but process, rate and seed, or the baseline is of other data: they
    could not share a figure.
    """
    settings = {name: value for name, value in records[0]["config"].items() if name not in VARIED}
    for record in records:
        differing = [name for name, value in settings.items() if record["config"][name] != value]
        if differing or record["data"]["sha256"] != records[0]["data"]["sha256"]:
            raise ValueError(f"the records differ in {', '.join(differing) or 'their data'}: draw them apart")
    if baseline["test_examples"] != records[0]["data"]["test_examples"]:
        raise ValueError("baseline.json is of another test sample than the records: delete it, and it is made again")
    lossless = table[(table["loss_rate"] == 0) & (table["arm"] == table["arm"].iloc[0])]
    return {
        "settings": settings,
        "seeds": int(table["seed"].nunique()),
        "cells": len(records),
        "not_finite": sum(record["status"] == "not finite" for record in records),
        "rates": sorted(table["loss_rate"].unique().tolist()),
        "lossless_accuracy": _estimate(t_interval(lossless["accuracy_clean"].to_numpy())),
        "arms": [_arm(str(arm), runs) for arm, runs in table.groupby("arm", sort=False)],
        "difference_at_highest_rate": _paired_difference(table),
        "baseline": baseline,
        "data": {name: records[0]["data"][name] for name in ("train_examples", "test_examples", "sha256")},
        "real_token_share": min(record["data"]["real_token_share"] for record in records),
        "packets": sum(record["network"]["training"]["packets"] for record in records),
        "lost": sum(record["network"]["training"]["lost"] for record in records),
        "seconds_a_cell": float(np.median([record["timing"]["total_seconds"] for record in records])),
        "hours": sum(record["timing"]["total_seconds"] for record in records) / 3600,
        "environments": _distinct([record["environment"] for record in records]),
        "threads": sorted({record["timing"]["threads"] for record in records}),
        "commits": sorted({str(record["commit"])[:10] for record in records}),
    }


def _arm(name: str, runs: pd.DataFrame) -> dict[str, Any]:
    matrix = runs.pivot_table(index="seed", columns="loss_rate", values="accuracy_lossy")
    whole = matrix.dropna(axis=0)  # a seed without all its rates cannot be resampled as one
    rates = whole.columns.to_numpy(dtype=float)
    budget = loss_budget(rates, whole.to_numpy(), drop=DROP)
    return {
        "name": name,
        "seeds": len(whole),
        "largest_rate": float(rates[-1]),
        "budget": _estimate(budget),
        "fall_at_largest_rate": _estimate(t_interval(whole[rates[0]].to_numpy() - whole[rates[-1]].to_numpy())),
        "points": [_point(rate, runs[runs["loss_rate"] == rate]) for rate in rates.tolist()],
    }


def _point(rate: float, runs: pd.DataFrame) -> dict[str, Any]:
    return {
        "loss_rate": rate,
        "observed_loss_rate": float(runs["lost"].sum() / runs["packets"].sum()),
        "accuracy_lossy": _estimate(t_interval(runs["accuracy_lossy"].to_numpy())),
        "accuracy_clean": _estimate(t_interval(runs["accuracy_clean"].to_numpy())),
    }


def _paired_difference(table: pd.DataFrame) -> dict[str, Any] | None:
    """Second arm less first, lossy accuracy at the highest rate that both have, paired by seed; None for one arm."""
    names = list(dict.fromkeys(table["arm"]))
    if len(names) < 2:
        return None
    arms = [table[table["arm"] == name] for name in names[:2]]
    rate = float(max(set(arms[0]["loss_rate"].tolist()) & set(arms[1]["loss_rate"].tolist())))
    values = [arm[arm["loss_rate"] == rate].set_index("seed")["accuracy_lossy"] for arm in arms]
    difference = (values[1] - values[0]).dropna().to_numpy()
    return {"loss_rate": rate, "arms": names[:2], **_estimate(t_interval(difference))}


def _distinct(values: list[dict]) -> list[dict]:
    return [value for number, value in enumerate(values) if value not in values[:number]]


def _estimate(estimate: Estimate) -> dict[str, float | None]:
    """As JSON, which has no infinity: null stands for it."""
    return {name: value if math.isfinite(value) else None for name, value in estimate._asdict().items()}
