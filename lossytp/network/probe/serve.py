"""Run the receiving end of measurements, which waits for partners to start them.

It answers only partners that complete a handshake over TCP. It sends datagrams only to addresses that a partner's
datagrams came from, and never more bytes than it has received. So nobody can use it to flood another machine.
"""

import contextlib
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from lossytp.network.checks import shown
from lossytp.network.datagrams import ON_LINUX, bound, flow_key, new_session, udp_socket
from lossytp.network.probe.clocks import clock_name, same_clock
from lossytp.network.probe.control import Control, Vanished, checked_counts
from lossytp.network.probe.ends import PATIENCE_S, PORT, PROTOCOL, Log, Outcome, flow_traces
from lossytp.network.probe.plan import Plan
from lossytp.network.probe.receiving import Receiver
from lossytp.network.probe.sending import Route, Sender
from lossytp.network.probe.trace_file import FlowTrace

SILENT_S, HELLO_S = 5, 0.5  # how long a partner may wait with its first byte, and with the rest of its hello
REPORTED_AGAIN = 2048  # packets to report once more, in case some arrived late


class Limits(NamedTuple):
    """The largest measurement that a partner may ask for."""

    max_mbits: float = 100.0
    """Rate in one direction."""
    max_packets: int = 20_000_000
    """Number of packets in one direction, over all flows. Each takes up to 60 bytes of memory."""


def serve(
    host: str = "127.0.0.1",
    port: int = PORT,
    *,
    limits: Limits = Limits(),  # noqa: B008, an immutable value
    patience_s: float = PATIENCE_S,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Outcome]:
    """Take part in measurements one after another, and yield the outcome of each for the flows received.

    Args:
        host: address of this machine to listen on; "0.0.0.0" listens on all.
        port: TCP and UDP port to listen on.
        limits: the largest measurement that a partner may ask for.
        patience_s: seconds for which a partner may be silent before its measurement ends early.
        say: called with a line of text when a partner starts or is refused.

    Raises:
        ValueError: if the port is in use, or the address does not belong to this machine.
    """
    with bound(socket.SOCK_STREAM, host, port) as listener:
        if ON_LINUX:  # the system holds back partners that say nothing, so that these keep nobody waiting
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, SILENT_S)
        listener.listen()
        port = listener.getsockname()[1]
        udp_socket(host, port).close()  # fails now, and not at the first partner
        say(f"waiting at {host}, port {port} (TCP and UDP)")
        while True:
            connection, (partner, _) = listener.accept()
            with connection:
                if ON_LINUX and not select.select([connection], [], [], 0.05)[0]:
                    continue  # it said nothing for SILENT_S
                try:
                    run = _Run(connection, port, limits, patience_s)
                except (Vanished, OSError) as reason:  # OSError: the connection was reset before anything was sent
                    say(f"no measurement with {partner}: {reason}")
                    continue
                say(f"{partner} sends {run.plan.flows} x {run.plan.packets} packets, {run.plan.mbits_per_s:.1f} Mbit/s")
                yield run.measurement()


class _Run:
    def __init__(self, connection: socket.socket, port: int, limits: Limits, patience_s: float) -> None:
        self.ends = str(connection.getpeername()[0]), str(connection.getsockname()[0])
        hello = Control(connection, HELLO_S).receive("hello")
        self.control, self.patience_s = Control(connection, patience_s), patience_s
        try:
            protocol = hello.get("protocol")
            if protocol != PROTOCOL:
                raise ValueError(
                    f"it speaks {shown(protocol)}, but this end speaks {PROTOCOL!r}: run one version on both"
                )
            self.plan = plan = Plan.from_dict(hello.get("plan"))
            plan.check_rate(limits.max_mbits)
            if plan.flows * plan.packets > limits.max_packets:
                raise ValueError(
                    f"{plan.flows} x {plan.packets} packets are above max_packets = {limits.max_packets}: send fewer, "
                    "or raise max_packets"
                )
            self.socket = udp_socket(self.ends[1], port)
        except (TypeError, ValueError, OverflowError) as error:
            self.control.send({"refused": str(error)})
            raise Vanished(f"refused: {error}") from error
        self.control.allow(8 * plan.flows * plan.packets)
        self.same, session = same_clock(hello.get("clock")), new_session()
        keys = [flow_key(session, flow) for flow in range(2 * plan.flows)]
        self.receiver = Receiver([self.socket], keys[: plan.flows], plan.packets, plan.datagram_bytes, self.ends[0])
        self.back = Sender(plan, lambda flow: self._route(flow, keys[plan.flows + flow]), self._may_send)
        self.reported = [0] * plan.flows
        self.end: dict[str, Any] | None = None
        self.control.send({"kind": "welcome", "session": session.hex(), "clock": clock_name()})

    def _route(self, flow: int, key: bytes) -> Route | None:
        """Return the route back to a flow's sender, or None before its first packet has arrived."""
        address = self.receiver.addresses.get(flow)
        return None if address is None else Route(self.socket, address, key)

    def _may_send(self) -> bool:
        """Return whether one more packet would keep the bytes sent at or below the bytes received."""
        return (sum(self.back.counts) + 1) * self.plan.datagram_bytes <= self.receiver.bytes

    def measurement(self) -> Outcome:
        """Receive until the partner has sent all packets or vanishes; return what is known."""
        ended_early = ""
        with self.socket:
            self.receiver.start()
            if self.plan.both_directions:
                self.back.start()
            try:
                while self.end is None:
                    self._answer(self.control.receive("beat", "end"))
            except Vanished as reason:
                ended_early = str(reason)
            finally:
                self.back.stop()
                self.receiver.stop()
            own_losses = self.receiver.own_losses()
        if self.back.error is not None:
            ended_early = ended_early or f"the way back failed ({self.back.error})"
        source = f"UDP from {self.ends[0]} to {self.ends[1]}"
        return Outcome.of(self._flows(), same=self.same, ended_early=ended_early, own_losses=own_losses, source=source)

    def _answer(self, message: dict[str, Any]) -> None:
        if message["kind"] == "end":
            self._end(message)
            return
        newest = self.receiver.newest()
        first = [max(0, reported - REPORTED_AGAIN) for reported in self.reported]
        bits = {
            f"bits{flow}": np.packbits(self.receiver.arrived[flow, first[flow] : newest[flow]])
            for flow in range(self.plan.flows)
        }
        self.control.send({"kind": "beat", "first": first, "newest": newest}, bits)
        self.reported = newest

    def _end(self, message: dict[str, Any]) -> None:
        sent = checked_counts(message.get("sent"), self.plan.flows, self.plan.packets)
        sent_ns = message.get("sent_ns")
        if not isinstance(sent_ns, np.ndarray) or len(sent_ns) != sum(sent):
            raise Vanished("it did not send its departure times")
        deadline = time.monotonic() + self.patience_s / 2
        while self.back.is_alive() and self._may_send() and time.monotonic() < deadline:
            time.sleep(0.01)
        self.back.stop()
        flow, sequence, time_ns = self.receiver.log()
        arrays = {"flow": flow, "sequence": sequence, "time_ns": time_ns}
        arrays["sent_ns"] = np.concatenate([self.back.times_ns(number) for number in range(self.plan.flows)])
        answer = {"kind": "end", "sent": self.back.counts, "own_losses": self.receiver.own_losses()}
        if self.back.error is not None:
            answer["error"] = str(self.back.error)
        self.end = {"sent": sent, "sent_ns": sent_ns}
        with contextlib.suppress(Vanished):  # this end already has all it needs
            self.control.send(answer, arrays)

    def _flows(self) -> list[FlowTrace]:
        counts, sent_ns = self.receiver.newest(), None
        if self.end is not None:
            counts, sent_ns = self.end["sent"], self.end["sent_ns"]
        return flow_traces(self.plan, Log(*self.receiver.log()), counts, sent_ns, self.ends, self.same)
