"""Repairs: what they send, what stays missing, what they scale, and their names."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossytp.network import Bernoulli, LossyNetwork, Wire
from lossytp.network.repairs import (
    ZERO,
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
    wire_order,
)
from lossytp.network.routes import Hop
from tests.network.loss_statistics import assert_within, batch_means, is_within, reproducible

# Names


@pytest.mark.parametrize(
    ("text", "repair"),
    [
        *((kind.name, kind()) for kind in (Zero, Rescale, RescaleCounted, Stale, Local)),
        ("fec(10, 8)", Fec(n=10, k=8, depth=1, code="mds")),
        *(("fec(n=6, k=4, depth=3, code='xor')", Fec(6, 4, 3, "xor")), ("hadamard", Hadamard(block=64))),
        *(("retransmit(2)", Retransmit(budget=2)), ("protect(0.01, 'random')", Protect(share=0.01, by="random"))),
        ("retransmit(2)+stale", Chain((Retransmit(2), Stale()))),
        ("protect(0.1) + fec(10, 8) + rescale", Chain((Protect(0.1), Fec(10, 8), Rescale()))),
    ],
)
def test_repairs_are_found_by_name(text, repair):
    assert repair_named(text) == repair
    assert repair_named(str(repair)) == repair


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("repair", ("fix", "fec", "zero(1)", "protect(0.1) +", "protect(0.1) + fix", "hadamard(64) + protect(0.1)")),
        ("repair", ("fec(10, 8) + retransmit(1)", "stale + rescale", "protect(0.1) + local")),
        ("rescale_counted", ("protect(0.1) + rescale_counted",)),
        ("n", ("fec(8, 8)", "fec(10, 4, code='xor')", "fec(100000000000, 1)", "fec(10, 8, depth=100000)")),
        *(("depth", ("fec(10, 8, 0)",)), ("code", ("fec(10, 8, code='ldpc')",))),
        ("budget", ("retransmit", "retransmit(0)", "retransmit(1.5)", "retransmit(1000000000)")),
        ("block", ("hadamard(12)", "hadamard(1)", "hadamard(1048576)")),
        *(("share", ("protect(0)", "protect(1.0)", "protect('a')")), ("by", ("protect(0.1, 'last')",))),
    ],
)
def test_values_that_a_repair_cannot_take_are_refused(name, texts):
    for text in texts:
        with pytest.raises(ValueError, match=name):
            repair_named(text)


# What is sent, missing and scaled


@reproducible
@given(loss_rate=st.floats(0, 0.999999))
def test_rescale_is_the_inverse_of_the_delivery_probability(loss_rate):
    assert Rescale().weight(loss_rate) * (1 - loss_rate) == pytest.approx(1)
    assert Rescale().weight(1) == 1


def scripted(*rounds):
    """A link that loses, one call after another, the packets that each of `rounds` lists; what was asked of it."""
    asked = []

    def send(count, extra=0):
        lost = rounds[len(asked)]
        assert all(packet < count for packet in lost)
        asked.append((count, extra))
        return np.array(lost, dtype=np.int64)

    return send, asked


def test_what_is_lost_is_sent_again_until_it_arrives():
    """Of packets 1, 3, 4 and 7, resent as 0 to 3, the second and last are lost again: 3 and 7; then 7."""
    send, asked = scripted([1, 3, 4, 7], [1, 3], [1])
    assert Retransmit(2).deliver(8, send).tolist() == [7]
    assert asked == [(8, 0), (4, 4), (2, 2)]
    send, asked = scripted([1, 3], [], [0])
    assert Retransmit(5).deliver(8, send).tolist() == []
    assert asked == [(8, 0), (2, 2)]
    send, asked = scripted([])
    assert Retransmit(5).deliver(8, send).tolist() == []
    assert asked == [(8, 0)]
    for repair in (ZERO, Rescale(), Hadamard(8)):  # without a transport of its own
        send, asked = scripted([1, 4])
        assert repair.deliver(6, send).tolist() == [1, 4]
        assert asked == [(6, 0)]


@reproducible
@given(
    num_elements=st.integers(1, 5000),
    elements_per_packet=st.integers(1, 400),
    largest=st.sampled_from([2, 8, 64, 1024]),
)
def test_no_packet_carries_two_coefficients_of_a_block(num_elements, elements_per_packet, largest):
    """And the next larger block would, or is larger than allowed."""
    hadamard = Hadamard(largest)
    block = hadamard.block_for(num_elements, elements_per_packet)
    blocks = -(-num_elements // block)
    on_wire = hadamard.elements_on_wire(num_elements, elements_per_packet)
    assert on_wire == blocks * block < num_elements + block
    owners = np.arange(on_wire) % blocks
    pieces = [owners[start : start + elements_per_packet] for start in range(0, on_wire, elements_per_packet)]
    if block > 1:
        assert all(len(set(piece.tolist())) == len(piece) for piece in pieces)
    if block < largest:
        assert -(-num_elements // (2 * block)) < elements_per_packet


LINKS = 40_000


def over_bernoulli(repair, loss_rate, num_packets):
    """Share missing and share sent beyond, of a message's packets, over many messages, with standard errors."""
    losses, sent, missing = Bernoulli(loss_rate=loss_rate).losses((3, "test")), np.zeros(LINKS), np.zeros(LINKS)

    for message in range(LINKS):

        def send(count, extra=0, message=message):
            sent[message] += count
            return losses.take(count)

        missing[message] = len(repair.deliver(num_packets, send))
    return batch_means(missing / num_packets), batch_means(sent / num_packets - 1)


@pytest.mark.parametrize(
    ("name", "num_packets", "extra_share"),
    [
        *(("zero", 4, 0), ("retransmit(1)", 4, 0.2), ("retransmit(3)", 4, 0.2 + 0.2**2 + 0.2**3)),
        *(("fec(3, 2)", 2, 1 / 2), ("fec(6, 4)", 4, 1 / 2), ("fec(6, 4)", 12, 1 / 2)),
        *(("fec(7, 4, depth=3)", 24, 3 / 4), ("fec(6, 4, code='xor')", 4, 1 / 2)),
        *(("fec(8, 5, code='xor')", 10, 3 / 5), ("fec(8, 4, code='xor', depth=2)", 16, 1)),
    ],
)
def test_what_is_missing_and_what_is_sent_beyond_are_as_stated(name, num_packets, extra_share):
    """Whole blocks over Bernoulli links; control: the rate of the link itself is far off."""
    repair, loss_rate = repair_named(name), 0.2
    missing, extra = over_bernoulli(repair, loss_rate, num_packets)
    assert_within(missing, repair.missing_rate(loss_rate), f"missing after {name}")
    assert_within(extra, extra_share, f"extra by {name}")
    assert (name == "zero") == is_within(missing, loss_rate)


# Forward error correction

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


BY_HAND = {  # nine packets in blocks of four: on the wire 0 1 2 3 P P, 4 5 6 7 P P, 8 P P
    (0,): [],
    (3, 5): [],  # the message's fourth, and a parity packet
    (4, 5): [],
    (0, 2, 3): [0, 2, 3],  # three of one block
    (1, 4, 5): [1],
    (6, 9, 0, 1): [],  # two of each block
    (6, 9, 11): [4, 7],
    (0, 1, 2, 3, 4, 5, 6): [0, 1, 2, 3],  # and one of the other
    (13, 14): [],  # the last, shorter block: one packet, two of parity
    (12, 13, 14): [8],
}
XOR_BY_HAND = {  # 0 1 2 3, the sum of 0 and 2, the sum of 1 and 3
    (0, 1): [],  # of the two groups
    (0, 2): [0, 2],  # of one
    (0, 4): [0],  # with its parity packet
    (0, 5): [],
    (4, 5): [],
    (0, 1, 2, 3): [0, 1, 2, 3],
}


def test_what_is_restored_by_hand():
    for lost, missing in BY_HAND.items():
        assert missing_of(Fec(6, 4), 9, lost) == (missing, 15, 6)
    for lost, missing in XOR_BY_HAND.items():
        assert missing_of(Fec(6, 4, code="xor"), 4, lost) == (missing, 6, 2)


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
    order = wire_order(code, num_packets)[0] if num_packets else []
    own = {int(packet) for place, packet in enumerate(order) if place in lost}
    assert missing == sorted(missing)
    assert set(missing) <= own
    fewer = data.draw(st.sets(st.sampled_from(sorted(lost)))) if lost else set()
    assert set(missing_of(code, num_packets, fewer)[0]) <= set(missing)
    assert missing_of(code, num_packets, range(on_wire))[0] == list(range(num_packets))


# Protected packets

PACKETS, LOSS_RATE = 200, 0.3


def sent_over_a_link(repair: str, loss_rate: float, times: int = 1) -> tuple[list[np.ndarray], dict]:
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
    places = [Protect(0.1, by="random").protected(np.arange(100.0), seed).tolist() for seed in (0, 0, 1)]
    assert places[0] == places[1] != places[2], "random places follow from the seed"
    assert len(set(places[0])) == 10


def test_each_protected_packet_is_repeated_until_it_arrives() -> None:
    missing, summary = sent_over_a_link("protect(0.1)", LOSS_RATE, times=100)
    own, protected = 100 * PACKETS, 100 * 20
    assert summary["packets"] == own + summary["extra"]
    assert summary["extra"] == pytest.approx(protected * LOSS_RATE / (1 - LOSS_RATE), rel=0.1)
    assert summary["missing"] == sum(map(len, missing)) == pytest.approx((own - protected) * LOSS_RATE, rel=0.05)
    assert max(packets.max() for packets in missing) < PACKETS - 20, "numbered among the others"


def test_without_losses_it_sends_nothing_more() -> None:
    missing, summary = sent_over_a_link("protect(0.1) + fec(10, 8)", 0.0)
    assert not len(missing[0])
    assert summary["extra"] == 46  # 2 packets of parity for each block of 8 of 180 packets
    assert sent_over_a_link("protect(0.1)", 0.0)[1]["extra"] == 0
    padded = sent_over_a_link("protect(0.1) + hadamard(128)", 0.0)[1]["packets"]
    assert padded == 20 + 3 * 128 / 2, "180 packets of 2 elements make blocks of 128; protected ones travel as they are"


def test_a_link_that_delivers_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"repair = 'protect\(0.1\)'"):
        sent_over_a_link("protect(0.1)", 1.0)
