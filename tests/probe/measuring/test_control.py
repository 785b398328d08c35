import json
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from lossytp.probe.datagrams import LENGTH, Control, Vanished, checked_counts

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
        (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", "something other"),
        (framed([1, 2]), "something other"),
        (LENGTH.pack(60_000) + b"[" * 60_000, "something other"),
        (framed({"kind": "x", "arrays": [["a", "uint8", float("inf")]]}), "something other"),
        (framed({"arrays": []}), "something other"),
        (framed({"kind": "y", "arrays": []}), "sent 'y' instead of x"),
        (framed({"kind": "x", "arrays": [["a", "uint8", 11]]}), "arrays of 11 bytes, above 10"),
        (framed({"kind": "x", "arrays": [["a", "object", 1]]}), "arrays of 8 bytes"),
        (framed({"kind": "x", "arrays": [["a", "uint8", -1]]}), "arrays of -1 bytes"),
        (framed({"kind": "x", "arrays": [["a", "no", 1]]}), "something other"),
        (framed({"refused": "too fast"}), "refused: too fast"),
        (framed({"refused": "\x1b[2J\n" + "x" * 60_000}), r"refused: \\x1b\[2J\\nx{100,400}\.\.\.$"),
        (framed({"kind": "y" * 60_000, "arrays": []}), r"sent 'y{50,100}\.\.\. instead of x"),
        (LENGTH.pack(9) + b"\xff" * 9, "something other"),
        (framed({"kind": "x", "arrays": []})[:-1], "closed the connection"),
        (b"", "closed the connection"),
    ],
)
def test_anything_else_counts_as_vanished(pair: Pair, sent: bytes, message: str) -> None:
    pair[0].sendall(sent)
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(Vanished, match=message):
        Control(pair[1], 5.0, 10).receive("x")


def test_wrong_counts_are_shown_in_short() -> None:
    with pytest.raises(Vanished) as caught:
        checked_counts(["\x1b" * 10**5], 1, 5)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200


def test_silence_counts_as_vanished(pair: Pair) -> None:
    with pytest.raises(Vanished, match="silent for too long"):
        Control(pair[1], 0.05).receive("x")


@pytest.mark.parametrize("values", [None, [1], [1, 2, 3], [1, -1], [1, 6], [1, 1.0], [1, True], ["1", 1]])
def test_wrong_counts_count_as_vanished(values: object) -> None:
    assert checked_counts([0, 5], 2, 5) == [0, 5]
    with pytest.raises(Vanished, match="instead of 2 counts up to 5"):
        checked_counts(values, 2, 5)
