"""Build objects from one line of text, as in a flag or a YAML file: ``fec(10, 8, depth=4)``."""

import ast
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lossytp.network.checks import check_is, check_known

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
