"""Check arguments, and read notations such as ``fec(10, 8)``. A message names the value, the bound and the fix."""

import ast
import difflib
import inspect
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any, TypeGuard, TypeVar

LONGEST_SHOWN = 80
LONGEST_REFUSED = 4 * LONGEST_SHOWN  # a path
LONGEST_NOTATION = 500
BRIEF = reprlib.Repr()  # a few references of YAML can make a list of 10^9 items
BRIEF.maxlevel, BRIEF.maxlist, BRIEF.maxtuple, BRIEF.maxdict = 4, 20, 20, 20
BRIEF.maxstring = BRIEF.maxlong = BRIEF.maxother = 10 * LONGEST_SHOWN
T = TypeVar("T")


def shown(value: object, longest: int = LONGEST_SHOWN) -> str:
    """Return `value` as a message shows it: on one line, and cut if it is long."""
    text = " ".join(BRIEF.repr(value).split())
    return text if len(text) <= longest else f"{text[:longest]}..."


def printable(text: object, longest: int = 4 * LONGEST_SHOWN) -> str:
    """Return text that others wrote, on one line and cut if it is long, with escapes for what does not print."""
    signs = [sign if sign.isprintable() else ascii(sign)[1:-1] for sign in str(text)[: longest + 1]]
    return "".join(signs if len(signs) <= longest else [*signs[:longest], "..."])


def is_finite(value: object) -> TypeGuard[float]:
    """Return whether `value` is a finite number, and not a bool."""
    whole = isinstance(value, Integral)  # no float holds a very large one
    return isinstance(value, Real) and not isinstance(value, bool) and (whole or math.isfinite(value))


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


def refuse_if(wrong: object, name: str, value: object, fault: str) -> None:
    """Raise ValueError if a condition is `wrong`; `fault` follows the value, such as "is above 3: give 3 or less"."""
    if wrong:
        longest = LONGEST_REFUSED if isinstance(value, str) else LONGEST_SHOWN
        raise ValueError(f"{name} = {shown(value, longest)} {fault}")


def check_probability(name: str, value: float) -> None:
    """Raise ValueError unless `value` lies in [0, 1]."""
    wrong = not is_finite(value) or not 0 <= value <= 1
    refuse_if(wrong, name, value, "is not in [0, 1]: give a fraction, such as 0.01 for 1 %")


def check_at_least(name: str, value: object, least: int) -> None:
    """Raise ValueError unless `value` is a whole number of at least `least`."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    refuse_if(not whole, name, value, f"is not a whole number: give one, {least} or more")
    refuse_if(value < least, name, value, f"is below {least}: give {least} or more")  # type: ignore[operator]


def check_at_most(name: str, value: float, most: float, fix: str = "a smaller one") -> None:
    """Raise ValueError if a number is above `most`; `fix` follows "give"."""
    refuse_if(not value <= most, name, value, f"is above {most}: give {fix}")


def check_positive(name: str, value: object, unit: str) -> None:
    """Raise ValueError unless `value` is a finite number above 0."""
    wrong = not is_finite(value) or value <= 0
    refuse_if(wrong, name, value, f"is not a finite number above 0: give a number of {unit}")


def check_filled(name: str, values: object) -> None:
    """Raise ValueError unless `values` is a list or a tuple with at least one value."""
    filled = isinstance(values, list | tuple) and bool(values)
    refuse_if(not filled, name, values, "is not a list of at least one value: give one")


def check_known(name: str, value: object, known: Iterable[object]) -> None:
    """Raise ValueError if `value` is not among the `known` names."""
    names = list(known)
    shown_names = ", ".join(str(each) for each in names if each is not None)
    refuse_if(value not in names, name, value, f"is unknown: choose one of {shown_names}")


def check_names(given: Iterable[object], known: Iterable[str]) -> None:
    """Raise ValueError if a given name is not `known`; the message suggests the closest one."""
    names = list(known)
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(names)}"
            raise ValueError(f"unknown parameter {name!r}: {hint}")


# Build objects from one line of text, as in a flag or a YAML file: ``fec(10, 8, depth=4)``.


def parse(kind: str, text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the name, the values and the named values of ``name`` or ``name(1, two=2)``.

    Raises:
        TypeError: if `text` is not a str.
        ValueError: if `text` has another form; the message names the `kind`.
    """
    check_is(kind, text, str, "a name, or name(1, option=2)")
    if re.fullmatch(r"[\w-]+", text.strip()):
        return text.strip(), [], {}
    try:
        match ast.parse(text.strip()[: LONGEST_NOTATION + 1], mode="eval").body:
            case ast.Call(func=ast.Name(id=name), args=values, keywords=named):
                options = {str(each.arg): ast.literal_eval(each.value) for each in named}
                if len(options) == len(named):
                    return name, [ast.literal_eval(value) for value in values], options
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        pass
    raise ValueError(
        f"{kind} = {shown(text)} is not understood: write a name, or name(1, option=2) with plain values, in at most "
        f"{LONGEST_NOTATION} characters; names with a hyphen take none"
    )


def split_outside_parentheses(text: str, separator: str) -> list[str]:
    """Split `text` at each `separator` that is not within parentheses, and strip the parts."""
    found, depth = [""], 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == separator and depth == 0:
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
    signature = inspect.signature(known[name])
    try:
        taken = signature.bind_partial(*values, **named).arguments
        for setting, value in (given or {}).items():
            parameter = signature.parameters.get(setting)
            if parameter and setting not in taken:
                if value or (value is not None and parameter.default is inspect.Parameter.empty):
                    named[setting] = value
            elif value:
                raise TypeError(f"{setting} = {value!r} {'is given twice' if parameter else 'does not apply to it'}")
        signature.bind(*values, **named)
        return known[name](*values, **named)
    except TypeError as error:  # also from the callable: a value of another type than its parameter's
        takes = ", ".join(map(str, signature.parameters.values())) or "no values"
        raise ValueError(f"{kind} = {text!r}: {error}; {name} takes {takes}") from error
    except ValueError as error:
        if "(" not in text:  # without values in the text, the wrong one came from elsewhere
            raise
        raise ValueError(f"{kind} = {text!r}: {error}") from error
