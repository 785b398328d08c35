"""The base of all configurations: check names and values, and convert from and to a dict.

Values come from the command line, a YAML file or a notebook's parameters. Importing this module costs no torch.
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, Union, get_args, get_origin, get_type_hints

from lossytp.network.checks import check_known, check_names
from lossytp.training.config.bounds import check_bounds

TYPE_NAMES = {bool: "true or false", dict: "a mapping", type(None): "nothing"}  # in errors
NO_TEXT = re.compile("[\0\ud800-\udfff]")  # a surrogate stands for a byte of an argument that is not UTF-8
MAY_BE_EMPTY = ("repairs",)  # which gain zero

_kinds_of: dict[type, dict[str, "Kind"]] = {}


class Kind(NamedTuple):
    """The values of a field: of these types (and `elements`), one of these choices if any, within these bounds."""

    types: tuple[type, ...] = ()
    choices: tuple[Any, ...] = ()
    bounds: tuple[Any, ...] = ()
    elements: tuple[type, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A frozen, typed configuration.

    Raises:
        ValueError: if a value is of another type than its field, or out of the field's bounds.
    """

    neutral: ClassVar[tuple[str, ...]] = (
        "output_dir",
        "checkpoint_path",
        "keep_checkpoints",
        "task_folder",
        "timeout_s",
        "checkpoint_steps",
        "statistics",
        "tensorboard",
        "wandb",
    )
    """Fields that change no result."""

    def __post_init__(self) -> None:
        kinds = _kinds(type(self))
        for name, kind in kinds.items():
            _check_type(name, getattr(self, name), kind)
        for name, kind in kinds.items():  # 8 and 8.0 are one configuration, with one hash
            value = getattr(self, name)
            if float in kind.types and isinstance(value, int):
                if abs(value) > sys.float_info.max:
                    raise ValueError(f"{name} = {value} is beyond a float's 1.8e308: give a smaller number")
                object.__setattr__(self, name, value := float(value))
            if name == "output_dir" and value is not None:
                object.__setattr__(self, name, _folder(value))
            if kind.bounds and value is not None:
                check_bounds(name, value, kind.bounds)

    def as_dict(self) -> dict[str, Any]:
        """Return field names and values, which JSON can hold."""
        return asdict(self)

    def result_settings(self) -> dict[str, Any]:
        """Return the settings that the result depends on, as records hold them."""
        return self.result_of(self.as_dict())

    @classmethod
    def result_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that the result depends on."""
        return {name: value for name, value in values.items() if name not in cls.neutral}

    @classmethod
    def result_defaults(cls) -> dict[str, Any]:
        """Return the defaults of the settings that the result depends on."""
        return cls.result_of({field.name: field.default for field in fields(cls)})

    def group(self, kind: type["Settings"]) -> dict[str, Any]:
        """Return the names and values of one group of settings."""
        return {field.name: getattr(self, field.name) for field in fields(kind)}

    def changes(self) -> dict[str, Any]:
        """Return the names and values of the fields that differ from their defaults."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the configuration with these names and values.

        Raises:
            ValueError: if a name is unknown; the message suggests the closest one.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"{values!r} is not a configuration: give names with values, such as {{'seed': 1}}")
        cls.check_names(values)
        return cls(**values)

    @classmethod
    def check_names(cls, values: Mapping[str, Any]) -> None:
        """Raise ValueError if a name is not a field."""
        check_names(values, [field.name for field in fields(cls)])

    @classmethod
    def check_type(cls, name: str, value: Any) -> None:
        """Raise ValueError if the value is of another type than the field `name`."""
        _check_type(name, value, _kinds(cls)[name])


def _kinds(cls: type[Settings]) -> dict[str, Kind]:
    """Return the kind of each field. Each class is read only once, since a study makes thousands of configurations."""
    if cls not in _kinds_of:
        hints = get_type_hints(cls, include_extras=True)
        _kinds_of[cls] = {field.name: _kind(hints[field.name]) for field in fields(cls)}
    return _kinds_of[cls]


def _kind(hint: Any) -> Kind:
    """Return the kind of a field with this type hint."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        inner = _kind(arguments[0])
        return inner._replace(bounds=inner.bounds + arguments[1:])
    if origin is Literal:
        return Kind(choices=arguments)
    if origin in (Union, UnionType):
        kinds = [_kind(argument) for argument in arguments]
        return Kind(*(sum(parts, ()) for parts in zip(*kinds, strict=True)))
    return Kind(types=(origin or hint,), elements=arguments)


def _check_type(name: str, value: Any, kind: Kind) -> None:
    """Raise ValueError unless the value fits the field. Values from YAML or a notebook may have any type."""
    if kind.choices:
        if value is not None or type(None) not in kind.types:
            check_known(name, value, kind.choices)
        return
    allowed = kind.types
    matches = isinstance(value, (*allowed, int) if float in allowed else allowed)
    if not matches or (isinstance(value, bool) and bool not in allowed):
        expected = " or ".join(TYPE_NAMES.get(each, each.__name__) for each in allowed)
        raise ValueError(f"{name} = {value!r} is of the wrong type: give {expected}{_example(value, allowed)}")
    if isinstance(value, str) and NO_TEXT.search(value):
        what = "a NUL character" if "\0" in value else "bytes that are not UTF-8"
        raise ValueError(f"{name} = {value!r} holds {what}: give another value")
    if value == "" and name not in MAY_BE_EMPTY:
        raise ValueError(f"{name} = '' is empty: give a value, or leave it out")
    for element in value if kind.elements and isinstance(value, list) else ():
        _check_type(name, element, Kind(types=kind.elements))


def _example(value: object, allowed: tuple[type, ...]) -> str:
    """Return how to write the value with a type that fits, or "" if that is impossible."""
    if int in allowed and isinstance(value, float) and value.is_integer():
        return f", such as {int(value)}"
    if str in allowed and isinstance(value, int | float):
        return f', in YAML within quotes: "{value}"'
    return ""


def _folder(path: str) -> str:
    """Return the path of a folder to write, with a leading ~ replaced by the home folder.

    Raises:
        ValueError: if it is not a path, or the user after ~ has no home folder.
    """
    if path.splitlines() != [path]:
        raise ValueError(f"output_dir = {path!r} has a line break: give the path of a folder")
    if not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError(f"output_dir = {path!r} names a user who has no home folder: write ./{path}, or another path")
    return expanded
