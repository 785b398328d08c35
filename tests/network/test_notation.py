"""Things named in one line of text."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossytp.network.checks import build, parse
from tests.network.loss_statistics import reproducible

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
names = st.from_regex(r"[a-z]\w{0,6}", fullmatch=True).filter(lambda name: name.isascii() and not name.startswith("_"))
words = names.map(lambda name: f"x{name}")  # no keyword of Python's


@reproducible
@given(name=words, values=st.lists(plain, max_size=3), named=st.dictionaries(words, plain, max_size=3))
def test_what_is_written_is_read(name, values, named):
    given_ = [repr(value) for value in values] + [f"{key}={value!r}" for key, value in named.items()]
    assert parse("thing", f" {name}({', '.join(given_)})") == (name, values, named)


@pytest.mark.parametrize("name", ["zero", "gilbert-elliott", "rescale_counted", "4", " zero "])
def test_a_name_stands_alone(name):
    assert parse("thing", name) == (name.strip(), [], {})


@pytest.mark.parametrize(
    "text", ["", "a b", "a(", "a(b)", "a(1)(2)", "a.b(1)", "a(*[1])", "a(print(1))", "[1]", "a(1 + x)", "a; b", "1(2)"]
)
def test_what_is_not_understood_is_refused_with_what_would_be(text):
    with pytest.raises(
        ValueError, match=r"^thing = .* is not understood: write a name, or name\(1, option=2\) with"
    ) as no:
        parse("thing", text)
    assert repr(text) in str(no.value)
    assert "\n" not in str(no.value)


@dataclass(frozen=True)
class Square:
    side: int
    colour: str = "red"

    def __post_init__(self):
        if self.side < 0:
            raise ValueError(f"side = {self.side} is negative")


SHAPES = {"square": Square, "nothing": object}


def test_what_is_named_is_built():
    assert build("shape", "square(3)", SHAPES) == Square(3)
    assert build("shape", "square(colour='blue', side=2)", SHAPES) == Square(2, "blue")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("circle", "^shape = 'circle' is unknown: choose one of square, nothing$"),
        ("square", r"^shape = 'square': missing a required argument: 'side'; square takes side: int, colour: str = 'r"),
        ("square(1, 2, 3)", r"^shape = 'square\(1, 2, 3\)': too many positional arguments; square takes side"),
        ("square(1, edge=2)", r"got an unexpected keyword argument 'edge'; square takes side"),
        ("square(-1)", "side = -1 is negative$"),
        ("square('1')", r"^shape = \"square\('1'\)\": .*not supported .*; square takes side: int"),
    ],
)
def test_what_cannot_be_built_is_refused_with_what_it_takes(text, message):
    with pytest.raises(ValueError, match=message):
        build("shape", text, SHAPES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fec(" + "-" * 600 + "1)", "characters: give at most 500"),
        ("fec(" + "-" * 480 + "1)", "not understood"),
        ("square(side=1, side=2)", "not understood"),
    ],
)
def test_endless_and_doubled_text_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse("shape", text)


@pytest.mark.parametrize("text", [None, 5, ["square"], Square(3)])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(TypeError, match=r"^shape = .* is of type \w+, not str: give a name, or name\(1, option=2\)$"):
        build("shape", text, SHAPES)
