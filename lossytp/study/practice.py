"""What a practitioner takes from the study: what a network's losses cost, and whether that calls for a repair."""

from typing import Any

import pandas as pd

from lossytp.study.summary import DROP


def practice(compared: pd.DataFrame) -> list[dict[str, Any]]:
    """Of each arm and rate the task that suffers most: `loss_rate`, `losses`, `task`, `fall`, `low`, `high`, `advice`.

    Args:
        compared: from `contrasts.contrasts`, against runs without losses.

    `fall` of accuracy and its interval are shares, of the task of the largest. The advice is as sure as all tasks'
    intervals are: "nothing" where they end below one point, "repair" where one begins above that, else "undecided". One
    seed has no interval: "undecided".
    """
    rows = []
    for (arm, rate), ours in compared.dropna(subset=["difference"]).groupby(["arm", "loss_rate"], sort=False):
        falls_T3 = -ours[["difference", "high", "low"]].to_numpy(dtype=float)
        worst = int(falls_T3[:, 0].argmax())
        low, high = falls_T3[:, 1].max(), falls_T3[:, 2].max()
        advice = "nothing" if high < DROP else "repair" if low > DROP else "undecided"
        row = {"loss_rate": float(str(rate)), "losses": str(arm), "task": ours["task"].tolist()[worst]}
        rows.append(
            row | dict(zip(("fall", "low", "high"), falls_T3[worst].tolist(), strict=True)) | {"advice": advice}
        )
    return rows


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """`practice`'s rows as the README shows them."""
    lines = [
        "| loss rate | losses | fall in accuracy, points (95 %) | worst in | what to do |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        fall, low, high = (f"{100 * row[name]:z.1f}" for name in ("fall", "low", "high"))
        start = f"| {100 * row['loss_rate']:g} % | {row['losses']} | {fall} ({low} to {high})"
        lines.append(f"{start} | `{row['task']}` | {row['advice']} |")
    return "\n".join(lines)
