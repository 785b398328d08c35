"""Read records into one tidy table, one row per run."""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lossytp.study.grid import Experiment
from lossytp.training.config import RunSettings, settings_class
from lossytp.training.record import NEWER, read_record

LOSSLESS = "no loss"  # every grid's arm without losses
TRAINING = ("task", "model_name", "max_steps", "learning_rate")  # runs that share these are one training
NETWORK_COLUMNS = ("packets", "lost", "extra", "missing", "observed_loss_rate")
ACCURACIES = ("accuracy_clean", "accuracy_lossy")


def read_experiment(experiment: Experiment) -> tuple[pd.DataFrame, list[dict]]:
    """Read an experiment's finished cells, in the grid's order.

    Returns:
        The table of `tidy`, with two columns more, `arm` and `run` (the name of the record's folder); and the records.
    """
    found = [(cell, read_record(Path(cell.config.output_dir))) for cell in experiment.cells]
    done = [(cell, record) for cell, record in found if record is not None]
    records = [record for _, record in done]
    table = tidy(records)
    table.insert(0, "arm", [cell.arm for cell, _ in done])
    table.insert(1, "run", [_run(cell.config) for cell, _ in done])
    return table, records


def complete_seeds(
    experiment: Experiment, table: pd.DataFrame, records: list[dict], unlearned: pd.DataFrame, min_seeds: int = 1
) -> tuple[pd.DataFrame, list[dict]]:
    """Keep the runs of those tasks and seeds that have every arm, so that all arms share seeds.

    An arm with fewer than `min_seeds` runs of a task is left out, and limits no other arm. Every other arm limits all
    arms to its seeds. A training is left out if it lacks the lossless arm, or has no other arm.

    Args:
        experiment: the cells that a complete seed has.
        table: from `read_experiment`.
        records: from `read_experiment`.
        unlearned: from `comparisons.unlearned_trainings`. Its trainings are neither required nor kept.
        min_seeds: arms with fewer runs of a task are dropped, and tasks with fewer complete seeds.

    Returns:
        The rows kept, and their records.
    """
    if table.empty:
        return table, []
    without = set(unlearned[list(TRAINING)].itertuples(index=False, name=None))
    arms = {
        _run(cell.config): (*training, cell.arm, cell.config.process_rate)
        for cell in experiment.cells
        if (training := _training(cell.config)) not in without
    }
    finished = Counter(arms[run] for run in table["run"] if run in arms)
    enough = {arm for arm in arms.values() if finished[arm] >= min_seeds}
    compared: dict[bool, set[tuple]] = {True: set(), False: set()}  # trainings that have the lossless arm, and another
    for *its_training, arm, _ in enough:
        compared[arm == LOSSLESS].add(tuple(its_training))
    wanted = {run for run, arm in arms.items() if arm in enough and arm[:-2] in compared[True] & compared[False]}
    required = Counter((cell.config.task, cell.config.seed) for cell in experiment.cells if _run(cell.config) in wanted)
    table = table[table["run"].isin(wanted)]
    keys = list(zip(table["task"], table["seed"], strict=True))
    complete = {key for key, count in Counter(keys).items() if count == required[key]}
    seeds = Counter(task for task, _ in complete)
    kept = table[np.array([key in complete and seeds[key[0]] >= min_seeds for key in keys], dtype=bool)]
    return kept.reset_index(drop=True), [records[number] for number in kept.index]


def _training(config: RunSettings) -> tuple:
    """Return a cell's values of the columns `TRAINING`."""
    return config.task, config.model_name, config.steps, config.learning_rate


def _run(config: RunSettings) -> str:
    """Return the name of a run's folder, which no other configuration has."""
    return Path(config.output_dir).name


def tidy(records: list[dict]) -> pd.DataFrame:
    """Tabulate configuration, status, final metrics and the packets of training.

    The table leaves out what differs between repeated runs of a cell, such as seconds, so that tables can be compared.
    It has no column for a task's declaration either, because the task's name stands for it, nor for settings that are
    newer than all of the records.

    Returns:
        One row per record, in order, with its `final_accuracies`.

    Raises:
        ValueError: if two records share configuration and seed, since a copy is not a second sample.
    """
    rows = []
    left_out = {"declaration", *newer_settings(records)}
    settings = [{n: v for n, v in record["config"].items() if n not in left_out} for record in records]
    for record, its_settings in zip(records, settings, strict=True):
        config = settings_class(record["config"]).from_dict(record["config"])
        rows.append(
            {
                "task": config.task,
                **(settings[-1] | its_settings),  # in the newest record's order
                "max_steps": config.steps,  # pretraining has another name for it
                "loss_rate": config.process_rate,
                "mean_burst_packets": float(f"{config.process().mean_burst_packets:.12g}"),
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
        copies = table[[*settings[0], "processes"]].astype(str).duplicated()
        if copies.any():
            row = table[copies].iloc[0]
            raise ValueError(
                f"seed {row['seed']} at {row['loss_type']} {row['loss_rate']:g} has two records: tabulate them "
                "separately"
            )
        table["implementation"] = [record["implementation"] for record in records]  # the one that ran
    return table


def loss_rate_of(record: Mapping[str, Any]) -> float:
    """Return the stationary loss rate of a run's process. The setting `loss_rate` lacks that of a preset or a trace."""
    return settings_class(record["config"]).from_dict(record["config"]).process_rate


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


def joined(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Join the tables of experiments, by name, and add a column `experiment`.

    Experiments without runs are left out, because their columns have no type and would turn whole numbers into floats.
    """
    return pd.concat([table.assign(experiment=name) for name, table in tables.items() if len(table)])


def json_rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the table's rows for JSON, with null for missing and infinite values."""
    values = table.replace([math.inf, -math.inf], math.nan).astype(object).to_dict("records")
    return [{str(name): None if pd.isna(value) else value for name, value in row.items()} for row in values]
