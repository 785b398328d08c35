"""What a practitioner takes from the study: what a network's losses cost, and what is to be done about them."""

import re
from collections.abc import Collection
from typing import Any

import pandas as pd

from lossytp.study import summary
from lossytp.study.statistics import CONFIDENCE

AGAIN = {"06_repair": "06_repair_again", "06_repair_of_bursts": "06_repair_of_bursts_again"}  # arms on fresh seeds
NETWORKS = (  # grid, its arms that are networks of 4 ranks without a repair, and the grid that tries repairs on such
    ("01_tolerance", "single losses|reduce phase", "06_repair"),
    ("01_tolerance", r"(?P<losses>bursts of \d+)", "06_repair_of_bursts"),
    ("02_structure", r"(?P<losses>bursts of \d+)", "06_repair_of_bursts"),
    ("02_shared", r"(?P<losses>losses (half|all) shared)", None),
    ("01_tolerance_of_both_phases", r"(?P<losses>both phases)", "06_repair_of_both_phases"),
    ("03_algorithms", r"(?P<algorithm>ring|tree|switch), 4 ranks", None),
    ("03_rings", r"(?P<algorithm>ring), (?P<losses>both phases)", "06_repair_of_rings"),
)
UNSAID = {"losses": "single losses", "algorithm": "direct"}  # where an arm's name says nothing else


def practice(comparisons: dict[str, pd.DataFrame]) -> list[dict[str, Any]]:
    """Of each network and rate what its losses cost where nothing repairs them, and an advice; JSON-ready.

    Args:
        comparisons: by grid, from `contrasts.falls_and_gains`; 01_tolerance has every task.

    `loss_rates` has one rate; where every task was tried at one rate of its own, these, in the order of the tasks.
    `falls` has for each task the fall of accuracy `fall` and its interval `low`, `high`, all shares; `seeds` is the
    fewest. `advice` is "nothing" where every task's interval ends below one point, "repair" where a task's begins above
    that, else "undecided": a task that was not run is one whose interval is not known. `repair` is what is shown to
    help where it was tried, in a task that such losses harm, and sends least; null where nothing is, or was tried.

    ValueError where two grids have one network at one rate.
    """
    tasks = comparisons["01_tolerance"]["task"].nunique()
    rows = []
    for grid, arms, tried in NETWORKS:
        lossy = comparisons.get(grid, comparisons["01_tolerance"].head(0)).dropna(subset=["difference"])
        for arm, of_arm in lossy.groupby("arm", sort=False):
            if not (said := re.fullmatch(arms, str(arm))):
                continue
            at_one_rate = [of_arm] if of_arm["task"].is_unique else [each for _, each in of_arm.groupby("loss_rate")]
            for ours in at_one_rate:
                network = {"loss_rates": ours["loss_rate"].unique().tolist(), **UNSAID, **said.groupdict()}
                rows.append(network | _advice(ours, tasks, compared_again(comparisons, tried)))
    networks = [(rate, *(row[name] for name in UNSAID)) for row in rows for rate in row["loss_rates"]]
    if twice := [network for network in networks if networks.count(network) > 1]:
        raise ValueError(f"{twice[0]} stands in two grids: leave it out of one")
    return rows


def compared_again(comparisons: dict[str, pd.DataFrame], grid: str | None) -> pd.DataFrame | None:
    """What a grid compares; of arms that another grid tries again on fresh seeds, what that one found. None without it.

    To take the better of two tries would double the chance of an error, and no second try could take back a first.
    """
    if grid is None or grid not in comparisons:
        return None
    again = comparisons.get(AGAIN.get(grid, ""))
    if again is None:
        return comparisons[grid]
    anew = again.dropna(subset=["gain"])
    tried = pd.MultiIndex.from_frame(comparisons[grid][["task", "arm"]])
    return pd.concat([comparisons[grid][~tried.isin(pd.MultiIndex.from_frame(anew[["task", "arm"]]))], anew])


def _advice(ours: pd.DataFrame, tasks: int, repairs: pd.DataFrame | None) -> dict[str, Any]:
    ours = ours.assign(fall=-ours["difference"], low=-ours["high"], high=-ours["low"])
    harmless = len(ours) == tasks and ours["high"].notna().all() and ours["high"].max() < summary.DROP
    harmed = ours.loc[ours["low"] > summary.DROP, "task"]
    helping = [] if repairs is None else helpful(repairs, set(harmed))
    return {
        "seeds": int(ours["seeds"].min()),
        "falls": dict(zip(ours["task"], summary.rows(ours[["fall", "low", "high"]]), strict=True)),
        "advice": "nothing" if harmless else "repair" if len(harmed) else "undecided",
        "repair": helping[0]["arm"] if helping else None,
    }


def helpful(compared: pd.DataFrame, where: Collection[str] | None = None) -> list[dict[str, Any]]:
    """The repairs that are shown to lose less than the reference in some task, and more in none; JSON-ready.

    Args:
        compared: from `contrasts.falls_and_gains`, with `extra_packet_share`.
        where: the tasks, one of which a repair is to help in; any if left out.

    Each has `arm` and `extra`, the largest share of packets that it sends beyond the messages' own in any task; those
    that send nothing first, then the cheaper, and of equal cost the one that gains most in its worst task.
    """
    tried = compared.dropna(subset=["gain"])
    sure = tried[tried["gain_p_holm"] < 1 - CONFIDENCE]
    asked = sure["task"].isin(sure["task"].unique() if where is None else where)
    arms = set(sure.loc[asked & (sure["gain"] > 0), "arm"]) - set(sure.loc[sure["gain"] < 0, "arm"])
    by_arm = tried[tried["arm"].isin(arms)].groupby("arm", sort=False)
    best = by_arm.agg(extra=("extra_packet_share", "max"), gain=("gain", "min"))
    best = best.sort_values(["extra", "gain"], ascending=[True, False]).reset_index()
    return summary.rows(best[["arm", "extra"]])


def sufficient(compared: pd.DataFrame) -> list[str]:
    """The arms under which every task's fall has an interval that ends below one point.

    With the reference among them nothing need be repaired.

    Args:
        compared: as for `helpful`.
    """
    tried = compared.dropna(subset=["difference"])
    enough = (-tried["low"] < summary.DROP).groupby(tried["arm"], sort=False).all()  # not where there is no interval
    return [str(arm) for arm in enough.index[enough]]


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """`practice`'s rows as the README shows them."""
    tasks = list(dict.fromkeys(task for row in rows for task in row["falls"]))
    lines = [
        "| loss rate | losses | algorithm | seeds, at least |"
        + "".join(f" points lost in `{task}` |" for task in tasks)
        + " what to do |",
        f"|---|---|---|---|{'---|' * len(tasks)}---|",
    ]
    for row in rows:
        cells = [
            ", ".join(f"{100 * rate:g} %" for rate in row["loss_rates"]),
            row["losses"],
            row["algorithm"],
            str(row["seeds"]),
        ]
        cells += [_points(row["falls"].get(task)) for task in tasks]
        advice = f"{row['advice']}: `{row['repair']}`" if row["repair"] else row["advice"]
        lines.append(f"| {' | '.join([*cells, advice])} |")
    return "\n".join(lines)


def _points(of_task: dict[str, float | None] | None) -> str:
    if of_task is None:
        return "not run"
    fall, low, high = ("" if value is None else f"{100 * value:z.1f}" for value in of_task.values())
    return f"{fall} ({low} to {high})" if low else fall
