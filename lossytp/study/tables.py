"""Read records into tidy tables."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from lossytp.study.grid import Experiment
from lossytp.training.config import RunSettings, settings_class
from lossytp.training.record import NEWER, read_record

LOSSLESS = "no loss"  # every grid's arm without losses
NETWORK_COLUMNS = ("packets", "lost", "extra", "missing", "observed_loss_rate")
ACCURACIES = ("accuracy_clean", "accuracy_lossy")


def read_experiment(experiment: Experiment) -> tuple[pd.DataFrame, list[dict]]:
    """Read an experiment's finished cells, in the grid's order.

    Returns:
        The table of `tidy`, with two columns more, `arm` and `run` (the name of the record's folder); and the records.
    """
    found = [(cell, read_record(Path(cell.config.output.output_dir))) for cell in experiment.cells]
    done = [(cell, record) for cell, record in found if record is not None]
    records = [record for _, record in done]
    table = tidy(records)
    table.insert(0, "arm", [cell.arm for cell, _ in done])
    table.insert(1, "run", [run_name(cell.config) for cell, _ in done])
    return table, records


def run_name(config: RunSettings) -> str:
    """Return the name of a run's folder, which no other configuration has."""
    return Path(config.output.output_dir).name


def tidy(records: list[dict]) -> pd.DataFrame:
    """Tabulate configuration, status, final metrics and the packets of training, one row per record.

    The table leaves out what differs between repeated runs of a cell, such as seconds, so that tables can be compared.
    It has no column for a task's declaration either, because the task's name stands for it, nor for settings that are
    newer than all of the records. Two records of one configuration and seed are an error: no copy is a second sample.
    """
    rows = []
    left_out = {"declaration", *newer_settings(records)}
    settings = [{n: v for n, v in record["config"].items() if n not in left_out} for record in records]
    for record, its_settings in zip(records, settings, strict=True):
        config = settings_class(record["config"]).from_dict(record["config"])
        rows.append(
            {
                "task": config.task,
                **dict.fromkeys(settings[-1]),  # in the newest record's order
                **its_settings,
                "max_steps": config.steps,  # pretraining has another name for it
                "loss_rate": config.network.process_rate,
                "mean_burst_packets": float(f"{config.network.process().mean_burst_packets:.12g}"),
                "status": record["status"],
                "processes": record["processes"],
                **record["final"],
                **final_accuracies(record),
                **{name: record["network"]["training"].get(name) for name in NETWORK_COLUMNS},
                "majority_share": record["data"]["majority_share"],
            }
        )
    table = pd.DataFrame(rows)
    if len(table):
        for column in ACCURACIES:
            table[column] = table[column].astype(float)
        names = dict.fromkeys(name for each in settings for name in each)
        copies = table[[*names, "processes"]].astype(str).duplicated()
        if copies.any():
            row = table[copies].iloc[0]
            what = f"seed {row['seed']} at {row['loss_type']} {row['loss_rate']:g}"
            raise ValueError(f"{what} has two records: tabulate them separately")
        table["implementation"] = [record["implementation"] for record in records]  # the one that ran
    return table


def final_accuracies(record: Mapping[str, Any]) -> dict[str, float | None]:
    """Return a run's accuracies, by the names `ACCURACIES`; None in pretraining.

    A run that diverged scores the most frequent class's share: leaving it out would flatter.
    """
    if record["status"] == "not finite":
        return dict.fromkeys(ACCURACIES, record["data"]["majority_share"])
    return {name: record["final"][name] for name in ACCURACIES}


def newer_settings(records: list[dict]) -> set[str]:
    """Return the settings that are newer than all of these records, so that new settings do not change old tables."""
    return set.intersection(*(set(record.get(NEWER, ())) for record in records)) if records else set()


def with_lossless(table: pd.DataFrame) -> pd.DataFrame:
    """Add each task's lossless runs to all of its other arms, as the arm's rate 0.

    Tasks without such runs are dropped, since nothing could be said of their drops in accuracy.
    """
    if table.empty:  # it has no columns
        return table
    lossless, lossy = table[table["arm"] == LOSSLESS], table[table["arm"] != LOSSLESS]
    lossy = lossy[lossy["task"].isin(lossless["task"])]
    if lossy.empty:
        return lossless
    arms = []
    for (task, arm), runs in lossy.groupby(["task", "arm"], sort=False):
        arms += [lossless[lossless["task"] == task].assign(arm=str(arm)), runs]
    return pd.concat(arms, ignore_index=True)
