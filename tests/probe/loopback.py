"""Measurements over loopback: a receiving end in a thread, and partners that misbehave."""

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

from lossyprobe import wire as datagrams
from lossyprobe.measure import serve
from lossyprobe.wire import PROTOCOL, Control, Outcome, Plan, clock_name

PATIENCE_S = 20.0  # tests share a busy machine
HOST = "127.0.0.1"


class Served(NamedTuple):
    port: int
    said: list[str]
    measurements: list[Outcome]
    thread: threading.Thread

    def only(self) -> Outcome:
        """The measurement, once it has ended."""
        self.thread.join(PATIENCE_S)
        (measurement,) = self.measurements
        return measurement


@contextmanager
def served(patience_s: float = PATIENCE_S, **settings: Any) -> Iterator[Served]:
    """A receiving end that takes part in one measurement."""
    said: list[str] = []
    measurements: list[Outcome] = []
    waits = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        waits.set()

    def run() -> None:
        measurements.extend(islice(serve(HOST, 0, patience_s=patience_s, say=say, **settings), 1))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert waits.wait(PATIENCE_S)
    yield Served(int(re.findall(r"port (\d+)", said[0])[0]), said, measurements, thread)


def greeting(plan: Plan) -> dict[str, Any]:
    return {"kind": "hello", "protocol": PROTOCOL, "plan": plan.as_dict(), "clock": clock_name()}


class Greeted(NamedTuple):
    control: Control
    connection: socket.socket
    udp: socket.socket
    keys: list[bytes]
    address: tuple[str, int]

    def datagram(self, sequence: int, size: int, flow: int = 0, key: bytes | None = None) -> bytes:
        header = datagrams.HEADER.pack(self.keys[flow] if key is None else key, sequence, 0)
        return header + bytes(size - len(header))

    def send(self, *sequences: int, size: int, flow: int = 0) -> None:
        for sequence in sequences:
            self.udp.sendto(self.datagram(sequence, size, flow), self.address)


@contextmanager
def greeted(port: int, plan: Plan) -> Iterator[Greeted]:
    """A partner that has shaken hands with a receiving end, and sends what the test wants."""
    with socket.create_connection((HOST, port)) as connection, datagrams.udp_socket(HOST) as udp:
        control = Control(connection, PATIENCE_S, 10**8)
        control.send(greeting(plan))
        session = bytes.fromhex(control.receive("welcome")["session"])
        keys = [datagrams.flow_key(session, flow) for flow in range(2 * plan.flows)]
        yield Greeted(control, connection, udp, keys, (HOST, port))


@contextmanager
def fake_receiver(answer: Callable[[Control], None]) -> Iterator[int]:
    """A receiving end that shakes hands, does what `answer` does, and closes the connection; its port."""
    with datagrams.bound(socket.SOCK_STREAM, HOST, 0) as listener:
        listener.listen()

        def run() -> None:
            connection, _ = listener.accept()
            with connection:
                control = Control(connection, PATIENCE_S, 10**8)
                control.receive("hello")
                control.send({"kind": "welcome", "session": bytes(16).hex(), "clock": clock_name()})
                answer(control)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(PATIENCE_S)
