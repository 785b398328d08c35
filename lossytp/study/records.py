"""Records as one tidy table, a row a run."""

from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lossytp.study.contrasts import LOSSLESS, TRAINING
from lossytp.study.grid import Experiment
from lossytp.training.config import TrainConfig
from lossytp.training.record import read_record

NETWORK_COLUMNS = ("packets", "lost", "extra", "missing", "observed_loss_rate")
ACCURACIES = ("accuracy_clean", "accuracy_lossy")
KEPT = ("save_model", "eval_steps", "output_dir")  # what a run keeps, and when it looks; its training is the same


def read_experiment(experiment: Experiment) -> tuple[pd.DataFrame, list[dict]]:
    """The tidy table of the cells that are finished, in the grid's order, and their records.

    Besides what `tidy` has, `arm` and `run`, the name of the record's folder.
    """
    found = [(cell, read_record(Path(cell.config.output_dir))) for cell in experiment.cells]
    done = [(cell, record) for cell, record in found if record is not None]
    table = tidy([record for _, record in done])
    table.insert(0, "arm", [cell.arm for cell, _ in done])
    table.insert(1, "run", [Path(cell.config.output_dir).name for cell, _ in done])
    return table, [record for _, record in done]


def whole_seeds(
    experiment: Experiment, table: pd.DataFrame, records: list[dict], unlearnt: pd.DataFrame, fewest: int = 1
) -> tuple[pd.DataFrame, list[dict]]:
    """The table and records of `read_experiment`, of tasks and seeds that have every arm, so that arms share seeds.

    Tasks of which fewer than `fewest` seeds have are left out: an interval of two says nothing.
    Cells of trainings that `contrasts.unlearnt` lists are not asked for, nor are their rows kept.
    """
    if table.empty:
        return table, []
    without = set(unlearnt[list(TRAINING)].itertuples(index=False, name=None))
    wanted = Counter(
        (cell.config.dataset, cell.config.seed) for cell in experiment.cells if _training(cell.config) not in without
    )
    learnt = table[~pd.MultiIndex.from_frame(table[list(TRAINING)]).isin(without)]
    keys = list(zip(learnt["task"], learnt["seed"], strict=True))
    whole = {key for key, found in Counter(keys).items() if found == wanted[key]}
    seeds = Counter(task for task, _ in whole)
    kept = learnt[np.array([key in whole and seeds[key[0]] >= fewest for key in keys], dtype=bool)]
    return kept.reset_index(drop=True), [records[number] for number in kept.index]


def _training(config: TrainConfig) -> tuple:
    """What `TRAINING` names of a table's row, of a cell that may have none yet."""
    return tuple(getattr(config, "dataset" if name == "task" else name) for name in TRAINING)


def tidy(records: list[dict]) -> pd.DataFrame:
    """One row a record: configuration, status, final figures, and the losses of training.

    Nothing that differs from run to run of the same cell, such as seconds, so that tables can be compared. A run whose
    training loss was not finite counts as answering with the most frequent class: leaving it out would flatter.
    ValueError where two records are of one configuration and seed: copies of a run are no second one.
    """
    rows = []
    for record in records:
        process = TrainConfig.from_dict(record["config"]).process()
        rows.append(
            {
                "task": record["config"]["dataset"],
                **record["config"],
                "loss_rate": float(f"{process.loss_rate:.12g}"),  # a preset's rate is not in the configuration
                "mean_burst_packets": float(f"{process.mean_burst_packets:.12g}"),  # less a closed form's last digits
                "status": record["status"],
                "processes": record["processes"],
                **record["final"],
                **{name: record["network"]["training"].get(name) for name in NETWORK_COLUMNS},
                "majority_share": record["data"]["majority_share"],
            }
        )
    table = pd.DataFrame(rows)
    if len(table):
        for column in ACCURACIES:
            table[column] = table[column].astype(float).fillna(table["majority_share"])
        settings = table[[*records[0]["config"], "processes"]].astype(str)
        if settings.duplicated().any():
            row = table[settings.duplicated()].iloc[0]
            raise ValueError(
                f"two records of seed {row['seed']} at {row['loss_type']} {row['loss_rate']:g}: tabulate them apart"
            )
        table["implementation"] = [record["implementation"] for record in records]  # whose layers ran
    return table


def with_lossless(table: pd.DataFrame) -> pd.DataFrame:
    """The table with the runs without losses repeated in every other arm of their task, as its rate 0.

    Tasks that have no such runs are left out: nothing could be said of their falls.
    """
    if table.empty:  # without columns
        return table
    reference, lossy = table[table["arm"] == LOSSLESS], table[table["arm"] != LOSSLESS]
    lossy = lossy[lossy["task"].isin(reference["task"])]
    if lossy.empty:
        return reference
    arms = []
    for (task, arm), runs in lossy.groupby(["task", "arm"], sort=False):
        arms += [reference[reference["task"] == task].assign(arm=str(arm)), runs]
    return pd.concat(arms, ignore_index=True)


def repeated(records: list[dict]) -> dict[str, dict[str, Any]]:
    """Whether trainings that were run twice, keeping other things, answer alike where nothing is lost in evaluation.

    Where losses are, other versions of the evaluation let them fall on other texts.

    For pairs of runs on `one` kind of processor, as records name it, and on `two`: how many `pairs` there are, how many
    `differ` in accuracy, and by how much at most, `largest`, with losses `largest_lossy`, shares, 0 without pairs.
    """
    trainings: dict[str, list[dict]] = {}
    for record in (record for record in records if record["final"]["accuracy_clean"] is not None):
        training = {name: value for name, value in record["config"].items() if name not in KEPT}
        trainings.setdefault(f"{sorted(training.items())} {record['processes']}", []).append(record)
    apart: dict[str, list[np.ndarray]] = {"one": [], "two": []}
    for first, second in (pair for runs in trainings.values() for pair in combinations(runs, 2)):
        processors = {run["environment"]["processor"] for run in (first, second)}
        scores = np.array([[run["final"][name] for name in ACCURACIES] for run in (first, second)])
        apart["one" if len(processors) == 1 else "two"].append(np.abs(scores[0] - scores[1]))
    return {
        name: {
            "pairs": len(each),
            "differ": sum(bool(clean > 0) for clean, _ in each),
            "largest": float(max((clean for clean, _ in each), default=0.0)),
            "largest_lossy": float(max((lossy for _, lossy in each), default=0.0)),
        }
        for name, each in apart.items()
    }
