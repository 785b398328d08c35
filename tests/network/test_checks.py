"""Checks of what callers give: every message is one line."""

from numbers import Integral

import numpy as np
import pytest

from lossytp.network.checks import (
    check_at_least,
    check_at_most,
    check_bool,
    check_filled,
    check_is,
    check_known,
    check_not_negative,
    check_number,
    check_positive,
    check_probability,
    printable,
    shown,
)

HUGE = 10**400  # above all floats


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (check_bool, [True, False], ["no", "false", 0, 1, None]),
        (check_probability, [0, 0.5, 1, np.float32(0.5)], [-0.1, 1.1, float("nan"), True, "5%", None, HUGE]),
        (lambda name, value: check_number(name, value, Integral, "one"), [0, -3, np.int64(2)], [0.5, "1", True, None]),
        (lambda name, value: check_at_least(name, value, 2), [2, 9, np.int64(2)], [1, 2.0, "2", True, None]),
        (lambda name, value: check_at_most(name, value, 2), [2, -1], [3, 2.5, HUGE]),
        (lambda name, value: check_positive(name, value, "s"), [0.1, 3, HUGE], [0, -1, float("inf"), "1", None, True]),
        (lambda name, value: check_not_negative(name, value, "s"), [0, 0.1], [-1, float("inf"), "1", None, True]),
        (lambda name, value: check_known(name, value, {"a": 1, "b": 2}), ["a"], ["c", None, ["a"], 1]),
        (lambda name, value: check_is(name, value, (int, str), "one"), [1, "a"], [1.0, None, [1]]),
    ],
)
def test_a_check_passes_what_it_should_and_names_what_it_refuses(check, good, bad):
    for value in good:
        check("size", value)
    for value in bad:
        with pytest.raises((TypeError, ValueError)) as refusal:
            check("size", value)
        assert str(refusal.value).startswith(f"size = {shown(value)} is ")
        assert "\n" not in str(refusal.value)


def test_a_message_names_the_types():
    with pytest.raises(TypeError, match=r"^wire = 1500 is of type int, not str or float: give a name$"):
        check_is("wire", 1500, (str, float), "a name")


@pytest.mark.parametrize("value", [np.ones((50, 50)), "a\nb" * 100, list(range(1000))])
def test_what_is_shown_is_short_and_on_one_line(value):
    assert "\n" not in shown(value)
    assert len(shown(value)) < 100


@pytest.mark.parametrize(
    ("text", "expected"),
    [("né 数据", "né 数据"), ("\x1b[2J\n\u202e\udcff", r"\x1b[2J\n\u202e\udcff"), ("abcd", "abc...")],
)
def test_text_of_others_is_printable_and_short(text, expected):
    assert printable(text, 3 if text == "abcd" else 80) == expected


@pytest.mark.parametrize("values", [[], (), 5, None, "12", {}])
def test_an_empty_list_is_refused(values):
    with pytest.raises(ValueError, match=r"^rates = .* is not a list of at least one value: give one$"):
        check_filled("rates", values)
    check_filled("rates", [0])


def test_a_list_that_refers_to_itself_many_times_is_shown_at_once():
    value = "x"
    for _ in range(30):
        value = [value] * 10
    assert shown(value).startswith("[[[[")
    assert len(shown(value)) < 100
