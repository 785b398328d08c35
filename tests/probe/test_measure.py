"""Both ends of a measurement, and its summary."""

import socket
import struct
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from lossyprobe import measure as measuring
from lossyprobe.measure import Limits, Route, Sender, loss_rate, measure, serve, summary_lines
from lossyprobe.trace_file import FlowTrace, ProbeTrace
from lossyprobe.wire import HEADER, Control, Plan, Vanished, bound, udp_socket
from lossytp.network import Bernoulli, GilbertElliott, LossProcess
from tests.probe.loopback import HOST, PATIENCE_S, fake_receiver, greeted, greeting, served

Send = Callable[..., None]
FAST = 2e4


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, Send], None]], None]:
    """`wire(treat)` puts `treat(sequence, send)` in place of sending: it may send never, twice, or something else."""
    real = measuring.send_to

    def install(treat: Callable[[int, Send], None]) -> None:
        def send_to(opened: object, datagram: bytearray, address: tuple) -> None:
            content = bytearray(datagram)
            treat(HEADER.unpack_from(content)[1], lambda other=content: real(opened, bytearray(other), address))

        monkeypatch.setattr(measuring, "send_to", send_to)

    return install


def test_loopback_loses_nothing() -> None:
    plan = Plan(packets=10_000, packet_bytes=200, rate_packets_per_s=FAST)
    with served() as receiver:
        trace, ended_early = measure(plan, HOST, receiver.port, patience_s=PATIENCE_S)
        theirs = receiver.only().trace
    flow = trace.flows[0]
    assert (ended_early, trace.complete, trace.clocks, trace.own_losses) == ("", True, "same", 0)
    assert (flow.num_packets, flow.lost.sum(), flow.duplicates.sum(), flow.reordered.sum()) == (10_000, 0, 0, 0)
    assert (flow.src, flow.dst, flow.packet_bytes, flow.rate_packets_per_s) == (HOST, HOST, 200, FAST)
    assert flow.sent_s[0] == 0
    assert (np.diff(flow.sent_s) > 0).all()
    assert (flow.delay_s > 0).all()
    assert np.median(flow.delay_s) < 0.01
    for name in ("lost", "sent_s", "delay_s"):
        np.testing.assert_array_equal(getattr(theirs.flows[0], name), getattr(flow, name))


@pytest.mark.slow
def test_what_is_dropped_is_lost_and_nothing_else(wire: Callable) -> None:
    dropped = np.random.default_rng(0).random(5000) < 0.05
    wire(lambda sequence, send: None if dropped[sequence] else send())
    with served() as receiver:
        trace, _ = measure(Plan(packets=5000, packet_bytes=100, rate_packets_per_s=FAST), HOST, receiver.port)
    flow = trace.flows[0]
    np.testing.assert_array_equal(flow.lost, dropped)
    np.testing.assert_array_equal(np.isnan(flow.delay_s), dropped)
    assert not np.isnan(flow.sent_s).any()


def test_duplicates_reordering_and_garbage_are_told_apart(wire: Callable) -> None:
    held: list[Send] = []

    def treat(sequence: int, send: Send) -> None:
        if sequence == 10:
            return held.append(send)  # arrives behind 12
        send()
        if sequence == 12:
            held[0]()
        if sequence == 20:
            send()
            send()
        if sequence == 30:
            send(b"garbage")
            send(HEADER.pack(b"wrongkey", 31, 0) + bytes(56))
        return None

    wire(treat)
    with served() as receiver:
        plan = Plan(packets=100, packet_bytes=100, rate_packets_per_s=FAST)
        trace, _ = measure(plan, HOST, receiver.port)
    flow = trace.flows[0]
    assert flow.lost.sum() == 0
    assert np.flatnonzero(flow.reordered).tolist() == [10]
    assert {int(at): int(flow.duplicates[at]) for at in np.flatnonzero(flow.duplicates)} == {20: 2}
    assert flow.delay_s[10] > flow.delay_s[11]


def test_several_flows_in_both_directions(wire: Callable) -> None:
    plan = Plan(packets=2000, flows=3, packet_bytes=100, rate_packets_per_s=5000.0, both_directions=True)
    with served() as receiver:
        trace, _ = measure(plan, HOST, receiver.port)
        assert list(receiver.only().trace.flows) == [0, 1, 2]  # the sender alone knows what came back
    assert {number: flow.num_packets for number, flow in trace.flows.items()} == dict.fromkeys(range(6), 2000)
    assert not any(flow.lost.any() for flow in trace.flows.values())


def test_a_receiver_that_vanishes_leaves_what_it_told() -> None:
    def answer(control: Control) -> None:
        control.receive("beat")
        lost = np.array([0, 1, 0, 0, 1, 0], np.uint8)
        control.send({"kind": "beat", "first": [0], "newest": [6]}, {"bits0": np.packbits(1 - lost)})

    plan = Plan(packets=10**6, packet_bytes=100, rate_packets_per_s=100.0)
    with fake_receiver(answer) as port:
        started = time.monotonic()
        trace, ended_early = measure(plan, HOST, port)
    assert time.monotonic() - started < 10
    assert "closed the connection" in ended_early
    assert not trace.complete
    assert trace.flows[0].lost.tolist() == [False, True, False, False, True, False]
    assert trace.flows[0].sent_s[-1] > 0


def test_a_receiver_that_vanishes_at_once_is_an_error() -> None:
    plan = Plan(packets=10**6, packet_bytes=100, rate_packets_per_s=100.0)
    with (
        fake_receiver(lambda control: None) as port,
        pytest.raises(ValueError, match=r"127.0.0.1 vanished \(.*\) before anything was known: start both ends again"),
    ):
        measure(plan, HOST, port)


def test_an_interrupt_keeps_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(sent: int, arrived: int) -> None:
        if arrived:
            raise KeyboardInterrupt

    plan = Plan(packets=10**6, packet_bytes=100, rate_packets_per_s=1000.0)
    with served() as receiver:
        trace, ended_early = measure(plan, HOST, receiver.port, watch=interrupt)
    assert (ended_early, trace.complete) == ("it was interrupted", False)
    assert 100 < trace.flows[0].num_packets < 10**5
    assert not trace.flows[0].lost[:100].any()
    assert not np.isnan(trace.flows[0].delay_s[:100]).any()  # the whole log, and not only what was told meanwhile


def test_an_interrupt_before_a_beat_is_answered_keeps_the_whole_log(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = Control.receive

    def interrupted(control: Control, *kinds: str) -> dict:
        if kinds == ("beat",):
            raise KeyboardInterrupt
        return receive(control, *kinds)

    monkeypatch.setattr(Control, "receive", interrupted)
    with served() as receiver:
        plan = Plan(packets=10**6, packet_bytes=100, rate_packets_per_s=1000.0)
        trace, ended_early = measure(plan, HOST, receiver.port)
        assert receiver.only().ended_early == "the sender stopped before its last packet"
    assert ended_early == "it was interrupted"
    assert not np.isnan(trace.flows[0].delay_s[:100]).any()


def test_a_network_that_goes_away_leaves_what_arrived_before(wire: Callable) -> None:
    def treat(sequence: int, send: Send) -> None:
        if sequence == 300:
            time.sleep(1.5 * measuring.BEAT_S)  # until the earlier packets are known
            raise OSError(101, "Network is unreachable")
        send()

    wire(treat)
    with served() as receiver:
        plan = Plan(packets=400, packet_bytes=100, rate_packets_per_s=FAST)
        trace, ended_early = measure(plan, HOST, receiver.port)
        assert not receiver.only().trace.complete
    assert "unreachable" in ended_early
    assert (trace.complete, trace.flows[0].num_packets, trace.flows[0].lost.sum()) == (False, 300, 0)


def test_clocks_of_different_machines_give_relative_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "same_clock", lambda theirs: False)
    with served() as receiver:
        trace, _ = measure(Plan(packets=100, packet_bytes=100), HOST, receiver.port)
    assert trace.clocks == "different"
    assert trace.flows[0].delay_s.min() == 0


def test_nobody_there_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no receiver answers at 127.0.0.1, port 9 .*: start python -m lossyprobe"):
        measure(Plan(packets=1), HOST, 9)


Sent = list[tuple[float, bytes, int]]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """When each datagram left, its key and its sequence number."""
    left: Sent = []

    def note(opened: object, datagram: bytearray, address: object) -> None:
        key, sequence, _ = HEADER.unpack_from(datagram)
        left.append((time.perf_counter(), key, sequence))

    monkeypatch.setattr(measuring, "send_to", note)
    return left


def run(plan: Plan, **settings: Callable) -> Sender:
    with socket.socket(type=socket.SOCK_DGRAM) as opened:
        routes = [Route(opened, ("127.0.0.1", 9), bytes([flow] * 8)) for flow in range(plan.flows)]
        sender = Sender(plan, lambda flow: routes[flow], **settings)
        sender.run()
    assert sender.error is None
    return sender


def test_packets_are_numbered_flows_take_turns_and_a_sender_that_may_not_send_waits(sent: Sent) -> None:
    sender = run(Plan(packets=3, flows=2, rate_packets_per_s=1e5))
    assert [(key[0], sequence) for _, key, sequence in sent] == [(f, n) for n in range(3) for f in range(2)]
    assert sender.counts == [3, 3]
    assert np.diff(sender.times_ns(1)).min() >= 0
    allowed = iter([True, True, *[False] * 50, True])
    assert run(Plan(packets=3, rate_packets_per_s=1e6), may_send=lambda: next(allowed)).counts == [3]


def test_no_packet_leaves_early_and_a_late_one_causes_no_flood(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + (seconds if seconds else 0)))
    held_up = iter([False] * 10 + [True] + [False] * 1000)

    def may_send() -> bool:
        if next(held_up):
            now[0] += 1.0  # the system runs something else for a second
        return True

    run(Plan(packets=100, rate_packets_per_s=1000.0), may_send=may_send)
    times = np.array([at for at, _, _ in sent])
    assert times[:10] == pytest.approx(np.arange(10) / 1000)
    late = times - times[10]
    at_once = int((late[11:] < 1e-9).sum())
    assert at_once <= 1000 * measuring.MOST_BEHIND_S + 1
    assert times[-1] == pytest.approx(1.0 + 0.1, abs=0.01)  # the second is skipped, and not made up for


def test_packets_of_a_burst_leave_together(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    run(Plan(packets=8, rate_packets_per_s=100.0, burst_packets=4))
    assert [at for at, _, _ in sent] == pytest.approx([0.0] * 4 + [0.04] * 4)


PLAN = Plan(packets=10, packet_bytes=100)
SIZE = PLAN.datagram_bytes


def refusal(plan: dict, **settings: object) -> str:
    """What a receiving end answers to a plan; it still takes the next partner afterwards."""
    with served(**settings) as receiver:
        with socket.create_connection((HOST, receiver.port)) as connection:
            control = Control(connection, PATIENCE_S)
            control.send({**greeting(PLAN), "plan": plan})
            with pytest.raises(Vanished) as caught:
                control.receive("welcome")
        smaller = replace(PLAN, packets=1)
        with greeted(receiver.port, smaller):
            pass
        receiver.only()
    assert any(line.startswith("no measurement with 127.0.0.1: refused: ") for line in receiver.said)
    return str(caught.value)


def test_plans_beyond_the_limits_and_nonsense_are_refused() -> None:
    fast = Plan(packets=10, rate_packets_per_s=1e4).as_dict()
    assert "above max_mbits = 100" in refusal(fast)
    assert "1 x 10 packets are above max_packets = 9" in refusal(PLAN.as_dict(), limits=Limits(max_packets=9))
    assert "plan = " in refusal({"packets": 1})
    assert refusal({**PLAN.as_dict(), "rate_packets_per_s": 10**400})


def test_garbage_on_the_connection_or_its_reset_costs_the_next_partner_nothing() -> None:
    with served() as receiver:
        with socket.create_connection((HOST, receiver.port)) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with greeted(receiver.port, PLAN) as partner:
            partner.send(*range(10), size=SIZE)
            ended(partner)
        assert receiver.only().trace.flows[0].num_packets == 10
    with served() as receiver:
        connection = socket.create_connection((HOST, receiver.port))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # so that closing resets it
        connection.close()
        with greeted(receiver.port, PLAN) as partner:
            partner.send(*range(10), size=SIZE)
            ended(partner)
        assert receiver.only().trace.flows[0].num_packets == 10


def ended(partner: object, sent: int = 10) -> dict:
    partner.control.send({"kind": "end", "sent": [sent]}, {"sent_ns": np.arange(sent)})
    return partner.control.receive("end")


def test_strangers_are_neither_counted_nor_answered() -> None:
    plan = Plan(packets=10, packet_bytes=100, rate_packets_per_s=1e4, both_directions=True)
    with served() as receiver, greeted(receiver.port, plan) as partner, udp_socket(HOST) as stranger:
        for sequence in range(10):
            stranger.sendto(partner.datagram(sequence, SIZE, key=b"notakey!"), partner.address)
            stranger.sendto(b"hello", partner.address)
        partner.send(0, 1, size=SIZE)
        time.sleep(0.3)
        answer = ended(partner)
        stranger.settimeout(0.1)
        with pytest.raises(TimeoutError):
            stranger.recv(2000)
        assert answer["sequence"].tolist() == [0, 1]
        assert answer["sent"] == [2]
        partner.udp.settimeout(PATIENCE_S)
        back = [partner.udp.recv(2000) for _ in range(2)]
        assert [HEADER.unpack_from(datagram)[:2] for datagram in back] == [(partner.keys[1], 0), (partner.keys[1], 1)]
        assert sum(map(len, back)) <= 2 * SIZE  # no more than came in
    assert receiver.only().trace.flows[0].lost.tolist() == [False] * 2 + [True] * 8


def test_a_partner_that_closes_leaves_what_arrived() -> None:
    with served() as receiver:
        with greeted(receiver.port, PLAN) as partner:
            partner.send(0, 1, 3, size=SIZE)
            time.sleep(0.2)
        trace, ended_early = receiver.only()
    assert ended_early == "it closed the connection"
    assert trace.flows[0].lost.tolist() == [False, False, True, False]  # what came later was perhaps never sent
    assert np.isnan(trace.flows[0].sent_s).all()
    assert not trace.complete


def test_a_partner_that_falls_silent_ends_the_measurement_within_the_patience() -> None:
    with served(patience_s=0.4) as receiver, greeted(receiver.port, PLAN) as partner:
        partner.send(0, size=SIZE)
        started = time.monotonic()
        _, ended_early = receiver.only()
        assert time.monotonic() - started < 5
    assert ended_early == "it was silent for too long"


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_port_in_use_is_named(kind: socket.SocketKind) -> None:
    with bound(kind, HOST, 0) as held:
        if kind == socket.SOCK_STREAM:
            held.listen()
        port = held.getsockname()[1]
        with pytest.raises(ValueError, match=f"port = {port} is in use on {HOST}: give another"):
            next(serve(HOST, port))


def coverage(process: LossProcess, packets: int, confidence: float = 0.95, links: int = 300) -> float:
    """The share of links on which the interval holds the truth."""
    holds = 0
    for link in range(links):
        lost = np.zeros(packets, np.bool_)
        lost[process.losses((0, "coverage", 0, link)).take(packets)] = True
        _, low, high = loss_rate(lost, confidence)
        holds += low <= process.loss_rate <= high
    return holds / links


def test_the_interval_holds_the_truth_for_single_losses_and_bursts() -> None:
    for rate in (0.001, 0.05, 0.5):
        assert coverage(Bernoulli(loss_rate=rate), 10_000) > 0.92
    bursts = GilbertElliott.from_loss_and_burst(loss_rate=0.05, mean_burst_packets=20)
    assert coverage(bursts, 40_000) > 0.92


def test_single_losses_have_wilson_s_interval_no_loss_an_upper_bound_and_no_packet_no_rate() -> None:
    lost = np.zeros(10_000, np.bool_)
    lost[::100] = True  # as even as can be: no more variance than independent losses have
    rate, low, high = loss_rate(lost)
    assert rate == 0.01
    assert (low, high) == pytest.approx((0.00821, 0.01217), abs=1e-4)
    rate, low, high = loss_rate(np.zeros(100_000, np.bool_))
    assert (rate, low) == (0.0, 0.0)
    assert high == pytest.approx(3.94e-5, rel=0.01)
    assert loss_rate(np.ones(10, np.bool_)).high == 1.0
    assert loss_rate(np.ones(1, np.bool_))[::2] == (1.0, 1.0)
    with pytest.raises(ValueError, match="0 packets has no loss rate"):
        loss_rate(np.zeros(0, np.bool_))


def test_a_summary_says_what_was_measured() -> None:
    lost = np.zeros(1000, np.bool_)
    lost[[1, 2, 5]] = True
    delay_s = np.where(lost, np.nan, 1e-3)
    flow = FlowTrace(
        lost=lost, sent_s=np.arange(1000) * 1e-2, delay_s=delay_s, src="a", dst="b", rate_packets_per_s=100.0
    )
    text = "\n".join(summary_lines(ProbeTrace(flows={0: flow}, clocks="different", own_losses=2)))
    assert "flow 0, a to b: 1000 packets at 100/s of 100/s" in text
    assert "lost 3: 0.300% (95% interval 0." in text
    assert "bursts by length: 1: 1, 2: 1; mean 1.50 packets" in text
    assert "delay in ms: 50% within 1.000, 90% within 1.000, 99% within 1.000, 99.9% within 1.000" in text
    assert "clocks differ" in text
    assert "2 of the lost packets reached a machine that was too slow" in text
    assert "WARNING" not in text


def test_names_from_a_file_reach_the_terminal_without_escapes() -> None:
    flow = FlowTrace(lost=np.zeros(3, np.bool_), src="\x1b[2J\nflow 1, x", dst="long" * 10**4)
    first = next(summary_lines(ProbeTrace(flows={0: flow})))
    assert first.isprintable()
    assert len(first) < 1000
    assert first.startswith(r"flow 0, \x1b[2J\nflow 1, x to longlong")


def test_a_summary_of_losses_alone_leaves_times_out_and_says_if_the_trace_ended_early() -> None:
    lines = list(summary_lines(ProbeTrace(flows={0: FlowTrace(lost=np.zeros(10, np.bool_))})))
    assert lines[0] == "flow 0, 0 to 1: 10 packets"
    assert len(lines) == 2
    flows = {0: FlowTrace(lost=np.zeros(10, np.bool_))}
    assert [line for line in summary_lines(ProbeTrace(flows=flows, complete=False)) if "ended early" in line]
    assert not [line for line in summary_lines(ProbeTrace(flows=flows)) if "ended early" in line]
