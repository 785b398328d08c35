"""Things named in one line of text, as a flag or a YAML file gives them: ``fec(10, 8, depth=4)``."""

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lossytp.network.checks import check_known

T = TypeVar("T")


def parse(kind: str, text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """``name`` or ``name(1, two=2)`` as name, values and named values; ValueError, naming the `kind`, otherwise."""
    problem = ValueError(f"{kind} = {text!r} is not understood: write a name, or name(1, option=2) with plain values")
    if re.fullmatch(r"[\w-]+", text.strip()):
        return text.strip(), [], {}
    try:
        expression = ast.parse(text.strip(), mode="eval").body
        if not isinstance(expression, ast.Call) or not isinstance(expression.func, ast.Name):
            raise problem
        values = [ast.literal_eval(value) for value in expression.args]
        named = {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in expression.keywords}
    except (SyntaxError, ValueError) as error:
        raise problem from error
    return expression.func.id, values, named


def build(kind: str, text: str, known: Mapping[str, Callable[..., T]]) -> T:
    """What `text` names: ``known[name]`` called with its values.

    Raises ValueError for an unknown name, for values that its signature does not take, and whatever it raises itself.
    """
    name, values, named = parse(kind, text)
    check_known(kind, name, known)
    signature = inspect.signature(known[name])
    try:
        signature.bind(*values, **named)
    except TypeError as error:
        takes = ", ".join(str(parameter) for parameter in signature.parameters.values()) or "no values"
        raise ValueError(f"{kind} = {text!r}: {error}; {name} takes {takes}") from error
    return known[name](*values, **named)
