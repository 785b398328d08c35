"""Records as one tidy table, a row a run."""

import json
from pathlib import Path

import pandas as pd

NETWORK_COLUMNS = ("packets", "lost", "observed_loss_rate")


def load_records(folder: Path) -> list[dict]:
    """Every finished run's record below `folder`, in the order of their paths."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.rglob("record.json"))]


def tidy(records: list[dict]) -> pd.DataFrame:
    """One row a record: configuration, status, final figures, and the losses of training.

    Nothing that differs from run to run of the same cell, such as seconds, so that tables can be compared. A run whose
    training loss was not finite counts as answering with the most frequent class: leaving it out would flatter.
    """
    rows = [
        {
            **record["config"],
            "status": record["status"],
            **record["final"],
            **{name: record["network"]["training"][name] for name in NETWORK_COLUMNS},
            "majority_share": record["data"]["majority_share"],
        }
        for record in records
    ]
    table = pd.DataFrame(rows)
    if len(table):
        for column in ("accuracy_clean", "accuracy_lossy"):
            table[column] = table[column].astype(float).fillna(table["majority_share"])
        table["mean_burst_packets"] = table["mean_burst_packets"].astype(float)
        table = table.sort_values(["loss_type", "loss_rate", "seed"], kind="stable", ignore_index=True)
    return table
