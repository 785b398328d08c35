import contextlib
import socket
import struct
import time
from dataclasses import replace

import numpy as np
import pytest

from lossytp.probe import measure as serving
from lossytp.probe.datagrams import HEADER, Control, Vanished, bound, udp_socket
from lossytp.probe.measure import Limits, serve
from lossytp.probe.wire import Plan
from tests.probe.measuring.loopback import HOST, PATIENCE_S, greeted, greeting, served

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


def test_plans_beyond_the_limits_are_refused() -> None:
    fast = Plan(packets=10, rate_packets_per_s=1e4).as_dict()
    assert "above max_mbits = 100" in refusal(fast)
    assert "1 x 10 packets are above max_packets = 9" in refusal(PLAN.as_dict(), limits=Limits(max_packets=9))


def test_nonsense_is_refused() -> None:
    assert "plan = " in refusal({"packets": 1})
    assert refusal({**PLAN.as_dict(), "rate_packets_per_s": 10**400})


def test_an_address_without_a_socket_is_refused_and_the_next_partner_served(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def second_fails(*address: object) -> socket.socket:
        calls.append(address)
        if len(calls) == 2:  # the first tries the port
            raise ValueError("no socket there")
        return udp_socket(*address)

    monkeypatch.setattr("lossytp.probe.measure.udp_socket", second_fails)
    assert "no socket there" in refusal(PLAN.as_dict())


def test_garbage_on_the_connection_costs_the_next_partner_nothing() -> None:
    with served() as receiver:
        with socket.create_connection((HOST, receiver.port)) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with greeted(receiver.port, PLAN) as partner:
            partner.send(*range(10), size=SIZE)
            ended(partner)
        assert receiver.only().trace.flows[0].num_packets == 10


@pytest.mark.slow
def test_strangers_who_say_nothing_cost_the_next_partner_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "SILENT_S", 1)
    with served() as receiver, contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection((HOST, receiver.port))) for _ in range(20)]
        strangers[0].sendall(b"\0")
        strangers[-1].settimeout(PATIENCE_S)
        assert strangers[-1].recv(1) == b""  # after SILENT_S
        started = time.monotonic()
        with greeted(receiver.port, PLAN) as partner:
            assert time.monotonic() - started < 5
            partner.send(*range(10), size=SIZE)
            ended(partner)
        assert receiver.only().trace.flows[0].num_packets == 10
        assert "no measurement with 127.0.0.1: it was silent for too long" in receiver.said


def test_what_a_partner_speaks_is_shown_in_short() -> None:
    with served() as receiver:
        with socket.create_connection((HOST, receiver.port)) as connection:
            Control(connection, PATIENCE_S).send({"kind": "hello", "protocol": "\x1b[2J" * 1000})
            assert b"lossytp.probe 1" in connection.recv(1000)
        with greeted(receiver.port, replace(PLAN, packets=1)):
            pass
        receiver.only()
    assert all(line.isprintable() and len(line) < 400 for line in receiver.said)


def test_a_connection_that_is_reset_costs_the_next_partner_nothing() -> None:
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


@pytest.mark.parametrize(
    ("message", "arrays"),
    [
        ({"kind": "end", "sent": [11]}, {"sent_ns": np.arange(11)}),
        ({"kind": "end", "sent": [10]}, {"sent_ns": np.arange(9)}),
        ({"kind": "end", "sent": "all"}, {}),
        ({"kind": "what"}, {}),
    ],
)
def test_a_partner_that_contradicts_itself_counts_as_vanished(message: dict, arrays: dict) -> None:
    with served() as receiver, greeted(receiver.port, PLAN) as partner:
        partner.send(0, size=SIZE)
        time.sleep(0.1)
        partner.control.send(message, arrays)
        trace, ended_early = receiver.only()
    assert ended_early.startswith("it ")
    assert trace.flows[0].num_packets == 1


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_port_in_use_is_named(kind: socket.SocketKind) -> None:
    with bound(kind, HOST, 0) as held:
        if kind == socket.SOCK_STREAM:
            held.listen()
        port = held.getsockname()[1]
        with pytest.raises(ValueError, match=f"port = {port} is in use on {HOST}: give another"):
            next(serve(HOST, port))
