import numpy as np

from lossytp.probe.datagrams import HEADER, flow_key, udp_socket
from lossytp.probe.wire import MOST_COPIES, Receiver, fates

SIZE = 100
KEYS = [flow_key(bytes(16), flow) for flow in range(2)]


def naive_fates(sequences: list[int], num_packets: int) -> tuple[list, list, list]:
    """Lost, reordered, duplicates: packet by packet, as RFC 4737 words it."""
    lost, reordered, duplicates = [True] * num_packets, [False] * num_packets, [0] * num_packets
    next_expected = 0
    for sequence in sequences:
        if sequence >= num_packets:
            continue
        if lost[sequence]:
            lost[sequence] = False
            reordered[sequence] = sequence < next_expected
        else:
            duplicates[sequence] += 1
        next_expected = max(next_expected, sequence + 1)
    return lost, reordered, duplicates


def test_fates_equal_those_counted_packet_by_packet() -> None:
    generator = np.random.default_rng(0)
    for num_packets in (1, 2, 7, 40):
        for _ in range(50):
            sequences = generator.integers(0, num_packets + 2, generator.integers(0, 2 * num_packets + 2))
            found = fates(sequences.astype(np.uint32), np.arange(len(sequences)) + 1, num_packets)
            expected = naive_fates(sequences.tolist(), num_packets)
            assert (found.lost.tolist(), found.reordered.tolist(), found.duplicates.tolist()) == expected


def test_the_first_copy_says_when_a_packet_arrived() -> None:
    found = fates(np.array([1, 0, 1, -9]), np.array([10, 20, 30, 40]), 3)
    assert found.arrived_ns.tolist() == [20, 10, 0]


def received(*datagrams: bytes, packets: int = 4, only_from: str = "127.0.0.1") -> Receiver:
    """A receiver of two flows that has read these datagrams."""
    with udp_socket("127.0.0.1") as opened, udp_socket("127.0.0.1") as sender:
        receiver = Receiver([opened], KEYS, packets, SIZE, only_from)
        for datagram in datagrams:
            sender.sendto(datagram, opened.getsockname())
        receiver._read(opened)
        assert receiver.own_losses() in (0, None)
    return receiver


def datagram(sequence: int, flow: int = 0, key: bytes | None = None, size: int = SIZE) -> bytes:
    return (HEADER.pack(KEYS[flow] if key is None else key, sequence, 0) + bytes(SIZE))[:size]


def test_arrivals_of_both_flows_are_noted_in_their_order() -> None:
    receiver = received(datagram(1), datagram(3, 1), datagram(0), datagram(1))
    flows, sequences, times_ns = receiver.log()
    assert (flows.tolist(), sequences.tolist()) == ([0, 1, 0, 0], [1, 3, 0, 1])
    assert (np.diff(times_ns) >= 0).all()
    assert times_ns[0] > 1.7e18  # nanoseconds since 1970
    assert (receiver.counts(), receiver.newest(), receiver.bytes) == ([2, 1], [2, 4], 4 * SIZE)


def test_garbage_is_neither_counted_nor_noted() -> None:
    stranger = flow_key(bytes(15) + b"x", 0)
    receiver = received(
        b"",
        b"garbage",
        bytes(SIZE),
        bytes(3 * SIZE),
        datagram(0, key=stranger),
        datagram(0, size=SIZE - 1),
        datagram(0) + b"x",
        datagram(4),  # beyond the plan
        datagram(2**32 - 1),
        datagram(2),
    )
    assert (receiver.counts(), receiver.bytes, len(receiver.log()[0])) == ([1, 0], SIZE, 1)


def test_datagrams_from_another_machine_are_not_noted() -> None:
    receiver = received(datagram(0), only_from="127.0.0.2")
    assert (receiver.counts(), receiver.addresses) == ([0, 0], {})


def test_a_flood_of_copies_fills_no_memory() -> None:
    receiver = received(*[datagram(0)] * 40, packets=2)
    assert len(receiver.log()[0]) == MOST_COPIES * 2 * len(KEYS)
