"""Run both ends of a measurement, and summarise what was lost."""

import contextlib
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from lossyprobe.trace_file import FlowTrace, ProbeTrace
from lossyprobe.wire import (
    BEAT_S,
    HEADER,
    LATE_S,
    MOST_COPIES,
    ON_LINUX,
    PATIENCE_S,
    PORT,
    PROTOCOL,
    Control,
    Log,
    Outcome,
    Plan,
    Receiver,
    Vanished,
    address_of,
    bound,
    checked_counts,
    clock_name,
    flow_key,
    flow_traces,
    new_session,
    same_clock,
    send_to,
    udp_socket,
)
from lossytp.network.checks import printable, shown
from lossytp.network.traces import DOUBT, burst_lengths

# Send numbered datagrams at a steady rate.


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
            f"no receiver answers at {host}, port {port} ({error}): start python -m lossyprobe receive there"
        ) from error
    with connection:
        try:
            run = _Run(plan, Control(connection, patience_s), connection, (address, port), watch)
        except Vanished as reason:
            raise ValueError(f"the receiver at {host}, port {port} did not start a measurement: {reason}") from reason
        with run.sockets:
            run.measure()
        if (failed := run.sender.error) is not None:
            if isinstance(failed, ValueError) or not run.arrived.any():  # above the MTU, or nothing is known
                raise ValueError(str(failed)) from failed
            run.ended_early = run.ended_early or f"sending failed ({failed})"
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
            arrived = int(self.arrived.sum())  # a packet can arrive before its sender counts it
            self.watch(max(sum(self.sender.counts), arrived), arrived)

    def _end(self) -> None:
        """Tell the other end that all packets are sent, and receive its log."""
        sent_ns = np.concatenate([self.sender.times_ns(flow) for flow in range(self.plan.flows)])
        self.control.send({"kind": "end", "sent": self.sender.counts}, {"sent_ns": sent_ns})
        while (end := self.control.receive("beat", "end"))["kind"] != "end":
            pass  # Ctrl-C came before the answer to a beat was read
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


# Run the receiving end of measurements, which waits for partners to start them.
#
# It answers only partners that complete a handshake over TCP. It sends datagrams only to addresses that a partner's
# datagrams came from, and never more bytes than it has received. So nobody can use it to flood another machine.


SILENT_S, HELLO_S = 5, 0.5  # how long a partner may wait with its first byte, and with the rest of its hello
REPORTED_AGAIN = 2048  # packets to report once more, in case some arrived late


class Limits(NamedTuple):
    """The largest measurement that a partner may ask for."""

    max_mbits: float = 100.0
    """Rate in one direction."""
    max_packets: int = 20_000_000
    """Number of packets in one direction, over all flows. Each takes up to 120 bytes of memory."""


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
                    run = _Served(connection, port, limits, patience_s)
                except (Vanished, OSError) as reason:  # OSError: the connection was reset before anything was sent
                    say(f"no measurement with {partner}: {reason}")
                    continue
                say(f"{partner} sends {run.plan.flows} x {run.plan.packets} packets, {run.plan.mbits_per_s:.1f} Mbit/s")
                yield run.measurement()


class _Served:
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
        if self.end is not None and self.end["sent"] != [self.plan.packets] * self.plan.flows:
            ended_early = ended_early or "the sender stopped before its last packet"
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


# Summarise a trace: the loss rate with its interval, burst lengths, delays.


CONFIDENCE = 0.95
BLOCKS = 100
SHARES = (0.5, 0.9, 0.99, 0.999)
BURSTS_SHOWN = 8


class LossRate(NamedTuple):
    """The share of lost packets, and its confidence interval."""

    value: float
    low: float
    high: float


def loss_rate(lost: np.ndarray, confidence: float = CONFIDENCE) -> LossRate:
    """Return the loss rate, with an interval that allows for bursts.

    Bursts reduce the number of independent packets. The factor is the variance of the losses over `BLOCKS` consecutive
    blocks, relative to the variance of independent losses (batch means; Law, "Simulation Modeling and Analysis", 5th
    ed., 9.5.3). The interval is Wilson's (1927) for the reduced number, with Student's quantile. It is too narrow if
    bursts are as long as a block.

    Args:
        lost: bool, (packets,): whether each packet was lost.
        confidence: probability that the interval holds the true rate.

    Raises:
        ValueError: if there are no packets.
    """
    packets = len(lost)
    if not packets:
        raise ValueError("a flow of 0 packets has no loss rate: send at least one")
    rate = float(np.mean(lost))
    blocks = min(BLOCKS, packets)
    length = packets // blocks
    independent = float(packets)
    if blocks > 1 and 0 < rate < 1:
        sums = np.asarray(lost)[: blocks * length].reshape(blocks, length).sum(1)
        independent = packets / max(1.0, float(sums.var(ddof=1)) / (length * rate * (1 - rate)))
    quantile = float(stats.t.ppf((1 + confidence) / 2, max(1, blocks - 1)))
    weight = quantile**2 / independent
    middle = (rate + weight / 2) / (1 + weight)
    half = quantile / (1 + weight) * math.sqrt(rate * (1 - rate) / independent + weight / (4 * independent))
    return LossRate(rate, max(0.0, middle - half), min(1.0, middle + half))


def summary_lines(trace: ProbeTrace) -> Iterator[str]:
    """Yield the lines of a summary."""
    for number, flow in sorted(trace.flows.items()):
        seconds, asked, speed = float(flow.sent_s[-1] - flow.sent_s[0]), flow.rate_packets_per_s, ""
        if seconds > 0:  # not of unknown times
            speed = f" at {(flow.num_packets - 1) / seconds:.0f}/s" + ("" if asked is None else f" of {asked:g}/s")
        yield f"flow {number}, {printable(flow.src)} to {printable(flow.dst)}: {flow.num_packets} packets{speed}"
        yield from (f"  {line}" for line in _flow_lines(flow))
    yield from caveats(trace)


def caveats(trace: ProbeTrace) -> Iterator[str]:
    """Yield what a reader of the trace's numbers should know about the measurement."""
    lost = trace.all_lost()
    if trace.clocks == "none" and 2 * lost.sum() > len(lost):  # not measured by this program
        yield DOUBT.format(lost.mean())
    if not trace.complete:
        yield "the measurement ended early: this trace lacks the packets after that"
    if trace.clocks == "different":
        yield "delays count from each flow's fastest packet, because the two machines' clocks differ"
    if trace.own_losses:
        yield (
            f"{trace.own_losses} of the lost packets reached a machine that was too slow to take them. The network did "
            "not lose these: send slower, or raise net.core.rmem_max there"
        )


def _flow_lines(flow: FlowTrace) -> Iterator[str]:
    rate, bursts = loss_rate(flow.lost), burst_lengths(np.flatnonzero(flow.lost))
    yield (
        f"lost {int(flow.lost.sum())}: {rate.value:.3%} ({CONFIDENCE:.0%} interval {rate.low:.3%} to {rate.high:.3%}); "
        f"reordered {int(flow.reordered.sum())}, duplicates {int(flow.duplicates.sum())}"
    )
    if len(bursts):
        lengths, counts = np.unique(bursts, return_counts=True)
        shown = [f"{length}: {count}" for length, count in zip(lengths, counts, strict=True)]
        more = f", ... up to {lengths[-1]}" if len(shown) > BURSTS_SHOWN else ""
        yield f"bursts by length: {', '.join(shown[:BURSTS_SHOWN])}{more}; mean {bursts.mean():.2f} packets"
    delays_ms = flow.delay_s[~np.isnan(flow.delay_s)] * 1e3
    if len(delays_ms):
        parts = [
            f"{share:.1%}".replace(".0%", "%") + f" within {np.quantile(delays_ms, share):.3f}" for share in SHARES
        ]
        yield f"delay in ms: {', '.join(parts)}, longest {delays_ms.max():.3f}"
