"""Test kinds of tasks with data of a user's own."""

import pandas as pd
import pytest

from lossytp.training.rows import sample_indices
from lossytp.training.tasks import TASKS, Classification, Files, Generation, MultipleChoice, Regression, Table


def test_a_sample_is_drawn_before_any_text_is_made():
    read = []
    rows = [{"text": f"row {i}", "label": i % 2} for i in range(50)]
    task = Classification(
        source=Table(train=rows, test=rows), body=lambda row: read.append(row) or row["text"], labels=("a", "b")
    )
    assert [example.body for example in task.examples("test", 7)] == [f"row {i}" for i in sample_indices(50, 7)]
    assert len(read) == 7
    assert len(task.examples("test", 1000)) == len(task.examples("test")) == 50


def test_a_users_task_from_a_csv(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pd.DataFrame({"review": ["fine {really}", "poor", None], "verdict": ["good", "bad", "bad"]}).to_csv(
        tmp_path / "reviews.csv"
    )
    TASKS["reviews"] = Classification(
        source=Files(train=tmp_path / "reviews.csv", test=tmp_path / "reviews.csv"),
        body="{review}",
        label="verdict",
        labels=("bad", "good"),
    )
    try:
        assert TASKS["reviews"].examples("train") == [
            ("fine {really}", ("",), 1, ""),
            ("poor", ("",), 0, ""),
            ("", ("",), 0, ""),
        ]
    finally:
        del TASKS["reviews"]


def test_a_users_column_may_be_named_part():
    rows = [{"text": "fine", "label": 1, "part": 7}, {"text": "poor", "label": 0, "part": None}]
    task = Classification(source=Table(train=rows, test=rows), body="{text}", labels=("bad", "good"))
    assert [example.part for split in ("train", "test") for example in task.examples(split)] == [""] * 4


STARS = {"body": "{review}", "label": "stars", "labels": ("1", "2", "3")}


@pytest.mark.parametrize("gap", [[], [("poor again", "")]], ids=["whole", "with a gap"])
def test_names_of_classes_that_are_numbers_in_a_csv(tmp_path, monkeypatch, gap):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [("poor", 1), ("fair", 2), ("fine", 3), *gap]  # with a gap the column holds 1.0, 2.0, 3.0
    (tmp_path / "stars.csv").write_text("review,stars\n" + "".join(f"{text},{stars}\n" for text, stars in rows))
    task = Classification(source=Files(train=tmp_path / "stars.csv", test=tmp_path / "stars.csv"), **STARS)
    assert [(example.body, example.label) for example in task.examples("train")] == [
        ("poor", 0),
        ("fair", 1),
        ("fine", 2),
    ]


@pytest.mark.parametrize("label", [0.7, 2.5, "inf", float("inf"), [1], 7, -2])
def test_labels_that_are_no_class_are_refused(label):
    task = Classification(source=Table(train=[], test=[]), body="{text}", labels=("bad", "good"))
    with pytest.raises(ValueError, match="is not a class of bad, good"):
        task.example({"text": "so", "label": label})


@pytest.mark.parametrize("label", [float("nan"), float("inf"), "much"])
def test_labels_that_are_no_numbers_are_refused(label):
    rows = [{"text": "so", "label": label}]
    task = Regression(source=Table(train=rows, test=rows), body="{text}")
    with pytest.raises(ValueError, match=r"in row .* of train of table"):
        task.examples("train")


def test_a_users_function_that_fails_is_named_with_its_row():
    rows = [{"text": None, "label": 0}]
    task = Classification(source=Table(train=rows, test=rows), body=lambda row: row["text"].lower(), labels=("a", "b"))
    with pytest.raises(ValueError, match=r"has no attribute 'lower', in row .* of test of table"):
        task.examples("test")


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
        rows = [{"text": "a", "label": label} for label in labels]
        return Classification(source=Table(train=rows, test=[]), **{"body": "{text}", "labels": ("x", "y"), **options})

    with pytest.raises(ValueError, match="table has no column 'review': name one of its columns, text, label"):
        task(0, 1, body="{review}").examples("train")
    for label, others in ((2, [0, 1]), ("z", ["x", "y"])):
        with pytest.raises(
            ValueError, match=f"label {label!r} is not a class of x, y: .*, in row .* of train of table"
        ):
            task(label, *others).examples("train")
    with pytest.raises(ValueError, match="classification has no metric 'pearson': choose from accuracy"):
        task(metrics=("pearson",))
    with pytest.raises(ValueError, match="not two or more different names"):
        task(labels=("x", "x"))
    with pytest.raises(ValueError, match="'f1' needs two classes, not 3"):
        task(labels=("x", "y", "z"), metrics=("f1",))
    single = MultipleChoice(source=Table(train=[{"o": ["x"], "label": 0}], test=[]), body="", options="o")
    with pytest.raises(ValueError, match="list of two or more"):
        single.examples("train")


def test_a_fingerprint_depends_on_rows_prompt_and_code():
    rows = [{"text": "a", "label": 0}]

    def fingerprint(rows=rows, body="{text}", **options):
        return Classification(
            source=Table(train=rows, test=rows), body=body, labels=("x", "y"), **options
        ).fingerprint()

    others = [
        fingerprint(),
        fingerprint(rows=[{"text": "b", "label": 0}]),
        fingerprint(body="{text}!"),
        fingerprint(ending=" so"),
        fingerprint(body=lambda row: row["text"]),
        fingerprint(body=lambda row: row["text"] + "!"),
    ]
    assert len(set(others)) == len(others)
    assert fingerprint() == others[0] == fingerprint(targets=(0.5,))  # targets change no example


@pytest.mark.parametrize("options", ["yes or no", {"text": ["a", "b"], "label": ["A", "B"]}, None])
def test_a_column_that_lists_no_options_is_refused(options):
    """The letters of a text, or the keys of a mapping, are no options."""
    rows = [{"question": "?", "options": options, "label": 0}]
    task = MultipleChoice(source=Table(train=rows, test=rows), body="{question}", options="options")
    with pytest.raises(ValueError, match=r"^options = .* not a list"):
        task.examples("train")


@pytest.mark.parametrize("answers", [{"text": ["a"], "answer_start": [1]}, 0, 42, [4, 5]])
def test_a_column_that_holds_no_answers_is_refused(answers):
    rows = [{"question": "?", "answers": answers}]
    task = Generation(source=Table(train=rows, test=rows), body="{question}", ending="", answers="answers")
    with pytest.raises(ValueError, match=r"^answers = .* not a text"):
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
