"""Send numbered datagrams at a steady rate."""

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lossytp.network.datagrams import HEADER, send_to
from lossytp.network.probe.plan import Plan

MOST_BEHIND_S = 0.005  # after a longer delay the sender skips the lost time instead of sending a larger burst
LONGEST_SLEEP_S = 0.05
WAIT_S = 1e-4


class Route(NamedTuple):
    """The socket, address and key with which a flow is sent."""

    socket: socket.socket
    address: tuple[str, int]
    key: bytes


class Sender(threading.Thread):
    """A thread that sends a plan's flows, one packet of each flow in turn.

    Packet i is due at i / rate. A token schedule keeps the mean rate: packets that are due leave back to back, at most
    as many as are due in `MOST_BEHIND_S`.

    Args:
        plan: the packets to send.
        route_of: returns a flow's route, or None if the flow cannot be sent yet.
        may_send: returns whether the next packet may leave now. The thread waits until it returns True.
    """

    def __init__(
        self, plan: Plan, route_of: Callable[[int], Route | None], may_send: Callable[[], bool] = lambda: True
    ) -> None:
        super().__init__(daemon=True)
        self._plan, self._route_of, self._may_send = plan, route_of, may_send
        self._stop_now = threading.Event()
        self.sent_ns = [np.zeros(plan.packets, np.int64) for _ in range(plan.flows)]
        self.counts = [0] * plan.flows
        self.error: Exception | None = None

    def stop(self) -> None:
        """Stop sending, and wait for the thread to end."""
        self._stop_now.set()
        if self.ident is not None:
            self.join()

    def times_ns(self, flow: int) -> np.ndarray:
        """Return the departure times of a flow's packets so far, by this machine's clock: int64 (sent,)."""
        return self.sent_ns[flow][: self.counts[flow]]

    def run(self) -> None:
        try:
            if self._wait_for(lambda: all(map(self._route_of, range(self._plan.flows)))):
                self._send([route for flow in range(self._plan.flows) if (route := self._route_of(flow))])
        except (OSError, ValueError) as error:
            self.error = error

    def _wait_for(self, ready: Callable[[], bool]) -> bool:
        """Wait, and return True once `ready()` is true, or False if the thread is stopped first."""
        while not self._stop_now.is_set():
            if ready():
                return True
            time.sleep(WAIT_S)
        return False

    def _send(self, routes: list[Route]) -> None:
        plan, stopped, datagram = self._plan, self._stop_now.is_set, bytearray(os.urandom(self._plan.datagram_bytes))
        start = time.perf_counter()
        for packet in range(plan.packets):
            due = start + packet // plan.burst_packets * plan.burst_packets / plan.rate_packets_per_s
            while (ahead := due - time.perf_counter()) > 0 and not stopped():
                time.sleep(min(ahead, LONGEST_SLEEP_S))
            start += max(0.0, -ahead - MOST_BEHIND_S)
            for flow, route in enumerate(routes):
                if stopped() or not (self._may_send() or self._wait_for(self._may_send)):
                    return
                HEADER.pack_into(datagram, 0, route.key, packet, 0)
                self.sent_ns[flow][packet] = time.time_ns()
                send_to(route.socket, datagram, route.address)
                self.counts[flow] = packet + 1
