"""Answer what a network's losses cost, and which repair helps."""

import re
from collections.abc import Collection
from typing import Any

import pandas as pd

from lossytp.study.comparisons import with_falls
from lossytp.study.records import json_rows
from lossytp.study.statistics import CONFIDENCE, ONE_POINT

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
