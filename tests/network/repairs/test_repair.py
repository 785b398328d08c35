"""What is done about packets that do not arrive: how many are sent, which are missing, and what is scaled."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossytp.network.losses import Bernoulli
from lossytp.network.repairs import ZERO, Hadamard, Rescale, Retransmit, Zero, repair_named
from tests.network.loss_statistics import assert_within, batch_means, indicators, is_within, reproducible


@reproducible
@given(loss_rate=st.floats(0, 0.999999))
def test_rescale_is_the_inverse_of_the_delivery_probability(loss_rate):
    assert Rescale().weight(loss_rate) * (1 - loss_rate) == pytest.approx(1)


@reproducible
@given(loss_rate=st.floats(0, 1))
def test_zero_leaves_what_arrives_as_it_is(loss_rate):
    assert Zero().weight(loss_rate) == 1


EVERY_REPAIR = [
    *("zero", "rescale", "rescale_counted", "stale", "local", "retransmit(1)", "retransmit(2)", "hadamard(8)"),
    *("fec(3, 2)", "fec(10, 8, depth=3)", "fec(12, 8)", "fec(12, 8, code='xor')", "fec(5, 4, code='xor')"),
]


@pytest.mark.parametrize("name", EVERY_REPAIR)
def test_without_losses_nothing_is_scaled(name):
    assert repair_named(name).weight(0) == 1
    assert repair_named(name).weight(0.0) == 1


def test_a_link_that_delivers_nothing_is_not_divided_by_zero():
    assert Rescale().weight(1) == 1


def test_rescaled_sums_are_unbiased_and_zero_filled_ones_are_not():
    """The mean of what arrives of 10^6 ones at a loss rate of 0.2; without repair it is 0.8."""
    lost = Bernoulli(loss_rate=0.2).losses((0, "test")).take(10**6)
    delivered = 1 - indicators(lost, 10**6).astype(np.float64)
    assert_within(batch_means(delivered * Rescale().weight(0.2)), 1, "rescaled")
    assert_within(batch_means(delivered * Zero().weight(0.2)), 0.8, "zero-filled")
    assert not is_within(batch_means(delivered * Zero().weight(0.2)), 1)


def scripted(*rounds):
    """A link that loses, one call after another, the packets that each of `rounds` lists; what was asked of it."""
    asked = []

    def send(count, extra=0):
        lost = rounds[len(asked)]
        assert all(packet < count for packet in lost)
        asked.append((count, extra))
        return np.array(lost, dtype=np.int64)

    return send, asked


def test_without_a_transport_of_its_own_a_repair_sends_a_message_once():
    for repair in (ZERO, Rescale(), Hadamard(8)):
        send, asked = scripted([1, 4])
        assert repair.deliver(6, send).tolist() == [1, 4]
        assert asked == [(6, 0)]


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


@pytest.mark.parametrize(
    ("num_elements", "elements_per_packet", "block", "sent"),
    [
        (64, 4, 16, 64),  # 4 blocks: a packet's four coefficients are of four blocks
        (63, 4, 16, 64),
        (49, 4, 16, 64),
        (48, 4, 8, 48),
        (8, 4, 2, 8),
        (7, 4, 2, 8),
        (6, 4, 1, 6),
        (4, 4, 1, 4),
        (1, 4, 1, 1),
        (1000, 1, 64, 1024),
        (1000, 4, 64, 1024),
    ],
)
def test_blocks_are_as_large_as_leaves_one_coefficient_of_each_to_a_packet(
    num_elements, elements_per_packet, block, sent
):
    hadamard = Hadamard(64)
    assert hadamard.block_for(num_elements, elements_per_packet) == block
    assert hadamard.elements_on_wire(num_elements, elements_per_packet) == sent


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
        ("zero", 4, 0),
        ("retransmit(1)", 4, 0.2),
        ("retransmit(3)", 4, 0.2 + 0.2**2 + 0.2**3),
        ("fec(3, 2)", 2, 1 / 2),
        ("fec(6, 4)", 4, 1 / 2),
        ("fec(6, 4)", 12, 1 / 2),
        ("fec(7, 4, depth=3)", 24, 3 / 4),
        ("fec(6, 4, code='xor')", 4, 1 / 2),
        ("fec(8, 5, code='xor')", 10, 3 / 5),
        ("fec(8, 4, code='xor', depth=2)", 16, 1),
    ],
)
def test_what_is_missing_and_what_is_sent_beyond_are_as_stated(name, num_packets, extra_share):
    """Whole blocks over Bernoulli links; control: the rate of the link itself is far off."""
    repair, loss_rate = repair_named(name), 0.2
    missing, extra = over_bernoulli(repair, loss_rate, num_packets)
    assert_within(missing, repair.missing_rate(loss_rate), f"missing after {name}")
    assert_within(extra, extra_share, f"extra by {name}")
    assert (name == "zero") == is_within(missing, loss_rate)


@pytest.mark.parametrize("name", EVERY_REPAIR)
def test_without_losses_nothing_is_missing(name):
    assert repair_named(name).missing_rate(0) == 0
    assert repair_named(name).missing_rate(1) == 1
