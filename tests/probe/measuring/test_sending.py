import socket
import time
from collections.abc import Callable

import numpy as np
import pytest

from lossytp.probe import measure as sending
from lossytp.probe.datagrams import HEADER, udp_socket
from lossytp.probe.measure import Route, Sender
from lossytp.probe.wire import Plan

Sent = list[tuple[float, bytes, int]]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """When each datagram left, its key and its sequence number."""
    left: Sent = []

    def note(opened: object, datagram: bytearray, address: object) -> None:
        key, sequence, _ = HEADER.unpack_from(datagram)
        left.append((time.perf_counter(), key, sequence))

    monkeypatch.setattr(sending, "send_to", note)
    return left


def run(plan: Plan, **settings: Callable) -> Sender:
    with socket.socket(type=socket.SOCK_DGRAM) as opened:
        routes = [Route(opened, ("127.0.0.1", 9), bytes([flow] * 8)) for flow in range(plan.flows)]
        sender = Sender(plan, lambda flow: routes[flow], **settings)
        sender.run()
    assert sender.error is None
    return sender


def test_packets_are_numbered_and_flows_take_turns(sent: Sent) -> None:
    sender = run(Plan(packets=3, flows=2, rate_packets_per_s=1e5))
    assert [(key[0], sequence) for _, key, sequence in sent] == [(f, n) for n in range(3) for f in range(2)]
    assert sender.counts == [3, 3]
    assert np.diff(sender.times_ns(1)).min() >= 0


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
    assert at_once <= 1000 * sending.MOST_BEHIND_S + 1
    assert times[-1] == pytest.approx(1.0 + 0.1, abs=0.01)  # the second is skipped, and not made up for


def test_packets_of_a_burst_leave_together(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    run(Plan(packets=8, rate_packets_per_s=100.0, burst_packets=4))
    assert [at for at, _, _ in sent] == pytest.approx([0.0] * 4 + [0.04] * 4)


def test_a_sender_stops_when_asked() -> None:
    with udp_socket("127.0.0.1") as opened:
        route = Route(opened, opened.getsockname(), bytes(8))
        sender = Sender(Plan(packets=10**6, rate_packets_per_s=100.0), lambda flow: route)
        sender.start()
        time.sleep(0.1)
        sender.stop()
    assert not sender.is_alive()
    assert 0 < sender.counts[0] < 10**5


def test_a_sender_that_may_not_send_waits(sent: Sent) -> None:
    allowed = iter([True, True, *[False] * 50, True])
    assert run(Plan(packets=3, rate_packets_per_s=1e6), may_send=lambda: next(allowed)).counts == [3]
