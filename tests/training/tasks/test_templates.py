import re

import pytest

from lossytp.training.task_kinds import text_of
from lossytp.training.tasks import Classification, Files, MultipleChoice, Table


def classification(rows, **options):
    options = {"body": "{text}", "labels": ("x", "y"), **options}
    return Classification(source=Table(train=rows, test=rows), **options)


def test_a_text_is_a_template_or_a_function():
    row = {"text": "a ", "number": 3, "other": None}
    assert text_of("<{text}{other}{other:.2f}{other!r}", row) == "<a"
    assert text_of(lambda row: str(row["number"]), row) == "3"
    with pytest.raises(KeyError, match="absent"):
        text_of("{absent}", row)


@pytest.mark.parametrize("value", [3, 0.5, True, ["a", "b"], {"a": "b"}])
def test_a_column_that_holds_no_text_is_named_with_its_row_and_source(value):
    task = classification([{"text": value, "label": label} for label in (1, 0)])
    words = rf"column 'text' holds {re.escape(repr(str(value)))}, which is not text: .*, in row .* of train of table$"
    with pytest.raises(ValueError, match=words) as error:
        task.examples("train")
    assert "\n" not in str(error.value)


def test_a_function_that_returns_no_text_is_named():
    task = classification([{"text": "a", "label": 1}], ending=lambda row: row["label"])
    with pytest.raises(
        ValueError, match=r"^a function returned '1' for the row, which is not text: .* of test of table$"
    ):
        task.examples("test")


@pytest.mark.parametrize("template", ["body", "ending"])
@pytest.mark.parametrize("value", [None, "", " \n"])
def test_a_column_that_is_empty_in_all_rows_is_named(template, value):
    rows = [{"text": "a", "more": value, "label": number % 2} for number in range(5)]
    task = classification(rows, **{template: "<{more}>"})
    with pytest.raises(ValueError, match=r"^column 'more' is empty in all 5 rows of train of table: give text$"):
        task.examples("train")
    filled = classification([*rows, {"text": "a", "more": "b", "label": 0}], **{template: "<{more}>"})
    assert len(filled.examples("train", 1)) == 1, "a sample may well be empty"


@pytest.mark.parametrize(("column", "words"), [("1", "holds '1'"), ("", "is empty in all 2 rows")])
def test_a_users_file_is_named(tmp_path, column, words):
    file = tmp_path / "reviews.csv"
    file.write_text(f"review,label\n{column},0\n{column},1\n")
    task = Classification(source=Files(train=file, test=file), body="{review}", labels=("x", "y"))
    with pytest.raises(ValueError, match=rf"^column 'review' {words}.* of train of files {file}"):
        task.examples("train")


def test_options_are_texts_or_numbers():
    def examples(*options):
        rows = [{"question": "?", "options": list(options), "label": 1}]
        return MultipleChoice(source=Table(train=rows, test=rows), body="{question}", options="options").examples(
            "train"
        )

    assert examples(1, 2)[0].endings == (" 1", " 2")
    for wrong in (None, ["a"]):
        with pytest.raises(ValueError, match=rf"^option {re.escape(repr(str(wrong)))} is not text: give text"):
            examples(wrong, wrong)


def test_a_malformed_template_is_named():
    with pytest.raises(ValueError, match=r"^'{text' is malformed \(expected '}' before end"):
        classification([{"text": "a", "label": 1}], body="{text").examples("train")


@pytest.mark.parametrize("template", ["{text.__class__}", "{text[0]}", "{text.real}"])
def test_braces_hold_the_name_of_a_column_and_no_more(template):
    row = {"text": "a", "label": 1}
    with pytest.raises(KeyError, match=re.escape(template[1:-1])):
        text_of(template, row)
    assert text_of(template, {**row, template[1:-1]: "b"}) == "b"


def test_a_layout_cannot_fill_the_memory():
    assert text_of("{number:>5.1f}{text!s:>3}{{}}", {"number": 1, "text": "a"}) == "  1.0  a{}"
    for template in ("{text:>1000000000}", "{text:.1000000000}"):
        with pytest.raises(ValueError, match="has a width of 1000 or more"):
            text_of(template, {"text": "a"})
