import socket

import numpy as np
import pytest

from lossytp.network.routes import Wire
from lossytp.probe import datagrams
from lossytp.probe.datagrams import HEADER, HEADER_DTYPE, flow_key, new_session, numbers, send_to, udp_socket


def test_the_header_is_what_a_wire_counts_for_it() -> None:
    assert HEADER.size + datagrams.IP_AND_UDP_BYTES == Wire().header_bytes == 44
    assert HEADER.size == HEADER_DTYPE.itemsize == 16


def test_headers_are_read_as_they_were_packed() -> None:
    key = flow_key(new_session(), 3)
    read = np.frombuffer(HEADER.pack(key, 2**32 - 1, 7), HEADER_DTYPE)[0]
    assert (read["key"], read["sequence"], read["offset"]) == (numbers([key])[0], 2**32 - 1, 7)


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


def test_a_port_in_use_is_named() -> None:
    with (
        udp_socket("127.0.0.1") as held,
        pytest.raises(ValueError, match=f"port = {held.getsockname()[1]} is in use on 127.0.0.1: give another"),
    ):
        udp_socket("127.0.0.1", held.getsockname()[1])


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ValueError, match=r"host = '203.0.113.9', port = 0 cannot be used here"):
        udp_socket("203.0.113.9")


def test_a_name_without_an_address_is_refused() -> None:
    with pytest.raises(ValueError, match=r"host = 'no\.such\.machine\.invalid' has no IPv4 address"):
        datagrams.address_of("no.such.machine.invalid")


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
