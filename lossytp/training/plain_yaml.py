"""Read YAML by the rules of YAML 1.2, which take plain words at face value.

PyYAML follows YAML 1.1, in which 010 is eight, 1:30 is ninety, 1e-3 is text, no is false and 2024-01-01 is a date.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from lossytp.network.bounded_files import content_of


def read_yaml(text: str) -> Any:
    """Return the content of a YAML document.

    Plain words are null, true, false, decimal numbers or text (YAML 1.2, section 10.3.2, without hexadecimals).

    Raises:
        ValueError: if the text is not YAML, or a mapping has a key twice.
    """
    try:
        return yaml.load(text, _PlainLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"cannot be read as YAML: {' '.join(str(error).split())}") from error


def read_yaml_file(name: str, file: Path) -> Any:
    """Return the content of a YAML file.

    Raises:
        ValueError: if the file cannot be read, or is not YAML; the message begins with `name`.
    """
    try:
        text = content_of(file).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 ({error}): save it as UTF-8") from error
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    try:
        return read_yaml(text)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from error


class _PlainLoader(yaml.SafeLoader):
    """Read plain words by YAML 1.2, and refuse duplicate keys in a mapping.

    PyYAML would keep the last of two equal keys, and silently drop the first one's value.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]  # "<<" merges another mapping in
        keys = [self.construct_object(key, deep=True) for key in own]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"key {key!r} is given twice in one mapping: leave one out")
        return super().construct_mapping(node, deep)

    def construct_decimal(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        try:
            return int(text)
        except ValueError as error:
            raise ValueError(f"{text[:40]!r} is not a valid decimal number: write one, such as 10") from error


_WORDS = {
    "null": (r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    "merge": (r"<<", ["<"]),
}
_PlainLoader.yaml_implicit_resolvers = {}  # none of YAML 1.1's
for _kind, (_pattern, _beginnings) in _WORDS.items():
    _PlainLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"^(?:{_pattern})$"), _beginnings)
_PlainLoader.add_constructor("tag:yaml.org,2002:int", _PlainLoader.construct_decimal)
