"""Connect ranks in separate processes: by UDP for packets that may be lost, by TCP for everything else.

A message begins when all ranks are ready for it, so that no buffer overflows while a rank still computes. Each rank
then sends its packets, and tells the others over TCP when it has sent the last one. After that, a receiver waits
`deadline_s` for missing packets, then gives them up. Nothing is sent twice.
"""

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
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

import numpy as np

from lossytp.network.checks import printable, shown
from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.repairs import ZERO, Repair
from lossytp.network.routes import Hops, Missing
from lossytp.network.scope import Site
from lossytp.network.traces import FlowTrace, ProbeTrace

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


DEADLINE_S = 0.01
PATIENCE_S = 60.0
GREETING_S = 5.0
MOST_LOST_BYTES = 2**26  # of a list of lost packets
BURST_PACKETS = 8  # to send before reading what has come
LARGEST = 65_535
Address = tuple[str, int]


class Cargo(NamedTuple):
    """A chunk that one link carries, in packets whose sequence numbers follow each other."""

    rank: int
    """The rank that receives or sends the chunk."""
    content: np.ndarray
    """The chunk, uint8 (bytes,). Arriving packets are written into it; the rest stays as it is."""
    packet_bytes: int
    """Bytes in a full packet, without headers."""
    first_element: int
    """Position of the chunk's first element in its message."""
    elements_per_packet: int
    dropped: np.ndarray
    """Indices of packets that are left out, as if the link had lost them."""

    @property
    def num_packets(self) -> int:
        """Return how many packets the chunk fills."""
        return -(-len(self.content) // self.packet_bytes)

    def packet(self, index: int) -> np.ndarray:
        """Return the bytes of a packet: a view."""
        return self.content[index * self.packet_bytes : (index + 1) * self.packet_bytes]


class Mesh:
    """This rank's sockets.

    Args:
        rank: number of this rank.
        host: address at which the other ranks reach this machine.
        deadline_s: seconds to wait for missing packets after all ranks have sent their last one.
        patience_s: seconds for which another rank may be silent, for example while it computes.

    Raises:
        ValueError: if the address does not belong to this machine.
    """

    def __init__(
        self, rank: int, host: str = "127.0.0.1", *, deadline_s: float = DEADLINE_S, patience_s: float = PATIENCE_S
    ) -> None:
        self.rank, self.deadline_s, self.patience_s = rank, deadline_s, patience_s
        self._listener = bound(socket.SOCK_STREAM, host, 0)
        self._listener.listen()
        self.address: Address = self._listener.getsockname()
        """Host and port at which the other ranks reach this one, over TCP and UDP."""
        self._udp = udp_socket(*self.address)
        self._udp.setblocking(False)
        self._peers: dict[int, Control] = {}
        self._connections: dict[int, socket.socket] = {}
        self._addresses: dict[int, Address] = {}
        self._session = b""
        self._sequences: dict[tuple[int, int], int] = {}  # the next number on each link
        self._buffer = bytearray(LARGEST)

    def __deepcopy__(self, memo: object) -> Self:
        """Return the mesh itself: a copied network sends through the same sockets."""
        return self

    @property
    def ranks(self) -> set[int]:
        """Return the numbers of the connected ranks, this one included."""
        return {self.rank, *self._peers}

    def connect(self, addresses: Mapping[int, Address], session: bytes) -> None:
        """Connect to the other ranks; each calls this with the same arguments.

        Args:
            addresses: each rank's `address`.
            session: random bytes that nobody else knows.

        Raises:
            ValueError: if a rank does not connect.
        """
        self._session = session
        self._addresses = dict(addresses)
        try:
            for other, address in sorted(addresses.items()):
                if other < self.rank:
                    self._greet(other, socket.create_connection(address, self.patience_s))
            while len(self._peers) < len(addresses) - 1:
                self._listener.settimeout(self.patience_s)
                self._welcome(self._listener.accept()[0])
            self._listener.close()
        except (OSError, Vanished) as error:
            raise ValueError(
                f"rank {self.rank} of {len(addresses)} could not connect to all others over TCP ({error}): check that "
                "the machines can reach each other"
            ) from error

    def _greet(self, other: int, connection: socket.socket) -> None:
        Control(connection, self.patience_s).send({"kind": "rank", "rank": self.rank, "session": self._session.hex()})
        self._keep(other, connection)

    def _welcome(self, connection: socket.socket) -> None:
        """Keep a connection from another rank, and close a stranger's."""
        with contextlib.suppress(Vanished):
            greeting = Control(connection, GREETING_S).receive("rank")
            if greeting.get("session") == self._session.hex() and greeting.get("rank") in self._addresses:
                self._keep(int(greeting["rank"]), connection)
                return
        connection.close()

    def _keep(self, other: int, connection: socket.socket) -> None:
        self._connections[other] = connection
        self._peers[other] = Control(connection, self.patience_s, MOST_LOST_BYTES)

    def exchange(self, outgoing: Iterable[Cargo], incoming: Iterable[Cargo]) -> dict[tuple[int, int], np.ndarray]:
        """Send chunks to other ranks, receive theirs, and learn what every rank lacks; all ranks call this together.

        Args:
            outgoing: at most one chunk for each other rank.
            incoming: at most one chunk from each other rank, whose content is filled in.

        Returns:
            For every link that carried packets, the sorted indices of the lost ones, int64 (lost,).

        Raises:
            ValueError: if another rank has vanished.
        """
        try:
            self._tell({"kind": "ready"})
            self._heard("ready")
            return self._exchange(list(outgoing), list(incoming))
        except Vanished as error:
            raise ValueError(
                f"rank {self.rank} lost the connection to another rank ({error}): read that rank's own error"
            ) from error

    def _exchange(self, outgoing: list[Cargo], incoming: list[Cargo]) -> dict[tuple[int, int], np.ndarray]:
        arrivals = {flow_key(self._session, cargo.rank, self.rank): self._arrival(cargo) for cargo in incoming}
        self._send(outgoing, arrivals)
        self._tell({"kind": "sent"})
        for other in self._peers:
            while not self._has_come(self._connections[other]):
                self._read(arrivals)
            self._peers[other].receive("sent")
        deadline = time.monotonic() + self.deadline_s
        self._read(arrivals)
        while not all(arrival.arrived.all() for arrival in arrivals.values()) and time.monotonic() < deadline:
            _ready(select.POLLIN, max(0.0, deadline - time.monotonic()), self._udp)
            self._read(arrivals)
        mine = {str(arrival.cargo.rank): np.flatnonzero(~arrival.arrived) for arrival in arrivals.values()}
        self._tell({"kind": "lost"}, mine)
        lost = {(int(other), self.rank): packets for other, packets in mine.items()}
        for other, theirs in self._heard("lost").items():
            lost |= {(int(name), other): theirs[name] for name, *_ in theirs["arrays"]}
        return lost

    def _arrival(self, cargo: Cargo) -> "_Arrival":
        return _Arrival(
            cargo, self._numbers(cargo.rank, self.rank, cargo.num_packets), np.zeros(cargo.num_packets, bool)
        )

    def _numbers(self, src: int, dst: int, num_packets: int) -> int:
        """Return the sequence number of a link's next packet, and advance it by `num_packets`."""
        first = self._sequences.get((src, dst), 0)
        self._sequences[src, dst] = first + num_packets
        return first

    def _send(self, outgoing: list[Cargo], arrivals: Mapping[bytes, "_Arrival"]) -> None:
        """Send packets to all ranks in turn, and read arriving ones meanwhile."""
        firsts = [self._numbers(self.rank, cargo.rank, cargo.num_packets) for cargo in outgoing]
        keys = [flow_key(self._session, self.rank, cargo.rank) for cargo in outgoing]
        dropped = [set(cargo.dropped.tolist()) for cargo in outgoing]
        for index in range(max((cargo.num_packets for cargo in outgoing), default=0)):
            for cargo, first, key, skipped in zip(outgoing, firsts, keys, dropped, strict=True):
                if index < cargo.num_packets and index not in skipped:
                    offset = cargo.first_element + index * cargo.elements_per_packet
                    header = HEADER.pack(key, (first + index) % 2**32, offset % 2**32)
                    self._send_datagram(bytearray(header + cargo.packet(index).tobytes()), cargo.rank)
            if index % BURST_PACKETS == 0:
                self._read(arrivals)

    def _send_datagram(self, datagram: bytearray, other: int) -> None:
        while True:
            try:
                send_to(self._udp, datagram, self._addresses[other])
                return
            except BlockingIOError:  # the system's queue is full: wait, as a blocking socket would
                _ready(select.POLLOUT, None, self._udp)

    def _read(self, arrivals: Mapping[bytes, "_Arrival"]) -> None:
        """Read all datagrams that have arrived, without waiting, and put them in place."""
        while True:
            try:
                size = self._udp.recv_into(self._buffer)
            except (BlockingIOError, ConnectionRefusedError):
                return
            if size < HEADER.size:
                continue
            key, sequence, offset = HEADER.unpack_from(self._buffer)
            if key in arrivals:
                arrivals[key].put(sequence, offset, memoryview(self._buffer)[HEADER.size : size])

    def _has_come(self, connection: socket.socket) -> bool:
        """Wait for data over UDP or this connection; return whether the connection has some."""
        ready = _ready(select.POLLIN, self.patience_s, self._udp, connection)
        return connection.fileno() in ready or not ready  # after the patience, reading the connection fails

    def _tell(self, content: dict[str, Any], arrays: dict[str, np.ndarray] | None = None) -> None:
        for peer in self._peers.values():
            peer.send(content, arrays)

    def _heard(self, kind: str) -> dict[int, dict[str, Any]]:
        return {other: peer.receive(kind) for other, peer in self._peers.items()}

    def own_losses(self) -> int | None:
        """Return how many packets this machine dropped because its buffer was full; None if unknown."""
        return dropped_here(self._udp)

    def close(self) -> None:
        """Close all sockets."""
        for opened in (self._listener, self._udp, *self._connections.values()):
            opened.close()


def _ready(event: int, timeout_s: float | None, *sockets: socket.socket) -> set[int]:
    """Wait for an event on some of the sockets; return their descriptors, or none after the timeout.

    Unlike `select.select`, polling also works in a process that has more than 1,023 files open.
    """
    poll = select.poll()
    for each in sockets:
        poll.register(each, event)
    return {descriptor for descriptor, _ in poll.poll(None if timeout_s is None else 1000 * timeout_s)}


class _Arrival(NamedTuple):
    """A chunk that is arriving."""

    cargo: Cargo
    first: int
    arrived: np.ndarray

    def put(self, sequence: int, offset: int, content: memoryview) -> None:
        """Put a packet in place. Ignore copies, packets of earlier messages, and packets that do not fit."""
        cargo = self.cargo
        index = (sequence - self.first) % 2**32
        if index >= len(self.arrived) or self.arrived[index]:
            return
        place = cargo.packet(index)
        if len(content) == len(place) and offset == (cargo.first_element + index * cargo.elements_per_packet) % 2**32:
            place[:] = content
            self.arrived[index] = True


# Define a lossy network that really sends its packets.


CARRIED = ("float32", "float64")


class UdpNetwork(LossyNetwork):
    """A network that sends the packets of `direct` all-reduces over UDP between processes, one rank each.

    The path between the machines causes a link's real losses. The link's loss process adds to them: the sender leaves
    out the packets that the process loses. Every rank learns over TCP which packets each rank lacks, so counters,
    reports and `trace()` are the same on all. A sum contains the values that arrived.

    The arguments are those of `LossyNetwork`. Call `connect` before the first message.
    """

    carries_rows = True

    def __init__(self, *settings: Any, **named: Any) -> None:
        super().__init__(*settings, **named)
        self._mesh: Mesh | None = None
        self._recorded: dict[tuple[int, int], list[np.ndarray]] = {}
        self._sent: dict[tuple[int, int], int] = {}

    def connect(self, mesh: Mesh) -> None:
        """Send through this mesh from now on. It is already connected to the other ranks."""
        self._mesh = mesh

    def _send(
        self, hops: Hops, itemsize: int, repair: Repair, group: str, site: Site | None, rows: np.ndarray | None
    ) -> Missing:
        """Send this rank's contribution, and receive the other ranks' contributions to its own chunk.

        Args:
            hops: hops of a reduce phase, each of which carries one rank's contribution to its receiver.
            itemsize: bytes per element.
            repair: must be "zero".
            group: name of the ranks' group.
            site: where in the model the message is from.
            rows: this rank's contribution, (1, elements). Afterwards the rank's own chunk holds the sum of what
                arrived, and the rest is zero: the sum of all ranks' rows is the result. With a single rank, the row
                does not change.
        """
        mesh = self._mesh
        if mesh is None:
            raise ValueError("this network has no sockets yet: call connect() first")
        self._check(hops, itemsize, repair, rows, mesh)
        assert rows is not None
        if not hops:
            return Missing([])
        row_N = rows[0]
        capacity = self.wire.elements_per_packet(itemsize)
        outgoing: list[Cargo] = []
        incoming: list[Cargo] = []
        for hop in hops:
            dropped = self._streams.take(group, hop.src, hop.dst, hop.num_packets(capacity))
            if mesh.rank not in (hop.src, hop.dst):
                continue
            sends, length = hop.src == mesh.rank, hop.stop - hop.start
            values = row_N[hop.start : hop.stop] if sends else np.zeros(length, row_N.dtype)
            other = hop.dst if sends else hop.src
            cargo = Cargo(other, values.view(np.uint8), capacity * itemsize, hop.start, capacity, dropped)
            (outgoing if sends else incoming).append(cargo)
        lost = mesh.exchange(outgoing, incoming)
        own = next(((hop.start, hop.stop) for hop in hops if hop.dst == mesh.rank), (0, 0))
        row_N[: own[0]] = 0
        row_N[own[1] :] = 0
        for cargo in incoming:
            row_N[own[0] : own[1]] += cargo.content.view(row_N.dtype)
        missing = Missing([lost[hop.src, hop.dst] for hop in hops])
        self._count(hops, missing, capacity, group, site)
        return missing

    def _check(self, hops: Hops, itemsize: int, repair: Repair, rows: np.ndarray | None, mesh: Mesh) -> None:
        one_each = all(hop.positions == (position,) for hop in hops for position in hop.positions)
        links = [(hop.src, hop.dst) for hop in hops]
        if rows is None or not one_each or len(set(links)) < len(links):
            raise ValueError("the UDP network carries only the all-reduces of algorithm 'direct': choose 'direct'")
        if repair != ZERO:
            raise ValueError(f"repair = '{repair}' does not work over the UDP network: choose 'zero'")
        if rows.dtype.name not in CARRIED or rows.dtype.itemsize != itemsize or len(rows) != 1:
            raise ValueError(
                f"{len(rows)} rows of {rows.dtype}, {itemsize} bytes per element on the wire, cannot be sent: the UDP "
                f"network carries one rank's {' or '.join(CARRIED)}; leave out wire_dtype, and start a process per rank"
            )
        absent = {rank for link in links for rank in link} - mesh.ranks
        if absent:
            raise ValueError(f"links {shown(links)} end at ranks that are not connected: connect {sorted(absent)} too")

    def _count(self, hops: Hops, missing: Missing, capacity: int, group: str, site: Site | None) -> None:
        for hop, packets in zip(hops, missing.packets, strict=True):
            count, link = hop.num_packets(capacity), (hop.src, hop.dst)
            self.counters.add((self._streams.purpose[0], site, group, *link), count, len(packets), 0, len(packets))
            if self._streams.of_training:
                before = self._sent.get(link, 0)
                self._recorded.setdefault(link, []).append(packets + before)
                self._sent[link] = before + count
        if hops:
            self.counters.add_message((self._streams.purpose[0], site, group), missing.any)

    def trace(self) -> ProbeTrace:
        """Return the fates of training's packets on each link, in the order of sending.

        Flows are numbered in the order of the links. `Replay` loses the same packets in a simulated network.
        """
        flows = {}
        for number, (link, sent) in enumerate(sorted(self._sent.items())):
            lost = np.zeros(sent, np.bool_)
            lost[np.concatenate(self._recorded[link])] = True
            flows[number] = FlowTrace(
                lost=lost, src=str(link[0]), dst=str(link[1]), packet_bytes=self.wire.mtu_bytes, rate_packets_per_s=None
            )
        return ProbeTrace(flows=flows, source="training over UDP")

    def state_dict(self) -> dict:
        recorded = [[*link, sent, np.concatenate(self._recorded[link]).tolist()] for link, sent in self._sent.items()]
        return super().state_dict() | {"recorded": recorded}

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        recorded = state.get("recorded", [])
        self._sent = {(src, dst): sent for src, dst, sent, _ in recorded}
        self._recorded = {(src, dst): [np.array(lost, np.int64)] for src, dst, _, lost in recorded}
