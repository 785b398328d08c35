"""Test kinds of tasks with data of a user's own: labels, templates, and declarations in YAML files."""

import re
from unicodedata import normalize

import pytest

from lossytp.training.task_kinds import class_of, text_of
from lossytp.training.tasks import (
    Classification,
    Files,
    Generation,
    MultipleChoice,
    Regression,
    Table,
    declared_task,
    read_declaration,
)
from tests.training.own_tasks import declare, flat_rows

ANSWERED = {"ending": "", "answers": "answers"}
NFC, NFD = (normalize(form, "é") for form in ("NFC", "NFD"))


def classification(rows, **options):
    options = {"body": "{text}", "labels": ("x", "y"), **options}
    return Classification(source=Table(train=rows, test=rows), **options)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_users_task_from_a_csv(tmp_path):
    (tmp_path / "reviews.csv").write_text("review,verdict\nfine {really},good\npoor,bad\n,bad\n")
    source = Files(train=tmp_path / "reviews.csv", test=tmp_path / "reviews.csv")
    found = Classification(source=source, body="{review}", label="verdict", labels=("bad", "good")).examples("train")
    assert found == [("fine {really}", ("",), 1, ""), ("poor", ("",), 0, ""), ("", ("",), 0, "")]


@pytest.mark.parametrize("label", [0.7, 2.5, "inf", float("inf"), [1], 7, -2])
def test_labels_that_are_no_class_are_refused(label):
    with pytest.raises(ValueError, match="is not a class of x, y"):
        classification([]).example({"text": "so", "label": label})


def test_rows_without_a_label_are_left_out():
    def examples(kind, rows, **options):
        return kind(source=Table(train=rows, test=[]), body="{text}", **options).examples("train")

    rows = [{"text": text, "label": label} for text, label in (("a", -1), ("b", 1), (" ", 0))]
    found = examples(Classification, rows, labels=("x", "y"))
    assert [example.body for example in found] == ["b", ""]
    assert found.incomplete == {"without_label": 1, "without_text": 1}
    assert [
        example.label for example in examples(Regression, [{"text": "a", "label": None}, {"text": "b", "label": -1}])
    ] == [-1.0]
    choices = [{"text": "a", "options": ["x", "y"], "label": value} for value in ("", "1")]
    assert [example.label for example in examples(MultipleChoice, choices, options="options")] == [1]
    with pytest.raises(ValueError, match="table has no labelled row in split 'train'"):
        examples(Generation, [{"text": "a", "answers": []}], ending="", answers="answers")


def test_missing_columns_and_impossible_labels_are_named():
    def task(*labels, **options):
        return classification([{"text": "a", "label": label} for label in labels], **options)

    with pytest.raises(ValueError, match=r"table has no column 'review': .*text, label"):
        task(0, 1, body="{review}").examples("train")
    for label, others in ((2, [0, 1]), ("z", ["x", "y"])):
        with pytest.raises(ValueError, match=f"label {label!r} is not a class of x, y: .*, in row .* of train of"):
            task(label, *others).examples("train")
    with pytest.raises(ValueError, match="classification has no metric 'pearson': choose from accuracy"):
        task(metrics=("pearson",))
    for alike in (("x", "x"), (NFC, NFD)):
        with pytest.raises(ValueError, match="not two or more different names"):
            task(labels=alike)
    with pytest.raises(ValueError, match="'f1' needs two classes, not 3"):
        task(labels=("x", "y", "z"), metrics=("f1",))
    single = MultipleChoice(source=Table(train=[{"o": ["x"], "label": 0}], test=[]), body="", options="o")
    with pytest.raises(ValueError, match="list of two or more"):
        single.examples("train")


def test_a_fingerprint_depends_on_rows_prompt_and_code():
    rows = [{"text": "a", "label": 0}]

    def fingerprint(rows=rows, **options):
        return classification(rows, **options).fingerprint()

    bodies = ("{text}", "{text}!", lambda row: row["text"], lambda row: row["text"] + "!")
    others = [fingerprint(body=body) for body in bodies]
    others += [fingerprint(rows=[{"text": "b", "label": 0}]), fingerprint(ending=" so")]
    assert len(set(others)) == len(others)
    assert fingerprint() == others[0] == fingerprint(targets=(0.5,))  # targets change no example


@pytest.mark.parametrize(
    ("kind", "how", "column", "wrong"),
    [
        *((Regression, {}, "label", label) for label in (float("nan"), float("inf"), "much")),
        *((MultipleChoice, {"options": "options"}, "options", wrong) for wrong in ("yes or no", {"a": ["A"]}, None)),
        *((Generation, ANSWERED, "answers", wrong) for wrong in ({"text": ["a"], "answer_start": [1]}, 0, [4, 5])),
    ],
)
def test_a_column_without_numbers_a_list_of_options_or_answers_is_refused(kind, how, column, wrong):
    """The letters of a text, or the keys of a mapping, are no options."""
    rows = [{"question": "?", "label": 0, column: wrong}]
    task = kind(source=Table(train=rows, test=rows), body="{question}", **how)
    with pytest.raises(ValueError, match=rf"{column} = .* not a |label .* in row .* of train of table"):
        task.examples("train")


def test_labels_options_and_answers_of_a_csv_are_read_as_written(tmp_path):
    (tmp_path / "a.csv").write_text("text,one,two,right\nx,01,1e3,0\ny,NA,2.50,1\n")
    source = Files(train=tmp_path / "a.csv", test=tmp_path / "a.csv")
    choice = MultipleChoice(source=source, body="{text}", options=("one", "two"), answer="right")
    assert [example.endings for example in choice.examples("train")] == [(" 01", " 1e3"), (" NA", " 2.50")]
    named = Classification(source=source, body="{text}", label="one", labels=("01", "NA"))
    assert [example.label for example in named.examples("train")] == [0, 1]
    answered = Generation(source=source, body="{text}", ending="", answers="two")
    assert [example.label for example in answered.examples("train")] == [("1e3",), ("2.50",)]
    numbers = Regression(source=source, body="{text}", label="two")
    assert [example.label for example in numbers.examples("train")] == [1000.0, 2.5]
    with pytest.raises(ValueError, match="label 'NA' is not a finite number"):
        Regression(source=source, body="{text}", label="one").examples("train")


@pytest.mark.parametrize(
    ("labels", "indices"),
    [
        (("a", "b"), {"b": 1, 1: 1, "1.0": 1, "True": 1, -1: None, "-1.0": None, "": None}),
        *((("1", "2", "3"), {2: 1, "2.0": 1}), (("4", "5"), {1: 1}), (("-1", "0", "1"), {-1: 0})),
        *((("None", "b"), {None: None, "None": 0}), (("01", "1"), {"1": 1, "01": 0})),
        *((("1e3", "nan"), {1000.0: 0, "nan": 1}), (("True", "False"), {"true": 0, 0: 1})),
        *((("b", one), {other: 1}) for one, other in ((NFC, NFD), (NFD, NFC))),
    ],
)
def test_a_value_is_the_name_of_a_class_or_its_index(labels, indices):
    assert {value: class_of(value, labels) for value in indices} == indices


@pytest.mark.parametrize(("value", "labels"), [(0, ("1", "2", "3")), ("0", ("-1", "1")), (1, ("01", "1.0")), (2, "ab")])
def test_an_index_that_could_be_a_name_is_neither(value, labels):
    with pytest.raises(ValueError, match=f"label {value!r} is not a class of {labels[0]}"):
        class_of(value, tuple(labels))


@pytest.mark.parametrize(
    ("values", "labels", "lacking"),
    [
        *(([-1, 0, 1], ("neg", "neutral", "pos"), "pos"), ([-1, 1], ("neg", "pos"), "neg"), ([1, 1], ("a", "b"), "a")),
        *((values, ("a", "b", "c"), lacking) for values, lacking in (([1, 2], "a"), (["a", "b"], "c"))),
    ],
)
def test_a_class_without_a_training_row_is_refused(values, labels, lacking):
    """Otherwise training would drop rows, or shift the names, without a word."""
    wrong = classification([{"text": "a", "label": value} for value in values * 20], labels=labels)
    for samples in (None, 2):
        with pytest.raises(ValueError, match=rf"^label '{lacking}' does not occur in .*train of table"):
            wrong.examples("train", samples)
    assert wrong.examples("test")


@pytest.mark.parametrize("template", ["{text.__class__}", "{text[0]}", "{text.real}"])
def test_braces_hold_the_name_of_a_column_and_no_more(template):
    with pytest.raises(KeyError, match=re.escape(template[1:-1])):
        text_of(template, {"text": "a", "label": 1})


@pytest.mark.parametrize("suffix", [".csv", ".json", ".jsonl", ".parquet"])
def test_files_of_all_formats_from_the_declarations_own_folder(tmp_path, suffix):
    task = declared_task(read_declaration(declare(tmp_path / "a[b]", suffix=suffix)), str(tmp_path / "a[b]"))
    expected = flat_rows(36, 0)
    examples = task.examples("train")
    assert [example.body for example in examples] == [row["text"] for row in expected]
    assert [task.labels[example.label] for example in examples] == [row["name"] for row in expected]
    assert len(task.examples("test")) == 15


def test_single_values_stand_for_lists_and_the_file_names_the_task(tmp_path):
    file = declare(tmp_path, metric="f1", labels=["red", "blue"], targets=0.7, stem="my own (1)")
    declaration = read_declaration(file)
    assert declaration == {
        "name": "my-own-1-",
        "kind": "classification",
        "train": "rows/train-*.csv",
        "test": "rows/test.csv",
        "body": "{text}",
        "label": "name",
        "labels": ["red", "blue"],
        "metrics": ["f1"],
        "targets": [0.7],
    }
    task = declared_task(declaration, None)
    assert (task.metrics, task.targets, task.labels) == (("f1",), (0.7,), ("red", "blue"))
    assert read_declaration(declare(tmp_path, name="another"))["name"] == "another"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"lables": ["a", "b"]}, "'lables': did you mean labels"),
        *(({"kind": "clasification"}, "kind = 'clasification'"), ({"body": None, "labels": None}, "body, labels")),
        *(({"body": "always"}, "body"), ({"body": "{text"}, "expected '}'"), ({"label": 5}, "label = 5")),
        *(({"labels": labels}, "labels") for labels in (["a"], [["a"], "b"], [])),
        *(({"metric": "f2"}, "metric 'f2'"), ({"targets": [float("inf")]}, "targets")),
        ({"metric": "f1", "metrics": ["accuracy"]}, "metric = 'f1' stands beside metrics: give one"),
        ({"targets": [0.5, 2]}, "targets = 2"),
        *(({"train": gone}, f"train = '{gone}'") for gone in ("gone.csv", "gone-*.csv", "rows")),
        ({"train": "rows/*.csv"}, "rows/test.csv is in both train and test"),
        ({"test": "rows/../rows/train-0.csv"}, "rows/train-0.csv is in both train and test"),
        *(({"name": name}, f"'{name}'") for name in ("sst2", "a/b", "")),
    ],
)
def test_a_wrong_declaration_is_told_in_one_line(tmp_path, values, named):
    file = declare(tmp_path, **values)
    with pytest.raises(ValueError, match=f"^dataset = {re.escape(repr(str(file)))}: .*{re.escape(named)}"):
        read_declaration(file)
