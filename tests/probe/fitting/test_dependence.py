"""Flows that lose packets at the same time."""

import numpy as np
import pytest

from lossytp.network import Trace
from lossytp.probe.fitting import correlation_between
from tests.probe.fitting.recordings import TRUTHS, bits, recorded


def test_equal_flows_are_together_and_independent_ones_are_not():
    flow, other = recorded(TRUTHS["Gilbert-Elliott"], 20_000, 20_000)
    assert correlation_between([flow, flow]) == pytest.approx(1)
    assert abs(correlation_between([flow, other])) < 0.35  # 3.5 standard errors of 100 windows


def test_flows_of_one_queue_are_together_although_they_lose_other_packets():
    congested = np.repeat(np.random.default_rng(0).random(100) < 0.3, 50)
    draws = np.random.default_rng(1).random((2, 5000))
    flows = [Trace.from_indicators(congested & (each < 0.4)) for each in draws]
    assert not np.intersect1d(flows[0].lost, flows[1].lost).size > 0.6 * len(flows[0].lost)
    assert correlation_between(flows) > 0.9


@pytest.mark.parametrize("flows", [[bits("01")], [bits("01" * 600), bits("0" * 2000)], [bits("01"), bits("10")]])
def test_too_little_to_compare_is_0(flows):
    assert correlation_between(flows) == 0
