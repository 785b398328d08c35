"""Run the sending end of a measurement, which starts it and collects the outcome."""

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from lossytp.network.checks import printable
from lossytp.network.datagrams import address_of, flow_key, udp_socket
from lossytp.network.probe.clocks import clock_name, same_clock
from lossytp.network.probe.control import Control, Vanished, checked_counts
from lossytp.network.probe.ends import BEAT_S, LATE_S, PATIENCE_S, PORT, PROTOCOL, Log, Outcome, flow_traces
from lossytp.network.probe.plan import Plan
from lossytp.network.probe.receiving import MOST_COPIES, Receiver
from lossytp.network.probe.sending import Route, Sender

ARRIVAL_BYTES = 2 + 4 + 8  # flow, sequence number, time
Watch = Callable[[int, int], None]


def measure(
    plan: Plan, host: str = "127.0.0.1", port: int = PORT, *, patience_s: float = PATIENCE_S, watch: Watch | None = None
) -> Outcome:
    """Send a plan's packets to a machine that runs `serve`, and return their fates.

    If the other end vanishes or the user presses Ctrl-C, the measurement ends early and returns what is known.

    Args:
        plan: the packets to send.
        host: name or IPv4 address of the other machine.
        port: its TCP and UDP port.
        patience_s: seconds for which the other end may be silent.
        watch: called now and then with the numbers of packets sent so far, and known to have arrived.

    Raises:
        ValueError: if the other end cannot be reached, refuses the plan, or vanishes before anything is known.
    """
    address = address_of(host)
    try:
        connection = socket.create_connection((address, port), patience_s)
    except OSError as error:
        raise ValueError(
            f"no receiver answers at {host}, port {port} ({error}): start python -m lossytp.probe receive there"
        ) from error
    with connection:
        try:
            run = _Run(plan, Control(connection, patience_s), connection, (address, port), watch)
        except Vanished as reason:
            raise ValueError(f"the receiver at {host}, port {port} did not start a measurement: {reason}") from reason
        with run.sockets:
            run.measure()
        if run.sender.error is not None:
            raise ValueError(str(run.sender.error)) from run.sender.error
        outcome = run.outcome()
    if not outcome.trace.flows:
        raise ValueError(f"{host} vanished ({run.ended_early}) before anything was known: start both ends again")
    return outcome


class _Run:
    def __init__(
        self, plan: Plan, control: Control, connection: socket.socket, address: tuple[str, int], watch: Watch | None
    ) -> None:
        self.plan, self.control, self.watch = plan, control, watch
        self.ends = str(connection.getsockname()[0]), address[0]
        control.send({"kind": "hello", "protocol": PROTOCOL, "plan": plan.as_dict(), "clock": clock_name()})
        welcome = control.receive("welcome")
        control.allow(plan.flows * plan.packets * (MOST_COPIES * ARRIVAL_BYTES + 8))
        try:
            session, self.same = bytes.fromhex(welcome["session"]), same_clock(welcome["clock"])
        except (KeyError, TypeError, ValueError) as error:
            raise Vanished("it sent no session") from error
        self.sockets = contextlib.ExitStack()
        opened = [self.sockets.enter_context(udp_socket(self.ends[0])) for _ in range(plan.flows)]
        keys = [flow_key(session, flow) for flow in range(2 * plan.flows)]
        routes = [Route(*route) for route in zip(opened, [address] * plan.flows, keys, strict=False)]
        self.sender = Sender(plan, lambda flow: routes[flow])
        self.receiver = Receiver(opened, keys[plan.flows :], plan.packets, plan.datagram_bytes, address[0])
        self.arrived = np.zeros((plan.flows, plan.packets), np.bool_)  # as the other end has reported so far
        self.newest = [0] * plan.flows
        self.end: dict[str, Any] | None = None
        self.ended_early = ""
        self.own_losses: int | None = 0

    def measure(self) -> None:
        """Send all packets, ask now and then which have arrived, and collect the other end's log."""
        try:
            if self.plan.both_directions:
                self.receiver.start()
            self.sender.start()
            try:
                while self.sender.is_alive():
                    self.sender.join(BEAT_S)
                    self._beat()
                deadline = time.monotonic() + LATE_S
                while sum(self.sender.counts) > int(self.arrived.sum()) and time.monotonic() < deadline:
                    time.sleep(0.05)
                    self._beat()
            except KeyboardInterrupt:
                self.ended_early = "it was interrupted"
            self.sender.stop()
            self._end()
        except Vanished as reason:
            self.ended_early = str(reason)
        finally:
            self.sender.stop()
            self.receiver.stop()
            self.own_losses = self.receiver.own_losses()  # while the sockets are open

    def _beat(self) -> None:
        self.control.send({"kind": "beat", "sent": self.sender.counts})
        answer = self.control.receive("beat")
        firsts = checked_counts(answer.get("first"), self.plan.flows, self.plan.packets)
        self.newest = checked_counts(answer.get("newest"), self.plan.flows, self.plan.packets)
        for flow, (first, newest) in enumerate(zip(firsts, self.newest, strict=True)):
            bits = np.unpackbits(answer.get(f"bits{flow}", np.empty(0, np.uint8)))
            if first > newest or len(bits) < newest - first:
                raise Vanished(f"it sent {len(bits)} bits for {newest - first} packets")
            self.arrived[flow, first:newest] = bits[: newest - first]
        if self.watch is not None:
            self.watch(sum(self.sender.counts), int(self.arrived.sum()))

    def _end(self) -> None:
        """Tell the other end that all packets are sent, and receive its log."""
        sent_ns = np.concatenate([self.sender.times_ns(flow) for flow in range(self.plan.flows)])
        self.control.send({"kind": "end", "sent": self.sender.counts}, {"sent_ns": sent_ns})
        end = self.control.receive("end")
        end["sent"] = checked_counts(end.get("sent"), self.plan.flows, self.plan.packets)
        columns = [end.get(name) for name in ("flow", "sequence", "time_ns", "sent_ns")]
        lengths = [len(column) if isinstance(column, np.ndarray) else -1 for column in columns]
        if lengths != [*lengths[:1] * 3, sum(end["sent"])]:
            raise Vanished(f"it sent a log whose columns have {lengths} rows")
        if self.plan.both_directions:
            deadline = time.monotonic() + LATE_S
            while self.receiver.counts() != end["sent"] and time.monotonic() < deadline:
                time.sleep(0.05)
        if end.get("own_losses") is not None:
            checked_counts([end["own_losses"]], 1, self.plan.flows * self.plan.packets)
        if end.get("error"):
            self.ended_early = self.ended_early or f"the way back failed ({printable(end['error'])})"
        self.end = end

    def outcome(self) -> Outcome:
        """Return what is known, without the flows about which nothing is known."""
        plan, end = self.plan, self.end
        known_F, known_N = np.nonzero(self.arrived)
        counts, log = self.newest, Log(known_F, known_N, np.zeros(len(known_F), np.int64))
        if end is not None:
            counts, log = self.sender.counts, Log(end["flow"], end["sequence"], end["time_ns"])
        sent_ns = np.concatenate([self.sender.times_ns(flow)[:count] for flow, count in enumerate(counts)])
        flows = flow_traces(plan, log, counts, sent_ns, self.ends, self.same)
        own_losses = None if end is None else end.get("own_losses")
        if plan.both_directions:
            counts = self.receiver.newest() if end is None else end["sent"]
            back_ns = None if end is None else end["sent_ns"]
            flows += flow_traces(plan, Log(*self.receiver.log()), counts, back_ns, self.ends[::-1], self.same)
            here = self.own_losses
            own_losses = None if own_losses is None or here is None else own_losses + here
        source = f"UDP between {self.ends[0]} and {self.ends[1]}"
        return Outcome.of(flows, same=self.same, ended_early=self.ended_early, own_losses=own_losses, source=source)
