"""Records as one tidy table, a row a run."""

import pandas as pd

from lossytp.training.config import TrainConfig

NETWORK_COLUMNS = ("packets", "lost", "observed_loss_rate")


def tidy(records: list[dict]) -> pd.DataFrame:
    """One row a record: configuration, status, final figures, and the losses of training.

    Nothing that differs from run to run of the same cell, such as seconds, so that tables can be compared. A run whose
    training loss was not finite counts as answering with the most frequent class: leaving it out would flatter.
    """
    processes = [TrainConfig.from_dict(record["config"]).process() for record in records]
    rows = [
        {
            **record["config"],
            "loss_rate": float(f"{process.loss_rate:.12g}"),  # a preset's rate is not in the configuration
            "mean_burst_packets": float(f"{process.mean_burst_packets:.12g}"),  # less the closed form's last digits
            "status": record["status"],
            **record["final"],
            **{name: record["network"]["training"][name] for name in NETWORK_COLUMNS},
            "majority_share": record["data"]["majority_share"],
        }
        for record, process in zip(records, processes, strict=True)
    ]
    table = pd.DataFrame(rows)
    if len(table):
        for column in ("accuracy_clean", "accuracy_lossy"):
            table[column] = table[column].astype(float).fillna(table["majority_share"])
        twice = table.duplicated(["loss_type", "loss_rate", "mean_burst_packets", "seed"])
        if twice.any():
            row = table[twice].iloc[0]
            raise ValueError(
                f"two records of seed {row['seed']} at {row['loss_type']} {row['loss_rate']:g}: tabulate them apart"
            )
        table = table.sort_values(["loss_type", "loss_rate", "seed"], kind="stable", ignore_index=True)
    return table
