"""All-reduces over UDP, each rank a thread with sockets of its own."""

import os
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from lossytp.network import ALGORITHMS, Bernoulli, LossProcess, LossyNetwork, Wire
from lossytp.network import udp as meshes
from lossytp.network.repairs import Rescale
from lossytp.network.traces import Replay
from lossytp.network.udp import Mesh, UdpNetwork, new_session
from tests.namespaces import two_machines

CAPACITY = 364  # float32 in a packet


def joined(hosts: list[str], function: Callable[[Mesh], Any], **settings: Any) -> list[Any]:
    """`function(mesh)` for each rank, in threads."""
    opened = [Mesh(rank, host, **settings) for rank, host in enumerate(hosts)]
    addresses, session = {mesh.rank: mesh.address for mesh in opened}, new_session()

    def run(mesh: Mesh) -> Any:
        mesh.connect(addresses, session)
        return function(mesh)

    try:
        with ThreadPoolExecutor(len(opened)) as pool:
            return list(pool.map(run, opened, timeout=60))
    finally:
        for mesh in opened:
            mesh.close()


def summed(
    x_RN: np.ndarray, process: LossProcess, messages: int = 1, **settings: Any
) -> tuple[np.ndarray, list[UdpNetwork]]:
    """The sums (messages, N) of the rows over UDP, and each rank's network."""
    ranks = len(x_RN)

    def run(mesh: Mesh) -> tuple[list[np.ndarray], UdpNetwork]:
        network = UdpNetwork(process, seed=3)
        network.connect(mesh)
        rows = []
        for number in range(messages):
            row = x_RN[mesh.rank : mesh.rank + 1] + number
            network.send(ALGORITHMS["direct"].reduce(x_RN.shape[1], tuple(range(ranks))), row.itemsize, rows=row)
            rows.append(row[0])
        return rows, network

    answers = joined(["127.0.0.1"] * ranks, run, **settings)
    return np.sum([rows for rows, _ in answers], axis=0), [network for _, network in answers]


def simulated(x_RN: np.ndarray, process: LossProcess, messages: int = 1) -> np.ndarray:
    """The same over a simulated network."""
    network, (ranks, length) = LossyNetwork(process, seed=3), x_RN.shape
    capacity = Wire().elements_per_packet(x_RN.itemsize)
    sums = []
    for number in range(messages):
        rows = x_RN + number
        hops = ALGORITHMS["direct"].reduce(length, tuple(range(ranks)))
        for hop, packets in zip(hops, network.send(hops, x_RN.itemsize).packets, strict=True):
            for packet in packets:
                first = hop.start + packet * capacity
                rows[hop.positions[0], first : min(first + capacity, hop.stop)] = 0
        sums.append(rows.sum(0))
    return np.array(sums)


def rows_of(ranks: int, length: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((ranks, length)).astype(dtype)


def test_a_single_ranks_sum_is_its_own_row() -> None:
    (total,), _ = summed(np.ones((1, 10), np.float32), Bernoulli(loss_rate=0.5))
    assert (total == 1).all()


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 5, 3 * CAPACITY, 20 * CAPACITY + 7])
def test_without_losses_all_arrives(ranks: int, length: int) -> None:
    x_RN = rows_of(ranks, length)
    (total,), networks = summed(x_RN, Bernoulli(loss_rate=0.0))
    np.testing.assert_allclose(total, x_RN.sum(0), rtol=1e-5, atol=1e-6)
    assert networks[0].summary("training")["lost"] == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("ranks", [2, 3])
def test_injected_losses_are_the_simulated_network_s(ranks: int, dtype: type) -> None:
    x_RN, process = rows_of(ranks, 30 * CAPACITY, dtype), Bernoulli(loss_rate=0.2)
    totals, networks = summed(x_RN, process, messages=3)
    expected = simulated(x_RN, process, messages=3)
    np.testing.assert_allclose(totals, expected, rtol=1e-5, atol=1e-5)
    assert abs(expected - (x_RN.sum(0) + ranks * np.arange(3)[:, None])).max() > 0.1
    reports = [network.summary("training") for network in networks]
    assert all(report == reports[0] for report in reports)
    assert 0.1 < reports[0]["observed_loss_rate"] < 0.3


def test_the_recorded_trace_replays_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, real, lock = np.random.default_rng(1), meshes.send_to, threading.Lock()

    def dropping(*datagram: Any) -> None:
        with lock:
            lost = generator.random() < 0.1  # on the way, so that no rank knows beforehand
        if not lost:
            real(*datagram)

    monkeypatch.setattr(meshes, "send_to", dropping)
    x_RN = rows_of(3, 30 * CAPACITY)
    totals, networks = summed(x_RN, Bernoulli(loss_rate=0.0), messages=4)
    monkeypatch.undo()
    traces = [network.trace() for network in networks]
    flows = traces[0].flows.values()
    assert [(flow.src, flow.dst) for flow in flows] == [(str(a), str(b)) for a in range(3) for b in range(3) if a != b]
    for trace in traces:
        for mine, theirs in zip(flows, trace.flows.values(), strict=True):
            np.testing.assert_array_equal(mine.lost, theirs.lost)
    assert 0.05 < np.mean(np.concatenate([flow.lost for flow in flows])) < 0.15
    replay = Replay(tuple(((int(flow.src), int(flow.dst)), flow.losses()) for flow in flows))
    np.testing.assert_allclose(totals, simulated(x_RN, replay, messages=4), rtol=1e-5, atol=1e-5)


def test_strangers_copies_and_late_packets_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real, held = meshes.send_to, []

    def disturbing(opened: Any, datagram: bytearray, address: tuple) -> None:
        for late in held:
            real(opened, *late)
        real(opened, datagram, address)
        real(opened, bytearray(datagram[:16] + bytes(len(datagram) - 16)), address)  # a copy with another content
        real(opened, bytearray(b"strange!" + datagram[8:]), address)
        real(opened, bytearray(b"short"), address)
        held[:] = [(bytearray(datagram), address)]

    monkeypatch.setattr(meshes, "send_to", disturbing)
    x_RN = rows_of(2, 8 * CAPACITY)
    totals, networks = summed(x_RN, Bernoulli(loss_rate=0.0), messages=5)
    np.testing.assert_allclose(totals, x_RN.sum(0) + 2 * np.arange(5)[:, None], rtol=1e-5, atol=1e-5)
    assert networks[0].summary("training")["lost"] == 0


def test_a_saved_state_keeps_the_trace() -> None:
    x_RN = rows_of(2, 10 * CAPACITY)
    _, (network, _) = summed(x_RN, Bernoulli(loss_rate=0.3), messages=2)
    again = UdpNetwork(Bernoulli(loss_rate=0.3), seed=3)
    again.load_state_dict(network.state_dict())
    for mine, theirs in zip(network.trace().flows.values(), again.trace().flows.values(), strict=True):
        np.testing.assert_array_equal(mine.lost, theirs.lost)


def test_it_works_in_a_process_with_many_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    x_RN, process = rows_of(2, 30 * CAPACITY), Bernoulli(loss_rate=0.2)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limits[1]), limits[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]  # select() ends at descriptor 1023
    try:
        totals, networks = summed(x_RN, process)  # a loss makes receivers wait
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    np.testing.assert_allclose(totals, simulated(x_RN, process), rtol=1e-5, atol=1e-6)
    assert networks[0].summary("training")["lost"] > 0


def test_a_rank_that_ends_is_noticed() -> None:
    def run(mesh: Mesh) -> str:
        if mesh.rank == 1:
            mesh.close()
            return ""
        network = UdpNetwork(Bernoulli(loss_rate=0.0))
        network.connect(mesh)
        with pytest.raises(ValueError, match="rank 0 lost the connection to another rank") as caught:
            network.send(ALGORITHMS["direct"].reduce(8, (0, 1)), 4, rows=rows_of(1, 8))
        return str(caught.value)

    assert "\n" not in joined(["127.0.0.1"] * 2, run)[0]


@pytest.fixture
def alone() -> Iterator[UdpNetwork]:
    network, mesh = UdpNetwork(Bernoulli(loss_rate=0.0)), Mesh(0)
    network.connect(mesh)
    yield network
    mesh.close()


@pytest.mark.parametrize(
    ("algorithm", "settings", "message"),
    [
        ("ring", {"rows": rows_of(1, 8)}, "only the all-reduces of algorithm 'direct'"),
        ("direct", {}, "only the all-reduces of algorithm 'direct'"),
        ("direct", {"rows": rows_of(1, 8), "repair": Rescale()}, "repair = 'rescale' does not work over the UDP"),
        ("direct", {"rows": rows_of(2, 8)}, "2 rows of float32"),
        ("direct", {"rows": rows_of(1, 8, np.float16)}, "1 rows of float16"),
        ("direct", {"rows": rows_of(1, 8, np.float64)}, "4 bytes per element on the wire, cannot be sent"),
        ("direct", {"rows": rows_of(1, 8)}, r"end at ranks that are not connected: connect \[1, 2\] too"),
    ],
)
def test_what_it_cannot_carry_is_refused(alone: UdpNetwork, algorithm: str, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        alone.send(ALGORITHMS[algorithm].reduce(8, (0, 1, 2)), 4, **settings)


def test_a_network_without_sockets_says_so() -> None:
    with pytest.raises(ValueError, match="no sockets yet: call connect"):
        UdpNetwork(Bernoulli(loss_rate=0.0)).send(ALGORITHMS["direct"].reduce(8, (0, 1)), 4, rows=rows_of(1, 8))


def test_losses_of_the_kernel_are_recorded_and_missing_from_the_sum() -> None:
    x_RN = rows_of(2, 400 * CAPACITY)
    with two_machines() as machines:
        dropped = machines[1].drop(50)
        opened = []
        for rank, machine in enumerate(machines):
            with machine.entered():
                opened.append(Mesh(rank, machine.address))
        addresses, session = {mesh.rank: mesh.address for mesh in opened}, new_session()

        def run(mesh: Mesh) -> tuple[np.ndarray, UdpNetwork]:
            with machines[mesh.rank].entered():
                mesh.connect(addresses, session)
            network, row = UdpNetwork(Bernoulli(loss_rate=0.0)), x_RN[mesh.rank : mesh.rank + 1].copy()
            network.connect(mesh)
            network.send(ALGORITHMS["direct"].reduce(x_RN.shape[1], (0, 1)), 4, rows=row)
            return row[0], network

        with ThreadPoolExecutor(2) as pool:
            (one, network), (other, _) = pool.map(run, opened, timeout=60)
        flows = network.trace().flows
        assert [int(flow.lost.sum()) for flow in flows.values()] == [dropped(), 0]
        assert dropped() > 0
        for mesh in opened:
            assert mesh.own_losses() == 0
            mesh.close()
    missing_N = np.repeat(flows[0].lost, CAPACITY)
    expected = x_RN.sum(0)
    expected[200 * CAPACITY :][missing_N] = x_RN[1, 200 * CAPACITY :][missing_N]
    np.testing.assert_allclose(one + other, expected, rtol=1e-5, atol=1e-6)
