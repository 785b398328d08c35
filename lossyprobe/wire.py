"""The wire of a measurement: datagrams over UDP, messages over TCP, the plan of both ends, and what arrives."""

import contextlib
import errno
import hashlib
import json
import math
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from lossyprobe.trace_file import FlowTrace, ProbeTrace
from lossytp.network.checks import check_at_least, check_at_most, check_bool, check_is, check_positive, printable, shown

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
                data = array.data.cast("B")
                for start in range(0, len(data), PIECE_BYTES):  # the patience is for one piece
                    self._connection.sendall(data[start : start + PIECE_BYTES])
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
            if not content.keys().isdisjoint(name for name, _, _ in sizes):
                raise Vanished(f"it sent arrays in place of values of the message {wanted}")
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


# Describe the packets that a measurement sends.


LEAST_BYTES = IP_AND_UDP_BYTES + HEADER.size
MOST_BYTES = 65_535
MOST_FLOWS = 256
MOST_PACKETS = 2**31


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Numbered packets to send in several flows at once, in one direction or both.

    Args:
        packets: number of packets in each flow.
        flows: number of flows. Each has its own port, as a rank has one per peer in a collective. With
            `both_directions`, as many flows come back.
        packet_bytes: size of a whole IP packet: 20 bytes of IP, 8 of UDP, a header of 16, and payload.
        rate_packets_per_s: largest mean rate of each flow.
        burst_packets: number of packets that leave back to back. Pauses between bursts keep the mean rate.
        both_directions: whether the receiver sends too. It never sends more bytes than it has received.

    Raises:
        TypeError: if a value has the wrong type.
        ValueError: if a value is out of bounds.
    """

    packets: int
    flows: int = 1
    packet_bytes: int = 1500
    rate_packets_per_s: float = 1000.0
    burst_packets: int = 1
    both_directions: bool = False

    def __post_init__(self) -> None:
        for name, least, most in (
            ("packets", 1, MOST_PACKETS),
            ("flows", 1, MOST_FLOWS),
            ("packet_bytes", LEAST_BYTES, MOST_BYTES),
            ("burst_packets", 1, MOST_PACKETS),
        ):
            check_at_least(name, getattr(self, name), least)
            check_at_most(name, getattr(self, name), most)
        check_positive("rate_packets_per_s", self.rate_packets_per_s, "packets a second")
        check_bool("both_directions", self.both_directions)

    @property
    def datagram_bytes(self) -> int:
        """Return the bytes of a datagram, without the headers of IP and UDP."""
        return self.packet_bytes - IP_AND_UDP_BYTES

    @property
    def mbits_per_s(self) -> float:
        """Return the Mbit/s of all flows of one direction together."""
        return self.flows * self.rate_packets_per_s * self.packet_bytes * 8 / 1e6

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """Return the plan that another machine describes.

        Raises:
            TypeError: if a value has the wrong type.
            ValueError: if the names are not a plan's, or a value is out of bounds.
        """
        check_is("plan", values, Mapping, "names with values")
        assert isinstance(values, Mapping)
        if set(values) != {field.name for field in fields(cls)}:
            raise ValueError(
                f"plan = {shown(dict(values))} does not have this version's fields: run the same version on both ends"
            )
        return cls(**values)

    def check_rate(self, max_mbits: float) -> None:
        """Raise ValueError if one direction is faster than `max_mbits`."""
        if self.mbits_per_s > max_mbits:
            raise ValueError(
                f"{self.flows} x {self.rate_packets_per_s:g} packets/s of {self.packet_bytes} bytes are "
                f"{self.mbits_per_s:.6g} Mbit/s, above max_mbits = {max_mbits:g}: send slower, or raise max_mbits"
            )


# Tell whether two machines read the same clock, as containers of one machine do.


def clock_name() -> str:
    """Return a name of this machine's clock that all its processes and containers share; "" if it has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def same_clock(theirs: object) -> bool:
    """Return whether the other end, which sent this name, reads the same clock."""
    return isinstance(theirs, str) and theirs != "" and theirs == clock_name()


# Receive numbered datagrams, and log when each arrived.


BATCH = 512
POLL_S = 0.05
MOST_COPIES = 4  # arrivals to log per planned packet, so that a flood of copies cannot fill the memory
TIMESTAMP = struct.Struct("=qq")  # seconds, nanoseconds
SPACE = 64  # bytes for a datagram's timestamp


class Fates(NamedTuple):
    """The fates of a flow's packets; each array has the shape (packets,)."""

    arrived_ns: np.ndarray
    """Arrival time of the first copy by the receiver's clock; 0 if lost."""
    lost: np.ndarray
    reordered: np.ndarray
    duplicates: np.ndarray


def fates(sequences: np.ndarray, times_ns: np.ndarray, num_packets: int) -> Fates:
    """Return the fates of packets 0 to `num_packets` - 1.

    A packet is reordered if one with a larger sequence number arrived before it (RFC 4737, 3.3).

    Args:
        sequences: (arrivals,) sequence numbers in the order of arrival.
        times_ns: (arrivals,) arrival times.
        num_packets: number of packets sent.
    """
    known = (sequences >= 0) & (sequences < num_packets)
    sequences, times_ns = sequences[known].astype(np.int64), times_ns[known]
    newest_before = np.maximum.accumulate(np.concatenate(([-1], sequences)))[:-1]
    packets, first, copies = np.unique(sequences, return_index=True, return_counts=True)
    arrived_ns = np.zeros(num_packets, np.int64)
    lost, reordered = np.ones(num_packets, np.bool_), np.zeros(num_packets, np.bool_)
    duplicates = np.zeros(num_packets, np.int32)
    arrived_ns[packets], lost[packets], duplicates[packets] = times_ns[first], False, copies - 1
    reordered[packets] = packets < newest_before[first]
    return Fates(arrived_ns, lost, reordered, duplicates)


class Receiver(threading.Thread):
    """A thread that logs the datagrams that arrive at `sockets`.

    It ignores datagrams with an unknown key or another size. Linux stamps each datagram on arrival, so that a delayed
    thread does not blur the delays.

    Args:
        sockets: sockets that are unconnected, or connected to the sender.
        keys: the key of each flow.
        num_packets: number of packets in each flow; larger sequence numbers are ignored.
        datagram_bytes: size of a datagram.
        only_from: the sender's IP address; datagrams from other addresses are ignored.
    """

    def __init__(
        self, sockets: list[socket.socket], keys: list[bytes], num_packets: int, datagram_bytes: int, only_from: str
    ) -> None:
        super().__init__(daemon=True)
        self._sockets, self._keys = sockets, numbers(keys)
        self._datagram_bytes, self._only_from = datagram_bytes, only_from
        self._room = MOST_COPIES * num_packets * len(keys)
        self._stop_now = threading.Event()
        self._log: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # flows, sequences, times
        self.arrived = np.zeros((len(keys), num_packets), np.bool_)
        self.addresses: dict[int, tuple[str, int]] = {}  # where each flow comes from
        self.bytes = 0  # received with a known key
        for opened in sockets if ON_LINUX else ():
            opened.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        scrap = memoryview(bytearray(datagram_bytes + 1))  # one more, to notice larger datagrams
        self._headers = bytearray(BATCH * HEADER.size)
        slots = memoryview(self._headers)
        self._places = [[slots[at : at + HEADER.size], scrap] for at in range(0, len(slots), HEADER.size)]

    def counts(self) -> list[int]:
        """Return how many of each flow's packets have arrived."""
        return [int(row.sum()) for row in self.arrived]

    def newest(self) -> list[int]:
        """Return the largest sequence number of each flow that has arrived, plus one; 0 if nothing has."""
        return [len(row) - int(row[::-1].argmax()) if row.any() else 0 for row in self.arrived]

    def own_losses(self) -> int | None:
        """Return how many datagrams this machine dropped because it was too slow; None if unknown."""
        drops = [dropped_here(opened) for opened in self._sockets]
        return None if None in drops else sum(drop or 0 for drop in drops)

    def log(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return flows (uint16), sequence numbers (uint32) and times (int64, ns) of all arrivals, in order."""
        empty = np.empty(0, np.uint16), np.empty(0, np.uint32), np.empty(0, np.int64)
        flows, sequences, times_ns = (np.concatenate(parts) for parts in zip(empty, *self._log, strict=True))
        return flows, sequences, times_ns

    def stop(self) -> None:
        """Stop logging, and wait for the thread to end."""
        self._stop_now.set()
        if self.ident is not None:
            self.join()

    def run(self) -> None:
        poll = select.poll()
        by_number = {opened.fileno(): opened for opened in self._sockets}
        for number in by_number:
            poll.register(number, select.POLLIN)
        while not self._stop_now.is_set():
            for number, _ in poll.poll(POLL_S * 1000):
                self._read(by_number[number])

    def _read(self, opened: socket.socket) -> None:
        """Read what has arrived at a socket, at most `BATCH` datagrams."""
        sizes, stamps, senders = [], [], []
        with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
            for place in self._places:
                size, ancillary, _, sender = opened.recvmsg_into(place, SPACE, socket.MSG_DONTWAIT)
                sizes.append(size)
                stamps.append(ancillary[0][2] if ancillary else TIMESTAMP.pack(*divmod(time.time_ns(), 10**9)))
                senders.append(sender)
        if sizes:
            self._note(np.array(sizes), np.frombuffer(b"".join(stamps), np.int64).reshape(-1, 2), senders)

    def _note(self, sizes: np.ndarray, stamps: np.ndarray, senders: list[tuple[str, int]]) -> None:
        headers = np.frombuffer(self._headers, HEADER_DTYPE, len(sizes))
        matches = headers["key"] == self._keys[:, None]  # (flows, datagrams)
        right = matches.any(0) & (sizes == self._datagram_bytes) & (headers["sequence"] < self.arrived.shape[1])
        right &= np.fromiter((sender[0] == self._only_from for sender in senders), np.bool_, len(senders))
        places = np.flatnonzero(right)[: self._room]
        if not len(places):
            return
        flows = matches.argmax(0)[places].astype(np.uint16)
        sequences = headers["sequence"][places].astype(np.uint32)
        self._log.append((flows, sequences, stamps[places] @ np.array([10**9, 1])))
        self._room -= len(places)
        self.arrived[flows, sequences] = True
        for flow, place in zip(*np.unique(flows, return_index=True), strict=True):
            self.addresses[int(flow)] = senders[places[place]]
        self.bytes += len(places) * self._datagram_bytes


PROTOCOL = "lossyprobe 1"
PORT = 29470
BEAT_S = 0.5
"""Seconds between the sender's requests for a report of which packets have arrived."""
LATE_S = 1.0
"""Seconds for which the sender waits for the last packets to arrive."""
PATIENCE_S = 10.0
"""Seconds of silence after which the other end counts as vanished."""


class Outcome(NamedTuple):
    """The outcome of a measurement."""

    trace: ProbeTrace
    ended_early: str
    """Why the measurement ended before all packets were sent; "" if it did not."""

    @classmethod
    def of(
        cls, flows: list[FlowTrace], *, same: bool, ended_early: str, own_losses: int | None, source: str
    ) -> "Outcome":
        """Return the outcome for the flows that have packets. `same` says whether both ends read the same clock."""
        trace = ProbeTrace(
            flows={number: flow for number, flow in enumerate(flows) if flow.num_packets},
            clocks="same" if same else "different",
            complete=not ended_early,
            own_losses=own_losses,
            source=source,
        )
        return cls(trace, ended_early)


class Log(NamedTuple):
    """Arrivals in order; each array has the shape (arrivals,)."""

    flow: np.ndarray
    sequence: np.ndarray
    time_ns: np.ndarray
    """Arrival times by the receiver's clock; 0 if unknown."""


def flow_traces(
    plan: Plan, log: Log, counts: list[int], sent_ns: np.ndarray | None, ends: tuple[str, str], same: bool
) -> list[FlowTrace]:
    """Return the traces of all flows in one direction.

    Args:
        plan: the measurement's plan.
        log: the arrivals.
        counts: (flows,) number of packets sent in each flow.
        sent_ns: (packets of all flows,) departure times, flow after flow; None if unknown.
        ends: names of the sending and the receiving machine.
        same: whether both machines read the same clock.
    """
    bounds = np.cumsum([0, *counts])
    firsts = [] if sent_ns is None else [sent_ns[at] for at, count in zip(bounds, counts, strict=False) if count]
    traces = []
    for flow, count in enumerate(counts):
        found = fates(log.sequence[log.flow == flow], log.time_ns[log.flow == flow], count)
        delay_s = sent_s = np.full(count, np.nan)
        if sent_ns is not None:
            times_ns = sent_ns[bounds[flow] : bounds[flow + 1]]
            sent_s = (times_ns - min(firsts, default=0)) * 1e-9
            delay_s = np.where(found.arrived_ns == 0, np.nan, (found.arrived_ns - times_ns) * 1e-9)
            if not same and not np.isnan(delay_s).all():
                delay_s = delay_s - np.nanmin(delay_s)
        traces.append(
            FlowTrace(
                lost=found.lost,
                sent_s=sent_s,
                delay_s=delay_s,
                reordered=found.reordered,
                duplicates=found.duplicates,
                src=ends[0],
                dst=ends[1],
                packet_bytes=plan.packet_bytes,
                rate_packets_per_s=plan.rate_packets_per_s,
            )
        )
    return traces
