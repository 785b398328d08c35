"""Make a row's text from a template over its columns, such as "{premise}", or by a function of the row."""

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
    """Return the row's text, without trailing white space; a null counts as "".

    Raises:
        KeyError: if the row lacks a column.
        ValueError: if a column, or the function's result, is not text.
    """
    if not callable(template):
        return template.format_map(_Texts(row)).rstrip()
    text = template(row)
    if not isinstance(text, str):
        raise ValueError(f"a function returned {str(text)[:SHOWN]!r} for the row, which is not text: return a str")
    return text.rstrip()


def check_filled(rows: "Dataset", templates: Iterable[Text], where: str) -> None:
    """Check that no column that a template names is null or blank in all rows.

    Args:
        rows: all rows of a split; a small sample may well be blank.
        templates: the templates; functions among them are not checked.
        where: the split and its source, for the message.

    Raises:
        ValueError: if there is such a column.
    """
    for column in sorted(set().union(*map(_columns, templates))):
        if column in rows.column_names and len(rows) and not any(map(_is_filled, rows[column])):
            raise ValueError(f"column {column!r} is empty in all {len(rows)} rows of {where}: give text")


class _Texts:
    """Look up a row's columns for a template, and refuse values that are not text."""

    def __init__(self, row: Row) -> None:
        self._row = row

    def __getitem__(self, column: str) -> str:
        value = self._row[column]
        if not isinstance(value, str | None):
            raise ValueError(
                f"column {column!r} holds {str(value)[:SHOWN]!r}, which is not text: name a column of text, or give a "
                f"function, such as lambda row: str(row[{column!r}])"
            )
        return value or ""


def _columns(template: Text) -> set[str]:
    """Return the columns that a template names; none for a function, or for a malformed template, which fails later."""
    if callable(template):
        return set()
    try:
        return {re.split(r"[.\[]", name)[0] for _, name, _, _ in Formatter().parse(template) if name}
    except ValueError:
        return set()


def _is_filled(value: Any) -> bool:
    return value.strip() != "" if isinstance(value, str) else value is not None
