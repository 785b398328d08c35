"""Losses that the kernel makes between two network namespaces, against what the probe says of them."""

import re
import threading
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest

from lossyprobe.measure import Limits, loss_rate, measure, serve
from lossyprobe.wire import Outcome, Plan
from lossytp.network.traces import burst_lengths
from tests.namespaces import Machine, two_machines

ALMOST_SURE = 0.9999  # of an interval that a test may rely on
Machines = tuple[Machine, Machine]


@pytest.fixture
def machines() -> Iterator[Machines]:
    with two_machines() as both:
        yield both


def measured(machines: Machines, plan: Plan) -> Outcome:
    """Measure from the first machine to the second."""
    here, there = machines
    waits, ports = threading.Event(), []

    def say(line: str) -> None:
        ports.extend(map(int, re.findall(r"waiting at .* port (\d+)", line)))
        waits.set()

    def receive() -> None:
        with there.entered():
            list(islice(serve(there.address, 0, limits=Limits(max_mbits=1e4), say=say), 1))

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    assert waits.wait(20)
    with here.entered():
        outcome = measure(plan, there.address, ports[0])
    thread.join(20)
    return outcome


@pytest.mark.parametrize("per_mille", [1, 10, 50])
def test_the_probe_counts_what_the_kernel_dropped(machines: Machines, per_mille: int) -> None:
    dropped = machines[1].drop(per_mille)
    trace, ended_early = measured(machines, Plan(packets=20_000, packet_bytes=200, rate_packets_per_s=4e4))
    flow = trace.flows[0]
    assert (ended_early, trace.clocks, trace.own_losses) == ("", "same", 0)
    assert (flow.src, flow.dst) == ("10.213.87.1", "10.213.87.2")
    assert flow.lost.sum() == dropped() > 0
    _, low, high = loss_rate(flow.lost, ALMOST_SURE)
    assert low <= per_mille / 1000 <= high
    assert high - low < 0.03


def test_congestion_loses_bursts(machines: Machines) -> None:
    machines[0].congest("40mbit", "15kb")
    plan = Plan(packets=4000, packet_bytes=1000, rate_packets_per_s=4000.0, burst_packets=50)
    trace, _ = measured(machines, plan)
    lost = trace.flows[0].lost
    rate = loss_rate(lost)
    assert 0.1 < rate.value < 0.9
    assert burst_lengths(np.flatnonzero(lost)).mean() > 2 / (
        1 - rate.value
    )  # independent losses have a mean of 1 / (1 - rate)
    delay_s = trace.flows[0].delay_s
    assert np.nanmax(delay_s) > 1e-3  # 15 kB take 3 ms at 40 Mbit/s
    assert np.nanmin(delay_s) < 1e-3


def test_packets_above_the_mtu_are_refused(machines: Machines) -> None:
    with pytest.raises(ValueError, match="packets of 1501 bytes are above the path's MTU: give fewer bytes"):
        measured(machines, Plan(packets=10, packet_bytes=1501))
