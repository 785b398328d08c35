"""The tasks by name, and the files that declare a user's own."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from lossytp.network.checks import check_known, check_names, check_probability, refuse_if, shown
from lossytp.training.command_line import read_yaml_file
from lossytp.training.docstrings import LIBRARIES, Docstrings
from lossytp.training.rows import Files, HeldOut, Row, Source, Split, Table

__all__ = ["TASKS", "Classification", "Files", "Generation", "MultipleChoice", "Regression", "Source", "Table"]
from lossytp.training.task_kinds import (
    Classification,
    Generation,
    MultipleChoice,
    Regression,
    Task,
    columns_of,
    name_of,
)

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
    splits: dict[Split, str] = {"train": "train", "test": validation}
    return Source(path="nyu-mll/glue", name=name, splits=splits, official_rows={"train": train, "test": test})


def _without_line_breaks(row: Row) -> str:
    return " ".join(row["text"].replace("<br />", " ").split())


def _before_blank(row: Row) -> str:
    return row["sentence"].partition("_")[0]


def _from_blank(row: Row) -> str:
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
    paragraphs = zip(row["context"]["title"], row["context"]["sentences"], strict=True)
    return "\n".join(f"{title}: {' '.join(''.join(sentences).split())}" for title, sentences in paragraphs)


SAME_END = " ."  # ends all texts alike, even cut ones and phrases: GPT-2 classifies at the last token


TASKS: dict[str, Task] = {
    "docstrings": Classification(source=Docstrings(), body="{text}", ending=SAME_END, labels=LIBRARIES),
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
    """Return the task of this name."""
    fault = f"is unknown: choose one of {', '.join(TASKS)}, or give a YAML file that declares a task of your own"
    refuse_if(name not in TASKS, "dataset", name, fault)
    return TASKS[name]


# Read a user's task from a YAML file.
#
#     train: reviews/train-*.csv      # a path or a pattern, relative to this file's folder: csv, json, jsonl or parquet
#     test: reviews/held_out.csv
#     kind: classification            # the default; or regression, multiple choice, generation
#     body: "{title}: {review}"       # columns in braces
#     label: verdict                  # a name in `labels`, or its number from 0; empty or -1 leaves a row out
#     labels: [bad, good]
#     metrics: [f1, accuracy]         # the first is the headline; metric: f1 gives one
#
# The other keys are the fields of the kind's class in `lossytp.training.task_kinds`. The task is named after the file,
# or by the key `name`.


KINDS: dict[str, type[Task]] = {each.kind: each for each in (Classification, Regression, MultipleChoice, Generation)}
DECLARATIONS = (".yaml", ".yml")  # endings of the files that declare a task
OF_ALL_KINDS = ("name", "kind", "train", "test")
LISTS: dict[str, Any] = {"labels": str | int | float, "metrics": str, "targets": int | float}
PLAIN_NAME = re.compile(r"[\w.-]+")  # it becomes part of the names of folders


def read_declaration(file: Path) -> dict[str, Any]:
    """Return a YAML file's declaration, with defaults for `name` and `kind`, and lists in place of single values."""
    content = read_yaml_file(f"dataset = {str(file)!r}", file)
    with _named(f"dataset = {str(file)!r}"):
        if not isinstance(content, dict):
            raise ValueError(f"it holds {shown(content)}: write keys with values, such as 'train: my_rows.csv'")
        declaration = {"name": re.sub(r"[^\w.-]+", "-", file.stem), "kind": Classification.kind, **content}
        if "metric" in declaration:
            refuse_if("metrics" in declaration, "metric", declaration["metric"], "stands beside metrics: give one")
            declaration["metrics"] = declaration.pop("metric")
        for key in LISTS:
            if key in declaration and not isinstance(declaration[key], list):
                declaration[key] = [declaration[key]]
        source: Any = _task(declaration, file.parent).source
        for target in declaration.get("targets", ()):  # old records may hold others
            check_probability("targets", target)
        if declaration["name"] in TASKS:
            raise ValueError(f"{declaration['name']!r} is the name of another task: add the key name with another name")
        both = set(map(Path.resolve, source.files("train"))).intersection(map(Path.resolve, source.files("test")))
        if both:
            raise ValueError(f"{min(both)} is in both train and test: test on rows that training does not see")
    return declaration


def declared_task(declaration: Mapping[str, Any], folder: str | None) -> Task:
    """Return the task of a declaration. Its files need not exist yet.

    Args:
        declaration: the result of `read_declaration`.
        folder: where relative paths start; the working folder if None.
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
        if key in LISTS or (key == "options" and isinstance(value, list)):
            fits, wanted = all(isinstance(each, LISTS.get(key, str)) for each in value), "a list of such values"
        else:
            fits, wanted = isinstance(value, str), "text"
        if not fits or (value == [] and key in LISTS):
            raise ValueError(f"{key} = {shown(value)} is of the wrong type: give {wanted}")
    if not PLAIN_NAME.fullmatch(declaration["name"]):
        raise ValueError(f"name = {declaration['name']!r} is not a plain name: use only letters, digits, _, - and .")
    if not columns_of(declaration["body"]):
        raise ValueError(f"body = {shown(declaration['body'])} names no column: write one in braces, such as {{text}}")
    values = {key: value for key, value in declaration.items() if key not in OF_ALL_KINDS}
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    if "labels" in values:
        values["labels"] = tuple(map(name_of, values["labels"]))
    return kind(source=Files(train=declaration["train"], test=declaration["test"], folder=folder), **values)


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Prefix the messages of errors within the block with their place."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
