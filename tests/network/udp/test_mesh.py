import contextlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from lossytp.network.udp import LENGTH, Cargo, Mesh, new_session


def framed(content: object) -> bytes:
    text = json.dumps(content).encode()
    return LENGTH.pack(len(text)) + text


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n", framed({"kind": "rank", "rank": 1, "session": "00" * 16, "arrays": []})]
)
def test_a_stranger_at_the_door_is_turned_away(sent: bytes) -> None:
    first, second = Mesh(0), Mesh(1)
    addresses, session = {0: first.address, 1: second.address}, new_session()
    with socket.create_connection(first.address) as stranger, ThreadPoolExecutor(2) as pool:
        stranger.sendall(sent)
        list(pool.map(lambda mesh: mesh.connect(addresses, session), (first, second), timeout=30))
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):  # what it sent was not read to its end
            assert stranger.recv(100) == b""
        cargo = Cargo(1, np.zeros(8, np.uint8), 8, 0, 8, np.empty(0, np.int64))
        exchanged = pool.map(
            lambda mesh, *sides: mesh.exchange(*sides), (first, second), ([cargo], []), ([], [cargo._replace(rank=0)])
        )
        assert [list(lost) for lost in exchanged] == [[(0, 1)]] * 2
    first.close()
    second.close()


def test_a_rank_that_does_not_come_is_reported() -> None:
    mesh = Mesh(0, patience_s=0.1)
    with pytest.raises(ValueError, match="rank 0 of 2 could not connect to all others over TCP") as caught:
        mesh.connect({0: mesh.address, 1: ("127.0.0.1", 9)}, new_session())
    assert "\n" not in str(caught.value)
    mesh.close()


@pytest.mark.parametrize("lost", [[], [1], [0, 2]])
def test_lost_packets_are_waited_for_until_the_deadline_and_leave_holes(lost: list[int]) -> None:
    meshes = [Mesh(rank, deadline_s=0.3) for rank in range(2)]
    addresses, session = {mesh.rank: mesh.address for mesh in meshes}, new_session()
    sent = np.arange(25, dtype=np.uint8) + 1
    arrived = np.zeros(25, np.uint8)

    def run(mesh: Mesh) -> tuple[dict, float]:
        mesh.connect(addresses, session)
        cargo = Cargo(1 - mesh.rank, arrived if mesh.rank else sent, 10, 0, 10, np.array(lost, np.int64))
        started = time.monotonic()
        return mesh.exchange(*([], [cargo]) if mesh.rank else ([cargo], [])), time.monotonic() - started

    with ThreadPoolExecutor(2) as pool:
        (one, _), (other, waited_s) = pool.map(run, meshes, timeout=30)
    assert list(one) == list(other) == [(0, 1)]
    assert one[0, 1].tolist() == other[0, 1].tolist() == lost
    expected = sent.copy()
    for packet in lost:
        expected[10 * packet : 10 * packet + 10] = 0
    np.testing.assert_array_equal(arrived, expected)
    assert (waited_s >= 0.3) == bool(lost)
    for mesh in meshes:
        mesh.close()
