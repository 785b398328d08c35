"""Make a row's text from a template over its columns, such as "{premise}", or with a function of the row."""

import re
from collections.abc import Callable
from functools import lru_cache
from string import Formatter
from typing import Any

from lossytp.training.tasks.sources import Row

Text = str | Callable[[Row], str]
SHOWN = 60  # characters of a wrong value


def text_of(template: Text, row: Row) -> str:
    """Return the row's text, without trailing white space; a null counts as "".

    Raises:
        KeyError: if the row lacks a column.
        ValueError: if a column, or the function's result, is not text.
    """
    if not callable(template):
        return "".join(literal + _cell(row, *cell) for literal, *cell in _parsed(template)).rstrip()
    text = template(row)
    if not isinstance(text, str):
        raise ValueError(f"a function returned {str(text)[:SHOWN]!r} for the row, which is not text: return a str")
    return text.rstrip()


def check_template(name: str, template: str) -> None:
    """Raise ValueError if the template is malformed, or names no column."""
    try:
        columns = [column for _, column, _, _ in _parsed(template) if column is not None]
    except ValueError as error:
        raise ValueError(f"{name} = {error}") from None
    if name == "body" and not columns:
        raise ValueError(f"{name} = {template[:SHOWN]!r} names no column: write one in braces, such as {{text}}")
    if "" in columns or any(column.isdigit() for column in columns):
        raise ValueError(f"{name} = {template[:SHOWN]!r} has braces without a column: write one, such as {{text}}")


def columns_of(*templates: Text) -> list[str]:
    """Return the columns that templates name; none for a function."""
    parsed = [_parsed(template) for template in templates if not callable(template)]
    return sorted({column for pieces in parsed for _, column, _, _ in pieces if column})


def is_filled(value: Any) -> bool:
    """Return whether a value is neither null nor blank."""
    return value.strip() != "" if isinstance(value, str) else value is not None


@lru_cache
def _parsed(template: str) -> tuple[tuple[str, str | None, str | None, str | None], ...]:
    """Return a template's pieces: a text, then a column, its layout and its conversion, which the last may lack."""
    shown = repr(template[:SHOWN])
    try:
        pieces = tuple(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{shown} is malformed ({error}): pair the braces, and double those of the text") from None
    if any(re.search(r"\d{4}", layout or "") for _, _, layout, _ in pieces):
        raise ValueError(f"{shown} has a width of 1000 or more: give at most 999")
    return pieces


def _cell(row: Row, column: str | None, layout: str | None, conversion: str | None) -> str:
    """Return the text of a column. A value that is not text needs a conversion or a layout: {stars!s}, {price:.2f}."""
    if column is None or row[column] is None:
        return ""
    value = row[column]
    if not (layout or conversion or isinstance(value, str)):
        raise ValueError(
            f"column {column!r} holds {str(value)[:SHOWN]!r}, which is not text: name a column of text, or write "
            f"{{{column}!s}} to read the value as text"
        )
    return format(Formatter().convert_field(value, conversion), layout or "")
