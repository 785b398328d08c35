"""Draw all figures, check all claims, and write the numbers of the paper."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from lossytp.study.grid import Experiment
from lossytp.study.tables import ACCURACIES
from lossytp.training.files import write_atomically
from lossytp.training.settings import without_obsolete
from paper.collectives import channel
from paper.comparisons import json_rows, speed_and_traffic
from paper.law import law
from paper.packet_size import together
from paper.parallelisms import implementations, parallelisms
from paper.predictions import predictions
from paper.pretraining import pretraining, pretraining_gpt2
from paper.price import price
from paper.real_model import real_model
from paper.real_training import real_training
from paper.repairs import comparisons
from paper.robustness import replicas, robustness
from paper.sizes import sizes
from paper.study import CLAIMS, HEADLINE, Claim, Results, Study
from paper.tolerance import tolerance
from paper.training_length import longer

# Summarise the study's own runs: how many, how repeatable, and at what cost.


NOT_TRAINING = ("save_model", "eval_steps", "output_dir")  # settings that do not change training


def summarise_runs(records: list[dict]) -> dict[str, Any]:
    """Summarise all experiments' distinct runs: number, packets, core hours and `repeatability`.

    Controls send no packets, so theirs do not count. Returns JSON-ready values.
    """
    records = _distinct_runs(records)
    with_packets = [record["network"]["training"] for record in records if not record["config"]["control"]]
    return {
        "cells": len(records),
        "packets": sum(traffic["packets"] for traffic in with_packets),
        "hours": sum(record["timing"]["total_seconds"] * record["processes"] for record in records) / 3600,
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
        A summary under `one` for pairs on one model of processor or GPU, and under `two` for pairs on two. It has the
        number of `pairs`, the number that `differ` in clean accuracy, and the largest difference in clean accuracy
        (`largest`) and in lossy accuracy (`largest_lossy`), as shares, or 0 without pairs.
    """
    trainings: dict[str, list[dict]] = {}
    for record in (record for record in records if record["final"]["accuracy_clean"] is not None):
        training = {name: value for name, value in record["config"].items() if name not in NOT_TRAINING}
        trainings.setdefault(f"{sorted(training.items())} {record['processes']}", []).append(record)
    differences: dict[str, list[np.ndarray]] = {"one": [], "two": []}
    for first, second in (pair for runs in trainings.values() for pair in combinations(runs, 2)):
        machines = [run["environment"] for run in (first, second)]
        processors = {(machine["processor"], machine.get("gpu")) for machine in machines}
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
        new = [cell for cell in experiment.cells if cell.config.output.output_dir not in earlier]
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
    return json.dumps(
        {name: value for name, value in without_obsolete(config).items() if name != "seed"}, sort_keys=True
    )


def runs(study: Study) -> dict[str, Any]:
    """Return what the runs themselves are: number, machines, repeatability, cost."""
    table = joined(study.tables).reset_index(drop=True).join(speed_and_traffic(study.every_record))
    write_atomically(study.results / "experiment_summary.csv", table.to_csv(index=False))
    return {
        "study": summarise_runs(study.every_record),
        "budget": json_rows(compute_hours(study.experiments.values(), study.records)),
    }


# The paper's claims: each with the condition on the results under which its sentence is true.
#
# A sentence stands in the paper as `#claim("name")[...]`. Typesetting stops if its condition does not hold, and names
# the claim, its numbers and the sentence.


QUESTIONS = (
    ("tolerance", "training_length", "robustness"),
    ("law", "packet_size", "predictions"),
    ("pretraining",),
    ("sizes",),
    ("real_model", "real_training"),
    ("repairs", "price"),
    ("parallelisms",),
)
"""Modules of `paper`, in the order in which paper.json has their claims."""


def claims() -> dict[str, Callable[[Results], Claim]]:
    """Return all claims by name, in the order of `QUESTIONS`."""
    number = {f"paper.{module}": number for number, modules in enumerate(QUESTIONS) for module in modules}
    ordered = sorted((number[condition.__module__], name) for name, condition in CLAIMS.items())
    return {name: CLAIMS[name] for _, name in ordered}


def check_claims(results: Results) -> dict[str, dict[str, Any]]:
    """Return, for each claim, whether it `holds` and its `numbers`."""
    checked = {}
    for name, condition in claims().items():
        try:
            checked[name] = condition(results)
        except (LookupError, StopIteration, ArithmeticError, TypeError, ValueError) as error:
            raise ValueError(
                f"the claim {name} cannot be checked ({error!r}): its results are missing or have another form; run "
                "the experiment that it needs"
            ) from error
    return {name: {"holds": claim.holds, "numbers": _finite(claim.numbers)} for name, claim in checked.items()}


def _finite(numbers: dict[str, float]) -> dict[str, float | None]:
    """Return the numbers with null for infinity, which JSON lacks."""
    return {name: number if math.isfinite(number) else None for name, number in numbers.items()}


SECTIONS: tuple[Callable[[Study], dict[str, Any]], ...] = (
    runs, tolerance, comparisons, law, predictions, together, longer, pretraining, pretraining_gpt2, sizes, real_model,
    real_training, parallelisms, implementations, replicas, robustness, price, channel,
)  # fmt: skip


OF_ANY_GRID = (runs, comparisons)


def make(study: Study) -> dict[str, Any]:
    """Draw all figures, check the claims of the paper's profile, and write and return paper.json.

    Grids of your own, without the study's headline, get the sections `OF_ANY_GRID` alone.
    """
    paper: dict[str, Any] = {}
    for section in SECTIONS if HEADLINE in study.experiments else OF_ANY_GRID:
        paper |= section(study)
    if study.profile == "paper":
        paper["claims"] = check_claims(paper)
    write_atomically(study.results / "paper.json", json.dumps(paper, indent=1, allow_nan=False) + "\n")
    return paper


def joined(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Join the tables of experiments, by name, and add a column `experiment`.

    Experiments without runs are left out, because their columns have no type and would turn whole numbers into floats.
    """
    return pd.concat([table.assign(experiment=name) for name, table in tables.items() if len(table)])
