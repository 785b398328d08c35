"""Losses from one function of the packets' numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossytp.network import Bernoulli, PerPacket
from lossytp.network.losses import Stream
from tests.network.loss_statistics import (
    assert_a_saved_state_resumes,
    assert_any_pieces_lose_the_same,
    partitions,
    reproducible,
)

KEY = (0, "test")
PROCESSES = {
    "every tenth": PerPacket(lambda packets, uniforms: packets % 10 == 0),
    "Bernoulli": PerPacket(lambda packets, uniforms: uniforms < 0.2),
    "both": PerPacket(lambda packets, uniforms: (packets % 100 < 20) & (uniforms < 0.5)),
}
some_process = st.sampled_from([*PROCESSES.values()])


def test_packets_are_counted_from_0():
    losses = PROCESSES["every tenth"].losses(KEY)
    assert losses.take(25).tolist() == [0, 10, 20]
    assert losses.take(25).tolist() == [5, 15]


def test_each_packet_has_one_number_of_its_own():
    by_hand = np.flatnonzero(Stream((*KEY, "packets")).uniforms(1000) < 0.2)
    np.testing.assert_array_equal(PROCESSES["Bernoulli"].losses(KEY).take(1000), by_hand)
    assert PROCESSES["Bernoulli"].losses((1, "test")).take(1000).tolist() != by_hand.tolist()


def test_measured_forms_of_known_laws():
    tenth, bernoulli = PROCESSES["every tenth"], PROCESSES["Bernoulli"]
    assert tenth.loss_rate == pytest.approx(0.1, abs=1e-5)
    assert tenth.mean_burst_packets == pytest.approx(1, abs=1e-4)
    assert [tenth.autocorrelation(lag) for lag in (0, 1, 10)] == pytest.approx([1, -1 / 9, 1], abs=1e-4)
    exact = Bernoulli(loss_rate=0.2)
    assert bernoulli.loss_rate == pytest.approx(0.2, abs=0.0015)
    assert bernoulli.mean_burst_packets == pytest.approx(exact.mean_burst_packets, abs=0.005)
    assert bernoulli.autocorrelation(1) == pytest.approx(0, abs=0.004)


def test_the_link_measured_is_not_one_of_a_network():
    """So that what is measured holds for other links, within their own error."""
    share = len(PROCESSES["both"].losses(KEY).take(2**20)) / 2**20
    assert share == pytest.approx(PROCESSES["both"].loss_rate, abs=0.0015)
    assert share != PROCESSES["both"].loss_rate


@reproducible
@given(process=some_process, edges=partitions(40_000))
def test_any_pieces_lose_the_same_packets(process, edges):
    assert_any_pieces_lose_the_same(process, edges, KEY)


@reproducible
@given(process=some_process, edges=partitions(40_000), cut=st.integers(1, 12))
def test_a_saved_state_resumes_with_the_same_losses(process, edges, cut):
    assert_a_saved_state_resumes(process, edges[:cut], KEY)


@pytest.mark.parametrize(
    ("function", "given_back"),
    [
        (lambda packets, uniforms: True, r"bool of shape \(\)"),
        (lambda packets, uniforms: uniforms, r"float64 of shape \(8,\)"),
        (lambda packets, uniforms: np.flatnonzero(uniforms < 2)[:3], r"int64 of shape \(3,\)"),
    ],
)
def test_a_function_that_gives_no_bool_a_packet_is_refused(function, given_back):
    with pytest.raises(ValueError, match=rf"is_lost gave {given_back} for 8 packets: return a bool for each"):
        PerPacket(function)


def test_a_function_that_later_gives_too_few_bools_is_refused_there():
    losses = PerPacket(lambda packets, uniforms: uniforms[:500] < 0.1).losses(KEY)
    assert len(losses.take(500)) > 0
    with pytest.raises(ValueError, match=r"is_lost gave bool of shape \(500,\) for 501 packets: .* shape \(501,\)$"):
        losses.take(501)


def test_a_function_is_not_asked_about_no_packets():
    listed = PerPacket(lambda packets, uniforms: [bool(number < 0.5) for number in uniforms])
    assert listed.losses(KEY).take(0).tolist() == []


@pytest.mark.parametrize("is_lost", [0.1, None, [True]])
def test_what_is_no_function_is_refused(is_lost):
    with pytest.raises(TypeError, match=r"is not a function: give a function of \(packets, uniforms\) that"):
        PerPacket(is_lost)
