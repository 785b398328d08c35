"""Forward error correction: which packets are restored."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossytp.network.losses import GilbertElliott
from lossytp.network.repairs import Fec, wire_order
from tests.network.loss_statistics import reproducible

codes = st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.sampled_from(["mds", "xor"])).filter(
    lambda drawn: drawn[3] == "mds" or drawn[1] <= drawn[0]
)
fecs = codes.map(lambda drawn: Fec(n=drawn[0] + drawn[1], k=drawn[0], depth=drawn[2], code=drawn[3]))


def missing_of(code, num_packets, lost):
    """Missing in the end where the packets `lost` of those on the wire are lost; how many were sent, how many extra."""
    asked = []

    def send(count, extra=0):
        asked.append((count, extra))
        return np.array(sorted(lost), dtype=np.int64)

    missing = code.deliver(num_packets, send).tolist()
    assert len(asked) == 1
    return missing, *asked[0]


@pytest.mark.parametrize(
    ("lost", "missing"),
    [
        ([], []),
        ([0], []),
        ([3, 5], []),  # the message's fourth, and a parity packet
        ([4, 5], []),
        ([0, 3], []),
        ([0, 2, 3], [0, 2, 3]),  # three of one block
        ([1, 4, 5], [1]),
        ([6, 9, 0, 1], []),  # two of each block
        ([6, 9, 11], [4, 7]),
        ([0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3]),  # and one of the other
        ([12, 13], []),  # the last, shorter block: one packet, two of parity
        ([13, 14], []),
        ([12, 13, 14], [8]),
    ],
)
def test_two_losses_of_a_block_are_restored_by_hand(lost, missing):
    """Nine packets in blocks of four: on the wire 0 1 2 3 P P, 4 5 6 7 P P, 8 P P."""
    assert missing_of(Fec(6, 4), 9, lost) == (missing, 15, 6)


@pytest.mark.parametrize(
    ("lost", "missing"),
    [
        ([0], []),
        ([0, 1], []),  # of the two groups
        ([0, 2], [0, 2]),  # of one
        ([0, 4], [0]),  # with its parity packet
        ([0, 5], []),
        ([1, 5], [1]),
        ([4, 5], []),
        ([0, 1, 2, 3], [0, 1, 2, 3]),
    ],
)
def test_xor_restores_one_of_what_a_parity_packet_covers_by_hand(lost, missing):
    """0 1 2 3, the sum of 0 and 2, the sum of 1 and 3."""
    assert missing_of(Fec(6, 4, code="xor"), 4, lost) == (missing, 6, 2)


@pytest.mark.parametrize("code", ["mds", "xor"])
def test_interleaved_blocks_by_hand(code):
    """Depth 2, three of two: blocks {0, 2} and {1, 3} and their parity at 4 and 5, then {4} with its own."""
    fec = Fec(3, 2, depth=2, code=code)
    for first in range(5):
        assert missing_of(fec, 5, [first, first + 1]) == ([], 8, 3), "neighbours are of different blocks"
    assert missing_of(fec, 5, [0, 2])[0] == [0, 2]
    assert missing_of(fec, 5, [1, 5])[0] == [1]
    assert missing_of(fec, 5, [0, 3])[0] == []
    assert missing_of(fec, 5, [6, 7])[0] == [4]


@pytest.mark.parametrize("code", ["mds", "xor"])
@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_burst_of_depth_packets_takes_one_of_each_block(k, depth, code):
    """So a single parity packet restores it, wherever it starts, also where the last blocks are shorter.

    As long as those are `depth`; one packet more takes two of one block.
    """
    fec = Fec(k + 1, k, depth=depth, code=code)
    for num_packets in range(1, 3 * depth * k + 1):
        last = num_packets % (depth * k)
        if 0 < last <= (depth - 1) * k:
            continue  # fewer blocks than depth
        on_wire = missing_of(fec, num_packets, [])[1]
        for first in range(on_wire - depth + 1):
            burst = list(range(first, first + depth))
            assert missing_of(fec, num_packets, burst)[0] == [], (num_packets, burst)
        assert missing_of(fec, num_packets, list(range(depth + 1)))[0] != []


@reproducible
@given(code=fecs, num_packets=st.integers(0, 60), data=st.data())
def test_what_is_missing_was_lost_and_fewer_losses_leave_no_more_missing(code, num_packets, data):
    on_wire = missing_of(code, num_packets, [])[1]
    lost = data.draw(st.sets(st.integers(0, on_wire - 1))) if on_wire else set()
    missing, sent, extra = missing_of(code, num_packets, lost)
    assert (sent, sent - extra) == (on_wire, num_packets)
    own = (
        [int(packet) for place, packet in enumerate(wire_order(code, num_packets)[0]) if place in lost] if sent else []
    )
    assert missing == sorted(missing)
    assert set(missing) <= set(own)
    fewer = data.draw(st.sets(st.sampled_from(sorted(lost)))) if lost else set()
    assert set(missing_of(code, num_packets, fewer)[0]) <= set(missing)
    assert missing_of(code, num_packets, range(on_wire))[0] == list(range(num_packets))


@reproducible
@given(code=fecs, num_packets=st.integers(1, 60))
def test_packets_keep_their_order_and_every_block_has_its_parity(code, num_packets):
    packet, group = wire_order(code, num_packets)
    assert packet[packet >= 0].tolist() == list(range(num_packets))
    parity, blocks = code.n - code.k, -(-num_packets // code.k)
    assert (packet < 0).sum() == parity * blocks
    assert missing_of(code, num_packets, [])[1:] == (num_packets + parity * blocks, parity * blocks)
    groups = blocks * (parity if code.code == "xor" else 1)
    assert np.bincount(group[packet < 0], minlength=groups).tolist() == [parity if code.code == "mds" else 1] * groups
    assert np.bincount(group[packet >= 0]).max() <= (code.k if code.code == "mds" else -(-code.k // parity))


@reproducible
@given(k=st.integers(1, 6), depth=st.integers(1, 4), num_packets=st.integers(0, 40), data=st.data())
def test_with_one_parity_packet_both_codes_are_the_same(k, depth, num_packets, data):
    mds, xor = (Fec(k + 1, k, depth, code) for code in ("mds", "xor"))
    on_wire = missing_of(mds, num_packets, [])[1]
    lost = data.draw(st.sets(st.integers(0, on_wire - 1))) if on_wire else set()
    assert missing_of(mds, num_packets, lost) == missing_of(xor, num_packets, lost)


def test_what_is_missing_is_closed_form_by_hand():
    """Three for two: a packet and one of two others, or both. Four for two, xor: a packet and the parity of it."""
    assert Fec(3, 2).missing_rate(0.1) == pytest.approx(0.1 * (1 - 0.9**2))
    assert Fec(4, 2, code="xor").missing_rate(0.1) == pytest.approx(0.1 * 0.1)
    assert Fec(4, 2).missing_rate(0.1) == pytest.approx(0.1 * (3 * 0.1**2 * 0.9 + 0.1**3))


def missing_share(code, process, num_messages=4000, num_packets=64):
    link = process.losses((1, "test"))
    missing = sum(len(code.deliver(num_packets, lambda count, extra=0: link.take(count))) for _ in range(num_messages))
    return missing / num_messages / num_packets


def test_interleaving_leaves_fewer_missing_where_losses_come_in_bursts():
    """And as many as before where they do not."""
    bursts = GilbertElliott.from_loss_and_burst(loss_rate=0.02, mean_burst_packets=4)
    shares = [missing_share(Fec(10, 8, depth=depth), bursts) for depth in (1, 4, 8)]
    assert shares[0] > 1.5 * shares[1] > 1.5 * shares[2] > 0
    single = GilbertElliott(
        p_good_to_bad=0.1, p_bad_to_good=0.9, loss_bad=0.2, loss_good=0.2
    )  # one rate in both states
    one, eight = (missing_share(Fec(10, 8, depth=depth), single) for depth in (1, 8))
    assert one == pytest.approx(eight, rel=0.1)
    assert one == pytest.approx(Fec(10, 8).missing_rate(0.2), rel=0.1)
