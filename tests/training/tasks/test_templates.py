import re

import pytest

from lossytp.training.task_kinds import text_of
from lossytp.training.tasks import Classification, MultipleChoice, Table


def classification(rows, **options):
    options = {"body": "{text}", "labels": ("x", "y"), **options}
    return Classification(source=Table(train=rows, test=rows), **options)


def test_a_text_is_a_template_or_a_function():
    row = {"text": "a ", "number": 3, "other": None}
    assert text_of("<{text}{other}{number:>3}{{}}", row) == "<a   3{}"
    assert text_of(lambda row: str(row["number"]), row) == "3"
    with pytest.raises(KeyError, match="absent"):
        text_of("{absent}", row)


@pytest.mark.parametrize("value", [["a", "b"], {"a": "b"}])
def test_a_column_that_holds_no_text_is_named_with_its_row_and_source(value):
    task = classification([{"text": value, "label": label} for label in (1, 0)])
    with pytest.raises(ValueError, match=r"^column 'text' .*, in row .* of train of table$") as error:
        task.examples("train")
    assert "\n" not in str(error.value)


def test_a_function_that_returns_no_text_is_named():
    with pytest.raises(ValueError, match=r", in row .* of test of table$"):
        classification([{"text": "a", "label": 1}], ending=lambda row: row["label"]).examples("test")


def test_options_are_texts_or_numbers():
    def examples(*options):
        rows = [{"question": "?", "options": list(options), "label": 1}]
        return MultipleChoice(source=Table(train=rows, test=rows), body="{question}", options="options").examples(
            "train"
        )

    assert examples(1, 2)[0].endings == (" 1", " 2")
    for wrong in (None, ["a"]):
        with pytest.raises(ValueError, match=r"^option "):
            examples(wrong, wrong)


@pytest.mark.parametrize("template", ["{text.__class__}", "{text[0]}", "{text.real}"])
def test_braces_hold_the_name_of_a_column_and_no_more(template):
    with pytest.raises(KeyError, match=re.escape(template[1:-1])):
        text_of(template, {"text": "a", "label": 1})
