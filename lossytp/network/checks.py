"""Check arguments, and read notations such as ``fec(10, 8)``. A message names the value, the bound and the fix."""

import ast
import difflib
import functools
import inspect
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any, TypeGuard, TypeVar

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


# Build objects from one line of text, as in a flag or a YAML file: ``fec(10, 8, depth=4)``.


T = TypeVar("T")
LONGEST = 500


def parse(kind: str, text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the name, the values and the named values of ``name`` or ``name(1, two=2)``.

    Raises:
        TypeError: if `text` is not a str.
        ValueError: if `text` has another form; the message names the `kind`.
    """
    check_is(kind, text, str, "a name, or name(1, option=2)")
    problem = ValueError(
        f"{kind} = {text!r} is not understood: write a name, or name(1, option=2) with plain values; names with a "
        "hyphen take none"
    )
    if re.fullmatch(r"[\w-]+", text.strip()):
        return text.strip(), [], {}
    if len(text) > LONGEST:
        raise ValueError(f"{kind} = {text[:40]!r}... has {len(text)} characters: give at most {LONGEST}")
    try:
        expression = ast.parse(text.strip(), mode="eval").body
        if not isinstance(expression, ast.Call) or not isinstance(expression.func, ast.Name):
            raise problem
        values = [ast.literal_eval(value) for value in expression.args]
        named = {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in expression.keywords}
        if len(named) < len(expression.keywords):
            raise problem
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise problem from error
    return expression.func.id, values, named


def split_outside_parentheses(text: str, mark: str) -> list[str]:
    """Split `text` at each `mark` that is not within parentheses, and strip the parts."""
    found, depth = [""], 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == mark and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [part.strip() for part in found]


def build(kind: str, text: str, known: Mapping[str, Callable[..., T]], given: Mapping[str, Any] | None = None) -> T:
    """Return what `text` names: ``known[name]`` called with its values.

    Args:
        kind: what the text names, for messages.
        text: the name, with values.
        known: callables by name.
        given: settings from elsewhere, by name, for parameters that the text leaves open. A setting of 0 keeps a
            parameter's default; settings of None and 0 may stay unused.

    Raises:
        ValueError: if the name is unknown, if its signature does not take a value or a setting, if the text and a
            setting give the same parameter, or if the callable raises one.
    """
    name, values, named = parse(kind, text)
    check_known(kind, name, known)
    signature = _signature(known[name])
    parameters = signature.parameters
    takes = f"{name} takes " + (", ".join(str(parameter) for parameter in parameters.values()) or "no values")
    try:
        settled = signature.bind_partial(*values, **named).arguments
        for setting, value in (given or {}).items():
            if setting in parameters and setting not in settled:
                if value or (value is not None and parameters[setting].default is inspect.Parameter.empty):
                    named[setting] = value
            elif value:
                conflict = "is also given in" if setting in parameters else "does not apply to"
                raise ValueError(f"{setting} = {value!r} {conflict} {kind} = {text!r}: leave it out; {takes}")
        signature.bind(*values, **named)
    except TypeError as error:
        raise ValueError(f"{kind} = {text!r}: {error}; {takes}") from error
    try:
        return known[name](*values, **named)
    except ValueError as error:
        if "(" in text:  # without values in the text, the wrong one came from elsewhere
            raise ValueError(f"{kind} = {text!r}: {error}") from error
        raise
    except TypeError as error:  # a value of another type than its parameter's
        raise ValueError(f"{kind} = {text!r}: {error}; {takes}") from error


_signature = functools.cache(inspect.signature)  # a study builds thousands
