"""What the study's questions cost: runs times the seconds they were measured to take."""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from lossytp.study.grid import Experiment


def budget(
    experiments: Iterable[Experiment], tables: Mapping[str, pd.DataFrame], records: Mapping[str, list[dict]]
) -> pd.DataFrame:
    """One row an experiment, in their order: what it adds to those before it.

    Args:
        experiments: of one profile.
        tables, records: from `records.read_experiment`, by the experiment's name.

    Columns: `experiment`; `cells`, those that no experiment before it has; `finished`, how many of all its cells are,
    and `of`, how many these are; `seconds`, what a cell takes, the mean over arms of their runs' medians (one that was
    suspended tells nothing of the others); `core_hours`, cells times seconds times the processes of each. The last two
    are missing where no cell is finished.
    """
    rows, before = [], frozenset[str]()
    for experiment in experiments:
        added, before = experiment.folders - before, before | experiment.folders
        row: dict[str, Any] = {"experiment": experiment.name, "cells": len(added)}
        row |= {"finished": len(records[experiment.name]), "of": len(experiment.cells)}
        seconds = pd.Series([record["timing"]["total_seconds"] for record in records[experiment.name]], dtype=float)
        if len(seconds):
            row["seconds"] = float(seconds.groupby(tables[experiment.name]["arm"].to_numpy()).median().mean())
            row["core_hours"] = len(added) * row["seconds"] * experiment.processes / 3600
        rows.append(row)
    return pd.DataFrame(rows).reindex(columns=["experiment", "cells", "finished", "of", "seconds", "core_hours"])
