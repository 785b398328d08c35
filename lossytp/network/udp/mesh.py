"""Connect ranks in separate processes: by UDP for packets that may be lost, by TCP for everything else.

A message begins when all ranks are ready for it, so that no buffer overflows while a rank still computes. Each rank
then sends its packets, and tells the others over TCP when it has sent the last one. After that, a receiver waits
`deadline_s` for missing packets, then gives them up. Nothing is sent twice.
"""

import contextlib
import select
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

import numpy as np

from lossytp.network.datagrams import HEADER, bound, dropped_here, flow_key, send_to, udp_socket
from lossytp.network.probe.control import Control, Vanished

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
