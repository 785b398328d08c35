"""Exchange messages between the two ends of a measurement over TCP.

A message starts with the length of its JSON text (4 bytes, network byte order). The JSON text follows, then the bytes
of the arrays that it lists under "arrays" as [name, dtype, length].
"""

import json
import math
import socket
import struct
import time
from typing import Any

import numpy as np

from lossytp.network.checks import printable, shown

LENGTH = struct.Struct(">I")
MOST_JSON_BYTES = 2**16
DTYPES = ("uint8", "uint16", "uint32", "int64")
PIECE_BYTES = 2**20


class Vanished(Exception):
    """The other end closed the connection, was silent for too long, or does not speak this protocol."""


class Control:
    """One end of the connection.

    Args:
        connection: a connected TCP socket.
        patience_s: seconds for which the other end may be silent, or take to send a message without its arrays.
        most_array_bytes: largest size of a message's arrays; messages with more are refused.
    """

    def __init__(self, connection: socket.socket, patience_s: float, most_array_bytes: int = 0) -> None:
        self._connection, self._patience_s, self._most = connection, patience_s, most_array_bytes
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def allow(self, most_array_bytes: int) -> None:
        """Accept up to this many bytes of arrays in a message from now on."""
        self._most = most_array_bytes

    def send(self, content: dict[str, Any], arrays: dict[str, np.ndarray] | None = None) -> None:
        """Send values by name, and one-dimensional arrays.

        Raises:
            Vanished: if the connection fails.
        """
        arrays = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
        content = content | {"arrays": [[name, str(array.dtype), len(array)] for name, array in arrays.items()]}
        text = json.dumps(content).encode()
        self._connection.settimeout(self._patience_s)
        try:
            self._connection.sendall(LENGTH.pack(len(text)) + text)
            for array in arrays.values():
                self._connection.sendall(array.data.cast("B"))
        except OSError as error:
            raise Vanished(_reason(error)) from error

    def receive(self, *kinds: str) -> dict[str, Any]:
        """Return the next message, with its arrays by name.

        Args:
            kinds: values of the message's "kind" that are accepted.

        Raises:
            Vanished: if no such message arrives in time.
        """
        deadline, wanted = time.monotonic() + self._patience_s, " or ".join(kinds)
        try:
            (length,) = LENGTH.unpack(self._bytes(LENGTH.size, deadline))
            if length > MOST_JSON_BYTES:
                raise Vanished(f"it sent something other than the message {wanted}")
            content = json.loads(self._bytes(length, deadline))
            if "refused" in content:
                raise Vanished(f"it refused: {printable(content['refused'])}")
            if content["kind"] not in kinds:
                raise Vanished(f"it sent {shown(content['kind'])} instead of {wanted}")
            sizes = [(name, np.dtype(dtype), int(count)) for name, dtype, count in content["arrays"]]
            total = sum(dtype.itemsize * count for _, dtype, count in sizes)
            if any(str(dtype) not in DTYPES or count < 0 for _, dtype, count in sizes) or total > self._most:
                raise Vanished(f"it sent arrays of {total} bytes, above {self._most}")
            for name, dtype, count in sizes:
                content[name] = np.frombuffer(self._bytes(dtype.itemsize * count), dtype)
        except OSError as error:
            raise Vanished(_reason(error)) from error
        except (LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise Vanished(f"it sent something other than the message {wanted}") from error
        return content

    def _bytes(self, count: int, deadline: float = math.inf) -> bytes:
        """Receive `count` bytes before the deadline, without a pause longer than the patience."""
        parts = []
        while count:
            self._connection.settimeout(max(1e-3, min(self._patience_s, deadline - time.monotonic())))
            part = self._connection.recv(min(count, PIECE_BYTES))
            if not part:
                raise Vanished("it closed the connection")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


def _reason(error: OSError) -> str:
    return "it was silent for too long" if isinstance(error, TimeoutError) else str(error)


def checked_counts(values: object, number: int, most: int) -> list[int]:
    """Return the counts that the other end sent.

    Raises:
        Vanished: if they are not `number` whole numbers from 0 to `most`.
    """
    whole = isinstance(values, list) and len(values) == number and all(type(value) is int for value in values)
    if not whole or not all(0 <= value <= most for value in values):  # type: ignore[attr-defined]
        raise Vanished(f"it sent {shown(values)} instead of {number} counts up to {most}")
    return list(values)  # type: ignore[call-overload]
