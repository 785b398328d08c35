"""Text of a row: a template over the row's columns, such as "{premise}", or a function of the row."""

import re
from collections.abc import Callable, Iterable
from string import Formatter
from typing import TYPE_CHECKING, Any

from lossytp.training.tasks.sources import Row

if TYPE_CHECKING:
    from datasets import Dataset

Text = str | Callable[[Row], str]
SHOWN = 60  # characters of a wrong value


def text_of(template: Text, row: Row) -> str:
    """Return the row's text, without blanks at its end; a null counts as "".

    Raises:
        KeyError: where the row lacks a column.
        ValueError: where a column, or the function's result, is no text.
    """
    if not callable(template):
        return template.format_map(_Texts(row)).rstrip()
    text = template(row)
    if not isinstance(text, str):
        raise ValueError(f"{str(text)[:SHOWN]!r}, which a function made of the row, is no text: give a str")
    return text.rstrip()


def check_filled(rows: "Dataset", templates: Iterable[Text], where: str) -> None:
    """Raise ValueError for a column that a template names and that is null or blank in all rows.

    Args:
        rows: all rows of a split, since a sample of a few may well be blank.
        where: the split and its source, for the error.
    """
    for column in sorted(set().union(*map(_columns, templates))):
        if column in rows.column_names and len(rows) and not any(map(_is_filled, rows[column])):
            raise ValueError(f"column {column!r} is empty in all {len(rows)} rows of {where}: give text")


class _Texts:
    """Give a template a row's columns of text."""

    def __init__(self, row: Row) -> None:
        self._row = row

    def __getitem__(self, column: str) -> str:
        value = self._row[column]
        if not isinstance(value, str | None):
            raise ValueError(
                f"column {column!r} holds {str(value)[:SHOWN]!r}, which is no text: name a column of text, or give a "
                f"function, such as lambda row: str(row[{column!r}])"
            )
        return value or ""


def _columns(template: Text) -> set[str]:
    """Return the columns that a template names; none of a function, or of what is no template, as the rows will say."""
    if callable(template):
        return set()
    try:
        return {re.split(r"[.\[]", name)[0] for _, name, _, _ in Formatter().parse(template) if name}
    except ValueError:
        return set()


def _is_filled(value: Any) -> bool:
    return value.strip() != "" if isinstance(value, str) else value is not None
