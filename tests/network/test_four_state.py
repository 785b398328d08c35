"""netem's four-state loss: its closed forms, its law against the kernel's loop, its edges, pieces and states."""

import math
import random
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from lossytp.network import FourState, GilbertElliott, from_netem
from lossytp.network.bernoulli import LARGEST_BLOCK
from tests.network.loss_statistics import (
    assert_a_saved_state_resumes,
    assert_any_pieces_lose_the_same,
    assert_closed_forms_hold,
    assert_same,
    autocorrelation,
    autocorrelation_by_matrix,
    batch_means,
    burst_lengths,
    chain,
    indicators,
    is_within,
    mean_burst_by_matrix,
    partitions,
    reproducible,
)

NUM_PACKETS = 10**6
KEY = (0, "test")
PROCESSES = {
    "all four states": FourState(0.02, 0.2, 0.1, 0.3, 0.01),
    "bursts with few pauses": FourState(0.005, 0.05, 0.3, 0.4, 0.001),
    "single losses follow upon each other": FourState(0.1, 0.3, 0.3, 0.5, 0.8),
    "no state is kept": FourState(0.5, 0.4, 0.6, 1, 0.5),
    "a loss every other packet": FourState(0.5, 0.5, p14=0.5),
    "no single losses": FourState(0.03, 0.2, 0.2, 0.1),
    "no pauses": FourState(0.03, 0.2, p14=0.02),
    "single losses alone": FourState(0, 0.2, 0.1, 0.3, 0.05),
    "a burst for ever": FourState(0.01, 0, 0.3, 0.2, 0.4),
}
SETTLED = {
    "lost for ever": (FourState(0.01, 0), 1),
    "delivered for ever": (FourState(0.01, 0.1, 0.2, 0), 0),
    "never a loss": (FourState(0, 0.5, 0.5, 0.5), 0),
    "no way out anywhere": (FourState(0, 0, 0, 0), 0),
}
varying = pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)


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


# The law of what is drawn


@varying
def test_closed_forms_hold_over_a_million_packets(process):
    lost = process.losses(KEY).take(NUM_PACKETS)
    assert_closed_forms_hold(process, lost, NUM_PACKETS)
    assert not is_within(batch_means(indicators(lost, NUM_PACKETS)), 1.1 * process.loss_rate)


def losses_by_the_kernels_loop(process, num_packets, seed):
    """One packet after the other from state 1 on: the chain steps, then its new state decides the loss."""
    generator = random.Random(seed)
    state, lost = 1, []
    for packet in range(-1000, num_packets):
        number = generator.random()
        if state == 1:
            state = 4 if number < process.p14 else 3 if number < process.p14 + process.p13 else 1
        elif state == 2:
            state = 3 if number < process.p23 else 2
        elif state == 3:
            state = 2 if number < process.p32 else 1 if number < process.p32 + process.p31 else 3
        else:
            state = 1
        if state > 2 and packet >= 0:
            lost.append(packet)
    return np.array(lost)


def measured(lost, rate):
    is_lost, bursts = indicators(lost, NUM_PACKETS), burst_lengths(lost)
    gaps = np.diff(lost)[np.diff(lost) > 1] - 1
    estimates = {"loss rate": batch_means(is_lost), "mean burst": batch_means(bursts), "mean gap": batch_means(gaps)}
    for length in (1, 2, 3, 5, 8):
        estimates[f"share of bursts of {length}"] = batch_means((bursts == length).astype(float))
        estimates[f"share of gaps of {length}"] = batch_means((gaps == length).astype(float))
        estimates[f"bursts of {length} after one of 1"] = batch_means(
            ((bursts[:-1] == 1) & (bursts[1:] == length)) * 1.0
        )
        estimates[f"gaps of {length} after one of 1"] = batch_means(((gaps[:-1] == 1) & (gaps[1:] == length)) * 1.0)
    for lag in (1, 2, 5, 20):
        estimates[f"autocorrelation at lag {lag}"] = autocorrelation(is_lost, lag, rate)
    return estimates


@varying
def test_agrees_with_the_kernels_loop(process):
    """In what hangs on the order of states too: which lengths of runs and of gaps follow each other."""
    drawn = measured(process.losses(KEY).take(NUM_PACKETS), process.loss_rate)
    looped = measured(losses_by_the_kernels_loop(process, NUM_PACKETS, seed=1), process.loss_rate)
    for what in drawn:
        assert_same(drawn[what], looped[what], what)


def test_disagrees_with_the_loop_of_another_process():
    """Control: the same stationary rate and mean burst, but bursts with fewer and longer pauses."""
    process, other = FourState(0.02, 0.2, 0.1, 0.3, 0.01), FourState(0.02, 0.25, 0.05, 0.0789, 0.00667)
    drawn = measured(process.losses(KEY).take(NUM_PACKETS), process.loss_rate)
    looped = measured(losses_by_the_kernels_loop(other, NUM_PACKETS, seed=1), process.loss_rate)
    with pytest.raises(AssertionError):
        assert_same(drawn["share of gaps of 1"], looped["share of gaps of 1"], "gaps")


@pytest.mark.parametrize("name", ["all four states", "a loss every other packet", "a burst for ever"])
def test_a_link_starts_stationary(name):
    """Which of the first four packets are lost, over 5,000 links, against the matrix; a start in state 1 would show."""
    process = PROCESSES[name]
    patterns = np.zeros(16)
    for link in range(5000):
        patterns[int(indicators(process.losses((link, "test")).take(4), 4) @ [8, 4, 2, 1])] += 1
    transition, loss, stationary = chain(process)

    def expected(start):
        shares = np.zeros(16)
        for pattern in range(16):
            state = start
            for position, is_lost in enumerate(f"{pattern:04b}"):
                state = (state if position == 0 else state @ transition) * (loss if is_lost == "1" else 1 - loss)
            shares[pattern] = state.sum()
        return shares * 5000

    def fits(start):
        some = expected(start) > 1
        return (
            not patterns[expected(start) == 0].any()
            and chisquare(
                [*patterns[some], 5000 - patterns[some].sum() + 1e-9],
                [*expected(start)[some], 5000 - expected(start)[some].sum() + 1e-9],
            ).pvalue
            > 1e-4
        )

    assert fits(stationary)
    assert not fits(np.array([1.0, 0, 0, 0]))


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
    with pytest.raises(ValueError, match=rf"{one} \+ {other} = 1.1 is above 1: give ways out of state {one[1]}"):
        FourState(**{"p13": 0.1, "p31": 0.2, **values})
    FourState(**{"p13": 0.1, "p31": 0.2, **values, other: 0.4})
