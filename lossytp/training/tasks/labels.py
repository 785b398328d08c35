"""Match the values of a label column with a task's classes or options."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

LONGEST_LIST = 8  # values that a message lists


def name_of(value: Any) -> str:
    """Return a label as the name of a class. A csv column with gaps holds 3.0 in place of 3, and both become "3"."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def class_of(value: Any, labels: Sequence[str]) -> int | None:
    """Return the index of a class, given its name or index; None for no label."""
    name = name_of(value)
    return labels.index(name) if name in labels else index_of(value, len(labels), f"a class of {', '.join(labels)}")


def index_of(value: Any, number: int, meaning: str) -> int | None:
    """Return an index that is given as a number or as digits; None for values that mean no label.

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
    """Check that the label column names every class in some training row. A misspelt class has no row.

    Args:
        rows: all training rows; a sample may well lack a class.
        column: the column of labels. If it is missing or holds indices, nothing is checked.
        labels: the names of the classes.
        where: the split and its source, for the message.

    Raises:
        ValueError: if a class has no row.
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
