"""What the study's questions cost: runs times the seconds they were measured to take."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from lossytp.study.grid import Experiment
from lossytp.training.models import Shape, shape_of
from lossytp.training.record import portable

GPU_FLOPS_PER_S = 1e13  # what a GPU may sustain on batches as small as the study's; no measurement


def budget(experiments: Iterable[Experiment], records: Mapping[str, list[dict]]) -> pd.DataFrame:
    """One row an experiment, in their order: what it adds to those before it.

    Args:
        experiments: of one profile.
        records: of their finished cells, by the experiment's name.

    Columns: `experiment`; `cells`, those that no experiment before it has; `finished`, how many of all its cells are,
    and `of`, how many these are; `core_hours` of its cells, finished or not, and `seconds`, the mean of them. A cell
    takes what cells that differ only in the seed took, their median (one that was suspended tells nothing of the
    others); where none is finished, its steps times the mean seconds a step of the experiment's others. Missing where
    there are no others.
    """
    rows, before = [], frozenset[str]()
    for experiment in experiments:
        added = [cell for cell in experiment.cells if cell.config.output_dir not in before]
        before |= experiment.folders
        done = records[experiment.name]
        row: dict[str, Any] = {"experiment": experiment.name, "cells": len(added)}
        row |= {"finished": len(done), "of": len(experiment.cells)}
        if done and added:
            known = pd.DataFrame([record["config"] | record["timing"] for record in done])
            known = known.assign(kind=[_kind(record["config"]) for record in done])
            took = known.groupby("kind")[["total_seconds", "max_steps"]].median()
            a_step = float((took["total_seconds"] / took["max_steps"]).mean())
            seconds = [
                took["total_seconds"].get(_kind(portable(cell.config)), a_step * cell.config.max_steps)
                for cell in added
            ]
            row |= {"seconds": sum(seconds) / len(added), "core_hours": sum(seconds) * experiment.processes / 3600}
        rows.append(row)
    return pd.DataFrame(rows).reindex(columns=["experiment", "cells", "finished", "of", "seconds", "core_hours"])


def larger(records: Iterable[dict], model_name: str = "gpt2") -> dict[str, Any]:
    """What arithmetic the finished runs would be with a larger model, and how long it takes a GPU; JSON-ready.

    A run that several experiments have counts once. Each parameter of the blocks takes 6 operations a token in
    training, and 2 in each of the two evaluations (Kaplan et al. 2020, section 2.1), whose texts are taken to be of
    full length; runs of a model on the hub whose shape is not known are left out. `times` is how many times the
    operations of the runs themselves it is, `hours` what it takes at `flops_per_s`, losses and messages not counted.
    """
    own = other = 0.0
    shape = shape_of(model_name)
    assert shape is not None, model_name
    for record in {json.dumps([each["config"], each["processes"]]): each for each in records}.values():
        config, timing = record["config"], record["timing"]
        trained = timing["tokens_per_second"] * timing["train_seconds"]
        evaluated = 2 * record["data"]["test_examples"] * config["max_length"]
        a_parameter = 6 * trained + 2 * evaluated
        if (ours := shape_of(config["model_name"])) is not None:
            own += a_parameter * _parameters(ours)
            other += a_parameter * _parameters(shape)
    hours = other / GPU_FLOPS_PER_S / 3600
    times = other / own if own else None
    return {"model_name": model_name, "times": times, "flops_per_s": GPU_FLOPS_PER_S, "hours": hours}


def _parameters(shape: Shape) -> int:
    """Of the blocks' matrices: attention's 4 and the MLP's 8 squares of the width."""
    return 12 * shape.layers * shape.width**2


def _kind(config: dict[str, Any]) -> str:
    """All but the seed."""
    return json.dumps({name: value for name, value in config.items() if name != "seed"}, sort_keys=True)
