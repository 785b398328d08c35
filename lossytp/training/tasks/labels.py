"""Match the values of a label column with a task's classes or options."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

LONGEST_LIST = 8  # values that a message lists


def name_of(value: Any) -> str:
    """Return a label as a class's name. In a csv 3 is "3", and so is 3.0, as a column with gaps reads it."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def class_of(value: Any, labels: Sequence[str]) -> int | None:
    """Return the index of the class that a column names, or whose index it gives; None for no label."""
    name = name_of(value)
    return labels.index(name) if name in labels else index_of(value, len(labels), f"a class of {', '.join(labels)}")


def index_of(value: Any, number: int, meaning: str) -> int | None:
    """Return the index that a column gives as a number or as digits; None for values that stand for no label.

    Raises:
        ValueError: if the value is not an index below `number`; `meaning` names what it should be.
    """
    if value is None or value in ("", -1, "-1"):
        return None
    try:
        index = int(value)
        whole = index == float(value)
    except (ValueError, TypeError, OverflowError):
        whole = False
    if not (whole and 0 <= index < number):
        raise ValueError(f"label {value!r} is not {meaning}: give one that is, or leave out such rows")
    return index


def check_all_occur(rows: "Dataset", column: str, labels: Sequence[str], where: str) -> None:
    """Check that every class is named in a training row, if the column names classes: a misspelt one is not.

    Args:
        rows: all training rows; a sample may well lack a class.
        column: the column of labels. If it is missing, or gives indices, there is nothing to check.
        labels: the names of the classes.
        where: the split and its source, for the message.

    Raises:
        ValueError: if a class is not named.
    """
    values = sorted({name_of(value) for value in rows[column]}) if column in rows.column_names else []
    if not set(labels).intersection(values):
        return
    for label in labels:
        if label not in values:
            shown = ", ".join(values[:LONGEST_LIST]) + (", ..." if len(values) > LONGEST_LIST else "")
            raise ValueError(
                f"label {label!r} does not occur in column {column!r} of {where}, which holds {shown}: correct it, or "
                "leave it out"
            )
