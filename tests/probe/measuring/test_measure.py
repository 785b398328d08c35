import socket
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from lossytp.probe import measure as measuring
from lossytp.probe import measure as sending
from lossytp.probe.datagrams import HEADER, Control
from lossytp.probe.measure import measure
from lossytp.probe.wire import Plan
from tests.probe.measuring.loopback import HOST, PATIENCE_S, fake_receiver, served

Send = Callable[..., None]
FAST = 2e4


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, Send], None]], None]:
    """`wire(treat)` puts `treat(sequence, send)` in place of sending: it may send never, twice, or something else."""
    real = sending.send_to

    def install(treat: Callable[[int, Send], None]) -> None:
        def send_to(opened: object, datagram: bytearray, address: tuple) -> None:
            content = bytearray(datagram)
            treat(HEADER.unpack_from(content)[1], lambda other=content: real(opened, bytearray(other), address))

        monkeypatch.setattr(sending, "send_to", send_to)

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


def test_a_way_back_that_takes_no_packets_leaves_an_incomplete_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sending.send_to

    def too_large_on_the_way_back(opened: socket.socket, datagram: bytearray, address: tuple) -> None:
        if opened.getsockname()[1] == receiver.port:
            raise ValueError("packets of 100 bytes are above the path's MTU: give fewer bytes")
        real(opened, datagram, address)

    monkeypatch.setattr(sending, "send_to", too_large_on_the_way_back)
    plan = Plan(packets=200, packet_bytes=100, rate_packets_per_s=FAST, both_directions=True)
    with served() as receiver:
        outcomes = measure(plan, HOST, receiver.port), receiver.only()
    for trace, ended_early in outcomes:
        assert ended_early == "the way back failed (packets of 100 bytes are above the path's MTU: give fewer bytes)"
        assert not trace.complete
        assert {number: flow.num_packets for number, flow in trace.flows.items()} == {0: 200}


@pytest.mark.slow
def test_no_more_bytes_come_back_than_went_out(wire: Callable) -> None:
    back_too = iter(np.random.default_rng(0).random(10**6) < 0.1)
    wire(lambda sequence, send: None if next(back_too) else send())  # both directions lose
    plan = Plan(packets=3000, packet_bytes=100, rate_packets_per_s=FAST, both_directions=True)
    with served() as receiver:
        trace, _ = measure(plan, HOST, receiver.port)
    there, back = trace.flows[0], trace.flows[1]
    assert there.num_packets == 3000
    assert back.num_packets <= 3000 - there.lost.sum()
    assert back.num_packets > 2000
    assert 0.05 < back.lost.mean() < 0.15


def test_progress_is_reported() -> None:
    seen: list[tuple[int, int]] = []
    plan = Plan(packets=2000, packet_bytes=100, rate_packets_per_s=4000.0)
    with served() as receiver:
        measure(plan, HOST, receiver.port, watch=lambda *counts: seen.append(counts))
    sent, arrived = np.array(seen).T
    assert sent[-1] == arrived[-1] == 2000
    assert (np.diff(sent) >= 0).all()
    assert (arrived <= sent).all()


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


@pytest.mark.slow
def test_a_receiver_that_falls_silent_ends_the_measurement_within_its_patience() -> None:
    done = threading.Event()

    def answer(control: Control) -> None:
        control.receive("beat")
        control.send({"kind": "beat", "first": [0], "newest": [1]}, {"bits0": np.packbits([1])})
        done.wait(PATIENCE_S)

    plan = Plan(packets=10**6, packet_bytes=100, rate_packets_per_s=100.0)
    with fake_receiver(answer) as port:
        started = time.monotonic()
        _, ended_early = measure(plan, HOST, port, patience_s=0.5)
        assert time.monotonic() - started < PATIENCE_S / 2
        done.set()
    assert ended_early == "it was silent for too long"


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


def test_clocks_of_different_machines_give_relative_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "same_clock", lambda theirs: False)
    with served() as receiver:
        trace, _ = measure(Plan(packets=100, packet_bytes=100), HOST, receiver.port)
    assert trace.clocks == "different"
    assert trace.flows[0].delay_s.min() == 0


def test_nobody_there_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no receiver answers at 127.0.0.1, port 9 .*: start python -m lossytp.probe"):
        measure(Plan(packets=1), HOST, 9)


def test_a_server_of_something_else_is_an_error() -> None:
    with socket.create_server((HOST, 0)) as server:

        def run() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                connection.recv(1000)

        threading.Thread(target=run, daemon=True).start()
        with pytest.raises(ValueError, match="did not start a measurement: it sent something other than"):
            measure(Plan(packets=1), HOST, server.getsockname()[1])
