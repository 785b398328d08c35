"""Kinds of tasks: how a row becomes text and a label, and what is measured.

A text of a row is a template over its columns ("{premise}") or a function of the row.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from lossytp.training.tasks.cache import code_digest, identity
from lossytp.training.tasks.sources import Row, RowSource, Split, sample_indices
from lossytp.training.tasks.templates import Text, check_filled, text_of

if TYPE_CHECKING:
    import evaluate

Column = str | Callable[[Row], Any]
Label = int | float | tuple[str, ...]
ROWS_AT_ONCE = 1000
PART = "part"  # a column of test rows that names a part to score by itself, too


class Example(NamedTuple):
    """A row as text: `body`, then one of `endings`, and the right answer."""

    body: str
    """What is cut where all of it is too long."""
    endings: tuple[str, ...]
    """What follows the body, uncut where it fits at all: one for each option of a multiple choice, else a single one,
    which may be ""."""
    label: Label
    """Index of the class or option, number, or accepted answers, of which the first is trained on."""
    part: str = ""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """What all kinds share."""

    kind: ClassVar[str]
    cut: ClassVar[Literal["left", "right"]]
    """The end of the body at which it is cut."""
    known_metrics: ClassVar[tuple[str, ...]]

    source: RowSource
    body: Text
    ending: Text
    """What follows the body."""
    metrics: tuple[str, ...] = ()
    """The first is the headline; the kind's first when left out."""
    targets: tuple[float, ...] = ()
    """Scores of interest: a record tells when each of them was reached, if it was."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", tuple(self.metrics) or self.known_metrics[:1])
        for name in self.metrics:
            if name not in self.known_metrics:
                raise ValueError(f"metric {name!r} is none of {self.kind}: choose from {', '.join(self.known_metrics)}")

    @property
    @abstractmethod
    def num_logits(self) -> int | None:
        """Outputs that the model has for an encoded text; None for generated text."""

    @abstractmethod
    def metric(self) -> "evaluate.Metric":
        """Computes the metrics, and as "score" the first of them, from `predictions` and `references`, the labels."""

    @abstractmethod
    def chance(self, references: Sequence[Any]) -> dict[str, float]:
        """The metrics of one that always gives the same answer, the most frequent of these labels."""

    @abstractmethod
    def example(self, row: Row) -> Example | None:
        """The row as text; None where it has no label."""

    def examples(self, split: Split, samples: int | None = None) -> list[Example]:
        """The split's examples, or those of a fixed pseudo-random sample of its rows.

        Rows without a label are left out.

        Raises:
            ValueError: where no row has a label, the rows lack a column, or a column of text holds something else or
                is empty throughout.
        """
        rows = self.source.rows(split)
        check_filled(rows, (self.body, self.ending), f"{split} of {self.source}")
        if samples is not None and samples < len(rows):
            rows = rows.select(sample_indices(len(rows), samples))
        examples = []
        for row in _each(rows):
            try:
                example = self.example(row)
            except KeyError as error:
                known = ", ".join(row)
                raise ValueError(f"{self.source} has no column {error}: its columns are {known}") from None
            except (ValueError, TypeError, AttributeError, OverflowError) as error:  # of a reader's own functions, too
                raise ValueError(f"{error}, in row {str(dict(row))[:120]} of {split} of {self.source}") from None
            if example is not None:
                examples.append(example._replace(part=row.get(PART, "")))
        if not examples:
            raise ValueError(f"{self.source} has no row with a label in split {split!r}: take a split that has labels")
        return examples

    def fingerprint(self) -> str:
        """Return a hash of the rows, the declaration and the code of both: other examples have another one."""
        told = [f"{split} {self.source.fingerprint(split)}" for split in ("train", "test")]
        told.append(code_digest(text_of.__module__))
        for each in fields(self):
            if each.name not in ("source", "metrics", "targets"):
                told.append(f"{each.name} {identity(getattr(self, each.name))}")
        return hashlib.blake2b("\n".join([self.kind, code_digest(__name__), *told]).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """A text of one of several classes; metrics accuracy, matthews_correlation, f1 (of class 1)."""

    kind: ClassVar[str] = "classification"
    cut: ClassVar[Literal["left", "right"]] = "right"
    known_metrics: ClassVar[tuple[str, ...]] = ("accuracy", "matthews_correlation", "f1")

    ending: Text = ""
    label: Column = "label"
    """A column, or function of the row, with the class's index or name."""
    labels: tuple[str, ...]
    """Names of the classes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "labels", tuple(self.labels))
        if len(set(self.labels)) != len(self.labels) or len(self.labels) < 2:
            raise ValueError(f"labels = {self.labels} are not two or more different names: name every class once")
        if "f1" in self.metrics and len(self.labels) != 2:
            raise ValueError(f"metric 'f1' is of two classes, not {len(self.labels)}: choose accuracy")

    @property
    def num_logits(self) -> int:
        return len(self.labels)

    def metric(self) -> "evaluate.Metric":
        from lossytp.training.tasks.metrics import ClassificationMetric

        return ClassificationMetric(self.metrics)

    def chance(self, references: Sequence[Any]) -> dict[str, float]:
        return _constant(self, references, self.num_logits)

    def example(self, row: Row) -> Example | None:
        value = _value(self.label, row)
        if _name(value) in self.labels:
            value = self.labels.index(_name(value))
        index = _index(value, len(self.labels), f"a class of {', '.join(self.labels)}")
        return None if index is None else Example(text_of(self.body, row).strip(), (text_of(self.ending, row),), index)


@dataclass(frozen=True, kw_only=True)
class Regression(Task):
    """A text with a number; metrics pearson, spearman."""

    kind: ClassVar[str] = "regression"
    cut: ClassVar[Literal["left", "right"]] = "right"
    known_metrics: ClassVar[tuple[str, ...]] = ("pearson", "spearman")

    ending: Text = ""
    label: Column = "label"

    @property
    def num_logits(self) -> int:
        return 1

    def metric(self) -> "evaluate.Metric":
        from lossytp.training.tasks.metrics import RegressionMetric

        return RegressionMetric(self.metrics)

    def chance(self, references: Sequence[Any]) -> dict[str, float]:
        return dict.fromkeys((*self.metrics, "score"), 0.0)

    def example(self, row: Row) -> Example | None:
        value = _value(self.label, row)
        if value is None or value == "":
            return None
        if not math.isfinite(float(value)):
            raise ValueError(f"label {value!r} is not a finite number")
        return Example(text_of(self.body, row).strip(), (text_of(self.ending, row),), float(value))


@dataclass(frozen=True, kw_only=True)
class MultipleChoice(Task):
    """Body and one of several endings, each of which is encoded and scored; metric accuracy."""

    kind: ClassVar[str] = "multiple choice"
    cut: ClassVar[Literal["left", "right"]] = "left"
    known_metrics: ClassVar[tuple[str, ...]] = ("accuracy",)

    options: Column | tuple[str, ...]
    """The column that lists them, a column for each, or a function of the row."""
    ending: Text = " {option}"
    """What follows the body where this option is chosen; `option` counts as a column."""
    answer: Column = "label"
    """A column, or function of the row, with the right one's index, counted from 0."""

    @property
    def num_logits(self) -> int:
        return 1

    def metric(self) -> "evaluate.Metric":
        from lossytp.training.tasks.metrics import MultipleChoiceMetric

        return MultipleChoiceMetric(self.metrics)

    def chance(self, references: Sequence[Any]) -> dict[str, float]:
        return _constant(self, references, max(references) + 1)

    def example(self, row: Row) -> Example | None:
        names = self.options
        options = [row[name] for name in names] if isinstance(names, tuple) else _value(names, row)
        if len(options) < 2:
            raise ValueError(f"options = {options} are fewer than two: leave such rows out")
        index = _index(_value(self.answer, row), len(options), f"one of {len(options)} options")
        for option in options:
            if not isinstance(option, str | int | float):
                raise ValueError(f"option {str(option)[:60]!r} is no text: give text, or leave such rows out")
        endings = tuple(text_of(self.ending, {**row, "option": str(option).strip()}) for option in options)
        return None if index is None else Example(text_of(self.body, row).strip(), endings, index)


@dataclass(frozen=True, kw_only=True)
class Generation(Task):
    """A text that the model goes on with; metrics exact_match, f1 (of words, as SQuAD defines them)."""

    kind: ClassVar[str] = "generation"
    cut: ClassVar[Literal["left", "right"]] = "left"
    known_metrics: ClassVar[tuple[str, ...]] = ("exact_match", "f1")

    ending: Text
    """What comes between the body and the answer, such as " Question: {question} Answer:"."""
    answers: Column
    """A column, or function of the row, with the accepted answers, or the only one."""

    @property
    def num_logits(self) -> None:
        return

    def metric(self) -> "evaluate.Metric":
        from lossytp.training.tasks.metrics import GenerationMetric

        return GenerationMetric(self.metrics)

    def chance(self, references: Sequence[Any]) -> dict[str, float]:
        return dict.fromkeys((*self.metrics, "score"), 0.0)

    def example(self, row: Row) -> Example | None:
        value = _value(self.answers, row)
        given = [value] if isinstance(value, str) else value or []
        answers = tuple(dict.fromkeys(answer.strip() for answer in given if answer.strip()))
        return Example(text_of(self.body, row).strip(), (text_of(self.ending, row),), answers) if answers else None


def _each(rows: Any) -> Iterator[dict[str, Any]]:
    for batch in rows.iter(ROWS_AT_ONCE):  # several times as fast as row by row
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


def _value(column: Column, row: Row) -> Any:
    return column(row) if callable(column) else row[column]


def _name(value: Any) -> str:
    """What a class may be called: a csv's 3 and, in a column with gaps, 3.0 are the name "3"."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _index(value: Any, number: int, meaning: str) -> int | None:
    """The index that a column gives as a number or its digits; None for what stands for no label."""
    if value is None or value in ("", -1, "-1"):
        return None
    try:
        index = int(value)
        whole = index == float(value)
    except (ValueError, TypeError, OverflowError):
        whole = False
    if not (whole and 0 <= index < number):
        raise ValueError(f"label {value!r} is not {meaning}")
    return index


def _constant(task: Classification | MultipleChoice, references: Sequence[Any], number: int) -> dict[str, float]:
    import numpy as np

    always = np.bincount(np.asarray(references), minlength=number).argmax()
    logits = np.tile(np.eye(number)[always], (len(references), 1))
    scores = task.metric().compute(predictions=logits, references=references)
    return {name: score for name, score in scores.items() if name != "cross_entropy"}
