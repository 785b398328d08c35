"""Send datagrams over UDP, from sockets that lose none themselves if the system allows buffers large enough.

The header of 16 bytes is a key (8 bytes), a sequence number (4) and an offset (4), in network byte order. The key names
the flow. It also keeps strangers' datagrams out, because only the two ends of a handshake know it. Addresses are IPv4.
"""

import contextlib
import errno
import hashlib
import secrets
import socket
import struct
import sys

import numpy as np

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
    """Return a UDP socket bound to `host`, which does not fragment, with buffers as large as the system allows.

    Raises:
        ValueError: if the address does not belong to this machine, or the port is in use.
    """
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
    """Return a socket bound to an address of this machine.

    Raises:
        ValueError: if the address does not belong to this machine, or the port is in use.
    """
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
    """Return the IPv4 address of a machine.

    Raises:
        ValueError: if it has none.
    """
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
    """Send a datagram. One that this machine's firewall or queue drops counts as sent, and lost on its way.

    Raises:
        ValueError: if the datagram is larger than the path allows.
    """
    try:
        opened.sendto(datagram, address)
    except OSError as error:
        if error.errno == errno.EMSGSIZE:
            raise ValueError(
                f"packets of {len(datagram) + IP_AND_UDP_BYTES} bytes are above the path's MTU: give fewer bytes"
            ) from error
        if error.errno not in LOCAL_DROPS:
            raise
