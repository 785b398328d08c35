"""The mechanism of configurations: frozen, typed settings, in groups, from keywords, flags, YAML or a record."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self, get_args

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
    expanded = os.path.expanduser(path)
    if len(path.splitlines()) > 1 or "\n" in path or expanded.startswith("~"):
        raise ValueError(f"output_dir = {path!r} has a line break or a ~ of nobody: give the path of a folder")
    return expanded


none_if_zero = AfterValidator(lambda value: value or None)  # as earlier studies wrote it
Folder = Annotated[str, AfterValidator(_expanded)]

NO_TEXT = re.compile("[\0\ud800-\udfff]")  # a surrogate stands for a byte of an argument that is not UTF-8
MAY_BE_EMPTY = ("repairs",)  # which gain zero
LATER = ("declaration", "ranks_per_node", "lossy_positions")  # records leave these out if None: older ones lack them
OBSOLETE = {
    "transport": ("simulated", "training only simulates losses; the tests send real packets"),
    "link_gbits": (None, "paper/timing.py of a checkout computes the seconds of collectives and steps"),
    "round_trip_us": (100.0, "paper/timing.py of a checkout computes the seconds of collectives and steps"),
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
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True,
        protected_namespaces=(),
    )  # fmt: skip

    neutral: ClassVar[tuple[str, ...]] = ()
    """Fields that change no result."""

    def __init__(self, **values: Any) -> None:
        values = without_obsolete(values)
        check_names(values, self.known())
        own = {name: value for name, value in values.items() if name in type(self).model_fields}
        for name, group in self.groups().items():
            given = own.get(name, {})  # YAML may give a group as a mapping
            given = given.as_dict() if isinstance(given, Settings) else given
            if isinstance(given, Mapping):
                own[name] = group(**{**given, **{each: values[each] for each in group.known() if each in values}})
        try:
            super().__init__(**own)
        except ValidationError as error:
            raise ValueError(_in_one_line(error)) from None

    @field_validator("*")
    @classmethod
    def _check_text(cls, value: Any, info: Any) -> Any:
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and (NO_TEXT.search(text) or not (text or info.field_name in MAY_BE_EMPTY)):
                raise ValueError(f"{info.field_name} = {text!r} is empty or no text: give a value, or leave it out")
        return value

    @classmethod
    def groups(cls) -> dict[str, type["Settings"]]:
        """Return the fields that are groups of settings, with their classes."""
        kinds = {name: field.annotation for name, field in cls.model_fields.items()}
        return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Settings)}

    @classmethod
    def flat_fields(cls) -> Iterator[tuple[str, FieldInfo]]:
        """Yield the names and fields of the settings, those of groups too: the flags."""
        groups = cls.groups()
        for name, field in cls.model_fields.items():
            yield from groups[name].flat_fields() if name in groups else [(name, field)]

    @classmethod
    def known(cls) -> list[str]:
        """Return the names that the constructor takes."""
        return [name for name, _ in cls.flat_fields()] + list(cls.groups())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the configuration with these flat names and values."""
        if not isinstance(values, Mapping):
            raise ValueError(f"{values!r} is not a configuration: give names with values, such as {{'seed': 1}}")
        return cls(**values)

    @classmethod
    def check_type(cls, name: str, value: Any) -> None:
        """Raise ValueError if there is no setting `name`, or the value is of another type, or out of its bounds."""
        check_names([name], fields := dict(cls.flat_fields()))
        _validated(name, value, fields[name], strict=True)

    @classmethod
    def as_flag_value(cls, name: str, text: str) -> Any:
        """Return the value that a flag's text stands for; raise ValueError if it is none."""
        field = dict(cls.flat_fields())[name]
        kinds = get_args(field.annotation)
        is_none = text.lower() == "none" and type(None) in kinds and str not in kinds
        return None if is_none else _validated(name, text, field, strict=False)

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the flat names and defaults; a setting that must be given has none."""
        return {name: field.default for name, field in cls.flat_fields() if not field.is_required()}

    @classmethod
    def result_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that the result depends on."""
        left_out = (*cls.neutral, *(name for name in LATER if values.get(name) is None))
        return {name: value for name, value in values.items() if name not in left_out}

    def as_dict(self) -> dict[str, Any]:
        """Return the flat names and values, which JSON can hold."""
        values: dict[str, Any] = {}
        for name, value in self:
            values |= value.as_dict() if isinstance(value, Settings) else {name: value}
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


def without_obsolete(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without those of earlier versions' settings.

    Raises:
        ValueError: if one of them had an effect that is gone.
    """
    for name, (harmless, instead) in OBSOLETE.items():
        if values.get(name, harmless) != harmless and name != "round_trip_us":
            raise ValueError(f"{name} = {values[name]!r} is no longer a setting: {instead}; leave it out")
    return {name: value for name, value in values.items() if name not in OBSOLETE}


def _validated(name: str, value: Any, field: FieldInfo, *, strict: bool) -> Any:
    annotation: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    adapter = TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False))
    try:
        return adapter.validate_python(value, strict=strict)
    except ValidationError as error:
        raise ValueError(_in_one_line(error, name)) from None


BOUNDS = {
    "greater_than_equal": ("ge", "is below {0:g}: give {0:g} or more"),
    "greater_than": ("gt", "is not above {0:g}: give a larger number, or leave it out"),
    "less_than_equal": ("le", "is above {0:g}: give {0:g} or less"),
    "less_than": ("lt", "is not below {0:g}: give a smaller number"),
}


def _in_one_line(error: ValidationError, name: str | None = None) -> str:
    """Return the first of pydantic's complaints with the value, the bound and the fix."""
    first = error.errors(include_url=False)[0]
    kind, context, name = first["type"], first.get("ctx", {}), name or str(first["loc"][0] if first["loc"] else "")
    if kind == "value_error":
        return str(context["error"])
    if kind == "missing":
        return f"{name} is missing: give it"
    if kind in BOUNDS:
        bound, message = BOUNDS[kind]
        return f"{name} = {first['input']} {message.format(context[bound])}"
    reason = first["msg"].replace("Input", "it", 1)  # "it should be a valid number"
    return (
        f"{name} = {shown(first['input'])} is {'unknown' if kind == 'literal_error' else 'of the wrong type'}: {reason}"
    )
