"""What every configuration can: read names and values, refuse what it does not know, and be written down.

Values come from the command line, a YAML file or a notebook's parameters. Importing this module costs no torch.
"""

import difflib
import functools
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from lossytp.network.checks import check_known

_hints: Callable[[Any], dict[str, Any]] = functools.cache(get_type_hints)  # a study makes thousands of configurations

TYPE_NAMES = {bool: "true or false", type(None): "nothing"}  # as an error calls them


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A frozen, typed configuration. ValueError, naming the field, for a value of another type than the field's."""

    def __post_init__(self) -> None:
        for field in fields(self):  # a class's own constants are no fields
            self.check_type(field.name, getattr(self, field.name))
        for field in fields(self):  # 8 and 8.0 are one configuration, with one hash
            value = getattr(self, field.name)
            if isinstance(value, int) and "float" in str(field.type):
                if abs(value) > sys.float_info.max:
                    raise ValueError(f"{field.name} = {value} is beyond a float's 1.8e308: give a smaller number")
                object.__setattr__(self, field.name, float(value))
            if field.name == "output_dir":
                object.__setattr__(self, field.name, _folder(value))

    def check_at_least_one(self, *names: str) -> None:
        """Raise ValueError where one of the fields is below 1; None passes."""
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value} is below 1: give a positive number")

    def check_not_negative(self, *names: str) -> None:
        """Raise ValueError where one of the fields is negative or not finite; None passes."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} = {value} is negative or not finite: give 0 or more")

    def check_positive(self, *names: str) -> None:
        """Raise ValueError where one of the fields is 0, negative or not finite; None passes."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} = {value} is not above 0 and finite: give such a number, or leave it out")

    def check_warmup(self, steps: str) -> None:
        """Raise ValueError where `warmup_steps` was chosen, and is above the field `steps`.

        The default may be above: a short trial keeps it, and ends while its learning rate still rises.
        """
        warmup, total = self.changes().get("warmup_steps", 0), getattr(self, steps)
        if warmup > total:
            raise ValueError(f"warmup_steps = {warmup} is above {steps} = {total}: give as many or fewer")

    def as_dict(self) -> dict[str, Any]:
        """Field names and values, JSON-ready."""
        return asdict(self)

    def changes(self) -> dict[str, Any]:
        """Names and values of the fields that are not at their default."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From names and values; ValueError names an unknown one and the closest that there is."""
        cls.check_names(values)
        return cls(**values)

    @classmethod
    def check_names(cls, values: Mapping[str, Any]) -> None:
        """Raise ValueError for a name that is no field."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
                raise ValueError(f"unknown parameter {name!r}: {hint}")

    @classmethod
    def check_type(cls, name: str, value: Any) -> None:
        """Raise ValueError where the value is of another type than the field `name`.

        Values from YAML or a notebook carry no types of their own.
        """
        hint = _hints(cls)[name]
        if get_origin(hint) is Literal:
            check_known(name, value, get_args(hint))
            return
        allowed = get_args(hint) or (hint,)
        matches = isinstance(value, (*allowed, int) if float in allowed else allowed)
        if not matches or (isinstance(value, bool) and bool not in allowed):
            expected = " or ".join(TYPE_NAMES.get(kind, kind.__name__) for kind in allowed)
            raise ValueError(f"{name} = {value!r} is of the wrong type: give {expected}{_example(value, allowed)}")
        if isinstance(value, str) and "\0" in value:
            raise ValueError(f"{name} = {value!r} holds a NUL character: leave it out")


def _example(value: object, allowed: tuple[type, ...]) -> str:
    """Return how to write the value so that its type fits, where it can be written so; else ""."""
    if int in allowed and isinstance(value, float) and value.is_integer():
        return f", such as {int(value)}"
    if str in allowed and isinstance(value, int | float):
        return f', in YAML within quotes: "{value}"'
    return ""


def _folder(path: str) -> str:
    """Return the path of a folder to write, a leading ~ replaced by the home folder; ValueError where it is none."""
    if path.splitlines() != [path]:
        raise ValueError(f"output_dir = {path!r} is empty or has a line break: give the path of a folder")
    if not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError(f"output_dir = {path!r} names a user who has no home folder: write ./{path}, or another path")
    return expanded
