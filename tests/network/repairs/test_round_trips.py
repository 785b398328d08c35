"""Test how long messages wait for retransmissions, against simulated messages."""

import math

import numpy as np
import pytest

from lossytp.network.repairs import repair_named

PACKETS, MESSAGES = 200, 20_000
ENOUGH = 100  # transmissions, after which a simulated packet has arrived


def simulated(rate: float, most_sent_again: list[int]) -> float:
    """Return the mean number of rounds until no packet of a message may be sent again.

    Args:
        rate: of independent losses.
        most_sent_again: how often each packet of the message may be sent again.
    """
    losses = np.random.default_rng(0).geometric(1 - rate, (MESSAGES, len(most_sent_again))) - 1
    return float(np.minimum(losses, most_sent_again).max(1).mean())


@pytest.mark.parametrize(
    ("repair", "most_sent_again"),
    [
        ("zero", [0] * PACKETS),
        ("fec(10, 8)", [0] * PACKETS),
        ("retransmit(2)", [2] * PACKETS),
        ("protect(0.01)", [ENOUGH] * 2),
        ("protect(0.1)", [ENOUGH] * 20),
        ("protect(0.1) + hadamard(64)", [ENOUGH] * 20),
        ("protect(0.1) + retransmit(1)", [ENOUGH] * 20 + [1] * 180),
        ("protect(0.1) + retransmit(2)", [ENOUGH] * 20 + [2] * 180),
    ],
)
@pytest.mark.parametrize("rate", [0.003, 0.1, 0.5])
def test_expected_round_trips_are_those_of_simulated_messages(
    repair: str, most_sent_again: list[int], rate: float
) -> None:
    expected = repair_named(repair).round_trips(rate, PACKETS)
    assert expected == pytest.approx(simulated(rate, most_sent_again), rel=0.03, abs=0.005)


def test_a_link_that_delivers_hardly_anything_is_waited_for_long() -> None:
    expected = repair_named("protect(0.1)").round_trips(0.999, 100)
    assert expected == pytest.approx(simulated(0.999, [10**9] * 10), rel=0.02)


@pytest.mark.parametrize(
    ("repair", "at_full_loss"), [("zero", 0), ("retransmit(3)", 3), ("protect(0.1) + retransmit(3)", math.inf)]
)
def test_no_loss_waits_for_nothing_and_a_dead_link_for_ever(repair: str, at_full_loss: float) -> None:
    assert repair_named(repair).round_trips(0, PACKETS) == 0
    assert repair_named(repair).round_trips(1, PACKETS) == at_full_loss
