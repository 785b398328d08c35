from pathlib import Path

import numpy as np
import pytest

from lossytp.network import Bernoulli, LossyNetwork, Trace
from lossytp.network.traces import FlowTrace, ProbeTrace, Replay, write_trace

THERE = Trace.from_indicators([0, 1, 1, 0, 0, 0, 0, 1])
BACK = Trace.from_indicators([1, 0, 0, 0])
BOTH = Replay((((0, 1), THERE), ((1, 0), BACK)))


def test_training_loses_what_was_lost_from_the_beginning() -> None:
    network = LossyNetwork(BOTH, seed=5)
    assert network.lost_packets(0, 1, 3).tolist() == [1, 2]
    assert network.lost_packets(1, 0, 4).tolist() == [0]
    assert network.lost_packets(0, 1, 7).tolist() == [4, 6]  # wraps after the eighth packet
    assert LossyNetwork(BOTH, seed=6).lost_packets(0, 1, 8).tolist() == [1, 2, 7]


def test_evaluations_begin_elsewhere() -> None:
    network = LossyNetwork(BOTH, seed=5)
    firsts = set()
    for step in range(20):
        with network.evaluation(step):
            firsts.add(tuple(network.lost_packets(0, 1, 8).tolist()))
    assert len(firsts) > 3
    assert all(len(lost) == 3 for lost in firsts)


def test_a_resumed_network_goes_on() -> None:
    network, again = LossyNetwork(BOTH), LossyNetwork(BOTH)
    network.lost_packets(0, 1, 5)
    again.load_state_dict(network.state_dict())
    assert again.lost_packets(0, 1, 3).tolist() == [2]


def test_its_laws_are_those_of_all_links() -> None:
    assert BOTH.loss_rate == pytest.approx(4 / 12)
    assert BOTH.mean_burst_packets == pytest.approx(4 / 3)
    alone = Replay((((0, 1), THERE),))
    for lag in range(4):
        assert alone.autocorrelation(lag) == pytest.approx(THERE.autocorrelation(lag))
    assert alone.mean_burst_packets == THERE.mean_burst_packets
    never, always = (Replay((((0, 1), Trace.from_indicators([lost] * 4)),)) for lost in (0, 1))
    assert (never.loss_rate, never.mean_burst_packets, never.autocorrelation(1)) == (0.0, 0.0, 0.0)
    assert (always.loss_rate, always.mean_burst_packets) == (1.0, float("inf"))


def test_a_link_has_the_rate_of_its_own_recording() -> None:
    network = LossyNetwork({(0, 1): BOTH, (1, 0): BOTH}, default=Bernoulli(loss_rate=0.1))
    assert [network.loss_rate(*link) for link in ((0, 1), (1, 0), (0, 2))] == [3 / 8, 1 / 4, 0.1]


def test_a_link_that_was_not_recorded_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no link 0>2, only 0>1, 1>0: give a recording with as many ranks"):
        LossyNetwork(BOTH).lost_packets(0, 2, 1)


def test_links_must_be_given() -> None:
    with pytest.raises(ValueError, match=r"links = \(\) is not a list of at least one value"):
        Replay(())


def test_a_link_may_be_recorded_once() -> None:
    with pytest.raises(ValueError, match=r"^the recording has 2 flows from 0 to 1: give one for each link$"):
        Replay((((0, 1), THERE), ((1, 0), BACK), ((0, 1), BACK)))


def test_a_trace_between_machines_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    write_trace(path, ProbeTrace(flows={0: FlowTrace(lost=np.array([True]), src="10.0.0.1", dst="10.0.0.2")}))
    with pytest.raises(ValueError, match=r"does not name its flows by ranks .*: give the trace of a run with transpo"):
        Replay.from_file(path)
