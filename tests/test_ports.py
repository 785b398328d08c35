import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from tests.ports import held_port


def store(port: int, *, is_master: bool) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=is_master, wait_for_workers=False, timeout=timedelta(seconds=20))


def test_a_held_port_is_a_stores_again_and_again_and_nobody_elses() -> None:
    with held_port() as port:
        for number in range(3):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
            master = store(port, is_master=True)
            store(port, is_master=False).set("key", str(number))
            assert master.get("key") == str(number).encode()
            del master


def test_a_port_is_free_behind_the_block() -> None:
    with held_port() as port:
        pass
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        assert other.getsockname()[1] == port
