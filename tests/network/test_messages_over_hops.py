"""What a lossy network takes from messages over the hops of an algorithm, and what repairs send besides."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossytp.network import ALGORITHMS, SWITCH, GilbertElliott, LossyNetwork, Scope, Site
from lossytp.network.repairs import repair_named
from lossytp.network.routes import DIRECT as direct
from lossytp.network.routes import SENDER as sender
from lossytp.network.routes import Hop, Missing
from tests.network.loss_statistics import reproducible
from tests.network.lossy_traffic import BURSTS, EVERYTHING, RANKS, TWO_FLOATS, drawn, elements_missing, packets_of


def test_what_one_dead_link_takes_by_hand():
    """Ten elements over four ranks, two to a packet: chunks [0, 3), [3, 6), [6, 9), [9, 10).

    Rank 12, at position 2, sends rank 10's chunk [0, 3) as packets [0, 2) and [2, 3); both are lost.
    """
    network = LossyNetwork({(12, 10): EVERYTHING}, wire=TWO_FLOATS)
    hops = direct.reduce(10, (10, 11, 12, 13))
    missing = network.send(hops, 4)
    assert packets_of(missing) == [[0, 1] if (hop.src, hop.dst) == (12, 10) else [] for hop in hops]
    assert missing.reliable is False
    assert elements_missing(hops, missing, 2) == [(2, 0), (2, 1), (2, 2)]


def test_a_dead_uplink_takes_a_rank_s_whole_contribution():
    network = LossyNetwork({(7, SWITCH): EVERYTHING}, wire=TWO_FLOATS)
    assert packets_of(network.send(sender.reduce(5, (6, 7)), 4)) == [[], [0, 1, 2]]


def test_a_packet_s_elements_follow_their_size():
    network = LossyNetwork(EVERYTHING, wire=TWO_FLOATS)
    for itemsize, packets in ((2, [0, 1]), (4, [0, 1, 2]), (8, [0, 1, 2, 3, 4])):
        assert packets_of(network.send(sender.reduce(5, (0,)), itemsize)) == [packets]


def test_a_lost_packet_takes_all_it_carries():
    """As in a ring, where the partial sum of several ranks rides on one hop."""
    network = LossyNetwork(EVERYTHING, wire=TWO_FLOATS)
    hops = (Hop(0, 1, 4, 7, positions=(3, 0)),)
    lost = elements_missing(hops, network.send(hops, 4), 2)
    assert sorted(lost) == [(0, 4), (0, 5), (0, 6), (3, 4), (3, 5), (3, 6)]


def test_an_owners_own_part_is_never_lost():
    network = LossyNetwork(EVERYTHING, wire=TWO_FLOATS)
    hops = direct.reduce(40, RANKS)
    lost = elements_missing(hops, network.send(hops, 4), 2)
    assert set(lost) == {(row, element) for row in RANKS for element in range(40) if element // 10 != row}


@reproducible
@given(
    num_elements=st.integers(0, 300),
    ranks=st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True).map(tuple),
    algorithm=st.sampled_from(sorted(ALGORITHMS)),
    phase=st.sampled_from(["reduce", "gather", "reduce_scatter", "all_gather"]),
    itemsize=st.sampled_from([2, 4, 8]),
    num_messages=st.integers(1, 3),
)
def test_missing_packets_are_those_that_the_links_lost(num_elements, ranks, algorithm, phase, itemsize, num_messages):
    """Hop by hop, in the order in which they are given; element e of a hop is on packet (e - start) // elements."""
    process = GilbertElliott.from_loss_and_burst(loss_rate=0.3, mean_burst_packets=2)
    network, twin = (LossyNetwork(process, wire=TWO_FLOATS) for _ in range(2))
    hops = getattr(ALGORITHMS[algorithm], phase)(num_elements, ranks)
    carried = TWO_FLOATS.elements_per_packet(itemsize)
    for _ in range(num_messages):
        missing = network.send(hops, itemsize)
        assert all(packets.dtype == np.int64 for packets in missing.packets)
        expected = []
        for hop in hops:
            lost = drawn(twin, hop.src, hop.dst, -(-(hop.stop - hop.start) // carried))
            for element in range(hop.start, hop.stop):
                if (element - hop.start) // carried in lost:
                    expected += [(position, element) for position in hop.positions]
        assert sorted(elements_missing(hops, missing, carried)) == sorted(expected)


def test_a_repair_s_packets_are_on_the_wire_and_counted():
    """Two packets of the message and one of parity; sent again twice; half a block of padding."""
    hops = (Hop(0, 1, 0, 4, positions=(0,)),)
    for repair, packets, lost, extra, lacks in (
        ("zero", 2, 2, 0, [0, 1]),
        ("fec(3, 2)", 3, 3, 1, [0, 1]),
        ("retransmit(2)", 6, 6, 4, [0, 1]),
    ):
        network = LossyNetwork(EVERYTHING, wire=TWO_FLOATS)
        assert packets_of(network.send(hops, 4, repair=repair_named(repair))) == [lacks]
        row = network.counters.rows()[0]
        assert [row[name] for name in ("packets", "lost", "extra", "missing")] == [packets, lost, extra, 2]
    network = LossyNetwork(EVERYTHING, wire=TWO_FLOATS)
    network.send((Hop(0, 1, 0, 9, positions=(0,)),), 4, repair=repair_named("hadamard(4)"))
    total = network.counters.summary("training")
    assert (total["packets"], total["extra"]) == (6, 1), "twelve coefficients of nine elements"


@pytest.mark.parametrize("repair", ["zero", "retransmit(3)", "fec(4, 2)"])
def test_a_repair_s_packets_advance_their_link_and_no_other(repair):
    network, twin = LossyNetwork(BURSTS, wire=TWO_FLOATS), LossyNetwork(BURSTS)
    network.send((Hop(0, 1, 0, 400, positions=(0,)),), 4, repair=repair_named(repair))
    sent_packets = network.counters.rows()[0]["packets"]
    assert (sent_packets > 200) == (repair != "zero")
    drawn(twin, num_packets=sent_packets)
    assert drawn(network) == drawn(twin)
    assert drawn(network, 1, 0) == drawn(twin, 1, 0)


def test_what_lies_outside_the_scope_is_reliable_and_advances_nothing():
    network, everywhere = LossyNetwork(BURSTS, scope=Scope(direction="forward")), LossyNetwork(BURSTS)
    hops = direct.reduce(40_000, RANKS)
    backward, forward = Site(0, "mlp", "backward"), Site(0, "mlp", "forward")
    before = network.state_dict()
    assert network.send(hops, 4, site=backward) == Missing([], reliable=True)
    assert network.send(hops, 4) == Missing([], reliable=True), "of no direction"
    assert network.normals(hops, site=backward) == []
    assert network.state_dict() == before
    inside = network.send(hops, 4, site=forward)
    assert not inside.reliable
    assert packets_of(inside) == packets_of(everywhere.send(hops, 4, site=forward))
