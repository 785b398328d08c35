"""Read a user's task from a YAML file.

    train: reviews/train-*.csv      # a path or a pattern, relative to this file's folder: csv, json, jsonl or parquet
    test: reviews/held_out.csv
    kind: classification            # the default; or regression, multiple choice, generation
    body: "{title}: {review}"       # columns in braces; {stars!s} reads a number as text
    label: verdict                  # a name in `labels`, or its number from 0; empty or -1 leaves a row out
    labels: [bad, good]
    metrics: [f1, accuracy]         # the first is the headline; metric: f1 gives one

The other keys are the fields of the kind's class in `kinds`. The task is named after the file, or by the key `name`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from lossytp.network.checks import check_at_most, check_known, check_names, is_finite, shown
from lossytp.training.plain_yaml import read_yaml_file
from lossytp.training.tasks.catalogue import TASKS
from lossytp.training.tasks.kinds import Classification, Generation, MultipleChoice, Regression, Task
from lossytp.training.tasks.labels import name_of
from lossytp.training.tasks.sources import Files
from lossytp.training.tasks.templates import check_template

KINDS: dict[str, type[Task]] = {each.kind: each for each in (Classification, Regression, MultipleChoice, Generation)}
DECLARATIONS = (".yaml", ".yml")  # endings of the files that declare a task
OF_ALL_KINDS = ("name", "kind", "train", "test")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


LISTS: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "labels": (lambda value: _is_text(value) or isinstance(value, int | float), "names", "[bad, good]"),
    "metrics": (_is_text, "names", "[first, second]"),
    "targets": (is_finite, "finite numbers", "[0.7, 0.8]"),
}
PLAIN_NAME = re.compile(r"[\w.-]+")  # it becomes part of the names of folders


def read_declaration(file: Path) -> dict[str, Any]:
    """Return a YAML file's declaration, with defaults for `name` and `kind`, and lists in place of single values.

    Raises:
        ValueError: if the file declares no task, or its data files are missing. The message names the file.
    """
    content = read_yaml_file(f"dataset = {str(file)!r}", file)
    with _named(f"dataset = {str(file)!r}"):
        if not isinstance(content, dict):
            raise ValueError(f"it holds {shown(content)}: write keys with values, such as 'train: my_rows.csv'")
        declaration = {"name": re.sub(r"[^\w.-]+", "-", file.stem), "kind": Classification.kind, **content}
        if "metric" in declaration:
            if "metrics" in declaration:
                raise ValueError("metric and metrics are both given: leave one out")
            declaration["metrics"] = declaration.pop("metric")
        for key in LISTS:
            if key in declaration and not isinstance(declaration[key], list):
                declaration[key] = [declaration[key]]
        source = _task(declaration, file.parent).source
        check_at_most("targets", max(declaration.get("targets", [0])), 1, "shares, such as 0.7")  # not in old records
        if declaration["name"] in TASKS:
            raise ValueError(f"{declaration['name']!r} is the name of another task: add the key name with another name")
        assert isinstance(source, Files)
        both = set(map(Path.resolve, source.files("train"))).intersection(map(Path.resolve, source.files("test")))
        if both:
            raise ValueError(f"{min(both)} is in both train and test: test on rows that training does not see")
    return declaration


def declared_task(declaration: Mapping[str, Any], folder: str | None) -> Task:
    """Return the task of a declaration. Its files need not exist yet.

    Args:
        declaration: the result of `read_declaration`.
        folder: where relative paths start; the working folder if None.

    Raises:
        ValueError: if a key or a value is wrong.
    """
    with _named(f"declaration of {shown(declaration.get('name'))}"):
        return _task(declaration, folder)


def _task(declaration: Mapping[str, Any], folder: str | Path | None) -> Task:
    check_known("kind", declaration.get("kind"), KINDS)
    kind = KINDS[declaration["kind"]]
    own = [each for each in fields(kind) if each.name != "source"]
    check_names(declaration, [*OF_ALL_KINDS, *(each.name for each in own)])
    required = (*OF_ALL_KINDS, *(each.name for each in own if each.default is MISSING))
    lacking = [key for key in required if key not in declaration]
    if lacking:
        raise ValueError(f"a {kind.kind} needs {', '.join(required[2:])}: add {', '.join(lacking)}")
    for key, value in declaration.items():
        _check(key, value)
    if not PLAIN_NAME.fullmatch(declaration["name"]):
        raise ValueError(f"name = {declaration['name']!r} is not a plain name: use only letters, digits, _, - and .")
    values = {key: value for key, value in declaration.items() if key not in OF_ALL_KINDS}
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    if "labels" in values:
        values["labels"] = tuple(map(name_of, values["labels"]))
    return kind(source=Files(train=declaration["train"], test=declaration["test"], folder=folder), **values)


def _check(key: str, value: Any) -> None:
    """Raise ValueError if the value has the wrong type for the key."""
    if key in LISTS or (key == "options" and isinstance(value, list)):
        fits, wanted, example = LISTS.get(key, LISTS["metrics"])
        if not isinstance(value, list) or not value or not all(map(fits, value)):
            raise ValueError(f"{key} = {shown(value)} is not a list of {wanted}: give one, such as {example}")
    elif not _is_text(value):
        raise ValueError(f"{key} = {shown(value)} is not text: give text{', or a list' if key == 'options' else ''}")
    elif key in ("body", "ending"):
        check_template(key, value)


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Prefix the messages of errors within the block with their place."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
