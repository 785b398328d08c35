"""Answer whether losses only delay learning: falls in accuracy, and lost steps, by the length of training."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from lossytp.study.comparisons import lossy_changes
from lossytp.study.records import LOSSLESS
from lossytp.study.statistics import ONE_POINT, t_interval
from lossytp.training.config import TrainConfig


def falls_by_length(
    compared: Iterable[tuple[pd.DataFrame, Sequence[TrainConfig]]], learning_rate: float
) -> pd.DataFrame:
    """Return the falls of networks that were also trained for longer than the shortest runs.

    Args:
        compared: of each experiment, a row an arm, from `comparisons.drops_and_gains`, and a configuration of each
            row, for its network.
        learning_rate: the peak of the runs that count.

    Returns:
        Columns `task`, `network`, `max_steps`, the `fall` in accuracy, as a share, with its 95 % interval as `low` and
        `high`, and `slowdown`: how many times fewer steps without losses reach the same accuracy, with `slowdown_low`
        and `slowdown_high` at the ends of the fall's interval. It is interpolated on a logarithmic axis of steps, and
        NaN beyond the lossless runs. Networks that never cost half a point are left out.
    """
    rows: list[dict[str, Any]] = []
    lossless: dict[str, dict[int, float]] = {}
    for table, configs in compared:
        for row, config in zip(table.to_dict("records"), configs, strict=True):
            if row["learning_rate"] != learning_rate:
                continue
            if row["arm"] == LOSSLESS:
                lossless.setdefault(row["task"], {}).setdefault(row["max_steps"], row["mean"])
                continue
            rows.append(
                {"task": row["task"], "network": _network(config), "max_steps": row["max_steps"]}
                | {"fall": -row["difference"], "low": -row["high"], "high": -row["low"]}
            )
    falls = pd.DataFrame(rows).drop_duplicates(["task", "network", "max_steps"])
    by_network = falls.groupby(["task", "network"])
    longer = by_network["max_steps"].transform("max") > falls["max_steps"].min()
    harmful = by_network["fall"].transform("max") >= ONE_POINT / 2
    falls = falls[longer & harmful].sort_values(["task", "network", "max_steps"], kind="stable").reset_index(drop=True)
    for name, fall in (("slowdown", "fall"), ("slowdown_low", "low"), ("slowdown_high", "high")):
        falls[name] = [
            _slowdown(lossless[task], steps, lost)
            for task, steps, lost in falls[["task", "max_steps", fall]].itertuples(index=False)
        ]
    return falls


def _network(config: TrainConfig) -> str:
    phases = "one phase" if config.reliable_gather else "both phases"
    return f"{100 * config.loss_rate:g} %, {phases if config.algorithm == 'direct' else config.algorithm}"


def _slowdown(lossless: dict[int, float], steps: int, fall: float) -> float:
    """Return how many times fewer lossless steps reach what is left of the accuracy after `steps`.

    Args:
        lossless: the accuracy after some numbers of steps, among them `steps`.
        steps: of the run with losses.
        fall: of its accuracy.
    """
    lengths = np.array(sorted(lossless))
    reached = np.maximum.accumulate([lossless[each] for each in lengths.tolist()])
    accuracy = lossless[steps] - fall
    if not reached[0] <= accuracy <= reached[-1]:
        return float("nan")
    return steps / float(np.exp(np.interp(accuracy, reached, np.log(lengths))))


def gain_from_longer_training(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return how much less accuracy the largest rate costs in the longest runs than in the shortest.

    Args:
        table: runs of several lengths, with and without losses. Only the longest runs' learning rate counts.

    Returns:
        One mapping a task: the lengths `steps` and `longer_steps`, and the `gain`, paired by seed.
    """
    found = []
    lossy = lossy_changes(table)
    learning_rate = lossy.sort_values("max_steps")["learning_rate"].iloc[-1]
    lossy = lossy[(lossy["loss_rate"] == lossy["loss_rate"].max()) & (lossy["learning_rate"] == learning_rate)]
    for task, runs in lossy.groupby("task", sort=False):
        by_length = runs.pivot_table(index="seed", columns="max_steps", values="change")
        short, long = by_length.columns.min(), by_length.columns.max()
        gain = t_interval((by_length[long] - by_length[short]).dropna().to_numpy())
        found.append({"task": str(task), "steps": int(short), "longer_steps": int(long), "gain": gain.as_json()})
    return found
