"""Repairs by name."""

import re

import pytest

from lossytp.network.repairs import (
    REPAIRS,
    Chain,
    Fec,
    Hadamard,
    Local,
    Protect,
    Rescale,
    RescaleCounted,
    Retransmit,
    Stale,
    Zero,
    repair_named,
)


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
        ("protect(0.01)", Protect(0.01)),
        ("protect(0.01, 'random')", Protect(share=0.01, by="random")),
        ("protect(0.01) + hadamard(64)", Chain((Protect(0.01), Hadamard(64)))),
        ("retransmit(2)+stale", Chain((Retransmit(2), Stale()))),
        ("protect(0.1) + fec(10, 8) + rescale", Chain((Protect(0.1), Fec(10, 8), Rescale()))),
    ],
)
def test_repairs_are_found_by_name(text, repair):
    assert repair_named(text) == repair


def test_every_repair_is_tried_here():
    names = "zero, rescale, rescale_counted, stale, local, fec, hadamard, retransmit, protect"
    assert ", ".join(REPAIRS) == names


def test_an_unknown_repair_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"^repair = 'fix' is unknown: choose one of zero, rescale, .*, retransmit, protect$"
    ):
        repair_named("fix")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fec", "repair = 'fec': missing a required argument: 'n'; fec takes n: int, k: int, depth: int = 1"),
        ("retransmit", "missing a required argument: 'budget'; retransmit takes budget: int"),
        ("zero(1)", "repair = 'zero(1)': too many positional arguments; zero takes no values"),
        ("fec(8, 8)", "n = 8 leaves no parity packet in addition to k = 8: give n of at least 9"),
        ("fec(10, 8, 0)", "depth = 0 is below 1: give 1 or more"),
        ("fec(10, 8, code='ldpc')", "code = 'ldpc' is unknown: choose one of mds, xor"),
        ("fec(10, 4, code='xor')", "n - k = 6 parity packets cover k = 4: give n of at most 2 k"),
        ("retransmit(0)", "budget = 0 is below 1: give 1 or more"),
        ("retransmit(1.5)", "budget = 1.5 is not a whole number: give one, 1 or more"),
        ("hadamard(12)", "block = 12 is not a power of two: give one, such as 64"),
        ("hadamard(1)", "block = 1 is below 2: give 2 or more"),
        ("protect(0)", "share = 0 is not between 0 and 1: give a share of the packets, such as 0.01"),
        ("protect(1.0)", "share = 1.0 is not between 0 and 1: give a share of the packets, such as 0.01"),
        ("protect('a')", "share = 'a' is not a number: give a share of the packets, such as 0.01"),
        ("protect(0.1, 'last')", "by = 'last' is unknown: choose one of norm, random"),
        ("hadamard(64) + protect(0.1)", "cannot be joined: give at most one of each kind, in the order protect,"),
        ("fec(10, 8) + retransmit(1)", "cannot be joined: give at most one of each kind"),
        ("stale + rescale", "repair = 'stale + rescale' cannot be joined: give at most one of each kind"),
        ("protect(0.1) + local", "a receiver of local must know which packets other ranks protect"),
        ("protect(0.1) + rescale_counted", "a receiver of rescale_counted must know which packets"),
        ("protect(0.1) +", "repair = 'protect(0.1) +' lacks a name before or after +"),
        ("protect(0.1) + fix", "repair = 'fix' is unknown: choose one of"),
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
