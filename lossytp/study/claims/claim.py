"""Share what claims need: their type, and rows of the results. Falls are in points, rises in nats a token."""

from collections.abc import Iterable
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


def rows_of(rows: Iterable[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """Return the rows that have the wanted values."""
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def row_of(rows: Iterable[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """Return the row that has the wanted values.

    Raises:
        ValueError: if there is not exactly one.
    """
    found = rows_of(rows, **wanted)
    if len(found) != 1:
        raise ValueError(f"{len(found)} rows have {wanted}: give values that one row has")
    return found[0]


def real_row(results: Results, **wanted: Any) -> dict[str, Any]:
    """Return the real model's one row with these values, of the usual network where they do not say otherwise."""
    return row_of(results["real_model"], **USUAL | wanted)


def better(row: dict[str, Any], name: str) -> bool:
    """Return whether a row's column is positive, and shown to be."""
    return bool(row[name] > 0 and shown(row[f"{name}_p_holm"]))


def shown(p: float | None) -> bool:
    """Return whether a corrected p-value shows a difference; null stands for a test that was not possible."""
    return p is not None and p < 1 - CONFIDENCE
