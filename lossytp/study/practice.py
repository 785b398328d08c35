"""What a practitioner takes from the study: what a network's losses cost, and what is to be done about them."""

from typing import Any

import pandas as pd

from lossytp.study import summary

ALONE, ALGORITHM = "losses alone", "direct"  # of arms whose names say nothing else
NETWORKS = {  # by grid, the arms that are networks of 4 ranks without a repair, and what their names say
    "01_tolerance": rf"(?P<losses>{ALONE}|bursts of \d+)",
    "02_structure": r"(?P<losses>bursts of \d+)",
    "01_tolerance_of_both_phases": r"(?P<losses>both phases)",
    "03_algorithms": r"(?P<algorithm>ring|tree|switch), 4 ranks",
}
REPAIRS = {ALONE: "06_repair", "bursts": "06_repair_of_bursts"}  # grids, by the first word of the losses
SURE = 0.05  # of p-values after Holm


def practice(comparisons: dict[str, pd.DataFrame]) -> list[dict[str, Any]]:
    """Of each network and rate what its losses cost where nothing repairs them, and an advice; JSON-ready.

    Args:
        comparisons: by grid, from `contrasts.falls_and_gains`; 01_tolerance has every task.

    `falls` has for each task the fall of accuracy `fall` and its interval `low`, `high`, all shares; `seeds` is the
    fewest. `advice` is "nothing" where every task's interval ends below one point, "repair" where a task's begins above
    that, else "undecided": a task that was not run is one whose interval is not known. `repair` is what is shown to
    help against such losses and sends least, null where nothing is, or was tried.
    """
    lossy = pd.concat([_networks(comparisons[name], arms) for name, arms in NETWORKS.items() if name in comparisons])
    lossy = lossy.assign(fall=-lossy["difference"], low=-lossy["high"], high=-lossy["low"])
    tasks = lossy["task"].nunique()
    helping = {name: helpful(comparisons[name]) for name in REPAIRS.values() if name in comparisons}
    rows = []
    for (losses, algorithm, rate), ours in lossy.groupby(["losses", "algorithm", "loss_rate"], sort=False):
        sure = len(ours) == tasks and ours["high"].notna().all()
        harmless, harmful = sure and ours["high"].max() < summary.DROP, ours["low"].max() > summary.DROP
        kind = ALONE if losses == ALONE else str(losses).split()[0]
        repairs = helping.get(REPAIRS.get(kind, ""), []) if algorithm == ALGORITHM else []
        rows.append(
            {
                "loss_rate": float(str(rate)),
                "losses": str(losses),
                "algorithm": str(algorithm),
                "seeds": int(ours["seeds"].min()),
                "falls": dict(zip(ours["task"], summary.rows(ours[["fall", "low", "high"]]), strict=True)),
                "advice": "nothing" if harmless else "repair" if harmful else "undecided",
                "repair": repairs[0]["arm"] if harmful and repairs else None,
            }
        )
    return rows


def helpful(compared: pd.DataFrame) -> list[dict[str, Any]]:
    """The repairs that are shown to lose less than the reference in some task, and more in none; JSON-ready.

    Args:
        compared: from `contrasts.falls_and_gains`, with `extra_packet_share`.

    Each has `arm` and `extra`, the largest share of packets that it sends beyond the messages' own in any task; those
    that send nothing first, then the cheaper, and of equal cost the one that gains most in its worst task.
    """
    tried = compared.dropna(subset=["gain"])
    sure = tried[tried["gain_p_holm"] < SURE]
    arms = set(sure.loc[sure["gain"] > 0, "arm"]) - set(sure.loc[sure["gain"] < 0, "arm"])
    by_arm = tried[tried["arm"].isin(arms)].groupby("arm", sort=False)
    best = by_arm.agg(extra=("extra_packet_share", "max"), gain=("gain", "min"))
    best = best.sort_values(["extra", "gain"], ascending=[True, False]).reset_index()
    return summary.rows(best[["arm", "extra"]])


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
        cells = [f"{100 * row['loss_rate']:g} %", row["losses"], row["algorithm"], str(row["seeds"])]
        cells += [_points(row["falls"].get(task)) for task in tasks]
        advice = f"{row['advice']}: `{row['repair']}`" if row["repair"] else row["advice"]
        lines.append(f"| {' | '.join([*cells, advice])} |")
    return "\n".join(lines)


def _networks(compared: pd.DataFrame, arms: str) -> pd.DataFrame:
    """The arms that are networks, with `losses` and `algorithm`."""
    lossy = compared.dropna(subset=["difference"])
    said = lossy["arm"].str.extract(f"^{arms}$")
    named = lossy.assign(losses=ALONE, algorithm=ALGORITHM).assign(**{str(name): said[name] for name in said})
    return named[said.notna().all(axis=1)]


def _points(of_task: dict[str, float | None] | None) -> str:
    if of_task is None:
        return "not run"
    fall, low, high = ("" if value is None else f"{100 * value:z.1f}" for value in of_task.values())
    return f"{fall} ({low} to {high})" if low else fall
