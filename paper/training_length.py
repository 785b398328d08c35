"""Does longer training make up for losses?"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lossytp.study.statistics import ONE_POINT, Estimate, t_interval
from lossytp.study.style import estimates
from lossytp.study.tables import LOSSLESS, with_lossless
from lossytp.training.config import TrainConfig
from paper.comparisons import json_rows, with_falls
from paper.robustness import gain_from_longer_training
from paper.study import (
    FALL,
    HEADLINE,
    POINTS,
    Claim,
    Results,
    Study,
    claim,
    one_point,
    panels,
    row_of,
    rows_of,
    task_name,
)
from paper.tolerance import APART, tolerance_curves, tune_learning_rates


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
            alone = (config.network.repair, config.network.loss_type) == ("zero", "ber")
            if row["learning_rate"] == learning_rate and row["arm"] != LOSSLESS and alone:
                network = network_name(
                    config.network.loss_rate, config.network.algorithm, config.network.reliable_gather
                )
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


def delayed_or_lost(table: pd.DataFrame) -> Figure:
    """Draw the fall against the length of training: one line per network, one panel per task, a line at one point.

    Args:
        table: columns `task`, `network`, `max_steps`, `fall`, `low`, `high`.
    """
    figure, axes = panels(table["task"], 2.1, equal_falls=True, equal_x=True)
    networks = list(dict.fromkeys(table["network"]))
    for ax, (task, rows) in zip(axes, table.groupby("task", sort=False), strict=True):
        for network, ours in rows.groupby("network", sort=False):
            number = networks.index(str(network))
            apart = APART ** (number - (len(networks) - 1) / 2)
            estimates(ax, apart * ours["max_steps"], POINTS * ours[FALL], number, label=str(network), linestyle="-")
        one_point(ax)
        ax.set_xscale("log")
        ax.set_xticks(steps := sorted(table["max_steps"].unique()), [f"{each:g}" for each in steps])
        ax.minorticks_off()
        ax.set(title=task_name(task), xlabel="training steps")
    axes[0].set_ylabel("fall in accuracy, points")
    axes[-1].legend(*axes[0].get_legend_handles_labels(), loc="upper right", fontsize=5.5, borderpad=0)
    return figure


LONGEST = ("14_converged", "14_converged_longer")


def longer(study: Study) -> dict[str, Any]:
    """Return what longer training regains, and what other learning rates change."""
    table, _ = study.complete("01_training")
    if table.empty:
        return {}
    longest, _ = study.complete(LONGEST[0])
    of_each_length = [table[table["max_steps"] == table["max_steps"].max()], *([] if longest.empty else [longest])]
    curves = tolerance_curves(pd.concat(map(with_lossless, of_each_length), ignore_index=True))
    learning_rate = study.records[HEADLINE][0]["config"]["learning_rate"]
    names = ("01_training", HEADLINE, "01_tolerance_of_both_phases", *LONGEST)
    several = [(study.comparisons[name], study.configs(name)) for name in names if name in study.comparisons]
    lengths = falls_by_length(several, learning_rate)
    if len(lengths):
        study.draw(delayed_or_lost(lengths), "longer")
    runs = _runs_by_length(study, learning_rate)
    return {
        "retuned": tune_learning_rates(table[table["max_steps"] == table["max_steps"].min()]),
        "regained": gain_from_longer_training(table),
        "longer": [curve for curve in curves if len(curve["points"]) > 2],  # one rate alone says little of a budget
        "lengths": json_rows(lengths),
        "slowdowns": {} if runs.empty else slowdowns(runs),
        "longest_changes": {
            outcome: changes_in_longest_training(runs, outcome)
            for outcome in ("accuracy_lossy", "cross_entropy_clean")
            if not runs.empty
        },
    }


def _runs_by_length(study: Study, learning_rate: float) -> pd.DataFrame:
    """Return the runs of the tasks that have the longest trainings, with the name of their network."""
    longest = [study.complete(name)[0] for name in LONGEST if name in study.comparisons]
    if not longest:
        return pd.DataFrame()
    tasks = set(longest[0]["task"])
    runs = pd.concat([*longest, study.complete("01_training")[0]], ignore_index=True)
    runs = runs[(runs["learning_rate"] == learning_rate) & runs["task"].isin(tasks)]
    named = runs[["loss_rate", "algorithm", "reliable_gather"]].itertuples(index=False, name=None)
    names = pd.Series([network_name(*network) if network[0] else None for network in named], index=runs.index)
    return runs.assign(network=names)


@claim
def longer_training_regains(results: Results) -> Claim:
    """Require that three times the steps regain about half of the fall in docstrings.

    In SST-2 the interval must be wider than a point: too wide to tell, on whichever side of 0 it ends.
    """
    lows = {row["task"]: POINTS * row["gain"]["low"] for row in results["regained"]}
    (wide,) = (row["gain"]["high"] - row["gain"]["low"] for row in results["regained"] if row["task"] != "docstrings")
    gain = row_of(results["regained"], task="docstrings")["gain"]["value"]
    steps = min(row["max_steps"] for row in results["lengths"])
    before = row_of(results["lengths"], task="docstrings", network="30 %, reduce phase", max_steps=steps)["fall"]
    holds = lows["docstrings"] > 0 and wide > ONE_POINT and 0.4 < gain / before < 0.6
    holds &= all(row["longer_steps"] == 3 * row["steps"] for row in results["regained"])
    return Claim(holds, lows | {"share regained in docstrings": gain / before})


@claim
def a_fall_remains(results: Results) -> Claim:
    """Require that docstrings falls after nine times the steps, over each network, and by over a point at 30 %."""
    lows = {row["network"]: POINTS * row["low"] for row in _after(results, 9)}
    holds = set(lows) >= {"30 %, reduce phase", "10 %, both phases", "10 %, ring, reduce phase"}
    return Claim(holds and min(lows.values()) > 0 and lows["30 %, reduce phase"] > POINTS * ONE_POINT, lows)


@claim
def budgets_grow_with_training(results: Results) -> Claim:
    """Require that the loss budget in docstrings is larger after three and nine times the steps, each time."""
    (first,) = (
        c["budget"]["value"] for c in results["tolerance"] if (c["task"], c["name"]) == ("docstrings", "reduce phase")
    )
    longer = {
        c["name"]: c["budget"]["value"]
        for c in results["longer"]
        if c["task"] == "docstrings" and "both" not in c["name"]
    }
    holds = list(longer) == ["600 steps", "1800 steps"] and first < longer["600 steps"] < longer["1800 steps"]
    return Claim(holds, {"200 steps": first, **longer})


@claim
def longest_training_gains_nothing(results: Results) -> Claim:
    """Require that lossless training gains no accuracy from nine to 27 times the steps, and overfits.

    Paired by seed, the mean accuracy must fall, a gain of a point must be excluded, and the cross-entropy must rise.
    """
    changes = results["longest_changes"]
    accuracy, entropy = (
        row_of(changes[outcome], network=None) for outcome in ("accuracy_lossy", "cross_entropy_clean")
    )
    (steps,) = {row["max_steps"] for row in _after(results, 27)}
    numbers = {"points gained, at most": POINTS * accuracy["high"], "nats, at least": entropy["low"]}
    holds = accuracy["steps"] == entropy["steps"] == steps and accuracy["value"] < 0 < entropy["low"]
    return Claim(holds and accuracy["high"] < ONE_POINT, numbers)


@claim
def a_fall_remains_then(results: Results) -> Claim:
    """Require that a fall is left after 27 times the steps at 30 % loss; other networks' intervals may include 0."""
    lows = {row["network"]: POINTS * row["low"] for row in _after(results, 27)}
    networks = {"30 %, reduce phase", "10 %, both phases", "10 %, ring, reduce phase"}
    return Claim(set(lows) >= networks and lows["30 %, reduce phase"] > 0, lows)


@claim
def no_floor_is_seen(results: Results) -> Claim:
    """Require that the fall at 30 % still shrinks up to nine times the steps; that in both phases is uncertain.

    Beyond, both are uncertain.
    """
    lows = {
        (network, row["steps"]): POINTS * row["low"]
        for network, each in results["slowdowns"].items()
        for row in each["shrunk"]
    }
    (middle,), (last,) = ({row["max_steps"] for row in _after(results, times)} for times in (9, 27))
    largest, both = "30 %, reduce phase", "10 %, both phases"
    holds = lows[largest, middle] > 0 >= max(lows[both, middle], lows[both, last], lows[largest, last])
    return Claim(holds, {f"{network}, {steps} steps": low for (network, steps), low in lows.items()})


@claim
def losses_do_more_than_delay(results: Results) -> Claim:
    """Require that the slowdowns of two networks grow with training, with intervals above 1, paired by seed.

    If losses only delayed learning, the slowdown would stay. At 10 % in the reduce phase that is uncertain.
    """
    growths = {network: min(row["low"] for row in each["growth"]) for network, each in results["slowdowns"].items()}
    return Claim(
        min(growths["30 %, reduce phase"], growths["10 %, both phases"]) > 1 >= growths["10 %, reduce phase"], growths
    )


def _after(results: Results, times: int) -> list[dict[str, Any]]:
    """Return the falls in docstrings after this many times the shortest training's steps."""
    rows = rows_of(results["lengths"], task="docstrings")
    return rows_of(rows, max_steps=times * min(row["max_steps"] for row in rows))
