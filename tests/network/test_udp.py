"""All-reduces whose packets are real datagrams destroy exactly what the simulation says.

Each rank is a thread with a UDP socket of its own. It sends its contributions to the other ranks' chunks, in packets
with the header of `lossyprobe`, and leaves out those that the simulated network loses. The kernel may lose more.
"""

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Barrier

import numpy as np
import pytest
import torch

import lossytp as ltp
from lossyprobe.wire import HEADER, flow_key, udp_socket
from lossytp.network import ALGORITHMS, Bernoulli, LossProcess, LossyNetwork, PerPacket, Wire
from lossytp.network.routes import Link
from tests.namespaces import two_machines

CAPACITY = Wire().elements_per_packet(4)
DEADLINE_S = 0.2  # to wait for missing packets after all ranks have sent their last one
SESSION = bytes(16)


def over_udp(
    messages_MRN: np.ndarray, network: Callable[[], LossyNetwork], sockets: list[socket.socket]
) -> tuple[np.ndarray, list[dict[Link, np.ndarray]]]:
    """Return the sums (messages, elements), and for each message which packets of each link did not arrive."""
    ranks, barrier = len(sockets), Barrier(len(sockets))
    itemsize, elements = messages_MRN.itemsize, messages_MRN.shape[2]
    hops = ALGORITHMS["direct"].reduce(elements, tuple(range(ranks)))
    capacity = Wire().elements_per_packet(itemsize)
    addresses = [opened.getsockname() for opened in sockets]

    def send(rank: int, message: int, row_N: np.ndarray, dropped: list[np.ndarray]) -> None:
        for hop, skipped in zip(hops, dropped, strict=True):
            for packet in set(range(hop.num_packets(capacity))) - set(skipped.tolist()) if hop.src == rank else ():
                start = hop.start + packet * capacity
                header = HEADER.pack(flow_key(SESSION, message, rank, hop.dst), packet, start)
                payload = row_N[start : min(start + capacity, hop.stop)].tobytes()
                sockets[rank].sendto(header + payload, addresses[hop.dst])

    def receive(rank: int, message: int, sum_N: np.ndarray) -> dict[Link, np.ndarray]:
        """Add what arrives to the rank's own chunk, until all has arrived or the deadline."""
        arrived = {hop.src: np.zeros(hop.num_packets(capacity), bool) for hop in hops if hop.dst == rank}
        source = {flow_key(SESSION, message, src, rank): src for src in arrived}
        deadline = time.monotonic() + DEADLINE_S
        while not all(packets.all() for packets in arrived.values()) and (left := deadline - time.monotonic()) > 0:
            sockets[rank].settimeout(left)
            try:
                datagram = sockets[rank].recv(2000)
            except TimeoutError:
                break
            key, packet, start = HEADER.unpack_from(datagram)
            values = np.frombuffer(datagram[HEADER.size :], sum_N.dtype)
            sum_N[start : start + len(values)] += values
            arrived[source[key]][packet] = True
        return {(src, rank): np.flatnonzero(~packets) for src, packets in arrived.items()}

    def run(rank: int) -> list[tuple[np.ndarray, dict[Link, np.ndarray]]]:
        own, results = network(), []  # every rank draws the same losses, without a message
        for message, rows_RN in enumerate(messages_MRN):
            mine = next(slice(hop.start, hop.stop) for hop in hops if hop.dst == rank)
            sum_N = np.zeros_like(rows_RN[rank])
            sum_N[mine] = rows_RN[rank, mine]
            send(rank, message, rows_RN[rank], own.send(hops, itemsize).packets)
            barrier.wait(30)
            results.append((sum_N, receive(rank, message, sum_N)))
            barrier.wait(30)
        return results

    with ThreadPoolExecutor(ranks) as pool:
        by_rank = list(pool.map(run, range(ranks), timeout=60))
    sums = np.array([sum(part for part, _ in message) for message in zip(*by_rank, strict=True)])
    lost = [
        {link: packets for _, of in message for link, packets in of.items()} for message in zip(*by_rank, strict=True)
    ]
    return sums, lost


def simulated(messages_MRN: np.ndarray, network: LossyNetwork) -> np.ndarray:
    """The same sums by `ltp.all_reduce`."""
    return np.array([ltp.all_reduce(torch.from_numpy(rows_RN), network)[0].numpy() for rows_RN in messages_MRN])


def random_messages(messages: int, ranks: int, length: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((messages, ranks, length)).astype(dtype)


@pytest.mark.parametrize("loss_rate", [0.0, 0.2])
@pytest.mark.parametrize(("ranks", "dtype"), [(2, np.float32), (2, np.float64), (3, np.float32)])
def test_real_datagrams_over_loopback(loss_rate: float, ranks: int, dtype: type) -> None:
    messages_MRN = random_messages(3, ranks, 30 * CAPACITY + 7, dtype)
    with ExitStack() as stack:
        sockets = [stack.enter_context(udp_socket("127.0.0.1")) for _ in range(ranks)]
        sums, lost = over_udp(messages_MRN, lambda: LossyNetwork(Bernoulli(loss_rate=loss_rate), seed=3), sockets)
    expected = simulated(messages_MRN, LossyNetwork(Bernoulli(loss_rate=loss_rate), seed=3))
    np.testing.assert_allclose(sums, expected, rtol=1e-5, atol=1e-5)
    again = LossyNetwork(Bernoulli(loss_rate=loss_rate), seed=3)
    hops = ALGORITHMS["direct"].reduce(messages_MRN.shape[2], tuple(range(ranks)))
    for of_message in lost:
        for hop, packets in zip(hops, again.send(hops, messages_MRN.itemsize).packets, strict=True):
            np.testing.assert_array_equal(of_message[hop.src, hop.dst], packets)
    assert (np.abs(expected - messages_MRN.sum(1)).max() > 0.1) == bool(loss_rate)  # so the losses did matter


def test_a_kernel_that_drops_packets() -> None:
    messages_MRN = random_messages(2, 2, 200 * CAPACITY)
    with two_machines() as machines, ExitStack() as stack:
        dropped = machines[1].drop(50)
        sockets = []
        for machine in machines:
            with machine.entered():
                sockets.append(stack.enter_context(udp_socket(machine.address)))
        sums, lost = over_udp(messages_MRN, lambda: LossyNetwork(Bernoulli(loss_rate=0.0)), sockets)
        assert [sum(len(of[link]) for of in lost) for link in ((0, 1), (1, 0))] == [dropped(), 0]
        assert dropped() > 0
    is_lost = np.zeros(200, bool)
    is_lost[np.concatenate([100 * message + of[0, 1] for message, of in enumerate(lost)])] = True
    recorded: LossProcess = PerPacket(lambda packets, uniforms: is_lost[packets % 200])
    expected = simulated(messages_MRN, LossyNetwork({(0, 1): recorded}))
    np.testing.assert_allclose(sums, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError):  # control: other losses give other sums
        np.testing.assert_allclose(sums, messages_MRN.sum(1), rtol=1e-5, atol=1e-5)
