"""Datagrams, messages, plans, and what arrives."""

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from lossyprobe import wire as datagrams
from lossyprobe.wire import (
    HEADER,
    HEADER_DTYPE,
    LENGTH,
    MOST_COPIES,
    Control,
    Plan,
    Receiver,
    Vanished,
    checked_counts,
    fates,
    flow_key,
    new_session,
    same_clock,
    send_to,
    udp_socket,
)
from lossytp.network.routes import Wire


def test_the_header_is_what_a_wire_counts_for_it() -> None:
    assert HEADER.size + datagrams.IP_AND_UDP_BYTES == Wire().header_bytes == 44
    assert HEADER.size == HEADER_DTYPE.itemsize == 16


def test_every_flow_of_every_session_has_its_own_key() -> None:
    one, other = new_session(), new_session()
    keys = {flow_key(session, *flow) for session in (one, other) for flow in ((0,), (1,), (0, 1), (1, 0))}
    assert len(keys) == 8
    assert flow_key(one, 0, 1) == flow_key(one, 0, 1)


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_an_empty_host_does_not_mean_every_address(kind: socket.SocketKind) -> None:
    with pytest.raises(ValueError, match=r"host is empty.*0\.0\.0\.0"):
        datagrams.bound(kind, "", 0)
    with pytest.raises(ValueError, match="host = ''"):
        datagrams.address_of("")


def test_a_datagram_above_the_mtu_is_refused() -> None:
    with udp_socket("127.0.0.1") as opened, pytest.raises(ValueError, match="packets of 70028 bytes are above"):
        send_to(opened, bytearray(70_000), ("127.0.0.1", 9))


def test_what_a_full_buffer_dropped_is_counted() -> None:
    with udp_socket("127.0.0.1") as receiver, udp_socket("127.0.0.1") as sender:
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(50):
            send_to(sender, bytearray(1000), receiver.getsockname())
        arrived = 0
        receiver.setblocking(False)
        while True:
            try:
                receiver.recv(2000)
            except BlockingIOError:
                break
            arrived += 1
        assert 0 < arrived < 50
        assert datagrams.dropped_here(receiver) == (50 - arrived if datagrams.ON_LINUX else None)


Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with one, other:
        yield one, other


def test_values_and_arrays_arrive(pair: Pair) -> None:
    arrays = {"a": np.array([1, 2**32 - 1], np.uint32), "b": np.empty(0, np.int64), "c": np.arange(9, dtype=np.uint8)}
    Control(pair[0], 5.0).send({"kind": "x", "count": 3}, arrays)
    message = Control(pair[1], 5.0, 17).receive("w", "x")
    assert message["count"] == 3
    for name, array in arrays.items():
        np.testing.assert_array_equal(message[name], array)
        assert message[name].dtype == array.dtype


def framed(content: object) -> bytes:
    text = json.dumps(content).encode()
    return LENGTH.pack(len(text)) + text


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        *((b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", "something other"), (framed([1, 2]), "something other")),
        (LENGTH.pack(60_000) + b"[" * 60_000, "something other"),
        (framed({"kind": "x", "arrays": [["a", "uint8", float("inf")]]}), "something other"),
        *((framed({"arrays": []}), "something other"), (framed({"kind": "y", "arrays": []}), "sent 'y' instead of x")),
        (framed({"kind": "x", "arrays": [["a", "uint8", 11]]}), "arrays of 11 bytes, above 10"),
        (framed({"kind": "x", "arrays": [["a", "object", 1]]}), "arrays of 8 bytes"),
        (framed({"kind": "x", "arrays": [["a", "uint8", -1]]}), "arrays of -1 bytes"),
        (framed({"kind": "x", "arrays": [["a", "no", 1]]}), "something other"),
        (framed({"kind": "x", "count": 3, "arrays": [["count", "uint8", 1]]}), "arrays in place of values"),
        (framed({"refused": "too fast"}), "refused: too fast"),
        (framed({"refused": "\x1b[2J\n" + "x" * 60_000}), r"refused: \\x1b\[2J\\nx{100,400}\.\.\.$"),
        (framed({"kind": "y" * 60_000, "arrays": []}), r"sent 'y{50,100}\.\.\. instead of x"),
        (LENGTH.pack(9) + b"\xff" * 9, "something other"),
        *((framed({"kind": "x", "arrays": []})[:-1], "closed the connection"), (b"", "closed the connection")),
    ],
)
def test_anything_else_counts_as_vanished(pair: Pair, sent: bytes, message: str) -> None:
    pair[0].sendall(sent)
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(Vanished, match=message):
        Control(pair[1], 5.0, 10).receive("x")


def test_silence_counts_as_vanished(pair: Pair) -> None:
    with pytest.raises(Vanished, match="silent for too long"):
        Control(pair[1], 0.05).receive("x")


def test_a_slow_reader_of_a_long_array_is_not_silent(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datagrams, "PIECE_BYTES", 2**16)
    for each, option in zip(pair, (socket.SO_SNDBUF, socket.SO_RCVBUF), strict=True):
        each.setsockopt(socket.SOL_SOCKET, option, 2**15)
    pair[1].settimeout(10)
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(Control(pair[0], 2.0).send, {"kind": "x"}, {"a": np.zeros(2**20, np.uint8)})
        for _ in range(16):  # 4 s for the array, a quarter of a second for each piece
            pair[1].recv(2**16, socket.MSG_WAITALL)
            time.sleep(0.25)
        pair[1].recv(2**16)
        sent.result()
    assert not same_clock(np.empty(0)), "an array in place of a name"


@pytest.mark.parametrize("values", [None, [1], [1, 2, 3], [1, -1], [1, 6], [1, 1.0], [1, True], ["1", 1]])
def test_wrong_counts_count_as_vanished(values: object) -> None:
    assert checked_counts([0, 5], 2, 5) == [0, 5]
    with pytest.raises(Vanished, match="instead of 2 counts up to 5"):
        checked_counts(values, 2, 5)


def test_a_plan_knows_its_rate_and_time_and_a_rate_above_the_cap_is_refused() -> None:
    plan = Plan(packets=100, flows=3, packet_bytes=1000, rate_packets_per_s=50.0)
    assert (plan.mbits_per_s, plan.datagram_bytes) == (pytest.approx(1.2), 972)
    plan = Plan(packets=1, flows=2, rate_packets_per_s=10_000.0)
    plan.check_rate(240.0)
    with pytest.raises(ValueError, match=r"2 x 10000 packets/s of 1500 bytes are 240 Mbit/s, above max_mbits = 239"):
        plan.check_rate(239.0)


@pytest.mark.parametrize("values", [None, 3, [], {}, {"packets": 1}, {**Plan(packets=1).as_dict(), "more": 1}])
def test_another_machine_s_nonsense_is_refused(values: object) -> None:
    with pytest.raises((TypeError, ValueError), match="plan = "):
        Plan.from_dict(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"packets": 0}, "packets = 0 is below 1"),
        ({"packets": 2**40}, "packets = 1099511627776 is above 2147483648"),
        *(({"packets": "1"}, "packets = '1' is not a whole number"), ({"flows": 257}, "flows = 257 is above 256")),
        ({"packet_bytes": 43}, "packet_bytes = 43 is below 44"),
        ({"packet_bytes": 65_536}, "packet_bytes = 65536 is above 65535"),
        ({"rate_packets_per_s": 0.0}, "rate_packets_per_s = 0.0 is not a finite number above 0"),
        ({"burst_packets": 0}, "burst_packets = 0 is below 1"),
        ({"both_directions": 1}, "both_directions = 1 is of type int"),
    ],
)
def test_values_out_of_bounds_are_refused(values: dict, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Plan.from_dict({**Plan(packets=1).as_dict(), **values})


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
