"""Checks of what callers give, and things named in one line of text: every message is one line."""

from dataclasses import dataclass
from numbers import Integral

import numpy as np
import pytest

from lossytp.network import checks
from lossytp.network.checks import build, check_names, parse, printable, shown, split_outside_parentheses

HUGE = 10**400  # above all floats


@pytest.mark.parametrize(
    ("check", "more", "good", "bad"),
    [
        ("check_bool", (), [True, False], ["no", "false", 0, 1, None]),
        ("check_probability", (), [0, 0.5, 1, np.float32(0.5)], [-0.1, 1.1, float("nan"), True, "5%", None, HUGE]),
        ("check_number", (Integral, "one"), [0, -3, np.int64(2)], [0.5, "1", True, None]),
        ("check_at_least", (2,), [2, 9, np.int64(2)], [1, 2.0, "2", True, None]),
        ("check_at_most", (2,), [2, -1], [3, 2.5, HUGE]),
        ("check_positive", ("s",), [0.1, 3, HUGE], [0, -1, float("inf"), "1", None, True]),
        ("check_known", ({"a": 1, "b": 2},), ["a"], ["c", None, ["a"], 1]),
        ("check_is", ((int, str), "one"), [1, "a"], [1.0, None, [1]]),
        ("check_filled", (), [[0], (1,)], [[], (), 5, None, "12", {}]),
    ],
)
def test_a_check_passes_what_it_should_and_names_what_it_refuses(check, more, good, bad):
    for value in good:
        getattr(checks, check)("size", value, *more)
    for value in bad:
        with pytest.raises((TypeError, ValueError)) as refusal:
            getattr(checks, check)("size", value, *more)
        assert str(refusal.value).startswith(f"size = {shown(value)} is ")
        assert "\n" not in str(refusal.value)


nested = "x"  # refers to itself many times
for _ in range(30):
    nested = [nested] * 10


@pytest.mark.parametrize("value", [np.ones((50, 50)), "a\nb" * 100, list(range(1000)), nested])
def test_what_is_shown_is_short_and_on_one_line(value):
    assert "\n" not in shown(value)
    assert len(shown(value)) < 100


@pytest.mark.parametrize(
    ("text", "expected"),
    [("né 数据", "né 数据"), ("\x1b[2J\n\u202e\udcff", r"\x1b[2J\n\u202e\udcff"), ("abcd", "abc...")],
)
def test_text_of_others_is_printable_and_short(text, expected):
    assert printable(text, 3 if text == "abcd" else 80) == expected


def test_an_unknown_name_is_refused_with_the_closest_one():
    check_names(["loss_rate"], ["loss_rate", "seed"])
    with pytest.raises(ValueError, match=r"'loss_rat': did you mean loss_rate\?"):
        check_names(["loss_rat"], ["loss_rate", "seed"])
    with pytest.raises(ValueError, match="known are loss_rate, seed"):
        check_names(["xyz"], ["loss_rate", "seed"])


# Notation


def test_a_name_stands_alone_and_text_is_split_outside_parentheses():
    for name in ("zero", "gilbert-elliott", "rescale_counted", "4", " zero "):
        assert parse("thing", name) == (name.strip(), [], {})
    assert split_outside_parentheses("a(1 + (2)) + b+c", "+") == ["a(1 + (2))", "b", "c"]


@dataclass(frozen=True)
class Square:
    side: int
    colour: str = "red"

    def __post_init__(self):
        if self.side < 0:
            raise ValueError(f"side = {self.side} is negative")


SHAPES = {"square": Square, "nothing": object}


@pytest.mark.parametrize(
    "text",
    [
        *("", "a b", "a(", "a(b)", "a(1)(2)", "a.b(1)", "a(*[1])", "a(print(1))", "[1]", "a(1 + x)", "a; b", "1(2)"),
        *("fec(" + "-" * 600 + "1)", "fec(" + "-" * 480 + "1)", "square(side=1, side=2)"),
    ],
)
def test_what_is_not_understood_is_refused(text):
    with pytest.raises(ValueError, match="thing"):
        parse("thing", text)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        *(("circle", "shape"), ("square", "'side'"), ("square(1, 2, 3)", "square takes side")),
        *(("square(1, edge=2)", "edge"), ("square(-1)", "side = -1"), ("square('1')", "side: int")),
    ],
)
def test_what_is_named_is_built_and_what_cannot_be_is_refused(text, word):
    assert build("shape", "square(colour='blue', side=2)", SHAPES) == Square(2, "blue")
    with pytest.raises(ValueError, match=word):
        build("shape", text, SHAPES)
    with pytest.raises(TypeError, match="shape"):
        build("shape", 5, SHAPES)
