"""The mechanism of configurations: frozen, typed settings, in groups, from keywords, flags, YAML or a record."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator
from pydantic.fields import FieldInfo

from lossytp.network.checks import check_names, shown

# Bounds of settings, declared at the field, as in `batch_size: Count = 32`.

Count = Annotated[int, Field(ge=1)]
CountFromZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
FASTEST = 1e37  # Adam's first step is ten times its learning rate, in float32
LearningRate = Annotated[float, Field(ge=0, le=FASTEST)]


def _expanded(path: str) -> str:
    """Return the path of a folder to write, with a leading ~ replaced by the home folder."""
    if len(path.splitlines()) > 1 or "\n" in path:
        raise ValueError(f"output_dir = {path!r} has a line break: give the path of a folder")
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError(f"output_dir = {path!r} names a user who has no home folder: write ./{path}, or another path")
    return expanded


Folder = Annotated[str, AfterValidator(_expanded)]

NO_TEXT = re.compile("[\0\ud800-\udfff]")  # a surrogate stands for a byte of an argument that is not UTF-8
MAY_BE_EMPTY = ("repairs",)  # which gain zero
LATER = [
    ("declaration", None),
    ("ranks_per_node", None),
    ("lossy_positions", None),
]  # records do not mention these: older ones lack them
OBSOLETE = {
    "transport": ("simulated", "training only simulates losses; the tests send real packets"),
    "link_gbits": (None, "lossytp.training.record.seconds_of computes seconds from a record"),
    "round_trip_us": (100.0, "lossytp.training.record.seconds_of computes seconds from a record"),
}
"""Settings of earlier versions: the only value with which a record still means the same, and what came instead."""


class Settings(BaseModel):
    """A frozen configuration, checked when it is made.

    Values must have their field's type: 8 is a float too, but "8" is no number. `as_flag_value` reads text.

    Raises:
        ValueError: if a name is unknown, or a value is of another type, out of bounds, or contradicts another; in one
            line that names the value, the bound and the fix.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=False,
        protected_namespaces=(),
    )

    neutral: ClassVar[tuple[str, ...]] = ()
    """Fields that change no result."""

    def __init__(self, **values: Any) -> None:
        cls = type(self)
        values = without_obsolete(values)
        check_names(values, cls.known())
        try:
            super().__init__(**cls.sorted_into_groups(values))
        except ValidationError as error:
            raise ValueError(_in_one_line(error)) from None

    @field_validator("*")
    @classmethod
    def _check_text(cls, value: Any, info: Any) -> Any:
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and NO_TEXT.search(text):
                what = "a NUL character" if "\0" in text else "bytes that are not UTF-8"
                raise ValueError(f"{info.field_name} = {text!r} holds {what}: give another value")
        if value == "" and info.field_name not in MAY_BE_EMPTY:
            raise ValueError(f"{info.field_name} = '' is empty: give a value, or leave it out")
        return value

    @classmethod
    def groups(cls) -> dict[str, type["Settings"]]:
        """Return the fields that are groups of settings, with their classes."""
        return {
            name: field.annotation
            for name, field in cls.model_fields.items()
            if isinstance(field.annotation, type) and issubclass(field.annotation, Settings)
        }

    @classmethod
    def flat_fields(cls) -> Iterator[tuple[str, FieldInfo]]:
        """Yield the names and fields of the settings, those of groups too: the flags."""
        groups = cls.groups()
        for name, field in cls.model_fields.items():
            if name in groups:
                yield from groups[name].flat_fields()
            else:
                yield name, field

    @classmethod
    def known(cls) -> list[str]:
        """Return the names that the constructor takes."""
        return [name for name, _ in cls.flat_fields()] + list(cls.groups())

    @classmethod
    def sorted_into_groups(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return flat names and values as the fields hold them."""
        sorted_values = {name: value for name, value in values.items() if name in cls.model_fields}
        for name, group in cls.groups().items():
            own = {each: values[each] for each in group.known() if each in values}
            given = sorted_values.get(name, {})
            if (own or name not in sorted_values) and isinstance(given, Settings | Mapping):
                sorted_values[name] = group(**{**_flat(given), **own})
        return sorted_values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the configuration with these flat names and values."""
        if not isinstance(values, Mapping):
            raise ValueError(f"{values!r} is not a configuration: give names with values, such as {{'seed': 1}}")
        return cls(**values)

    @classmethod
    def check_names(cls, values: Mapping[str, Any]) -> None:
        """Raise ValueError if a name is not a setting."""
        check_names(values, [name for name, _ in cls.flat_fields()])

    @classmethod
    def check_type(cls, name: str, value: Any) -> None:
        """Raise ValueError if the value is of another type than the setting `name`, or out of its bounds."""
        _validated(name, value, dict(cls.flat_fields())[name], strict=True)

    @classmethod
    def as_flag_value(cls, name: str, text: str) -> Any:
        """Return the value that a flag's text stands for.

        Raises:
            ValueError: if it is none.
        """
        field = dict(cls.flat_fields())[name]
        if text.lower() == "none" and _is_optional(field) and str not in get_args(field.annotation):
            return None
        if dict in get_args(field.annotation):
            return _from_json(name, text)
        return _validated(name, text, field, strict=False)

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the flat names and defaults; a setting that must be given has none."""
        return {name: field.default for name, field in cls.flat_fields() if not field.is_required()}

    @classmethod
    def result_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that the result depends on."""
        return {name: value for name, value in values.items() if name not in cls.neutral and (name, value) not in LATER}

    @classmethod
    def result_defaults(cls) -> dict[str, Any]:
        """Return the defaults of the settings that the result depends on."""
        return cls.result_of(cls.defaults())

    def as_dict(self) -> dict[str, Any]:
        """Return the flat names and values, which JSON can hold."""
        groups = self.groups()
        values: dict[str, Any] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            values |= value.as_dict() if name in groups else {name: value}
        return values

    def result_settings(self) -> dict[str, Any]:
        """Return the settings that the result depends on, as records hold them."""
        return self.result_of(self.as_dict())

    def changes(self) -> dict[str, Any]:
        """Return the names and values of the settings that differ from their defaults."""
        defaults = self.defaults()
        return {name: value for name, value in self.as_dict().items() if value != defaults.get(name, ...)}

    def replace(self, **values: Any) -> Self:
        """Return a configuration with other values of some settings."""
        return type(self)(**{**self.as_dict(), **values})


def _flat(group: Any) -> dict[str, Any]:
    """Return a group's settings, which YAML may also give as a mapping."""
    if isinstance(group, Settings):
        return group.as_dict()
    return dict(group) if isinstance(group, Mapping) else {}


def without_obsolete(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without those of earlier versions' settings.

    Raises:
        ValueError: if one of them had an effect that is gone.
    """
    for name, (harmless, instead) in OBSOLETE.items():
        if values.get(name, harmless) != harmless and name != "round_trip_us":
            raise ValueError(f"{name} = {values[name]!r} is no longer a setting: {instead}; leave it out")
    return {name: value for name, value in values.items() if name not in OBSOLETE}


def _is_optional(field: FieldInfo) -> bool:
    return type(None) in get_args(field.annotation)


def _from_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} = {shown(text)} is not JSON ({error}): give a file instead") from None


def _validated(name: str, value: Any, field: FieldInfo, *, strict: bool) -> Any:
    annotation: Any = field.annotation
    if field.metadata:
        annotation = Annotated[(annotation, *field.metadata)]
    adapter = TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False))
    try:
        return adapter.validate_python(value, strict=strict)
    except ValidationError as error:
        raise ValueError(_in_one_line(error, name)) from None


WRONG_TYPE = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number, such as 10",
    "float_type": "a number",
    "float_parsing": "a number, such as 0.01",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping of its settings",
}
BOUNDS = {
    "greater_than_equal": ("ge", "is below {0:g}: give {0:g} or more"),
    "greater_than": ("gt", "is not above {0:g}: give a larger number, or leave it out"),
    "less_than_equal": ("le", "is above {0:g}: give {0:g} or less"),
    "less_than": ("lt", "is not below {0:g}: give a smaller number"),
}


def _in_one_line(error: ValidationError, name: str | None = None) -> str:
    """Return the first of pydantic's complaints with the value, the bound and the fix."""
    first = error.errors(include_url=False)[0]
    value, kind, context = first["input"], first["type"], first.get("ctx", {})
    name = name or str(first["loc"][0] if first["loc"] else "")
    match kind:
        case "value_error":
            return str(context["error"])
        case "missing":
            return f"{name} is missing: give it"
        case "literal_error":
            return f"{name} = {shown(value)} is unknown: choose {context['expected']}"
        case "finite_number":
            return f"{name} = {value} is not finite: give a finite number"
        case "string_unicode":
            return f"{name} = {value!r} holds bytes that are not UTF-8: give another value"
        case _ if kind in BOUNDS:
            bound, message = BOUNDS[kind]
            return f"{name} = {value} {message.format(context[bound])}"
    wanted = WRONG_TYPE.get(kind, first["msg"].lower())
    return f"{name} = {shown(value)} is of the wrong type: give {wanted}{_example(value, kind)}"


def _example(value: Any, kind: str) -> str:
    """Return how to write the value with a type that fits, or "" if that is impossible."""
    if kind.startswith("int") and isinstance(value, float) and value.is_integer():
        return f", such as {int(value)}"
    if kind == "string_type" and isinstance(value, int | float):
        return f', in YAML within quotes: "{value}"'
    return ""


def choices_of(field: FieldInfo) -> tuple[Any, ...]:
    """Return the values among which a field's value must be; none if any will do."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if get_origin(kind) is Literal:
            return get_args(kind)
    return ()
