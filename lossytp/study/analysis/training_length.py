"""Answer whether losses only delay learning: falls in accuracy, and lost steps, by the length of training."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from lossytp.study.comparisons import lossy_changes, with_falls
from lossytp.study.records import LOSSLESS
from lossytp.study.statistics import ONE_POINT, Estimate, t_interval
from lossytp.training.config import TrainConfig


def falls_by_length(
    compared: Iterable[tuple[pd.DataFrame, Sequence[TrainConfig]]], learning_rate: float
) -> pd.DataFrame:
    """Return the falls of networks that were also trained for longer than the shortest runs.

    They lose single packets, without a repair.

    Args:
        compared: of each experiment, one row per arm, from `comparisons.drops_and_gains`, and a configuration of each
            row, for its network. If several experiments have a network, the first one counts.
        learning_rate: the peak of the runs that count.

    Returns:
        Columns `task`, `network`, `max_steps`, and the `fall` in accuracy, as a share, with its 95 % interval as `low`
        and `high`. Networks that never cost half a point are left out.
    """
    rows: list[dict[str, Any]] = []
    for table, configs in compared:
        for row, config in zip(with_falls(table).to_dict("records"), configs, strict=True):
            alone = (config.repair, config.loss_type) == ("zero", "ber")
            if row["learning_rate"] == learning_rate and row["arm"] != LOSSLESS and alone:
                network = network_name(config.loss_rate, config.algorithm, config.reliable_gather)
                rows.append(
                    {"task": row["task"], "network": network, "max_steps": row["max_steps"]}
                    | {name: row[name] for name in ("fall", "low", "high")}
                )
    key = ["task", "network", "max_steps"]
    falls = pd.DataFrame(rows, columns=[*key, "fall", "low", "high"]).drop_duplicates(key)
    by_network = falls.groupby(["task", "network"])
    longer = by_network["max_steps"].transform("max") > falls["max_steps"].min()
    harmful = by_network["fall"].transform("max") >= ONE_POINT / 2
    return falls[longer & harmful].sort_values(["task", "network", "max_steps"], kind="stable").reset_index(drop=True)


def network_name(loss_rate: float, algorithm: str, reliable_gather: bool) -> str:
    """Return the name of an unrepaired network, such as "30 %, reduce phase" or "10 %, ring, both phases"."""
    parts = [f"{100 * loss_rate:g} %"] + [algorithm] * (algorithm != "direct")
    return ", ".join([*parts, "reduce phase" if reliable_gather else "both phases"])


def slowdowns(runs: pd.DataFrame) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return each network's slowdown at several lengths: its steps over the lossless steps of equal accuracy.

    If losses only delayed learning, the slowdown would not grow. Each seed has its own slowdowns: its lossless accuracy
    is interpolated on a logarithmic axis of steps. A seed whose accuracy lies beyond its lossless runs is left out, and
    a length with fewer than two seeds. Lengths beyond the best lossless one have no slowdown, since training overfits.

    Args:
        runs: of one task and learning rate: `network` (None without losses), `max_steps`, `seed`, `accuracy_lossy`.

    Returns:
        For each network with two slowdowns or more: the `slowdown` after each length, a geometric mean over seeds; the
        `growth` from each to the next, the ratio of two slowdowns; and `shrunk`, by how much the fall in accuracy
        shrinks from each length to the next. Both changes are paired by seed. Each list has one row per length, or
        one for the later of two lengths: `steps`, `seeds`, and the `value` with Student's interval as `low` and `high`.
    """
    runs = runs.drop_duplicates(["network", "max_steps", "seed"])
    lossless = runs[runs["network"].isna()].pivot(index="seed", columns="max_steps", values="accuracy_lossy")
    best: Any = lossless.dropna().mean().idxmax()
    found = {}
    for network, ours in runs[runs["seed"].isin(lossless.index)].groupby("network", sort=False):
        scores = ours[["seed", "max_steps", "accuracy_lossy"]].itertuples(index=False, name=None)
        slower = [log_slowdown(lossless.loc[seed, :best].dropna(), length, score) for seed, length, score in scores]
        logs = ours.assign(log=slower).pivot(index="seed", columns="max_steps", values="log")
        falls = lossless - ours.pivot(index="seed", columns="max_steps", values="accuracy_lossy")
        lengths = [n for n in logs if best >= n and logs[n].count() > 1]
        if len(lengths) > 1:
            found[str(network)] = {
                "slowdown": [_row(n, logs[n], np.exp) for n in lengths],
                "growth": _changes(logs[lengths], np.exp),
                "shrunk": _changes(-falls),
            }
    return found


def changes_in_longest_training(runs: pd.DataFrame, outcome: str) -> list[dict[str, Any]]:
    """Return how an outcome changes from the second longest training to the longest, over each network and over none.

    Args:
        runs: as for `slowdowns`, with the outcome.
        outcome: such as "accuracy_lossy".

    Returns:
        A mapping for each network that was trained for both lengths: `network` (None without losses), `steps` of the
        longest training, `seeds`, and the change's `value`, paired by seed, with its 95 % interval.
    """
    runs = runs.drop_duplicates(["network", "max_steps", "seed"])
    lengths = sorted(runs["max_steps"].unique())[-2:]
    found = []
    for network, ours in runs.groupby("network", sort=False, dropna=False):
        by_length = ours.pivot(index="seed", columns="max_steps", values=outcome).reindex(columns=lengths)
        name = None if pd.isna(network) else str(network)
        found += [{"network": name, **row} for row in _changes(by_length)]
    return found


def _changes(by_length: pd.DataFrame, form: Callable[[float], float] = float) -> list[dict[str, Any]]:
    """Return the mean change from each length to the next that two seeds or more have."""
    changes = by_length.diff(axis="columns").iloc[:, 1:]
    return [_row(n, changes[n], form) for n in changes if changes[n].count() > 1]


def _row(steps: Any, values: "pd.Series[float]", form: Callable[[float], float] = float) -> dict[str, Any]:
    values = values.dropna()
    interval = Estimate(*(float(form(end)) for end in t_interval(values.to_numpy())))
    return {"steps": int(steps), "seeds": len(values), **interval.as_json()}


def log_slowdown(lossless: "pd.Series[float]", length: float, score: float, *, linear: bool = False) -> float:
    """Return log(`length` / length of the lossless training of equal score); NaN if no lossless scores span `score`.

    Args:
        lossless: the score by length, such as a number of steps; a better score is higher.
        length: the length of the lossy training.
        score: its score.
        linear: interpolates on a linear axis of lengths, not on a logarithmic one.
    """
    reached, lengths = np.maximum.accumulate(lossless.to_numpy()), lossless.index.to_numpy(dtype=float)
    if not reached[0] <= score <= reached[-1]:
        return float("nan")
    if linear:
        return float(np.log(length / np.interp(score, reached, lengths)))
    return float(np.log(length) - np.interp(score, reached, np.log(lengths)))


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
        by_length = runs.pivot(index="seed", columns="max_steps", values="change")
        short, long = by_length.columns.min(), by_length.columns.max()
        gain = t_interval((by_length[long] - by_length[short]).dropna().to_numpy())
        found.append({"task": str(task), "steps": int(short), "longer_steps": int(long), "gain": gain.as_json()})
    return found
