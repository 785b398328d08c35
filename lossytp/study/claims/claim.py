"""Share what claims need: their type, and rows of the results. Falls are in points, rises in nats a token."""

from typing import Any, NamedTuple

from lossytp.study.analysis.real_model import USUAL
from lossytp.study.statistics import CONFIDENCE

POINTS = 100
Results = dict[str, Any]


class Claim(NamedTuple):
    """Whether a claim's sentence is true, and the numbers that decide."""

    holds: bool
    numbers: dict[str, float]


def tasks(results: Results) -> list[str]:
    """Return the names of the study's tasks."""
    return list(results["tasks"])


def row_of(
    rows: list[dict[str, Any]], task: str, arm: str | None = None, loss_rate: float | None = None
) -> dict[str, Any]:
    """Return the row of a task and, if given, arm and loss rate.

    Raises:
        ValueError: if there is not exactly one.
    """
    found = [
        row
        for row in rows
        if row["task"] == task and arm in (None, row["arm"]) and loss_rate in (None, row["loss_rate"])
    ]
    if len(found) != 1:
        raise ValueError(
            f"{len(found)} rows of {task} are of arm {arm!r} and loss rate {loss_rate}: give one that is there"
        )
    return found[0]


def real_row(results: Results, **wanted: Any) -> dict[str, Any]:
    """Return the real model's one row with these values, of the usual network where they do not say otherwise."""
    wanted = USUAL | wanted
    (row,) = (row for row in results["real_model"] if all(row[name] == value for name, value in wanted.items()))
    return dict(row)


def better(row: dict[str, Any], name: str) -> bool:
    """Return whether a row's column is positive, and shown to be."""
    return bool(row[name] > 0 and shown(row[f"{name}_p_holm"]))


def shown(p: float | None) -> bool:
    """Return whether a corrected p-value shows a difference; null stands for a test that was not possible."""
    return p is not None and p < 1 - CONFIDENCE
