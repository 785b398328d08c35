"""What a practitioner takes from the study: what a network's losses cost, and whether that calls for a repair."""

from typing import Any

import pandas as pd

from lossytp.study import summary


def practice(compared: pd.DataFrame) -> list[dict[str, Any]]:
    """Of each arm and rate `loss_rate`, `losses` (the arm), `seeds` (the fewest), `falls` and `advice`, JSON-ready.

    Args:
        compared: from `contrasts.contrasts`, against runs without losses.

    `falls` has for each task the fall of accuracy `fall` and its interval `low`, `high`, all shares. The advice is as
    sure as all tasks' intervals are: "nothing" where they end below one point, "repair" where one begins above that,
    else "undecided". One seed has no interval: "undecided".
    """
    lossy = compared.dropna(subset=["difference"])
    lossy = lossy.assign(fall=-lossy["difference"], low=-lossy["high"], high=-lossy["low"])
    rows = []
    for (arm, rate), ours in lossy.groupby(["arm", "loss_rate"], sort=False):
        sure = ours["high"].notna().all()
        harmless, harmful = sure and ours["high"].max() < summary.DROP, ours["low"].max() > summary.DROP
        rows.append(
            {
                "loss_rate": float(str(rate)),
                "losses": str(arm),
                "seeds": int(ours["seeds"].min()),
                "falls": dict(zip(ours["task"], summary.rows(ours[["fall", "low", "high"]]), strict=True)),
                "advice": "nothing" if harmless else "repair" if harmful else "undecided",
            }
        )
    return rows


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """`practice`'s rows as the README shows them."""
    tasks = list(dict.fromkeys(task for row in rows for task in row["falls"]))
    lines = [
        "| loss rate | losses | seeds, at least |"
        + "".join(f" points lost in `{task}` |" for task in tasks)
        + " what to do |",
        f"|---|---|---|{'---|' * len(tasks)}---|",
    ]
    for row in rows:
        cells = [f"{100 * row['loss_rate']:g} %", row["losses"], str(row["seeds"])]
        cells += [_points(row["falls"].get(task)) for task in tasks]
        lines.append(f"| {' | '.join([*cells, row['advice']])} |")
    return "\n".join(lines)


def _points(of_task: dict[str, float | None] | None) -> str:
    if of_task is None:
        return "not run"
    fall, low, high = ("" if value is None else f"{100 * value:z.1f}" for value in of_task.values())
    return f"{fall} ({low} to {high})" if low else fall
