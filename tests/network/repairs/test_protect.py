"""`protect`: which packets, what they cost, and links that deliver nothing."""

import numpy as np
import pytest

from lossytp.network import Bernoulli, LossyNetwork, Wire
from lossytp.network.repairs import Protect, repair_named, stage_of, without_protection
from lossytp.network.routes import Hop
from lossytp.network.theory import unprotected_energy

PACKETS, LOSS_RATE = 200, 0.3


def send(repair: str, loss_rate: float, times: int = 1) -> tuple[list[np.ndarray], dict]:
    network = LossyNetwork(Bernoulli(loss_rate=loss_rate), wire=Wire(elements=2))
    hops = (Hop(0, 1, 0, 2 * PACKETS, positions=(0,)),)
    missing = [network.send(hops, 4, repair=repair_named(repair)).packets[0] for _ in range(times)]
    return missing, network.summary("training")


@pytest.mark.parametrize(
    ("share", "packets", "protected"), [(0.01, 1, 1), (0.01, 100, 1), (0.01, 101, 2), (0.07, 100, 7), (0.5, 0, 0)]
)
def test_the_share_is_rounded_up_to_whole_packets(share: float, packets: int, protected: int) -> None:
    assert Protect(share).num_protected(packets) == protected


def test_the_packets_of_the_largest_norms_are_protected() -> None:
    squares = np.array([1.0, 9.0, 4.0, 9.0, 0.0])
    assert Protect(0.2).protected(squares, seed=0).tolist() == [1]  # the first of equals
    assert Protect(0.5).protected(squares, seed=0).tolist() == [1, 2, 3]


def test_random_places_follow_from_the_seed_alone() -> None:
    places = [Protect(0.1, by="random").protected(np.arange(100.0), seed).tolist() for seed in (0, 0, 1)]
    assert places[0] == places[1] != places[2]
    assert len(set(places[0])) == 10


def test_each_protected_packet_is_repeated_until_it_arrives() -> None:
    missing, summary = send("protect(0.1)", LOSS_RATE, times=100)
    own, protected = 100 * PACKETS, 100 * 20
    assert summary["packets"] == own + summary["extra"]
    assert summary["extra"] == pytest.approx(protected * LOSS_RATE / (1 - LOSS_RATE), rel=0.1)
    assert summary["missing"] == sum(map(len, missing)) == pytest.approx((own - protected) * LOSS_RATE, rel=0.05)
    assert max(packets.max() for packets in missing) < PACKETS - 20, "numbered among the others"


def test_without_losses_it_sends_nothing_more() -> None:
    missing, summary = send("protect(0.1) + fec(10, 8)", 0.0)
    assert not len(missing[0])
    assert summary["extra"] == 46  # 2 packets of parity for each block of 8 of 180 packets
    assert send("protect(0.1)", 0.0)[1]["extra"] == 0


def test_hadamard_pads_only_the_other_packets() -> None:
    """180 packets of 2 elements make blocks of 128 coefficients; protected ones travel as they are."""
    _, summary = send("protect(0.1) + hadamard(128)", 0.0)
    assert summary["packets"] == 20 + 3 * 128 / 2


def test_a_link_that_delivers_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"repair = 'protect\(0.1\)' sent a packet 10000 times over a link that deliv"):
        send("protect(0.1)", 1.0)


def test_unprotected_energy_is_what_the_other_packets_hold() -> None:
    squares = np.array([1.0, 90.0, 4.0, 5.0])
    assert unprotected_energy(squares, Protect(0.25)) == pytest.approx(0.1)
    assert unprotected_energy(np.ones(100), Protect(0.07)) == pytest.approx(0.93)


def test_stages_of_a_chain() -> None:
    chain = repair_named("protect(0.01) + fec(10, 8) + stale")
    assert [str(stage_of(chain, stage)) for stage in ("select", "deliver", "fill")] == [
        "protect(0.01)",
        "fec(10, 8, 1, 'mds')",
        "stale",
    ]
    assert str(without_protection(chain)) == "fec(10, 8, 1, 'mds') + stale"
    assert str(without_protection(repair_named("protect(0.01) + stale"))) == "stale"
    assert str(without_protection(repair_named("protect(0.01)"))) == "zero"
    assert chain.remembers
    assert chain.sends_more
    assert repair_named(str(chain)) == chain
