"""Test a repair and an algorithm from outside: a definition and a registry line reach every part of the library."""

from dataclasses import dataclass

import pytest
import torch

import lossytp as ltp
from lossytp.network import ALGORITHMS, REPAIRS, CommConfig
from lossytp.network.repairs import Zero
from lossytp.network.routes import Algorithm, Hop
from lossytp.parallel.collectives import FILLS, fills, zero_
from lossytp.training.loop import run
from lossytp.training.record import read_record
from notebooks.theory import expected_squared_error, missing_share

LOSS_RATE, RANKS = 0.3, 4


@dataclass(frozen=True)
class Twice(Zero):
    """Send every packet twice."""

    name = "twice"

    def deliver(self, num_packets, send):
        first, second = send(num_packets), send(num_packets, extra=num_packets)
        return first[[packet in second for packet in first]]

    def missing_rate(self, loss_rate):
        return loss_rate**2


def to_the_first(num_elements, ranks, unit=1):
    return tuple(Hop(rank, ranks[0], 0, num_elements, (place,)) for place, rank in enumerate(ranks) if place)


def from_the_first(num_elements, ranks, unit=1):
    return tuple(Hop(ranks[0], rank, 0, num_elements, (place,)) for place, rank in enumerate(ranks) if place)


STAR = Algorithm(
    reduce=to_the_first, gather=from_the_first, reduce_scatter=to_the_first, all_gather=from_the_first, name="star"
)


@pytest.fixture
def filled(monkeypatch):
    """Register both, and return a list that grows with each message that the repair fills in."""
    messages = []
    monkeypatch.setitem(REPAIRS, "twice", Twice)
    monkeypatch.setitem(ALGORITHMS, "star", STAR)
    monkeypatch.setitem(FILLS, Twice, None)  # so that the entry that `fills` adds is removed after the test

    @fills(Twice)
    def twice_(message, repair):
        messages.append(message)
        zero_(message, repair)

    return messages


def test_both_train_and_are_in_the_record(toy, tmp_path, filled):
    ways = {"algorithm": "star", "repair": "twice"}
    config = toy(**ways, loss_rate=LOSS_RATE, tensor_parallel_size=RANKS)
    record = run(config)
    assert {name: read_record(tmp_path / "run")["config"][name] for name in ways} == ways
    traffic = record["network"]["training"]
    assert traffic["extra"] * 2 == traffic["packets"]
    share = traffic["missing"] / traffic["extra"]
    assert share == pytest.approx(LOSS_RATE**2, abs=0.03)
    assert len(filled) > 0
    assert set(traffic["by_link"]) == {f"{rank}->0" for rank in range(1, RANKS)}


@pytest.mark.slow
def test_errors_of_their_sums_agree_with_theory(filled):
    comm = CommConfig.named(algorithm="star", repair="twice")
    expected = expected_squared_error(comm, RANKS, LOSS_RATE)
    assert expected == pytest.approx((RANKS - 1) / RANKS * LOSS_RATE**2)
    assert missing_share(comm, RANKS, LOSS_RATE) == pytest.approx(expected)
    x_RN = torch.randn(RANKS, 200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=LOSS_RATE), wire=ltp.Wire(elements=1))
    error_N = ltp.all_reduce(x_RN, network, algorithm="star", repair="twice")[0] - x_RN.sum(0)
    assert error_N.square().mean() / RANKS == pytest.approx(expected, rel=0.03)
    assert len(filled) == 1
