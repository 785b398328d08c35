"""Repairs by name."""

import re

import pytest

from lossytp.network.repairs import (
    REPAIRS,
    Hadamard,
    Local,
    Rescale,
    RescaleCounted,
    Retransmit,
    Stale,
    Zero,
    repair_named,
)
from lossytp.network.repairs.fec import Fec


@pytest.mark.parametrize(
    ("text", "repair"),
    [
        ("zero", Zero()),
        ("rescale", Rescale()),
        ("rescale_counted", RescaleCounted()),
        ("stale", Stale()),
        ("local", Local()),
        ("fec(10, 8)", Fec(n=10, k=8, depth=1, code="mds")),
        ("fec(n=6, k=4, depth=3, code='xor')", Fec(6, 4, 3, "xor")),
        ("hadamard", Hadamard(block=64)),
        ("hadamard(16)", Hadamard(16)),
        ("retransmit(2)", Retransmit(budget=2)),
    ],
)
def test_repairs_are_found_by_name(text, repair):
    assert repair_named(text) == repair


def test_every_repair_is_tried_here():
    names = "zero, rescale, rescale_counted, stale, local, fec, hadamard, retransmit"
    assert ", ".join(REPAIRS) == names


def test_an_unknown_repair_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"^repair = 'fix' is unknown: choose one of zero, rescale, .*, retransmit$"):
        repair_named("fix")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fec", "repair = 'fec': missing a required argument: 'n'; fec takes n: int, k: int, depth: int = 1"),
        ("retransmit", "missing a required argument: 'budget'; retransmit takes budget: int"),
        ("zero(1)", "repair = 'zero(1)': too many positional arguments; zero takes no values"),
        ("fec(8, 8)", "n = 8 leaves no packet of parity beside k = 8: give n of at least 9"),
        ("fec(10, 8, 0)", "depth = 0 is not a whole number of at least 1: give one"),
        ("fec(10, 8, code='ldpc')", "code = 'ldpc' is unknown: choose one of mds, xor"),
        ("fec(10, 4, code='xor')", "n - k = 6 parity packets cover k = 4: give n of at most 2 k"),
        ("retransmit(0)", "budget = 0 is not a whole number of at least 1: give one"),
        ("retransmit(1.5)", "budget = 1.5 is not a whole number of at least 1: give one"),
        ("hadamard(12)", "block = 12 is not a power of two: give one, such as 64"),
        ("hadamard(1)", "block = 1 is not a whole number of at least 2: give one"),
    ],
)
def test_values_that_a_repair_cannot_take_are_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        repair_named(text)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "text", ["fec(100000000000, 1)", "fec(10, 8, depth=100000)", "retransmit(1000000000)", "hadamard(1048576)"]
)
def test_what_would_never_end_is_refused_with_its_bound(text):
    with pytest.raises(ValueError, match=r"above \d+: give"):
        repair_named(text)
