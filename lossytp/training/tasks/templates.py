"""Make a row's text from a template over its columns, such as "{premise}", or with a function of the row."""

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


def check_has_text(rows: "Dataset", templates: Iterable[Text], where: str) -> None:
    """Check that every column that a template names has text in some row.

    Args:
        rows: all rows of a split; a small sample may well be blank.
        templates: the templates; functions among them are not checked.
        where: the split and its source, for the message.

    Raises:
        ValueError: if a column is null or blank in all rows.
    """
    for column in sorted(set().union(*map(_columns, templates))):
        if column in rows.column_names and len(rows) and not any(map(_is_filled, rows[column])):
            raise ValueError(f"column {column!r} is empty in all {len(rows)} rows of {where}: give text")


def check_template(name: str, template: str) -> None:
    """Raise ValueError if the template is malformed, or names no column."""
    try:
        columns = [column for _, column, _, _ in Formatter().parse(template) if column is not None]
    except ValueError as error:
        raise ValueError(
            f"{name} = {template[:SHOWN]!r} is malformed ({error}): pair the braces, and double those of the text"
        ) from None
    if name == "body" and not columns:
        raise ValueError(f"{name} = {template[:SHOWN]!r} names no column: write one in braces, such as {{text}}")
    if "" in columns or any(column.isdigit() for column in columns):
        raise ValueError(f"{name} = {template[:SHOWN]!r} has braces without a column: write one, such as {{text}}")


class _Texts:
    """Look up a row's columns for a template, and refuse values that are not text."""

    def __init__(self, row: Row) -> None:
        self._row = row

    def __getitem__(self, column: str) -> "str | _Other":
        value = self._row[column]
        return (value or "") if isinstance(value, str | None) else _Other(column, value)


class _Other:
    """A value that is not text. It is refused unless the template converts or formats it: {stars!s}, {price:.2f}."""

    def __init__(self, column: str, value: Any) -> None:
        self._column, self._value = column, value

    def __str__(self) -> str:
        return str(self._value)

    def __format__(self, layout: str) -> str:
        if not layout:
            raise ValueError(
                f"column {self._column!r} holds {str(self)[:SHOWN]!r}, which is not text: name a column of text, or "
                f"write {{{self._column}!s}} to read the value as text"
            )
        return format(self._value, layout)


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
