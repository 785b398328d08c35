"""Receive numbered datagrams, and log when each arrived."""

import contextlib
import select
import socket
import struct
import threading
import time
from typing import NamedTuple

import numpy as np

from lossytp.network.datagrams import HEADER, HEADER_DTYPE, ON_LINUX, SO_TIMESTAMPNS, dropped_here, numbers

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
