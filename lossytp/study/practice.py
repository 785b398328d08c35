"""What a practitioner takes from the study: what a network's losses cost, and whether that calls for a repair."""

import pandas as pd

from lossytp.study.summary import DROP


def practice(compared: pd.DataFrame) -> pd.DataFrame:
    """Of each arm and rate the task that suffers most: `loss_rate`, `losses`, `task`, `fall`, `low`, `high`, `advice`.

    Args:
        compared: from `contrasts.contrasts`, against runs without losses.

    `fall` of accuracy and its interval are shares, of the task of the largest. The advice is as sure as all tasks'
    intervals are: "nothing" where they end below one point, "repair" where one begins above that, else "undecided". One
    seed has no interval: "undecided".
    """
    rows = []
    for (arm, rate), ours in compared.dropna(subset=["difference"]).groupby(["arm", "loss_rate"], sort=False):
        worst = ours.loc[ours["difference"].idxmin()]
        row = {"loss_rate": rate, "losses": arm, "task": worst["task"], "fall": -worst["difference"]}
        row |= {"low": -worst["high"], "high": -worst["low"]}
        low, high = (-ours["high"]).max(), (-ours["low"]).max()
        row["advice"] = "nothing" if high < DROP else "repair" if low > DROP else "undecided"
        rows.append(row)
    return pd.DataFrame(rows)


def as_markdown(table: pd.DataFrame) -> str:
    """`practice`'s table as the README shows it."""
    lines = [
        "| loss rate | losses | fall in accuracy, points (95 %) | worst in | what to do |",
        "|---|---|---|---|---|",
    ]
    for row in table.itertuples():
        fall, low, high = (f"{100 * value:z.1f}" for value in (row.fall, row.low, row.high))
        lines.append(
            f"| {100 * row.loss_rate:g} % | {row.losses} | {fall} ({low} to {high}) | `{row.task}` | {row.advice} |"
        )
    return "\n".join(lines)
