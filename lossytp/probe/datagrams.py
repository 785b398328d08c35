"""Datagrams over UDP, and messages over TCP between the two ends of a measurement."""

import contextlib
import errno
import hashlib
import json
import math
import secrets
import socket
import struct
import sys
import time
from typing import Any

import numpy as np

from lossytp.network.checks import printable, shown

# Send datagrams over UDP, from sockets that lose none themselves if the system allows buffers large enough.
#
# The header of 16 bytes is a key (8 bytes), a sequence number (4) and an offset (4), in network byte order. The key
# names the flow. It also keeps strangers' datagrams out, because only the two ends of a handshake know it. Addresses
# are IPv4.


HEADER = struct.Struct(">8sII")
HEADER_DTYPE = np.dtype([("key", ">u8"), ("sequence", ">u4"), ("offset", ">u4")])
IP_AND_UDP_BYTES = 20 + 8
BUFFER_BYTES = 2**26  # the system grants as much of it as it allows
ON_LINUX = sys.platform == "linux"
SO_SNDBUFFORCE, SO_RCVBUFFORCE, SO_TIMESTAMPNS, SO_MEMINFO = 32, 33, 35, 55  # of Linux; Python does not name them
IP_MTU_DISCOVER, IP_PMTUDISC_DO = 10, 2
MEMINFO = struct.Struct("=9I")
LOCAL_DROPS = (errno.EPERM, errno.ENOBUFS, errno.ECONNREFUSED)  # firewall, full queue, refusal of an earlier datagram


def new_session() -> bytes:
    """Return 16 random bytes that the ends of a session share."""
    return secrets.token_bytes(16)


def flow_key(session: bytes, *flow: int) -> bytes:
    """Return the 8-byte key of one flow of a session."""
    return hashlib.blake2b(repr(flow).encode(), key=session, digest_size=8).digest()


def numbers(keys: list[bytes]) -> np.ndarray:
    """Return keys as the numbers that `HEADER_DTYPE` reads: uint64 (keys,)."""
    return np.frombuffer(b"".join(keys), ">u8")


def udp_socket(host: str, port: int = 0) -> socket.socket:
    """Return a UDP socket bound to `host`, which does not fragment, with buffers as large as the system allows."""
    opened = bound(socket.SOCK_DGRAM, host, port)
    for option, forced in ((socket.SO_RCVBUF, SO_RCVBUFFORCE), (socket.SO_SNDBUF, SO_SNDBUFFORCE)):
        opened.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        if ON_LINUX:
            with contextlib.suppress(PermissionError):  # only an administrator may exceed the system's limit
                opened.setsockopt(socket.SOL_SOCKET, forced, BUFFER_BYTES)
    if ON_LINUX:
        opened.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO)
    return opened


def bound(kind: socket.SocketKind, host: str, port: int) -> socket.socket:
    """Return a socket bound to an address of this machine, or raise ValueError if it cannot be used."""
    if not host:
        raise ValueError("host is empty: give an address of this machine, or 0.0.0.0 for all of them")
    opened = socket.socket(socket.AF_INET, kind)
    try:
        if kind == socket.SOCK_STREAM:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((host, port))
    except (OSError, OverflowError) as error:
        opened.close()
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise ValueError(f"port = {port} is in use on {host}: give another, or end the program there") from error
        raise ValueError(
            f"host = {host!r}, port = {port} cannot be used here ({error}): give an address of this machine"
        ) from error
    return opened


def address_of(host: str) -> str:
    """Return the IPv4 address of a machine, or raise ValueError if it has none."""
    try:
        return socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]  # type: ignore[return-value]
    except (OSError, UnicodeError) as error:
        raise ValueError(f"host = {host!r} has no IPv4 address ({error}): give a name or an address") from error


def dropped_here(opened: socket.socket) -> int | None:
    """Return how many datagrams the system dropped because this socket's buffer was full; None if unknown."""
    if not ON_LINUX:
        return None
    dropped: int = MEMINFO.unpack(opened.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, MEMINFO.size))[-1]
    return dropped


def send_to(opened: socket.socket, datagram: bytearray, address: tuple[str, int]) -> None:
    """Send a datagram. One that this machine's firewall or queue drops counts as sent, and lost on its way."""
    try:
        opened.sendto(datagram, address)
    except OSError as error:
        if error.errno == errno.EMSGSIZE:
            raise ValueError(
                f"packets of {len(datagram) + IP_AND_UDP_BYTES} bytes are above the path's MTU: give fewer bytes"
            ) from error
        if error.errno not in LOCAL_DROPS:
            raise


# Exchange messages between the two ends of a measurement over TCP.
#
# A message starts with the length of its JSON text (4 bytes, network byte order). The JSON text follows, then the bytes
# of the arrays that it lists under "arrays" as [name, dtype, length].


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
        """Send values by name, and one-dimensional arrays."""
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
        """Return the next message of these kinds, with its arrays by name; raise Vanished if none comes in time."""
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
    """Return the counts that the other end sent, or raise Vanished: `number` whole numbers from 0 to `most`."""
    whole = isinstance(values, list) and len(values) == number and all(type(value) is int for value in values)
    if not whole or not all(0 <= value <= most for value in values):  # type: ignore[attr-defined]
        raise Vanished(f"it sent {shown(values)} instead of {number} counts up to {most}")
    return list(values)  # type: ignore[call-overload]
