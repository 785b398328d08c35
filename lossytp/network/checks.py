"""Check arguments. Each message names the value, the bound and the fix, in one line."""

import difflib
import math
import reprlib
from collections.abc import Iterable
from numbers import Integral, Real
from typing import TypeGuard

LONGEST_SHOWN = 80
BRIEF = reprlib.Repr()  # a few references of YAML can make a list of 10^9 items
BRIEF.maxlevel, BRIEF.maxlist, BRIEF.maxtuple, BRIEF.maxdict = 4, 20, 20, 20
BRIEF.maxstring = BRIEF.maxlong = BRIEF.maxother = 10 * LONGEST_SHOWN


def shown(value: object) -> str:
    """Return `value` as a message shows it: on one line, and cut if it is long."""
    text = " ".join(BRIEF.repr(value).split())
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def printable(text: object, longest: int = 4 * LONGEST_SHOWN) -> str:
    """Return text that others wrote, on one line and cut if it is long, with escapes for what does not print."""
    signs = [sign if sign.isprintable() else ascii(sign)[1:-1] for sign in str(text)[: longest + 1]]
    return "".join(signs if len(signs) <= longest else [*signs[:longest], "..."])


def check_is(name: str, value: object, kind: type | tuple[type, ...], fix: str) -> None:
    """Raise TypeError unless `value` is an instance of `kind`; `fix` follows "give"."""
    if not isinstance(value, kind):
        wanted = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
        raise TypeError(f"{name} = {shown(value)} is of type {type(value).__name__}, not {wanted}: give {fix}")


def check_bool(name: str, value: object) -> None:
    """Raise TypeError unless `value` is True or False: the text "false" would count as true."""
    check_is(name, value, bool, "True or False")


def check_number(name: str, value: object, kind: type, fix: str) -> None:
    """Raise TypeError unless `value` is a number of `kind` (Integral or Real), not a bool; `fix` follows "give"."""
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} = {shown(value)} is not a {'whole ' if kind is Integral else ''}number: give {fix}")


def check_probability(name: str, value: float) -> None:
    """Raise ValueError unless `value` lies in [0, 1]."""
    if not is_finite(value) or not 0 <= value <= 1:
        raise ValueError(f"{name} = {shown(value)} is not in [0, 1]: give a fraction, such as 0.01 for 1 %")


def check_known(name: str, value: object, known: object) -> None:
    """Raise ValueError unless `value` is among the `known` names."""
    names = list(known)  # type: ignore[call-overload]
    if value not in names:
        raise ValueError(f"{name} = {shown(value)} is unknown: choose one of {', '.join(map(str, names))}")


def check_names(given: Iterable[object], known: Iterable[str]) -> None:
    """Raise ValueError if a given name is not `known`; the message suggests the closest one."""
    names = list(known)
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(names)}"
            raise ValueError(f"unknown parameter {name!r}: {hint}")


def check_at_least(name: str, value: object, least: int) -> None:
    """Raise ValueError unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} = {shown(value)} is not a whole number: give one, {least} or more")
    if value < least:
        raise ValueError(f"{name} = {shown(value)} is below {least}: give {least} or more")


def check_at_most(name: str, value: float, most: int, fix: str = "a smaller one") -> None:
    """Raise ValueError if a number is above `most`; `fix` follows "give"."""
    if value > most:
        raise ValueError(f"{name} = {shown(value)} is above {most}: give {fix}")


def check_positive(name: str, value: object, unit: str) -> None:
    """Raise ValueError unless `value` is a finite number above 0."""
    if not is_finite(value) or value <= 0:
        raise ValueError(f"{name} = {shown(value)} is not a finite number above 0: give a number of {unit}")


def check_not_negative(name: str, value: object, unit: str) -> None:
    """Raise ValueError unless `value` is a finite number of at least 0."""
    if not is_finite(value) or value < 0:
        known = isinstance(value, Real) and not isinstance(value, bool) and value == value  # NaN differs from itself
        fault = "negative or infinite" if known else "not a number"
        raise ValueError(f"{name} = {shown(value)} is {fault}: give 0 {unit} or more")


def check_filled(name: str, values: object) -> None:
    """Raise ValueError unless `values` is a list or a tuple with at least one value."""
    if not isinstance(values, list | tuple) or not values:
        raise ValueError(f"{name} = {shown(values)} is not a list of at least one value: give one")


def is_finite(value: object) -> TypeGuard[float]:
    """Return whether `value` is a finite number, and not a bool."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return isinstance(value, Integral) or math.isfinite(value)  # no float holds a very large whole number
