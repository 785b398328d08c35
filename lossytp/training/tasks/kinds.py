"""Define the kinds of tasks: how a row becomes text and a label, and which metrics score the answers.

A text is a template over the row's columns ("{premise}"), or a function of the row.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

from lossytp.training.tasks.cache import code_digest, identity
from lossytp.training.tasks.labels import class_of, index_of, name_of, number_of
from lossytp.training.tasks.sources import Files, Row, RowSource, Source, Split, sample_indices
from lossytp.training.tasks.templates import Text, columns_of, is_filled, text_of

if TYPE_CHECKING:
    import evaluate
    from datasets import Dataset

Column = str | Callable[[Row], Any]
Label = int | float | tuple[str, ...]
Made = TypeVar("Made")
AS_WRITTEN = ("label", "options", "answer", "answers")  # fields that name columns which are not numbers to count with
ROWS_AT_ONCE = 1000
LONGEST_LIST = 8  # values that a message lists
PART = "part"  # a column of the test rows of a source that `has_parts`: evaluation also scores each part


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
    metric_class: ClassVar[str]
    """The class in `metrics` that computes them."""

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
        if isinstance(self.source, Files | Source):
            named = [getattr(self, field, ()) for field in AS_WRITTEN]
            texts = [name for names in named for name in (names if isinstance(names, tuple) else [names])]
            source = replace(self.source, texts=tuple(name for name in texts if isinstance(name, str)))
            object.__setattr__(self, "source", source)

    @property
    def num_logits(self) -> int | None:
        """Return the model's number of outputs per sequence; None if the model generates text."""
        return 1

    def metric(self) -> "evaluate.Metric":
        """Return a metric that scores `predictions` against `references`. It returns the headline as "score" too."""
        from lossytp.training.tasks import metrics  # slow to import

        scorer: evaluate.Metric = getattr(metrics, self.metric_class)(self.metrics)
        return scorer

    def chance(self, references: Sequence[Any]) -> dict[str, float]:
        """Return the metrics of a model that always answers with the most frequent label."""
        return dict.fromkeys((*self.metrics, "score"), 0.0)

    @abstractmethod
    def example(self, row: Row) -> Example | None:
        """Return the row as text, or None if it has no label."""

    def examples(self, split: Split, samples: int | None = None) -> Examples:
        """Return the examples of the split, or of a fixed pseudo-random sample of `samples` of its rows.

        Rows without a label are left out. Rows of which a text column is null or blank are not.

        Raises:
            ValueError: if no row has a label, a column is missing, or a text column is empty in all rows or holds
                values that are not text.
        """
        rows = self.source.rows(split)
        self.check_rows(rows, split)
        if samples is not None and samples < len(rows):
            rows = rows.select(sample_indices(len(rows), samples))
        columns = columns_of(self.body, self.ending)
        has_parts = split == "test" and getattr(self.source, "has_parts", False)
        examples, blank = Examples(), 0
        for row, example in self._each(rows, split, self.example):
            if example is not None:
                examples.append(example._replace(part=row[PART]) if has_parts else example)
                blank += not all(is_filled(row[column]) for column in columns if column in row)
        if not examples:
            raise ValueError(f"{self.source} has no labelled row in split {split!r}: give a split with labels")
        examples.incomplete = {"without_label": len(rows) - len(examples), "without_text": blank}
        return examples

    def _each(self, rows: "Dataset", split: Split, read: Callable[[Row], Made]) -> Iterator[tuple[Row, Made]]:
        """Yield each row with what `read` makes of it; an error names the row."""
        for batch in rows.iter(ROWS_AT_ONCE):  # several times faster than row by row
            for values in zip(*batch.values(), strict=True):
                row = dict(zip(batch, values, strict=True))
                try:
                    yield row, read(row)
                except KeyError as error:
                    fix = f"name one of its columns, {', '.join(row)}"
                    raise ValueError(f"{split} of {self.source} has no column {error}: {fix}") from None
                except (ValueError, TypeError, AttributeError, OverflowError) as error:  # of users' functions, too
                    raise ValueError(f"{error}, in row {str(row)[:120]} of {split} of {self.source}") from None

    def check_rows(self, rows: "Dataset", split: Split) -> None:
        """Raise ValueError if the rows of a whole split do not fit this task's declaration."""
        for column in columns_of(self.body, self.ending):
            if column in rows.column_names and len(rows) and not any(map(is_filled, rows[column])):
                where = f"{len(rows)} rows of {split} of {self.source}"
                raise ValueError(f"column {column!r} is empty in all {where}: give text")

    def fingerprint(self) -> str:
        """Return a hash of the rows, the declaration and the code of both. Different examples have different hashes."""
        parts = [self.kind, code_digest(__name__)]
        parts += [f"{split} {self.source.fingerprint(split)}" for split in ("train", "test")]
        parts.append(code_digest(text_of.__module__))
        for each in fields(self):
            if each.name not in ("source", "metrics", "targets"):
                parts.append(f"{each.name} {identity(getattr(self, each.name))}")
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """A text that belongs to one of several classes. Metrics: accuracy, matthews_correlation, f1 (of class 1)."""

    kind: ClassVar[str] = "classification"
    known_metrics: ClassVar[tuple[str, ...]] = ("accuracy", "matthews_correlation", "f1")
    metric_class: ClassVar[str] = "ClassificationMetric"

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
        super().check_rows(rows, split)
        if split != "train":
            return
        values = {repr(value): value for _, value in self._each(rows, split, lambda row: _value(self.label, row))}
        found = set()
        for value in values.values():
            with suppress(ValueError):  # is reported with its row
                found.add(class_of(value, self.labels))
        lacking = [label for index, label in enumerate(self.labels) if index not in found]
        if lacking and found - {None}:  # misspelt, or the values are no indices: -1, 0 and 1 do not count from 0
            where = f"{f'column {self.label!r} of ' * isinstance(self.label, str)}{split} of {self.source}"
            held = ", ".join(sorted(values)[:LONGEST_LIST]) + ", ..." * (len(values) > LONGEST_LIST)
            raise ValueError(
                f"label {lacking[0]!r} does not occur in {where}, which holds {held}: correct it, or leave it out; "
                "numbers that are not names count the classes from 0, and -1 means no label"
            )

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
    metric_class: ClassVar[str] = "RegressionMetric"

    ending: Text = ""
    label: Column = "label"

    def example(self, row: Row) -> Example | None:
        value = _value(self.label, row)
        if value is None or value == "":
            return None
        number = number_of(value)
        if number is None:
            raise ValueError(f"label {value!r} is not a finite number: give one, or leave out such rows")
        return Example(text_of(self.body, row).strip(), (text_of(self.ending, row),), number)


@dataclass(frozen=True, kw_only=True)
class MultipleChoice(Task):
    """A body and several endings, of which one is right. The model scores each. Metric: accuracy."""

    kind: ClassVar[str] = "multiple choice"
    cut: ClassVar[Literal["left", "right"]] = "left"
    known_metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    metric_class: ClassVar[str] = "MultipleChoiceMetric"

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
            raise ValueError(f"options = {str(options)[:60]!r} are not a list of two or more: name a column of such")
        index = index_of(_value(self.answer, row), len(options), f"one of {len(options)} options")
        for option in options:
            if not isinstance(option, str | int | float):
                raise ValueError(f"option {str(option)[:60]!r} is not text: give text, or leave out such rows")
        endings = tuple(text_of(self.ending, {**row, "option": str(option).strip()}) for option in options)
        return None if index is None else Example(text_of(self.body, row).strip(), endings, index)


@dataclass(frozen=True, kw_only=True)
class Generation(Task):
    """A prompt that the model continues. Metrics: exact_match, f1 (of words, as in SQuAD)."""

    kind: ClassVar[str] = "generation"
    cut: ClassVar[Literal["left", "right"]] = "left"
    known_metrics: ClassVar[tuple[str, ...]] = ("exact_match", "f1")
    metric_class: ClassVar[str] = "GenerationMetric"

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
            raise ValueError(f"answers = {str(value)[:60]!r} are not a text or a list of texts: name a column of such")
        answers = tuple(dict.fromkeys(answer.strip() for answer in given if answer.strip()))
        return Example(text_of(self.body, row).strip(), (text_of(self.ending, row),), answers) if answers else None


def _value(column: Column, row: Row) -> Any:
    return column(row) if callable(column) else row[column]


def _constant(task: Classification | MultipleChoice, references: Sequence[Any], number: int) -> dict[str, float]:
    import numpy as np

    always = np.bincount(np.asarray(references), minlength=number).argmax()
    logits = np.tile(np.eye(number)[always], (len(references), 1))
    scores = task.metric().compute(predictions=logits, references=references)
    return {name: score for name, score in scores.items() if name != "cross_entropy"}
