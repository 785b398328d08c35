"""How much packet loss does a small model tolerate? Curves, budgets, longer training, robustness."""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lossytp.study.statistics import ONE_POINT, Estimate, loss_budget, rate_of_drop, t_interval
from lossytp.study.style import (
    COLUMN,
    FALL,
    MARKERS,
    POINTS,
    band,
    estimates,
    label_ends,
    loss_rate_axis,
    marker_of,
    shared_legend,
    task_name,
)
from lossytp.study.tables import (
    LOSSLESS,
    compare_arms,
    copy_spreads,
    json_rows,
    lossy_changes,
    newer_settings,
    stream_distances,
    with_falls,
    with_lossless,
)
from lossytp.training.config import TrainConfig
from lossytp.training.models import MODELS
from lossytp.training.shapes import shape_of
from paper.repairs import replica_divergence
from paper.study import HEADLINE, Claim, Results, Study, row_of, rows_of, shown, tasks

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


# Answer whether losses only delay learning: falls in accuracy, and lost steps, by the length of training.


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


# Answer whether training under packet loss makes a model robust to it, from evaluations at several loss rates.


KEY = ["task", "trained_at", "evaluated_at", "seed"]


def gains(table: pd.DataFrame) -> pd.DataFrame:
    """Compute the gain in accuracy of training at a loss rate over training without losses, paired by seed.

    Args:
        table: one row per evaluation, with `task`, `trained_at`, `evaluated_at`, `seed` and `accuracy`. Some models
            were trained at rate 0.

    Returns:
        One row for each task, rate of evaluation and rate of training: `task`, `evaluated_at`, `trained_at`, and the
        columns of `comparisons.compare_arms` from `seeds` on.

    Raises:
        ValueError: if no model was trained at 0, or two rows share task, rates and seed.
    """
    twice = table[table.duplicated(KEY)]
    if len(twice):
        task, trained_at, rate, seed = twice.iloc[0][KEY]
        raise ValueError(
            f"{task} is evaluated twice at {rate:g}, trained at {trained_at:g}, seed {seed}: leave one out"
        )
    runs = table.assign(arm="trained at " + table["trained_at"].map("{:g}".format), loss_rate=table["trained_at"])
    compared = compare_arms(runs, reference="trained at 0", outcome="accuracy", within=("task", "evaluated_at"))
    return compared.drop(columns="arm").rename(columns={"loss_rate": "trained_at"})


def evaluation_changes(table: pd.DataFrame) -> pd.DataFrame:
    """Compute how losses in evaluation change each model's accuracy, as input to `gains`.

    Args:
        table: as for `gains`; every model is evaluated at 0.

    Returns:
        The rows evaluated at other rates, their `accuracy` less the same model's at 0.
    """
    key = ["task", "trained_at", "seed"]
    without = table[table["evaluated_at"] == 0].set_index(key)["accuracy"].rename("without")
    lossy = table[table["evaluated_at"] > 0].join(without, on=key)
    return lossy.assign(accuracy=lossy["accuracy"] - lossy["without"])[table.columns]


# Draw curves against the loss rate, and the distribution of bursts.


def accuracy_against_loss(table: pd.DataFrame) -> Figure:
    """Draw accuracy against loss rate, evaluated with losses (left) and without (right), one row per task.

    Points are means over seeds, bands Student's 95 % intervals.

    Args:
        table: from `records.with_lossless`, with `task`, `arm`, `loss_rate`, `accuracy_lossy` and `accuracy_clean`.
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


def accuracy_against_evaluated_loss(table: pd.DataFrame) -> Figure:
    """Draw accuracy against the loss rate in evaluation, one line per loss rate in training, one panel per task.

    Points are means over seeds, bands Student's 95 % intervals.

    Args:
        table: one row per evaluation, with `task`, `trained_at`, `evaluated_at`, `seed` and `accuracy`.
    """
    tasks, trained_at = list(dict.fromkeys(table["task"])), sorted(table["trained_at"].unique())
    figure, axes_1T = plt.subplots(1, len(tasks), figsize=(COLUMN, 2.2), layout="constrained", squeeze=False)
    for ax, task in zip(axes_1T[0], tasks, strict=True):
        ours = table[table["task"] == task].rename(columns={"evaluated_at": "loss_rate"})
        for number, rate in enumerate(trained_at):
            label = f"{100 * rate:g} % loss" if rate else LOSSLESS
            band(ax, ours[ours["trained_at"] == rate], "loss_rate", "accuracy", label=label, number=number)
        ax.set_title(task_name(task))
        ax.set_xlabel("loss rate in evaluation, %")
        loss_rate_axis(ax, table["evaluated_at"])
    axes_1T[0, 0].set_ylabel("test accuracy")
    shared_legend(figure, axes_1T[0, 0], title="trained with")
    return figure


def burst_distribution(table: pd.DataFrame) -> Figure:
    """Draw the share of bursts of each length: points measured, lines the closed form.

    Args:
        table: columns process, burst_packets, measured, expected.
    """
    figure, ax = plt.subplots(figsize=(COLUMN, 1.9), layout="constrained")
    for number, (process, rows) in enumerate(table.groupby("process", sort=False)):
        color, marker = f"C{number}", marker_of(number)
        ax.plot(rows["burst_packets"], rows["expected"], color=color, linewidth=1)
        ax.plot(rows["burst_packets"], rows["measured"], marker, color=color, markersize=2.5, label=str(process))
    ax.set(yscale="log", xlabel="burst length, packets", ylabel="share of bursts")
    ax.set_ylim(1e-4, 1.5)
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def price_against_loss(price: pd.DataFrame, step_ratios: pd.DataFrame | None = None) -> Figure:
    """Draw the ratios by which reliable steps take longer (lines), and by which lossy runs need more steps (black).

    Losing wins where black lies below a line, retransmitting wins where it lies above.
    There is one panel per transport, and one line for each product of bandwidth and round trip, which sets the price.

    Args:
        price: from `break_even.price_of_reliability`.
        step_ratios: from `break_even.step_ratios`, drawn with 95 % intervals. A hollow mark is a lower bound: some run
            never reached the target.
    """
    transports, products = list(price["transport"].unique()), sorted(price["kilobytes"].unique())
    figure, axes_1T = plt.subplots(
        1, len(transports), figsize=(COLUMN, 2.7), sharex=True, layout="constrained", squeeze=False
    )
    for ax, transport in zip(axes_1T[0], transports, strict=True):
        ours = price["transport"] == transport
        for number, product in enumerate(products):
            rows = price[ours & (price["kilobytes"] == product)].drop_duplicates("loss_rate")
            label = f"{product / 1000:g} MB" if product >= 1000 else f"{product:g} kB"
            marker = marker_of(number)
            ax.plot(rows["loss_rate"], rows["price"], marker=marker, color=f"C{number}", label=label, markersize=2.5)
        ax.set_title(transport)
        ax.set_yscale("log")
        loss_rate_axis(ax, price["loss_rate"])
        smallest, largest = 1.0, price.loc[ours, "price"].max()
        if step_ratios is not None:
            smallest = max(0.5, step_ratios["low"].min())
            largest = max(largest, step_ratios["ratio"].max())
            _step_ratios(ax, step_ratios)
        ax.set_ylim(0.8 * smallest, 1.3 * largest)
        ax.set_xlabel("packet loss rate, %")
    axes_1T[0, 0].set_ylabel("reliable / best effort")
    shared_legend(figure, axes_1T[0, 0], title="bandwidth × round trip", max_columns=3)
    return figure


def _step_ratios(ax: Axes, step_ratios: pd.DataFrame) -> None:
    """Plot each task's ratios in black, with intervals."""
    for number, (task, rows) in enumerate(step_ratios[step_ratios["loss_rate"] > 0].groupby("task", sort=False)):
        rate, ratio = rows["loss_rate"].to_numpy(), rows["ratio"].to_numpy()
        marker = MARKERS[::-1][number % len(MARKERS)]  # unlike those of the first lines
        values = rows[["ratio", "low", "high"]].clip(1e-3, 1e6)  # an infinite interval leaves the panel
        estimates(ax, rate, values, number, fmt="none", color="0.15", elinewidth=1, capsize=2)
        ax.plot(
            rate, ratio, linestyle=":", color="0.15", marker=marker, markersize=4, label=f"steps, {task_name(task)}"
        )
        bound = rows["never"].to_numpy() > 0
        ax.plot(rate[bound], ratio[bound], marker, color="0.15", markerfacecolor="white", markersize=4)


# Draw the paper's main figures: one message each, with direct labels, legible in grey.


BELOW = 2.6  # points below 0, with room for the budgets' labels
FARTHEST = 10  # points: the tolerance figure is about what lies below
APART = 1.05  # between marks of equal x on a logarithmic axis


def fall_against_loss(table: pd.DataFrame) -> Figure:
    """Draw the fall in accuracy against the loss rate: one panel per task, one line per arm, and a line at one point.

    Points are means over seeds, paired with the lossless run of the seed; bands are Student's 95 % intervals. Dotted
    lines mark the loss budgets. Falls above `FARTHEST` points leave the panel.

    Args:
        table: from `records.with_lossless`.
    """
    figure, axes = _panels(table["task"], 2.0, equal_falls=True)
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
        _one_point(ax)
        loss_rate_axis(ax, runs["loss_rate"])
        ax.set(title=task_name(task), ylim=(-BELOW, FARTHEST))
    label_ends(axes[-1], ends)
    axes[0].annotate("one point", (0, POINTS * ONE_POINT), xytext=(0, 2), textcoords="offset points", fontsize=6)
    axes[0].set_ylabel("fall in accuracy, points")
    figure.supxlabel("packet loss rate, %", fontsize="medium")
    return figure


def delayed_or_lost(table: pd.DataFrame) -> Figure:
    """Draw the fall against the length of training: one line per network, one panel per task, a line at one point.

    Args:
        table: columns `task`, `network`, `max_steps`, `fall`, `low`, `high`.
    """
    figure, axes = _panels(table["task"], 2.1, equal_falls=True, equal_x=True)
    networks = list(dict.fromkeys(table["network"]))
    for ax, (task, rows) in zip(axes, table.groupby("task", sort=False), strict=True):
        for network, ours in rows.groupby("network", sort=False):
            number = networks.index(str(network))
            apart = APART ** (number - (len(networks) - 1) / 2)
            estimates(ax, apart * ours["max_steps"], POINTS * ours[FALL], number, label=str(network), linestyle="-")
        _one_point(ax)
        ax.set_xscale("log")
        ax.set_xticks(steps := sorted(table["max_steps"].unique()), [f"{each:g}" for each in steps])
        ax.minorticks_off()
        ax.set(title=task_name(task), xlabel="training steps")
    axes[0].set_ylabel("fall in accuracy, points")
    axes[-1].legend(*axes[0].get_legend_handles_labels(), loc="upper right", fontsize=5.5, borderpad=0)
    return figure


def _panels(
    tasks: pd.Series, height: float, *, equal_falls: bool = False, equal_x: bool = False
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel for each task, side by side."""
    number = tasks.nunique()
    figure, axes_1T = plt.subplots(
        1, number, figsize=(COLUMN, height), layout="constrained", squeeze=False,
        sharex=equal_x, sharey=equal_falls,
    )  # fmt: skip
    return figure, list(axes_1T[0])


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


def _one_point(ax: Axes) -> None:
    ax.axhline(POINTS * ONE_POINT, color="0.5", linewidth=0.8, linestyle="--", zorder=0)


LONGEST = ("14_converged", "14_converged_longer")


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


def robustness(study: Study) -> dict[str, Any]:
    """Return whether training under loss makes a model robust to it."""
    file = study.results / "robustness" / "evaluations.csv"
    if not file.is_file():
        return {}
    evaluated = pd.read_csv(file)
    study.draw(accuracy_against_evaluated_loss(evaluated), "robustness")
    return {
        "robustness": json_rows(gains(evaluated)),
        "sensitivity": json_rows(gains(evaluation_changes(evaluated))),
    }


def replicas(study: Study) -> dict[str, Any]:
    """Draw how far replicas diverge if sums return with losses."""
    table, records = study.complete("05_replicas")
    if table.empty:
        return {}
    study.draw(replica_divergence(stream_distances(table, records), copy_spreads(table, records)), "divergence")
    return {}


# Claims about how much loss the small model bears, where it hurts, and what training does about it.


def small_losses_cost_nothing(results: Results) -> Claim:
    """Require that no fall is shown up to 1 % loss, and that its interval ends below one point there, in each task."""
    rows = [row for row in results["tolerance_contrasts"] if 0 < row["loss_rate"] <= 0.01]
    numbers = {f"{row['task']} at {row['loss_rate']:g}": -POINTS * row["low"] for row in rows}
    holds = all(not shown(row["p_holm"]) and -row["low"] < ONE_POINT for row in rows)
    return Claim(holds and {row["task"] for row in rows} == set(tasks(results)), numbers)


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


def a_fall_remains(results: Results) -> Claim:
    """Require that docstrings falls after nine times the steps, over each network, and by over a point at 30 %."""
    lows = {row["network"]: POINTS * row["low"] for row in _after(results, 9)}
    holds = set(lows) >= {"30 %, reduce phase", "10 %, both phases", "10 %, ring, reduce phase"}
    return Claim(holds and min(lows.values()) > 0 and lows["30 %, reduce phase"] > POINTS * ONE_POINT, lows)


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


def a_fall_remains_then(results: Results) -> Claim:
    """Require that a fall is left after 27 times the steps at 30 % loss; other networks' intervals may include 0."""
    lows = {row["network"]: POINTS * row["low"] for row in _after(results, 27)}
    networks = {"30 %, reduce phase", "10 %, both phases", "10 %, ring, reduce phase"}
    return Claim(set(lows) >= networks and lows["30 %, reduce phase"] > 0, lows)


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


def losses_do_more_than_delay(results: Results) -> Claim:
    """Require that the slowdowns of two networks grow with training, with intervals above 1, paired by seed.

    If losses only delayed learning, the slowdown would stay. At 10 % in the reduce phase that is uncertain.
    """
    growths = {network: min(row["low"] for row in each["growth"]) for network, each in results["slowdowns"].items()}
    return Claim(
        min(growths["30 %, reduce phase"], growths["10 %, both phases"]) > 1 >= growths["10 %, reduce phase"], growths
    )


def one_learning_rate_is_best(results: Results) -> Claim:
    """Require that in docstrings a larger learning rate than the usual is best with and without losses.

    It must not be the largest that was tried.
    """
    tuned = row_of(results["retuned"], task="docstrings")
    usual = float(results["tasks"]["docstrings"]["settings"]["learning_rate"])
    numbers = {"lossless": tuned["learning_rate_lossless"], "lossy": tuned["learning_rate_lossy"], "usual": usual}
    return Claim(bool(not tuned["at_edge"] and numbers["lossless"] == numbers["lossy"] > usual), numbers)


def _after(results: Results, times: int) -> list[dict[str, Any]]:
    """Return the falls in docstrings after this many times the shortest training's steps."""
    rows = rows_of(results["lengths"], task="docstrings")
    return rows_of(rows, max_steps=times * min(row["max_steps"] for row in rows))


def forward_losses_hurt(results: Results) -> Claim:
    """Require that losses in backward alone show no cost, and cost less than losses in forward."""
    arms = results["comparisons"]["04_where"]
    numbers: dict[str, float] = {}
    holds = True
    for task in tasks(results):
        forward, backward = row_of(arms, task=task, arm="forward only"), row_of(arms, task=task, arm="backward only")
        holds &= not shown(backward["p_holm"]) and backward["difference"] > forward["high"]
        numbers |= {
            f"{task}, backward": -POINTS * backward["difference"],
            f"{task}, forward": -POINTS * forward["high"],
        }
    return Claim(holds, numbers)


def gather_phase_costs_more(results: Results) -> Claim:
    """Require that losses in the gather phase cost more than in the reduce phase, after Holm's correction."""
    rows = [row_of(results["comparisons"]["04_where"], task=task, arm="gather phase only") for task in tasks(results)]
    holds = all(row["gain"] < 0 and shown(row["gain_p_holm"]) for row in rows)
    return Claim(holds, {row["task"]: POINTS * row["gain"] for row in rows})


def first_layer_costs_most(results: Results) -> Claim:
    """Require that the first layer's interval lies above every later layer's mean, in docstrings."""
    rows = rows_of(results["comparisons"]["04_where"], task="docstrings")
    first, *later = (row for row in rows if row["arm"].startswith("layers"))
    highest = max(-row["difference"] for row in later)
    return Claim(-first["high"] > highest, {"first": -POINTS * first["high"], "later": POINTS * highest})


def lossy_averages_cost_more(results: Results) -> Claim:
    """Require in each task that averaging replicated gradients over lossy links costs more, with intervals apart."""
    rows = results["comparisons"]["05_replicas"]
    pairs = {
        task: [row_of(rows, task=task, arm=arm) for arm in ("averaged over lossy links", "never averaged")]
        for task in tasks(results)
    }
    apart = {task: POINTS * (never["low"] - averaged["high"]) for task, (averaged, never) in pairs.items()}
    return Claim(min(apart.values()) > 0, apart)


def evaluation_alone_costs_less(results: Results) -> Claim:
    """Require that losses in evaluation alone cost less than in training and evaluation, in docstrings, at 30 %."""
    alone = row_of(results["sensitivity"], task="docstrings", trained_at=0.0, evaluated_at=0.3)
    both = row_of(results["tolerance_contrasts"], task="docstrings", loss_rate=0.3)
    numbers = {"evaluation": -POINTS * alone["mean_low"], "training too": -POINTS * both["high"]}
    return Claim(numbers["evaluation"] < numbers["training too"], numbers)


def training_with_loss_does_not_pay(results: Results) -> Claim:
    """Require that training with losses never shows a gain, and does show less sensitivity to loss."""
    better = [row for row in results["robustness"] if shown(row["p_holm"])]
    best = max((row["difference"] for row in better), default=0.0)
    less_sensitive = row_of(results["sensitivity"], task="docstrings", trained_at=0.3, evaluated_at=0.3)
    holds = best <= 0 and less_sensitive["difference"] > 0 and shown(less_sensitive["p_holm"])
    return Claim(holds, {"largest difference that is shown": POINTS * best})


CLAIMS = (
    small_losses_cost_nothing,
    longer_training_regains,
    a_fall_remains,
    budgets_grow_with_training,
    longest_training_gains_nothing,
    a_fall_remains_then,
    no_floor_is_seen,
    losses_do_more_than_delay,
    one_learning_rate_is_best,
    forward_losses_hurt,
    gather_phase_costs_more,
    first_layer_costs_most,
    lossy_averages_cost_more,
    evaluation_alone_costs_less,
    training_with_loss_does_not_pay,
)
