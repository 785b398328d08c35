"""Tasks: how a row becomes text and a label, which metrics score the answers, and the tasks that have a name.

A text is a template over the row's columns ("{premise}"), or a function of the row.
"""

import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar
from unicodedata import normalize

import numpy as np
import yaml

from lossytp.network.checks import check_at_most, check_known, check_names, is_finite, shown
from lossytp.network.losses import Stream
from lossytp.training import rows as docstrings
from lossytp.training.command_line import read_yaml_file
from lossytp.training.rows import Files, Row, RowSource, Source, Split, code_digest, identity, sample_indices
from lossytp.training.rows import Table as Table

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
    """Return an index that is given as a number or as digits; None for values that mean no label.

    Raises:
        ValueError: if the value is not an index below `number`; `meaning` names what it should be.
    """
    index = number_of(value)
    if value is None or value == "" or index == -1:
        return None
    if index is None or not index.is_integer() or not 0 <= index < number:
        raise ValueError(f"label {value!r} is not {meaning}: give one that is, or leave out such rows")
    return int(index)


# Make a row's text from a template over its columns, such as "{premise}", or with a function of the row.


Text = str | Callable[[Row], str]
SHOWN = 60  # characters of a wrong value


def text_of(template: Text, row: Row) -> str:
    """Return the row's text, without trailing white space; a null counts as "".

    Raises:
        KeyError: if the row lacks a column.
        ValueError: if a column, or the function's result, is not text.
    """
    if not callable(template):
        return "".join(literal + _cell(row, *cell) for literal, *cell in _parsed(template)).rstrip()
    text = template(row)
    if not isinstance(text, str):
        raise ValueError(f"a function returned {str(text)[:SHOWN]!r} for the row, which is not text: return a str")
    return text.rstrip()


def check_template(name: str, template: str) -> None:
    """Raise ValueError if the template is malformed, or names no column."""
    try:
        columns = [column for _, column, _, _ in _parsed(template) if column is not None]
    except ValueError as error:
        raise ValueError(f"{name} = {error}") from None
    if name == "body" and not columns:
        raise ValueError(f"{name} = {template[:SHOWN]!r} names no column: write one in braces, such as {{text}}")
    if "" in columns or any(column.isdigit() for column in columns):
        raise ValueError(f"{name} = {template[:SHOWN]!r} has braces without a column: write one, such as {{text}}")


def columns_of(*templates: Text) -> list[str]:
    """Return the columns that templates name; none for a function."""
    parsed = [_parsed(template) for template in templates if not callable(template)]
    return sorted({column for pieces in parsed for _, column, _, _ in pieces if column})


def is_filled(value: Any) -> bool:
    """Return whether a value is neither null nor blank."""
    return value.strip() != "" if isinstance(value, str) else value is not None


@lru_cache
def _parsed(template: str) -> tuple[tuple[str, str | None, str | None, str | None], ...]:
    """Return a template's pieces: a text, then a column, its layout and its conversion, which the last may lack."""
    shown = repr(template[:SHOWN])
    try:
        pieces = tuple(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{shown} is malformed ({error}): pair the braces, and double those of the text") from None
    if any(re.search(r"\d{4}", layout or "") for _, _, layout, _ in pieces):
        raise ValueError(f"{shown} has a width of 1000 or more: give at most 999")
    return pieces


def _cell(row: Row, column: str | None, layout: str | None, conversion: str | None) -> str:
    """Return the text of a column. A value that is not text needs a conversion or a layout: {stars!s}, {price:.2f}."""
    if column is None or row[column] is None:
        return ""
    value = row[column]
    if not (layout or conversion or isinstance(value, str)):
        raise ValueError(
            f"column {column!r} holds {str(value)[:SHOWN]!r}, which is not text: name a column of text, or write "
            f"{{{column}!s}} to read the value as text"
        )
    return format(Formatter().convert_field(value, conversion), layout or "")


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
        from lossytp.training import metrics  # slow to import

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


# Suggest a declaration for a file of rows, by guessing which column is the label and which are texts.


MOST_CLASSES = 20
NUMBERS = ("int", "uint", "float")
ROWS_READ = 10_000
LIKELY_LABELS = ("label", "labels", "class", "category", "target", "verdict", "sentiment", "stars", "rating", "score")


def suggestion(file: Path) -> str:
    """Return a message of several lines that suggests a declaration of this file.

    Raises:
        ValueError: if the file cannot be read.
    """
    rows = Files(train=file, test=file).rows("train")
    declaration = {"train": file.name, "test": f"test{file.suffix}", **_of_columns(rows)}
    if "labels" in declaration:  # as the file writes them: 01 is not 1
        label = declaration["label"]
        declaration["labels"] = _values(Files(train=file, test=file, texts=(label,)).rows("train"), label)
    target = file.with_suffix(".yaml")
    return (
        f"dataset = {str(file)!r} holds rows, but does not declare a task: write {target} and give --dataset {target}. "
        "These lines would do, once test names a file of rows that training does not see:\n"
        + yaml.safe_dump(declaration, sort_keys=False, allow_unicode=True, default_flow_style=None, width=10**6).strip()
    )


def _of_columns(rows: "Dataset") -> dict[str, Any]:
    """Return the part of a declaration that follows from the columns."""
    types = {name: str(getattr(feature, "dtype", "")) for name, feature in rows.features.items()}
    texts = [name for name, kind in types.items() if kind.endswith("string")]  # string, or a parquet's large_string
    few = {name: values for name in rows.column_names if 2 <= len(values := _values(rows, name)) <= MOST_CLASSES}
    numbers = [name for name, kind in types.items() if kind.startswith(NUMBERS)]
    likely = [name for name in LIKELY_LABELS if name in few or name in numbers]
    label = (likely or sorted(few, key=lambda name: len(few[name])) or numbers or ["label"])[0]
    others = [name for name in rows.column_names if name != label]
    parts = [f"{{{name}}}" for name in others if name in texts] or [f"{{{name}!s}}" for name in others]
    found: dict[str, Any] = {"body": " ".join(parts), "label": label}
    if label in few:
        return {"kind": Classification.kind, **found, "labels": few[label]}
    return {"kind": Regression.kind, **found}


def _values(rows: "Dataset", column: str) -> list[str]:
    """Return a column's distinct values in the first rows as names; none if the column holds lists or mappings."""
    values = rows.select(range(min(ROWS_READ, len(rows))))[column]
    if any(isinstance(value, list | dict) for value in values):
        return []
    return sorted({name_of(value) for value in values if value is not None and value != ""})


# Move whole sentences from a training split to the test split, and remove their phrases from training.


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A source that adds some of its training sentences to the official test rows.

    SST-2's training rows are sentences and their phrases. A sentence is whole if no other row contains it. Whole
    sentences are held out, and training loses every phrase that they contain. Texts are compared word for word: a
    phrase that differs by a comma stays. Test rows have a column `part`: "official" or "held_out".

    SST-2 keeps 17,579 of its 67,349 training rows if 5,000 of its 6,885 whole sentences are held out.
    """

    has_parts: ClassVar[bool] = True
    source: RowSource
    column: str
    """Column of the sentences and phrases."""
    sentences: int
    """Number of sentences to hold out."""

    def __str__(self) -> str:
        return f"{self.source} with {self.sentences} sentences held out"

    def rows(self, split: Split) -> "Dataset":
        """Return the remaining training rows, or the official test rows followed by those held out.

        Raises:
            ValueError: if there are too few whole sentences.
        """
        import datasets

        train = self.source.rows("train")
        holders = _holders(train[self.column])
        whole = np.array([row for row, held_in in enumerate(holders) if held_in == [row]])
        if len(whole) <= self.sentences:
            raise ValueError(f"{self.source} has {len(whole)} whole sentences: hold out fewer than {self.sentences}")
        draw = np.argsort(Stream(("held out",)).uniforms(len(whole)), kind="stable")[: self.sentences]
        chosen = np.sort(whole[draw])
        if split == "train":
            gone = set(chosen.tolist())
            return train.select([row for row, held_in in enumerate(holders) if gone.isdisjoint(held_in)])
        official = self.source.rows("test")
        parts = [
            rows.add_column(PART, [name] * len(rows)).select_columns([*official.column_names, PART])
            for name, rows in (("official", official), ("held_out", train.select(chosen)))
        ]
        return datasets.concatenate_datasets([rows.cast(parts[0].features) for rows in parts])

    def subset(self, split: Split) -> bool | None:
        """Return whether the source lacks rows of the official split; None if there is no official number."""
        return self.source.subset(split)

    def fingerprint(self, split: Split) -> str:
        """Return a hash of both splits and this file: each split's rows depend on the other's."""
        parts = [self.source.fingerprint("train"), self.source.fingerprint("test"), self.column, str(self.sentences)]
        return hashlib.blake2b("\n".join([*parts, Path(__file__).read_text()]).encode(), digest_size=8).hexdigest()


def _holders(texts: Sequence[str]) -> list[list[int]]:
    """Return, for each text, the rows of the whole texts that contain it word for word.

    A whole text has only its own row. Of equal texts, the first counts as whole.
    """
    padded = [f" {' '.join(text.split())} " for text in texts]
    whole_by_word: dict[str, list[int]] = defaultdict(list)
    holders: list[list[int]] = [[] for _ in texts]
    for row in sorted(range(len(padded)), key=lambda row: -len(padded[row])):  # longest first; equal texts in order
        words = set(padded[row].split())
        rarest = min((whole_by_word[word] for word in words), key=len, default=[])
        holders[row] = [other for other in rarest if padded[row] in padded[other]] or [row]
        if holders[row] == [row]:
            for word in words:
                whole_by_word[word].append(row)
    return holders


# List the tasks by name.
#
# To add your own task, add an entry anywhere in your code:
#
#     TASKS["reviews"] = Classification(
#         source=Files(train="reviews.csv", test="held_out.csv"), body="{review}", label="stars", labels=("1", "2", "3")
#     )
#
# Row numbers are those of the official splits. Tasks are evaluated on the validation split if the hub withholds the
# test labels, as for all of GLUE. IMDB is evaluated on test because it has no validation split, and ARC-Easy as in
# Brown et al., NeurIPS 2020. Targets are those of earlier studies of time to accuracy.


def _glue(name: str, train: int, test: int, validation: str = "validation") -> Source:
    return Source(
        path="nyu-mll/glue",
        name=name,
        splits={"train": "train", "test": validation},
        official_rows={"train": train, "test": test},
    )


def _without_line_breaks(row: Row) -> str:
    return " ".join(row["text"].replace("<br />", " ").split())


def _before_blank(row: Row) -> str:
    return row["sentence"].partition("_")[0]


def _from_blank(row: Row) -> str:
    """Return the option and the words after the blank. The model scores the same words after either option."""
    before, _, after = row["sentence"].partition("_")
    return (" " if before.endswith(" ") else "") + row["option"] + after


def _captioned(row: Row) -> str:
    return f"{row['activity_label']}: {_without_marks(row['ctx'])}"


def _captioned_ending(row: Row) -> str:
    return f" {_without_marks(row['option'])}"


def _without_marks(text: str) -> str:
    """Remove [header], [title] and the like, which HellaSwag's texts from WikiHow contain."""
    return " ".join(re.sub(r"\[.*?\]", " ", text).split())


def _paragraphs(row: Row) -> str:
    """Return all of HotpotQA's paragraphs in order, both the supporting and the distracting ones."""
    paragraphs = zip(row["context"]["title"], row["context"]["sentences"], strict=True)
    return "\n".join(f"{title}: {' '.join(''.join(sentences).split())}" for title, sentences in paragraphs)


SAME_END = " ."  # ends all texts alike, even cut ones and phrases: GPT-2 classifies at the last token


TASKS: dict[str, Task] = {
    "docstrings": Classification(
        source=docstrings.Docstrings(), body="{text}", ending=SAME_END, labels=docstrings.LIBRARIES
    ),
    # GLUE (Wang et al., ICLR 2019)
    "sst2": Classification(
        source=_glue("sst2", 67349, 872),
        body="{sentence}",
        ending=SAME_END,
        labels=("negative", "positive"),
        targets=(0.7, 0.8, 0.9),
    ),
    "sst2_held_out": Classification(  # 5,872 test examples, enough to distinguish arms
        source=HeldOut(source=_glue("sst2", 67349, 872), column="sentence", sentences=5000),
        body="{sentence}",
        ending=SAME_END,
        labels=("negative", "positive"),
    ),
    "cola": Classification(
        source=_glue("cola", 8551, 1043),
        body="{sentence}",
        labels=("unacceptable", "acceptable"),
        metrics=("matthews_correlation", "accuracy"),
    ),
    "mrpc": Classification(
        source=_glue("mrpc", 3668, 408),
        body="{sentence1}",
        ending=" Compare: {sentence2}",
        labels=("not equivalent", "equivalent"),
        metrics=("accuracy", "f1"),
    ),
    "rte": Classification(
        source=_glue("rte", 2490, 277),
        body="{sentence1}",
        ending=" Hypothesis: {sentence2}",
        labels=("entailment", "not entailment"),
    ),
    "qnli": Classification(
        source=_glue("qnli", 104743, 5463),
        body="{sentence}",
        ending=" Question: {question}",
        labels=("entailment", "not entailment"),
    ),
    "mnli": Classification(
        source=_glue("mnli", 392702, 9815, "validation_matched"),
        body="{premise}",
        ending=" Hypothesis: {hypothesis}",
        labels=("entailment", "neutral", "contradiction"),
        targets=(0.6, 0.7, 0.75),
    ),
    "stsb": Regression(
        source=_glue("stsb", 5749, 1500),
        body="{sentence1}",
        ending=" Compare: {sentence2}",
        metrics=("pearson", "spearman"),
    ),
    "imdb": Classification(  # Maas et al., ACL 2011
        source=Source(
            path="stanfordnlp/imdb",
            name="plain_text",
            splits={"train": "train", "test": "test"},
            official_rows={"train": 25000, "test": 25000},
        ),
        body=_without_line_breaks,
        ending=SAME_END,
        labels=("negative", "positive"),
    ),
    "winogrande_l": MultipleChoice(  # Sakaguchi et al., AAAI 2020; the option replaces the blank
        source=Source(path="allenai/winogrande", name="winogrande_l", official_rows={"train": 10234, "test": 1267}),
        body=_before_blank,
        options=("option1", "option2"),
        ending=_from_blank,
        answer=lambda row: row["answer"] and int(row["answer"]) - 1,
        targets=(0.7, 0.8, 0.9),
    ),
    "hellaswag": MultipleChoice(  # Zellers et al., ACL 2019
        source=Source(path="Rowan/hellaswag", official_rows={"train": 39905, "test": 10042}),
        body=_captioned,
        options="endings",
        ending=_captioned_ending,
        targets=(0.3, 0.5, 0.7),
    ),
    "piqa": MultipleChoice(  # Bisk et al., AAAI 2020
        source=Source(path="ybisk/piqa", name="plain_text", official_rows={"train": 16113, "test": 1838}),
        body="Question: {goal}",
        options=("sol1", "sol2"),
        ending=" Answer: {option}",
        targets=(0.5, 0.7, 0.8),
    ),
    "arc_easy": MultipleChoice(  # Clark et al., 2018; three to five options, named A, B, ... or 1, 2, ...
        source=Source(
            path="allenai/ai2_arc",
            name="ARC-Easy",
            splits={"train": "train", "test": "test"},
            official_rows={"train": 2251, "test": 2376},
        ),
        body="Question: {question}",
        options=lambda row: row["choices"]["text"],
        ending=" Answer: {option}",
        answer=lambda row: row["answerKey"] and row["choices"]["label"].index(row["answerKey"]),
        targets=(0.4, 0.6, 0.7),
    ),
    "quality": MultipleChoice(  # Pang et al., NAACL 2022; the model reads the end of a long article, then the question
        source=Source(path="emozilla/quality", official_rows={"train": 2523, "test": 2086}),
        body="{article}",
        options="options",
        ending=" Question: {question} Answer: {option}",
        answer="answer",
        targets=(0.3, 0.5, 0.7),
    ),
    "cosmosqa": MultipleChoice(  # Huang et al., EMNLP 2019
        source=Source(path="allenai/cosmos_qa", official_rows={"train": 25262, "test": 2985}),
        body="{context}",
        options=("answer0", "answer1", "answer2", "answer3"),
        ending=" Question: {question} Answer: {option}",
    ),
    "squad": Generation(  # Rajpurkar et al., EMNLP 2016
        source=Source(path="rajpurkar/squad", name="plain_text", official_rows={"train": 87599, "test": 10570}),
        body="{context}",
        ending=" Question: {question} Answer:",
        answers=lambda row: row["answers"]["text"],
        metrics=("exact_match", "f1"),
        targets=(0.4, 0.6, 0.8),
    ),
    "hotpotqa": Generation(  # Yang et al., EMNLP 2018; two of the ten paragraphs hold the answer
        source=Source(path="hotpotqa/hotpot_qa", name="distractor", official_rows={"train": 90447, "test": 7405}),
        body=_paragraphs,
        ending=" Question: {question} Answer:",
        answers="answer",
        metrics=("exact_match", "f1"),
        targets=(0.1, 0.3, 0.5),
    ),
}


def task_named(name: str) -> Task:
    """Return the task of this name.

    Raises:
        ValueError: if there is none.
    """
    if name not in TASKS:
        raise ValueError(
            f"dataset = {shown(name)} is unknown: choose one of {', '.join(TASKS)}, or give a YAML file that "
            "declares a task of your own"
        )
    return TASKS[name]


# Read a user's task from a YAML file.
#
#     train: reviews/train-*.csv      # a path or a pattern, relative to this file's folder: csv, json, jsonl or parquet
#     test: reviews/held_out.csv
#     kind: classification            # the default; or regression, multiple choice, generation
#     body: "{title}: {review}"       # columns in braces; {stars!s} reads a number as text
#     label: verdict                  # a name in `labels`, or its number from 0; empty or -1 leaves a row out
#     labels: [bad, good]
#     metrics: [f1, accuracy]         # the first is the headline; metric: f1 gives one
#
# The other keys are the fields of the kind's class in `kinds`. The task is named after the file, or by the key `name`.


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
