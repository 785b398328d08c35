"""What the study's questions cost: runs times the seconds they were measured to take."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from lossytp.study.grid import Experiment
from lossytp.training.record import portable


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


def _kind(config: dict[str, Any]) -> str:
    """All but the seed."""
    return json.dumps({name: value for name, value in config.items() if name != "seed"}, sort_keys=True)
