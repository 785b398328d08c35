"""Match the values of a label column with a task's classes or options."""

import math
from functools import lru_cache
from typing import Any
from unicodedata import normalize


def name_of(value: Any) -> str:
    """Return a label as the name of a class. A column with gaps holds 3.0 in place of 3, and both become "3"."""
    name = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    return normalize("NFC", name)  # an accent can be written in two ways that look the same


def number_of(value: Any) -> float | None:
    """Return the number that a value is or spells, such as 1 for "01" or "true"; None if that is no finite number."""
    word = str(value).lower()
    try:
        number = float(word == "true" if word in ("true", "false") else value)
    except (ValueError, TypeError, OverflowError):
        return None
    return number if math.isfinite(number) else None


@lru_cache
def _classes(labels: tuple[str, ...]) -> tuple[dict[str | float | None, int], int]:
    """Return the classes by their names and by the numbers that they spell, and how many may be given by their index.

    None may if a name looks like an index: of the classes 1, 2 and 3, is 1 the first or the second?
    """
    numbers = [number_of(label) for label in labels]
    known: dict[str | float | None, int] = {
        n: i for i, n in enumerate(numbers) if n is not None and numbers.count(n) == 1
    }
    known |= {name_of(label): index for index, label in enumerate(labels)}
    return known, 0 if set(numbers).intersection(range(len(labels))) else len(labels)


def class_of(value: Any, labels: tuple[str, ...]) -> int | None:
    """Return the index of a class, given its name or index; None for no label."""
    if value is None:
        return None
    known, indices = _classes(labels)
    found = known.get(name_of(value), known.get(number_of(value)))
    return index_of(value, indices, f"a class of {', '.join(labels)}") if found is None else found


def index_of(value: Any, number: int, meaning: str) -> int | None:
    """Return an index that is given as a number or as digits; None for values that mean no label.

    Raises:
        ValueError: if the value is not an index below `number`; `meaning` names what it should be.
    """
    index = number_of(value)
    if value is None or value == "" or index == -1:
        return None
    if index is None or not index.is_integer() or not 0 <= index < number:
        raise ValueError(f"label {value!r} is not {meaning}: give one that is, or leave out such rows")
    return int(index)
