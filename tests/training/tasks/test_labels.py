from unicodedata import normalize

import pytest

from lossytp.training.task_kinds import class_of
from lossytp.training.tasks import Classification, Table

NFC, NFD = (normalize(form, "é") for form in ("NFC", "NFD"))


def task(labels, values, **options):
    rows = [{"text": "a", "value": value} for value in values]
    return Classification(
        source=Table(train=rows, test=rows), body="{text}", **{"label": "value", "labels": labels, **options}
    )


@pytest.mark.parametrize(
    ("value", "labels", "index"),
    [
        ("b", ("a", "b"), 1),
        (1, ("a", "b"), 1),
        ("1.0", ("a", "b"), 1),  # a csv column with gaps
        ("True", ("a", "b"), 1),
        (2, ("1", "2", "3"), 1),
        ("2.0", ("1", "2", "3"), 1),
        (1, ("4", "5"), 1),
        (-1, ("-1", "0", "1"), 0),
        (-1, ("a", "b"), None),
        ("-1.0", ("a", "b"), None),
        (None, ("None", "b"), None),
        ("None", ("None", "b"), 0),
        ("", ("a", "b"), None),
        ("1", ("01", "1"), 1),
        ("01", ("01", "1"), 0),
        (1000.0, ("1e3", "b"), 0),
        ("true", ("True", "False"), 0),
        (0, ("True", "False"), 1),
        (NFD, ("b", NFC), 1),
        (NFC, ("b", NFD), 1),
        ("nan", ("nan", "inf"), 0),
    ],
)
def test_a_value_is_the_name_of_a_class_or_its_index(value, labels, index):
    assert class_of(value, labels) == index


@pytest.mark.parametrize(("value", "labels"), [(0, ("1", "2", "3")), ("0", ("-1", "1")), (1, ("01", "1.0")), (2, "ab")])
def test_an_index_that_could_be_a_name_is_neither(value, labels):
    with pytest.raises(ValueError, match=f"label {value!r} is not a class of {labels[0]}"):
        class_of(value, tuple(labels))


@pytest.mark.parametrize(
    ("values", "labels", "lacking"),
    [
        ([-1, 0, 1], ("neg", "neutral", "pos"), "pos"),
        ([-1, 1], ("neg", "pos"), "neg"),
        ([1, 2], ("a", "b", "c"), "a"),
        (["a", "b"], ("a", "b", "c"), "c"),
        ([1, 1], ("a", "b"), "a"),
    ],
)
def test_a_class_without_a_training_row_is_refused(values, labels, lacking):
    """Otherwise training would drop rows, or shift the names, without a word."""
    wrong = task(labels, values * 20)
    for samples in (None, 2):
        with pytest.raises(ValueError, match=rf"^label '{lacking}' does not occur in .*train of table"):
            wrong.examples("train", samples)
    assert wrong.examples("test")


def test_classes_that_look_alike_are_one():
    with pytest.raises(ValueError, match="not two or more different names"):
        task((NFC, NFD), [])
