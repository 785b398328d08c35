"""Summarise the study's own runs: how many, on which machines, how repeatable, and at what cost."""

import json
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from lossytp.study.grid import Experiment
from lossytp.study.records import ACCURACIES
from lossytp.training.shapes import Shape, shape_of

NOT_TRAINING = ("save_model", "eval_steps", "output_dir")  # settings that do not change training
LARGER_MODEL = "gpt2"
GPU_FLOPS_PER_S = 1e13  # assumed for batches as small as the study's, not measured


def summarise_runs(records: list[dict]) -> dict[str, Any]:
    """Summarise all experiments' distinct runs: number, packets, core hours, machines and `repeatability`.

    Controls lose no packets, so their losses do not count. Returns JSON-ready values.
    """
    records = _distinct_runs(records)
    with_packets = [record["network"]["training"] for record in records if not record["config"]["control"]]
    environments = [record["environment"] for record in records]
    return {
        "cells": len(records),
        "not_finite": sum(record["status"] == "not finite" for record in records),
        "packets": sum(traffic["packets"] for traffic in with_packets),
        "lost": sum(traffic["lost"] for traffic in with_packets),
        "seconds_a_cell": float(np.median([record["timing"]["total_seconds"] for record in records])),
        "hours": sum(record["timing"]["total_seconds"] * record["processes"] for record in records) / 3600,
        "environments": [each for number, each in enumerate(environments) if each not in environments[:number]],
        "devices": sorted({record["timing"]["device"] for record in records}),
        "threads": sorted({record["timing"]["threads"] for record in records}),
        "commits": len({record["commit"] for record in records}),
        "repeated": repeatability(records),
    }


def _distinct_runs(records: Iterable[dict]) -> list[dict]:
    """Drop the copies of runs that several experiments share."""
    return list({json.dumps([record["config"], record["processes"]]): record for record in records}.values())


def repeatability(records: list[dict]) -> dict[str, dict[str, Any]]:
    """Compare the accuracies of pairs of runs that trained alike and differ only in saving and evaluation.

    Their clean accuracies should agree. Their lossy accuracies need not, because versions of the evaluation lose
    different packets.

    Returns:
        A summary under `one` for pairs on one model of processor, and under `two` for pairs on two models. It has the
        number of `pairs`, the number that `differ` in clean accuracy, and the largest difference in clean accuracy
        (`largest`) and in lossy accuracy (`largest_lossy`), as shares, or 0 without pairs.
    """
    trainings: dict[str, list[dict]] = {}
    for record in (record for record in records if record["final"]["accuracy_clean"] is not None):
        training = {name: value for name, value in record["config"].items() if name not in NOT_TRAINING}
        trainings.setdefault(f"{sorted(training.items())} {record['processes']}", []).append(record)
    differences: dict[str, list[np.ndarray]] = {"one": [], "two": []}
    for first, second in (pair for runs in trainings.values() for pair in combinations(runs, 2)):
        processors = {run["environment"]["processor"] for run in (first, second)}
        scores = np.array([[run["final"][name] for name in ACCURACIES] for run in (first, second)])
        differences["one" if len(processors) == 1 else "two"].append(np.abs(scores[0] - scores[1]))
    return {
        name: {
            "pairs": len(each),
            "differ": sum(bool(clean > 0) for clean, _ in each),
            "largest": float(max((clean for clean, _ in each), default=0.0)),
            "largest_lossy": float(max((lossy for _, lossy in each), default=0.0)),
        }
        for name, each in differences.items()
    }


def compute_hours(experiments: Iterable[Experiment], records: Mapping[str, list[dict]]) -> pd.DataFrame:
    """Estimate the core hours of each experiment's cells, finished or not.

    A cell's time is the median of the cells that differ from it only in the seed; the median ignores a run that was
    suspended. If none of them is finished, the time is the cell's number of steps, times the mean time per step of the
    experiment's other cells.

    Args:
        experiments: the experiments of one profile, in order.
        records: the records of their finished cells, by the experiment's name.

    Returns:
        One row per experiment: its name `experiment`, the number of `cells` that no earlier experiment has, how many
        cells are `finished` out `of` all, and the mean `seconds` per cell and the `core_hours` of `cells`. The last two
        are missing if no cell is finished.
    """
    rows, earlier = [], frozenset[str]()
    for experiment in experiments:
        new = [cell for cell in experiment.cells if cell.config.output_dir not in earlier]
        earlier |= experiment.folders
        done = records[experiment.name]
        row: dict[str, Any] = {"experiment": experiment.name, "cells": len(new)}
        row |= {"finished": len(done), "of": len(experiment.cells)}
        if done and new:
            known = pd.DataFrame(
                [{"max_steps": record["timing"]["steps"]} | record["config"] | record["timing"] for record in done]
            )
            known = known.assign(kind=[_without_seed(record["config"]) for record in done])
            took = known.groupby("kind")[["total_seconds", "max_steps"]].median()
            a_step = float((took["total_seconds"] / took["max_steps"]).mean())
            seconds = [
                took["total_seconds"].get(_without_seed(cell.config.result_settings()), a_step * cell.config.steps)
                for cell in new
            ]
            row |= {"seconds": sum(seconds) / len(new), "core_hours": sum(seconds) * experiment.processes / 3600}
        rows.append(row)
    return pd.DataFrame(rows).reindex(columns=["experiment", "cells", "finished", "of", "seconds", "core_hours"])


def _without_seed(config: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in config.items() if name != "seed"}, sort_keys=True)


def cost_of_larger_model(records: Iterable[dict]) -> dict[str, Any]:
    """Estimate how long a GPU would take to repeat the distinct finished runs with `LARGER_MODEL`.

    Each parameter of the blocks takes 6 operations per token in training, and 2 in each of the two evaluations (Kaplan
    et al. 2020, section 2.1). Evaluated texts count at full length; packet losses and messages do not count.
    Pretraining and runs of a model whose shape is unknown are left out.

    Returns:
        JSON-ready values: `model_name`, `times` (how many times the operations of the study's own runs, null without
        runs), `flops_per_s` (the assumed speed) and `hours` of one GPU.
    """
    own = other = 0.0
    shape = shape_of(LARGER_MODEL)
    assert shape is not None, LARGER_MODEL
    for record in _distinct_runs(records):
        config, timing = record["config"], record["timing"]
        if "test_examples" not in record["data"]:
            continue  # pretraining
        trained = timing["tokens_per_second"] * timing["train_seconds"]
        evaluated = 2 * record["data"]["test_examples"] * config["max_length"]
        a_parameter = 6 * trained + 2 * evaluated
        if (ours := shape_of(config["model_name"])) is not None:
            own += a_parameter * _block_parameters(ours)
            other += a_parameter * _block_parameters(shape)
    gpu = {"flops_per_s": GPU_FLOPS_PER_S, "hours": other / GPU_FLOPS_PER_S / 3600}
    return {"model_name": LARGER_MODEL, "times": other / own if own else None, **gpu}


def _block_parameters(shape: Shape) -> int:
    """Count the blocks' weights: 4 squares of the width in attention and 8 in the MLP."""
    return 12 * shape.layers * shape.width**2
