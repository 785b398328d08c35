"""netem's four-state loss: its closed forms, its edges, pieces and states, its notation."""

import math
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossytp.network import FourState, GilbertElliott, from_netem
from lossytp.network.losses import LARGEST_BLOCK
from tests.network.four_state_processes import KEY, PROCESSES
from tests.network.loss_statistics import (
    assert_a_saved_state_resumes,
    assert_any_pieces_lose_the_same,
    autocorrelation_by_matrix,
    chain,
    mean_burst_by_matrix,
    partitions,
    reproducible,
)

SETTLED = {
    "lost for ever": (FourState(0.01, 0), 1),
    "delivered for ever": (FourState(0.01, 0.1, 0.2, 0), 0),
    "never a loss": (FourState(0, 0.5, 0.5, 0.5), 0),
    "no way out anywhere": (FourState(0, 0, 0, 0), 0),
}


@st.composite
def any_process(draw):
    two = st.tuples(st.floats(0.001, 0.999), st.floats(0.001, 1)).map(lambda two: (two[0], two[1] * (1 - two[0])))
    (p13, p14), (p31, p32) = draw(two), draw(two)
    zeros = draw(st.sampled_from([(1, 1), (0, 1), (1, 0)]))
    return FourState(p13, p31, p32 * zeros[0], draw(st.floats(0.001, 1)), p14 * zeros[1])


# Closed forms


@reproducible
@given(process=any_process(), lag=st.integers(1, 200))
def test_closed_forms_from_matrices(process, lag):
    transition, loss, stationary = chain(process)
    np.testing.assert_allclose(stationary @ transition, stationary, atol=1e-12)
    np.testing.assert_allclose(process.shares, stationary, atol=1e-9)
    assert process.loss_rate == pytest.approx(stationary @ loss)
    assert process.mean_burst_packets == pytest.approx(mean_burst_by_matrix(process))
    assert process.autocorrelation(lag) == pytest.approx(autocorrelation_by_matrix(process, lag), abs=1e-8)
    assert process.autocorrelation(-lag) == process.autocorrelation(lag)
    assert process.autocorrelation(0) == 1


@pytest.mark.parametrize("process", [*PROCESSES.values(), *(process for process, _ in SETTLED.values())])
def test_stationary_is_what_the_kernels_chain_settles_to_from_state_1(process):
    np.testing.assert_allclose(process.shares, chain(process)[2], atol=1e-9)


def test_without_pauses_and_single_losses_it_is_the_simple_gilbert_channel():
    gilbert, four = GilbertElliott(p_good_to_bad=0.03, p_bad_to_good=0.2), FourState(0.03, 0.2)
    assert four.loss_rate == pytest.approx(gilbert.loss_rate)
    assert four.mean_burst_packets == pytest.approx(gilbert.mean_burst_packets)
    assert [four.autocorrelation(lag) for lag in range(5)] == pytest.approx(
        [gilbert.autocorrelation(n) for n in range(5)]
    )


def test_by_hand():
    """p13 = p31 = p32 = 0.5, p23 = 1: of the states 1, 2, 3 the shares are 2, 1, 2 in 5, and a burst is one packet."""
    process = FourState(0.5, 0.5, 0.5)
    np.testing.assert_allclose(process.shares, [0.4, 0.2, 0.4, 0])
    assert (process.loss_rate, process.mean_burst_packets) == (pytest.approx(0.4), pytest.approx(1))
    assert process.autocorrelation(1) == pytest.approx((0 - 0.16) / 0.24)


# Edges


@pytest.mark.parametrize(("process", "rate"), SETTLED.values(), ids=SETTLED)
def test_a_chain_that_comes_to_rest(process, rate):
    assert process.loss_rate == rate
    assert process.mean_burst_packets == (math.inf if rate else 0)
    assert [process.autocorrelation(lag) for lag in (0, 1)] == [1, 0]
    losses = process.losses(KEY)
    for num_packets in (0, 1, 1000):
        np.testing.assert_array_equal(losses.take(num_packets), np.arange(num_packets * rate))
    assert_a_saved_state_resumes(process, [0, 5, 100], KEY)


def test_every_packet_between_two_losses_where_no_state_is_kept():
    """p13 = 1, p31 = 1: states 1 and 3 take turns, from either."""
    starts = {int(FourState(1, 1).losses((link,)).take(2)[0]) for link in range(20)}
    assert starts == {0, 1}
    lost = FourState(1, 1).losses(KEY).take(10_001)
    np.testing.assert_array_equal(lost, np.arange(lost[0], 10_001, 2))


# Pieces, states, cost

TOTAL = 40_000
some_process = st.sampled_from([*PROCESSES.values(), FourState(1, 1), FourState(0.9, 0.05, 0.9, 0.9, 0.1)])


@reproducible
@given(process=some_process, edges=partitions(TOTAL))
def test_any_pieces_lose_the_same_packets(process, edges):
    assert_any_pieces_lose_the_same(process, edges, KEY)


def test_packet_by_packet_loses_the_same_packets():
    process = FourState(0.9, 0.5, 0.4, 0.9, 0.1)
    losses = process.losses(KEY)
    one_by_one = [packet for packet in range(20_000) if len(losses.take(1))]
    assert len(one_by_one) > LARGEST_BLOCK
    np.testing.assert_array_equal(one_by_one, process.losses(KEY).take(20_000))


@reproducible
@given(process=some_process, edges=partitions(TOTAL), cut=st.integers(1, 12))
def test_a_saved_state_resumes_with_the_same_losses(process, edges, cut):
    assert_a_saved_state_resumes(process, edges[:cut], KEY)


def test_losses_stay_the_same_across_versions():
    lost = PROCESSES["all four states"].losses(KEY).take(60)
    assert lost.tolist() == [9, 10, 26, 27, 28, 29, 38, 39, 40, 41, 42]


def test_losses_of_different_keys_differ():
    process = PROCESSES["all four states"]
    assert process.losses((0, "a")).take(1000).tolist() != process.losses((0, "b")).take(1000).tolist()


@pytest.mark.parametrize("num_packets", [10**9, 10**12])
def test_memory_is_in_proportion_to_losses_not_packets(num_packets):
    losses = FourState(2e4 / num_packets, 0.2, 0.1, 0.3, 2e4 / num_packets).losses(KEY)
    tracemalloc.start()
    lost = losses.take(num_packets)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(lost) == pytest.approx(1.2e5, rel=0.05)
    assert peak_bytes < 100 * len(lost)


def test_rare_losses_cost_next_to_nothing():
    before = time.perf_counter()
    lost = FourState(1e-7, 0.125, p14=1e-7).losses(KEY).take(10**9)
    assert time.perf_counter() - before < 0.5
    assert 600 < len(lost) < 1300


# netem's notation


@reproducible
@given(process=any_process())
def test_netem_round_trip(process):
    text = process.to_netem()
    again = from_netem(text)
    assert isinstance(again, FourState)
    for name in ("p13", "p31", "p32", "p23", "p14"):
        assert getattr(again, name) == pytest.approx(getattr(process, name), rel=1e-9)
    assert again.to_netem() == text


@pytest.mark.parametrize("p31", np.random.default_rng(0).uniform(0.9, 1, 20))
def test_netem_takes_back_probabilities_that_add_up_to_one(p31):
    process = FourState(p13=0.01, p31=p31, p32=1 - p31)
    assert from_netem(process.to_netem()).p31 == pytest.approx(p31)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("loss state 1%", (0.01, 0.99, 0, 1, 0)),
        ("loss state 1% 20%", (0.01, 0.2, 0, 1, 0)),
        ("loss state 1% 20% 5%", (0.01, 0.2, 0.05, 1, 0)),
        ("loss state 1% 20% 5% 30%", (0.01, 0.2, 0.05, 0.3, 0)),
        ("loss state 1 20 5 30 0.1", (0.01, 0.2, 0.05, 0.3, 0.001)),
    ],
)
def test_values_left_out_take_the_defaults_of_tc(text, values):
    """iproute2's tc/q_netem.c: p31 = 1 - p13, p32 = 0, p23 = 1, p14 = 0, which with p13 alone is Bernoulli."""
    process = from_netem(text)
    assert (process.p13, process.p31, process.p32, process.p23, process.p14) == pytest.approx(values)
    assert from_netem("loss state 3%").autocorrelation(1) == pytest.approx(0)


def test_what_is_written_for_tc():
    assert PROCESSES["all four states"].to_netem() == "loss state 2% 20% 10% 30% 1%"


@pytest.mark.parametrize("name", ["p13", "p31", "p32", "p23", "p14"])
@pytest.mark.parametrize("value", [-0.1, 1.5, math.nan, "0.1"])
def test_impossible_probabilities_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"{name} = .* is not in \[0, 1\]"):
        FourState(**{"p13": 0.1, "p31": 0.2, name: value})


@pytest.mark.parametrize("values", [{"p13": 0.6, "p14": 0.5}, {"p31": 0.6, "p32": 0.5}])
def test_more_than_certain_ways_out_are_refused(values):
    one, other = values
    with pytest.raises(ValueError, match=rf"{one} \+ {other} = 1.1 is above 1: give two that add up to 1"):
        FourState(**{"p13": 0.1, "p31": 0.2, **values})
    FourState(**{"p13": 0.1, "p31": 0.2, **values, other: 0.4})
