"""How a message becomes packets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossytp.network.routes import MOST, Wire
from tests.network.loss_statistics import reproducible

itemsizes = st.sampled_from([1, 2, 4, 8])
wires = st.builds(
    lambda header, payload: Wire(mtu_bytes=header + payload, header_bytes=header),
    header=st.integers(0, 200),
    payload=st.integers(8, 9000),
)


@pytest.mark.parametrize(("itemsize", "elements"), [(2, 728), (4, 364), (8, 182)])
def test_the_default_packet_carries_1456_bytes_of_payload(itemsize, elements):
    """MTU 1500 less IP 20, UDP 8, and 16 for key, sequence and offset."""
    assert Wire() == Wire(mtu_bytes=1500, header_bytes=44)
    assert Wire().elements_per_packet(itemsize) == elements


@reproducible
@given(wire=wires, itemsize=itemsizes)
def test_a_packet_is_never_above_its_payload_and_wastes_less_than_an_element(wire, itemsize):
    payload = wire.mtu_bytes - wire.header_bytes
    elements = wire.elements_per_packet(itemsize)
    assert elements >= 1
    assert elements * itemsize <= payload < (elements + 1) * itemsize


def test_no_element_too_many_in_a_payload_of_1450_bytes():
    """An earlier study put 1450 // 4 + 1 = 363 floats, 1452 bytes, into 1450."""
    assert Wire(mtu_bytes=1450, header_bytes=0).elements_per_packet(4) == 362


@reproducible
@given(wire=wires, itemsize=itemsizes, num_elements=st.integers(0, 10**7))
def test_packets_hold_the_message_and_the_last_one_is_not_empty(wire, itemsize, num_elements):
    num_packets = wire.num_packets(num_elements, itemsize)
    elements = wire.elements_per_packet(itemsize)
    assert num_packets * elements >= num_elements
    assert num_packets == 0 or (num_packets - 1) * elements < num_elements


@pytest.mark.parametrize(("num_elements", "num_packets"), [(0, 0), (1, 1), (364, 1), (365, 2), (728, 2), (729, 3)])
def test_num_packets_by_hand(num_elements, num_packets):
    assert Wire().num_packets(num_elements, 4) == num_packets


@pytest.mark.parametrize(("mtu_bytes", "header_bytes", "least"), [(51, 44, 52), (0, 44, 52), (-1500, 0, 8), (7, 0, 8)])
def test_an_mtu_without_room_for_an_element_is_refused(mtu_bytes, header_bytes, least):
    with pytest.raises(ValueError, match=rf"mtu_bytes = {mtu_bytes} .* at least {least}$") as refusal:
        Wire(mtu_bytes=mtu_bytes, header_bytes=header_bytes)
    assert f"{header_bytes} bytes" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mtu_bytes": 1500.5}, "mtu_bytes = 1500.5 is not a whole number: give one, 52 or more"),
        ({"mtu_bytes": float("nan")}, "mtu_bytes = nan is not a whole number"),
        ({"mtu_bytes": "1500"}, "mtu_bytes = '1500' is not a whole number: give one, 52 or more"),
        ({"mtu_bytes": None}, "mtu_bytes = None is not a whole number: give one, 52 or more"),
        ({"header_bytes": "44"}, "header_bytes = '44' is not a whole number: give one, 0 or more"),
        ({"header_bytes": 0.5}, "header_bytes = 0.5 is not a whole number: give one, 0 or more"),
        ({"header_bytes": -1}, "header_bytes = -1 is below 0"),
    ],
)
def test_bytes_are_whole(values, message):
    with pytest.raises(ValueError, match=message):
        Wire(**values)


def test_the_smallest_mtu_holds_one_8_byte_element():
    assert Wire(mtu_bytes=52).elements_per_packet(8) == 1


@reproducible
@given(elements=st.integers(1, 1000), itemsize=itemsizes, num_elements=st.integers(0, 10**6))
def test_elements_of_a_packet_may_be_given_whatever_their_size(elements, itemsize, num_elements):
    wire = Wire(elements=elements)
    assert wire.elements_per_packet(itemsize) == elements
    assert wire.num_packets(num_elements, itemsize) == -(-num_elements // elements)


@pytest.mark.parametrize("elements", [0, -1, 1.5, True])
def test_packets_of_no_whole_number_of_elements_are_refused(elements):
    with pytest.raises(ValueError, match=rf"^elements = {elements} is .*: give.* 1 or more$"):
        Wire(elements=elements)


@pytest.mark.parametrize("name", ["mtu_bytes", "elements"])
def test_packets_beyond_any_message_are_refused(name):
    Wire(**{name: MOST})
    with pytest.raises(ValueError, match=rf"^{name} = {2**66} is above {MOST}: give a smaller one$"):
        Wire(**{name: 2**66})
