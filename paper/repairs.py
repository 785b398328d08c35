"""Which repair helps, and what does it cost?"""

import re
from collections.abc import Collection
from textwrap import fill
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from lossytp.study.statistics import CONFIDENCE, ONE_POINT
from lossytp.study.style import COLUMN, estimates, marker_of, shared_legend
from paper.comparisons import TRAINING, json_rows, with_falls
from paper.study import HEADLINE, POINTS, Claim, Results, Study, band, better, claim, row_of, shown, task_name, tasks

RETESTS = {"06_repair": "06_repair_again", "06_repair_of_bursts": "06_repair_of_bursts_again"}  # on fresh seeds
NETWORKS = (  # a grid, a pattern for its arms without a repair on 4 ranks, and the grid that repairs these arms
    ("01_tolerance", "single losses|reduce phase", "06_repair"),
    ("01_tolerance", r"(?P<losses>bursts of \d+)", "06_repair_of_bursts"),
    ("02_structure", r"(?P<losses>bursts of \d+)", "06_repair_of_bursts"),
    ("02_shared", r"(?P<losses>losses (half|all) shared)", None),
    ("01_tolerance_of_both_phases", r"(?P<losses>both phases)", "06_repair_of_both_phases"),
    ("03_algorithms", r"(?P<algorithm>ring|tree|switch), 4 ranks", None),
    ("03_rings", r"(?P<algorithm>ring), (?P<losses>both phases)", "06_repair_of_rings"),
)
DEFAULTS = {"losses": "single losses", "algorithm": "direct"}  # for arms whose names do not say


def advise(comparisons: dict[str, pd.DataFrame]) -> list[dict[str, Any]]:
    """Return what unrepaired losses cost on each network and loss rate, and whether to repair them.

    Args:
        comparisons: by grid, from `comparisons.drops_and_gains`; 01_tolerance has every task.

    Returns:
        JSON-ready mappings, with:

        - `loss_rates`: a list of one loss rate or, if every task ran at a single rate, of the tasks' rates in order.
        - `losses` and `algorithm` of the network.
        - `seeds`: the smallest number of seeds of any task.
        - `falls`: each task's drop in accuracy, `fall`, and its interval, `low` and `high`, as shares.
        - `advice`: "nothing" if every task's interval ends below one point, "repair" if any task's begins above it,
          else "undecided". A task without runs leaves the advice undecided, unless another task needs a repair.
        - `repair`: the cheapest repair shown to help a task that needs it, or null. It may not be enough.

    Raises:
        ValueError: if two grids have the same network and rate.
    """
    tasks = comparisons["01_tolerance"]["task"].nunique()
    rows = []
    for grid, arms, repair_grid in NETWORKS:
        lossy = comparisons.get(grid, comparisons["01_tolerance"].head(0)).dropna(subset=["difference"])
        for arm, of_arm in lossy.groupby("arm", sort=False):
            if not (matched := re.fullmatch(arms, str(arm))):
                continue
            at_one_rate = [of_arm] if of_arm["task"].is_unique else [each for _, each in of_arm.groupby("loss_rate")]
            for ours in at_one_rate:
                network = {"loss_rates": ours["loss_rate"].unique().tolist(), **DEFAULTS, **matched.groupdict()}
                rows.append(network | _advice(ours, tasks, with_retests(comparisons, repair_grid)))
    networks = [(rate, *(row[name] for name in DEFAULTS)) for row in rows for rate in row["loss_rates"]]
    if twice := [network for network in networks if networks.count(network) > 1]:
        raise ValueError(f"{twice[0]} is in two grids: leave it out of one")
    return rows


def _advice(ours: pd.DataFrame, tasks: int, repairs: pd.DataFrame | None) -> dict[str, Any]:
    ours = with_falls(ours)
    harmless = len(ours) == tasks and ours["high"].notna().all() and ours["high"].max() < ONE_POINT
    harmed = ours.loc[ours["low"] > ONE_POINT, "task"]
    helping = [] if repairs is None else helpful_repairs(repairs, set(harmed))
    return {
        "seeds": int(ours["seeds"].min()),
        "falls": dict(zip(ours["task"], json_rows(ours[["fall", "low", "high"]]), strict=True)),
        "advice": "nothing" if harmless else "repair" if len(harmed) else "undecided",
        "repair": helping[0]["arm"] if helping else None,
    }


def with_retests(comparisons: dict[str, pd.DataFrame], grid: str | None) -> pd.DataFrame | None:
    """Return a grid's comparison. If an arm was tested again on fresh seeds, only the second test counts.

    To count the better of two tests would double the chance of a false claim, and no retest could refute a first one.

    Args:
        comparisons: by grid, from `comparisons.drops_and_gains`.
        grid: name of the grid. The result is None if the name is None, or if the grid was not compared.
    """
    if grid is None or grid not in comparisons:
        return None
    retests = comparisons.get(RETESTS.get(grid, ""))
    if retests is None:
        return comparisons[grid]
    retests = retests.dropna(subset=["gain"])
    tested = pd.MultiIndex.from_frame(comparisons[grid][["task", "arm"]])
    return pd.concat([comparisons[grid][~tested.isin(pd.MultiIndex.from_frame(retests[["task", "arm"]]))], retests])


def helpful_repairs(compared: pd.DataFrame, where: Collection[str] | None = None) -> list[dict[str, Any]]:
    """Return the repairs shown to beat the reference in some task, and shown to be worse in none.

    Args:
        compared: from `comparisons.drops_and_gains`, with `extra_packet_share`.
        where: tasks, at least one of which must gain; any task if None.

    Returns:
        JSON-ready mappings of `arm` and `extra`, the largest share of extra packets in any task. The cheapest repair
        comes first. Equally cheap ones are sorted by the gain in their worst task, the largest first.
    """
    tried = compared.dropna(subset=["gain"])
    sure = tried[tried["gain_p_holm"] < 1 - CONFIDENCE]
    asked = sure["task"].isin(sure["task"].unique() if where is None else where)
    arms = set(sure.loc[asked & (sure["gain"] > 0), "arm"]) - set(sure.loc[sure["gain"] < 0, "arm"])
    by_arm = tried[tried["arm"].isin(arms)].groupby("arm", sort=False)
    best = by_arm.agg(extra=("extra_packet_share", "max"), gain=("gain", "min"))
    best = best.sort_values(["extra", "gain"], ascending=[True, False]).reset_index()
    return json_rows(best[["arm", "extra"]])


# Draw an experiment's arms side by side, from `comparisons.drops_and_gains`.


LABEL = 24  # letters a line, beside two panels in a column
APART = 1.03  # ratio of the positions of two arms side by side
BESIDE = 0.022  # of a panel's width, between arms with one measured value
DIFFERENCE = ["difference", "low", "high"]
OUTCOMES = {  # of `drops_by_arm`: columns of value, interval and p, axis label, factor to its units
    "accuracy": (("difference", "low", "high", "p_holm"), "fall, points", -100.0),
    "cross-entropy": (("rise", "rise_low", "rise_high", "rise_p_holm"), "rise, nats an example", 1.0),
}


def drops_by_arm(compared: pd.DataFrame) -> Figure:
    """Draw what each arm costs in accuracy and cross-entropy against the lossless arm, with 95 % intervals.

    Each task has a colour and marker; a filled one differs from 0 after Holm's correction. An arm with several loss
    rates has a row for each.
    """
    table = _lossy(compared)
    tasks, arms = list(dict.fromkeys(table["task"])), list(dict.fromkeys(table["label"]))
    wrapped = max(map(len, arms)) > LABEL  # so that two lines do not touch the next label
    height = 0.23 if wrapped else 0.2
    figure, axes = plt.subplots(
        1, len(OUTCOMES), figsize=(COLUMN, 0.8 + height * len(arms)), sharey=True, layout="constrained"
    )
    for ax, (title, ((*estimate, p), text, scale)) in zip(axes, OUTCOMES.items(), strict=True):
        for number, task in enumerate(tasks):
            ours = table[table["task"] == task]
            places = [arms.index(label) + 0.3 * (number - (len(tasks) - 1) / 2) for label in ours["label"]]
            color, marker = f"C{number}", marker_of(number)
            estimates(ax, places, scale * ours[estimate], number, across=True, fmt="none", elinewidth=1)
            cost = scale * ours[estimate[0]]
            shown = np.where(ours[p].to_numpy(dtype=float) < 1 - CONFIDENCE, color, "white")
            ax.scatter(cost, places, c=shown, edgecolors=color, marker=marker, s=16, zorder=3)
            ax.plot([], [], marker, color=color, markersize=4, label=task_name(task))
        ax.axvline(0, color="0.45", linewidth=1, zorder=0)
        ax.set_title(title)
        ax.set_xlabel(text)
    axes[0].set_yticks(range(len(arms)), [fill(label, LABEL) for label in arms], linespacing=1.0)
    if wrapped:
        axes[0].tick_params(axis="y", labelsize=6)
    axes[0].set_ylim(len(arms) - 0.4, -0.6)  # the first on top
    shared_legend(figure, axes[0], loc="outside upper right")
    return figure


def replica_divergence(streams: pd.DataFrame, copies: pd.DataFrame) -> Figure:
    """Draw how far ranks diverge, with 95 % intervals: residual streams by layer, copies of parameters by step.

    Args:
        streams: from `paper.robustness.stream_distances`.
        copies: from `paper.robustness.copy_spreads`.
    """
    arms, tasks = list(dict.fromkeys(streams["arm"])), list(dict.fromkeys(streams["task"]))
    figure, axes_T2 = plt.subplots(
        len(tasks), 2, figsize=(COLUMN, 0.8 + 1.3 * len(tasks)), sharex="col", layout="constrained", squeeze=False
    )
    last = streams[streams["step"] == streams["step"].max()]
    for task, (left, right) in zip(tasks, axes_T2, strict=True):
        for number, arm in enumerate(arms):
            for ax, table, x, y in ((left, last, "layer", "distance"), (right, copies, "step", "spread")):
                runs = table[(table["task"] == task) & (table["arm"] == arm)].dropna(subset=[y])
                band(ax, runs, x, y, label=arm, number=number)
        left.set_xticks(sorted(last["layer"].unique()))
        left.set_ylabel("relative distance")
        right.set_ylabel("relative spread")
        left.set_title(f"{task_name(task)}, residual streams")
        right.set_title(f"{task_name(task)}, copies")
    axes_T2[-1, 0].set_xlabel("layer, at the last step")
    axes_T2[-1, 1].set_xlabel("step")
    shared_legend(figure, axes_T2[0, 0], max_columns=1)
    return figure


def _lossy(compared: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with a difference, and add a `label`: the arm, and its rate if it has several."""
    table = compared.dropna(subset=["difference"])
    several = table.groupby(["arm", *TRAINING])["loss_rate"].transform("nunique") > 1
    rates = table["loss_rate"].map(lambda rate: f", {100 * rate:g} %")
    return table.assign(label=table["arm"].where(~several, table["arm"] + rates))


def _side_by_side(values: pd.Series) -> pd.Series:
    """Return by how much to move each of (A,) marks aside so that equal values do not hide each other."""
    groups = values.groupby(values.round(3))
    place = groups.cumcount() - (groups.transform("size") - 1) / 2
    return BESIDE * (values.max() - values.min()) * place


def comparisons(study: Study) -> dict[str, Any]:
    """Return every other experiment's arms, what to do on each network, and which repairs help."""
    others = {name: table for name, table in study.comparisons.items() if name != HEADLINE}
    if "04_where" in others:
        study.draw(drops_by_arm(others["04_where"]), "04_where")
    if "06_repair" in others:
        axes = {"extra_packet_share": "packets sent beyond the messages, as a share"}
        study.draw(drops_against(others["06_repair"], axes, front=True), "06_repair_cost")
    return {
        "comparisons": {name: json_rows(compared) for name, compared in others.items()},
        "practice": advise(study.comparisons) if HEADLINE in study.comparisons else [],
    }


# Claims about repairs of the small model.


@claim
def hadamard_helps_the_small_model(results: Results) -> Claim:
    """Require that Hadamard costs less than no repair on fresh seeds, after Holm's correction, in each task."""
    rows = [row_of(results["comparisons"]["06_repair_again"], task=task, arm="hadamard(64)") for task in tasks(results)]
    return Claim(all(better(row, "gain") for row in rows), {row["task"]: POINTS * row["gain"] for row in rows})


@claim
def hadamard_gains_little_in_small_packets(results: Results) -> Claim:
    """Require that with small packets a gain of Hadamard is not shown, and that two points or more are ruled out."""
    row = row_of(results["comparisons"]["06_repair_of_small_packets"], task="docstrings", arm="hadamard(64)")
    numbers = {name: POINTS * row[name] for name in ("gain", "gain_low", "gain_high")}
    return Claim(not shown(row["gain_p_holm"]) and numbers["gain_high"] < 2, numbers)


@claim
def protection_helps_with_small_packets(results: Results) -> Claim:
    """Require that with small packets protection with Hadamard costs less than no repair, after Holm's correction."""
    rows = results["comparisons"]["06_repair_of_small_packets"]
    row = row_of(rows, task="docstrings", arm="protect(0.1) + hadamard(64)")
    return Claim(better(row, "gain"), {"gain": POINTS * row["gain"]})


@claim
def stale_harms(results: Results) -> Claim:
    """Require that stale values cost more than zeros, after Holm's correction, in each task."""
    rows = [row_of(results["comparisons"]["06_repair"], task=task, arm="stale") for task in tasks(results)]
    return Claim(
        all(row["gain"] < 0 and shown(row["gain_p_holm"]) for row in rows),
        {row["task"]: POINTS * row["gain"] for row in rows},
    )


@claim
def rescaling_harms_both_phases(results: Results) -> Claim:
    """Require that rescaling loses in both phases, after Holm's correction, and shows no gain in the reduce phase."""
    arms = results["comparisons"]
    rows = [row_of(arms["06_repair_of_both_phases"], task=task, arm="rescale") for task in tasks(results)]
    once = [row_of(arms["06_repair"], task=task, arm="rescale") for task in tasks(results)]
    holds = all(row["gain"] < 0 and shown(row["gain_p_holm"]) for row in rows)
    holds &= not any(better(row, "gain") for row in once)
    return Claim(holds, {row["task"]: POINTS * row["gain"] for row in rows})


NAMED_FALLS = (0, 1, 2, 5, 10, 20, 40)  # points, with a label on a logarithmic axis
LINEAR_TO = 2  # points: where falls of several loss rates turn to a logarithmic axis


def drops_against(compared: pd.DataFrame, axes: dict[str, str], *, front: bool = False) -> Figure:
    """Draw each arm's drop in accuracy, with its 95 % interval, against columns of the table, one panel per column.

    A line joins the loss rates of an arm with several; axes are then logarithmic, except near a fall of 0. Arms of one
    loss rate stand side by side.

    Args:
        compared: from `comparisons.drops_and_gains`, with the columns. Arms that lack one are left out.
        axes: the horizontal axes' labels, by column.
        front: whether to draw the Pareto front, the arms that no other beats in both drop and column.
    """
    table = _lossy(compared).dropna(subset=list(axes))
    tasks, arms = list(dict.fromkeys(table["task"])), list(dict.fromkeys(table["arm"]))
    palette = sns.color_palette("colorblind", len(arms))
    figure, axes_TX = plt.subplots(
        len(tasks), len(axes), figsize=(COLUMN, 0.8 + 1.3 * len(tasks)), sharex="col", sharey="row",
        layout="constrained", squeeze=False,
    )  # fmt: skip
    for row, task in zip(axes_TX, tasks, strict=True):
        ours = table[table["task"] == task]
        for ax, column in zip(row, axes, strict=True):
            if front:
                _front(ax, ours[column].to_numpy(dtype=float), -POINTS * ours["difference"].to_numpy(dtype=float))
            beside = _side_by_side(ours[column]) if ours["arm"].is_unique else pd.Series(0.0, ours.index)
            for arm, points in ours.groupby("arm", sort=False):
                style = arms.index(str(arm))
                chosen = column == "loss_rate"  # equal in all arms; measured values keep their place
                aside = APART ** (style - (len(arms) - 1) / 2) if chosen else 1.0
                where = aside * points[column] + beside[points.index]
                estimates(
                    ax, where, -POINTS * points[DIFFERENCE], style, linestyle="-", color=palette[style], label=str(arm),
                    markeredgecolor="0.2", markeredgewidth=0.4,  # keeps light colours visible in grey
                )  # fmt: skip
            ax.axhline(0, color="0.45", linewidth=1, zorder=0)
            ax.set_title(task_name(task))
            if len(ours) > ours["arm"].nunique():
                ax.set_xscale("log")
                ax.set_yscale("symlog", linthresh=LINEAR_TO)
                ax.set_yticks(NAMED_FALLS, [f"{each:g}" for each in NAMED_FALLS])
                falls, ends = -POINTS * ours["difference"], -POINTS * ours["low"]
                ax.set_ylim(-LINEAR_TO / 2, 1.2 * falls.max() + (ends - falls).max())
                ax.yaxis.set_minor_locator(NullLocator())
                ax.xaxis.set_minor_formatter(NullFormatter())
                if column == "loss_rate":
                    ax.set_xticks(sorted(ours[column].unique()))
                    ax.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{100 * rate:g} %"))
        row[0].set_ylabel("fall, points")
    for ax, text in zip(axes_TX[-1], axes.values(), strict=True):
        ax.set_xlabel(text, fontsize=6)
    shared_legend(figure, axes_TX[0, 0], max_columns=3, fontsize=6, columnspacing=1)
    return figure


def _front(ax: Axes, cost: np.ndarray, drop: np.ndarray) -> None:
    """Plot the Pareto front of (A,) costs and drops."""
    order = np.lexsort((drop, cost))
    best = drop[order] < np.minimum.accumulate(np.concatenate(([np.inf], drop[order][:-1])))
    ax.step(cost[order][best], drop[order][best], where="post", color="0.6", linewidth=1, zorder=0)
