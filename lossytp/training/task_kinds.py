"""The kinds of tasks: how a row becomes a text and a label, and which metrics score the answers.

A text is a template over the row's columns ("{premise}"), or a function of the row.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache
from string import Formatter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple
from unicodedata import normalize

import numpy as np

from lossytp.network.checks import shown
from lossytp.training.rows import PART, Row, RowSource, Split, code_digest, sample_indices

if TYPE_CHECKING:
    import evaluate
    from datasets import Dataset


# Match the values of a label column with a task's classes or options.


def name_of(value: Any) -> str:
    """Return a label as the name of a class. A column with gaps holds 3.0 in place of 3, and both become "3"."""
    name = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    return normalize("NFC", name)  # an accent can be written in two ways that look the same


def number_of(value: Any) -> float | None:
    """Return the number that a value is or spells, such as 1 for "01" or "true"; None if that is no finite number."""
    word = str(value).lower()
    try:
        number = float(word == "true" if word in ("true", "false") else value)
    except (ValueError, TypeError, OverflowError):
        return None
    return number if math.isfinite(number) else None


@lru_cache
def _classes(labels: tuple[str, ...]) -> tuple[dict[str | float | None, int], int]:
    """Return the classes by their names and by the numbers that they spell, and how many may be given by their index.

    None may if a name looks like an index: of the classes 1, 2 and 3, is 1 the first or the second?
    """
    numbers = [number_of(label) for label in labels]
    known: dict[str | float | None, int] = {
        n: i for i, n in enumerate(numbers) if n is not None and numbers.count(n) == 1
    }
    known |= {name_of(label): index for index, label in enumerate(labels)}
    return known, 0 if set(numbers).intersection(range(len(labels))) else len(labels)


def class_of(value: Any, labels: tuple[str, ...]) -> int | None:
    """Return the index of a class, given its name or index; None for no label."""
    if value is None:
        return None
    known, indices = _classes(labels)
    found = known.get(name_of(value), known.get(number_of(value)))
    return index_of(value, indices, f"a class of {', '.join(labels)}") if found is None else found


def index_of(value: Any, number: int, meaning: str) -> int | None:
    """Return an index that is given as a number or as digits; None for values that mean no label."""
    index = number_of(value)
    if value is None or value == "" or index == -1:
        return None
    if index is None or not index.is_integer() or not 0 <= index < number:
        raise ValueError(f"label {shown(value)} is not {meaning}: give one that is, or leave out such rows")
    return int(index)


# Make a row's text from a template over its columns, such as "{premise}", or with a function of the row.


Text = str | Callable[[Row], str]


def text_of(template: Text, row: Row) -> str:
    """Return the row's text, without trailing white space; a null counts as ""."""
    if callable(template):
        return template(row).rstrip()
    used = {name: row[name] for name in columns_of(template)}
    for name, value in used.items():
        if not isinstance(value, str | int | float | None):
            raise ValueError(f"column {name!r} holds {shown(value)}, which is not text: name a column of text")
    return template.format_map({name: "" if value is None else value for name, value in used.items()}).rstrip()


@lru_cache
def columns_of(*templates: Text) -> tuple[str, ...]:
    """Return the columns that templates name; none for a function."""
    parsed = [Formatter().parse(template) for template in templates if not callable(template)]
    return tuple(sorted({column for pieces in parsed for _, column, _, _ in pieces if column}))


Column = str | Callable[[Row], Any]
Label = int | float | tuple[str, ...]
ROWS_AT_ONCE = 1000


class Example(NamedTuple):
    """A row as text: `body`, then one of `endings`, and the right answer."""

    body: str
    """The text before the ending. It is cut if body and ending together are too long."""
    endings: tuple[str, ...]
    """The texts after the body: one for each option of a multiple choice, otherwise one, which may be "". An ending is
    cut only if it is too long by itself."""
    label: Label
    """The index of the class or option, the number, or the accepted answers, of which training uses the first."""
    part: str = ""


class Examples(list[Example]):
    """The examples of rows, and the numbers of rows without a label, which are left out, and without a text."""

    incomplete: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """The base of all kinds of tasks."""

    kind: ClassVar[str]
    cut: ClassVar[Literal["left", "right"]] = "right"
    """The end at which a body is cut."""
    known_metrics: ClassVar[tuple[str, ...]]

    source: RowSource
    body: Text
    ending: Text
    """The text after the body."""
    metrics: tuple[str, ...] = ()
    """Names of metrics, the headline first. By default, the kind's first metric."""
    targets: tuple[float, ...] = ()
    """Scores to reach. A record says when each was reached, if it was."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", tuple(self.metrics) or self.known_metrics[:1])
        for name in self.metrics:
            if name not in self.known_metrics:
                raise ValueError(f"{self.kind} has no metric {name!r}: choose from {', '.join(self.known_metrics)}")

    @property
    def num_logits(self) -> int | None:
        """Return the model's number of outputs per sequence; None if the model generates text."""
        return 1

    def metric(self) -> "evaluate.Metric":
        """Return a metric that scores `predictions` against `references`. It returns the headline as "score" too."""
        from lossytp.training.metrics import TaskMetric  # slow to import

        return TaskMetric(self.kind, self.metrics)

    def chance(self, references: Sequence[Any]) -> dict[str, float]:
        """Return the metrics of a model that always answers with the most frequent label."""
        return dict.fromkeys((*self.metrics, "score"), 0.0)

    @abstractmethod
    def example(self, row: Row) -> Example | None:
        """Return the row as text, or None if it has no label."""

    def examples(self, split: Split, samples: int | None = None) -> Examples:
        """Return the examples of the split, or of a fixed pseudo-random sample of `samples` of its rows.

        Rows without a label are left out. Rows of which a text column is null or blank are not.
        """
        rows = self.source.rows(split)
        self.check_rows(rows, split)
        if samples is not None and samples < len(rows):
            rows = rows.select(sample_indices(len(rows), samples))
        columns = columns_of(self.body, self.ending)
        has_parts = split == "test" and getattr(self.source, "has_parts", False)
        examples, blank = Examples(), 0
        for batch in rows.iter(ROWS_AT_ONCE):  # several times faster than row by row
            for values in zip(*batch.values(), strict=True):
                row = dict(zip(batch, values, strict=True))
                try:
                    example = self.example(row)
                except KeyError as error:
                    fix = f"name one of its columns, {', '.join(row)}"
                    raise ValueError(f"{split} of {self.source} has no column {error}: {fix}") from None
                except (ValueError, TypeError, AttributeError, OverflowError) as error:  # of users' functions, too
                    raise ValueError(f"{error}, in row {str(row)[:120]} of {split} of {self.source}") from None
                if example is not None:
                    examples.append(example._replace(part=row[PART]) if has_parts else example)
                    texts = [row[column] for column in columns if column in row]
                    blank += any(text is None or not str(text).strip() for text in texts)
        if not examples:
            raise ValueError(f"{self.source} has no labelled row in split {split!r}: give a split with labels")
        examples.incomplete = {"without_label": len(rows) - len(examples), "without_text": blank}
        return examples

    def check_rows(self, rows: "Dataset", split: Split) -> None:  # noqa: B027
        """Raise ValueError if the rows of a whole split do not fit this task's declaration."""

    def fingerprint(self) -> str:
        """Return a hash of the rows, the declaration and the code of both. Different examples have different hashes."""
        from datasets.fingerprint import Hasher  # hashes a notebook's function by its code, a module's only by its name

        values = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("source", "metrics", "targets"):
            del values[name]
        modules = {__name__, *(value.__module__ for value in values.values() if callable(value))}
        rows = [self.source.fingerprint(split) for split in ("train", "test")]
        return str(Hasher.hash([self.kind, rows, values, sorted(map(code_digest, modules))]))


@dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """A text that belongs to one of several classes. Metrics: accuracy, matthews_correlation, f1 (of class 1)."""

    kind: ClassVar[str] = "classification"
    known_metrics: ClassVar[tuple[str, ...]] = ("accuracy", "matthews_correlation", "f1")

    ending: Text = ""
    label: Column = "label"
    """A column, or a function of the row, that gives the index or name of the class."""
    labels: tuple[str, ...]
    """The names of the classes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "labels", tuple(self.labels))
        if len(set(map(name_of, self.labels))) != len(self.labels) or len(self.labels) < 2:
            raise ValueError(f"labels = {self.labels} are not two or more different names: name each class once")
        if "f1" in self.metrics and len(self.labels) != 2:
            raise ValueError(f"metric 'f1' needs two classes, not {len(self.labels)}: choose accuracy")

    @property
    def num_logits(self) -> int:
        return len(self.labels)

    def check_rows(self, rows: "Dataset", split: Split) -> None:
        """Raise ValueError if a class has no training row: -1, 0 and 1, say, do not count three classes from 0."""
        if split == "train" and isinstance(self.label, str) and self.label in rows.column_names:
            values = rows.unique(self.label)
            found = set()
            for value in values:
                with suppress(ValueError):  # is reported with its row
                    found.add(class_of(value, self.labels))
            lacking = [label for index, label in enumerate(self.labels) if index not in found]
            if lacking and found - {None}:
                what = f"label {lacking[0]!r} does not occur in column {self.label!r} of train of {self.source}"
                what += f", which holds {shown(values)}: correct it, or leave it out"
                raise ValueError(f"{what}; numbers that are not names count the classes from 0, and -1 is no label")

    def chance(self, references: Sequence[Any]) -> dict[str, float]:
        return _constant(self, references, self.num_logits)

    def example(self, row: Row) -> Example | None:
        index = class_of(_value(self.label, row), self.labels)
        return None if index is None else Example(text_of(self.body, row).strip(), (text_of(self.ending, row),), index)


@dataclass(frozen=True, kw_only=True)
class Regression(Task):
    """A text that has a number. Metrics: pearson, spearman."""

    kind: ClassVar[str] = "regression"
    known_metrics: ClassVar[tuple[str, ...]] = ("pearson", "spearman")

    ending: Text = ""
    label: Column = "label"

    def example(self, row: Row) -> Example | None:
        value = _value(self.label, row)
        if value is None or value == "":
            return None
        number = number_of(value)
        if number is None:
            raise ValueError(f"label {shown(value)} is not a finite number: give one, or leave out such rows")
        return Example(text_of(self.body, row).strip(), (text_of(self.ending, row),), number)


@dataclass(frozen=True, kw_only=True)
class MultipleChoice(Task):
    """A body and several endings, of which one is right. The model scores each. Metric: accuracy."""

    kind: ClassVar[str] = "multiple choice"
    cut: ClassVar[Literal["left", "right"]] = "left"
    known_metrics: ClassVar[tuple[str, ...]] = ("accuracy",)

    options: Column | tuple[str, ...]
    """A column that lists the options, several columns with one option each, or a function of the row."""
    ending: Text = " {option}"
    """The text after the body. It may use `option` like a column."""
    answer: Column = "label"
    """A column, or a function of the row, that gives the index of the right option, counted from 0."""

    def chance(self, references: Sequence[Any]) -> dict[str, float]:
        return _constant(self, references, max(references) + 1)

    def example(self, row: Row) -> Example | None:
        names = self.options
        options = [row[name] for name in names] if isinstance(names, tuple) else _value(names, row)
        if not isinstance(options, list | tuple) or len(options) < 2:  # a text would give its letters as options
            raise ValueError(f"options = {shown(options)} are not a list of two or more: name a column of such")
        index = index_of(_value(self.answer, row), len(options), f"one of {len(options)} options")
        for option in options:
            if not isinstance(option, str | int | float):
                raise ValueError(f"option {shown(option)} is not text: give text, or leave out such rows")
        endings = tuple(text_of(self.ending, {**row, "option": str(option).strip()}) for option in options)
        return None if index is None else Example(text_of(self.body, row).strip(), endings, index)


@dataclass(frozen=True, kw_only=True)
class Generation(Task):
    """A prompt that the model continues. Metrics: exact_match, f1 (of words, as in SQuAD)."""

    kind: ClassVar[str] = "generation"
    cut: ClassVar[Literal["left", "right"]] = "left"
    known_metrics: ClassVar[tuple[str, ...]] = ("exact_match", "f1")

    ending: Text
    """The text between body and answer, such as " Question: {question} Answer:"."""
    answers: Column
    """A column, or a function of the row, that gives the accepted answer or a list of them."""

    @property
    def num_logits(self) -> None:
        return

    def example(self, row: Row) -> Example | None:
        value = _value(self.answers, row)
        given = [] if value is None else value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(answer, str) for answer in given):
            raise ValueError(f"answers = {shown(value)} are not a text or a list of texts: name a column of such")
        answers = tuple(dict.fromkeys(answer.strip() for answer in given if answer.strip()))
        return Example(text_of(self.body, row).strip(), (text_of(self.ending, row),), answers) if answers else None


def _value(column: Column, row: Row) -> Any:
    return column(row) if callable(column) else row[column]


def _constant(task: Classification | MultipleChoice, references: Sequence[Any], number: int) -> dict[str, float]:
    always = np.bincount(np.asarray(references), minlength=number).argmax()
    logits = np.tile(np.eye(number)[always], (len(references), 1))
    scores = task.metric().compute(predictions=logits, references=references)
    return {name: score for name, score in scores.items() if name != "cross_entropy"}
