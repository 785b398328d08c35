"""Gilbert-Elliott packet loss: its closed forms, its edges, pieces and states, its cost, what is refused."""

import math
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lossytp.network.losses import LARGEST_BLOCK, Bernoulli, GilbertElliott
from tests.network.gilbert_elliott_processes import KEY, PROCESSES, general, simple
from tests.network.loss_statistics import (
    assert_a_saved_state_resumes,
    assert_within,
    autocorrelation,
    autocorrelation_by_matrix,
    batch_means,
    burst_lengths,
    chain,
    indicators,
    mean_burst_by_matrix,
    reproducible,
    share_of_bursts_longer_than,
    taken_in_pieces,
)

# Closed forms, against the transition matrix

probabilities = st.floats(0.001, 1)
any_process = st.builds(
    general, probabilities, probabilities, loss_bad=st.floats(0, 1), loss_good=st.one_of(st.just(0), st.floats(0, 1))
)


@reproducible
@given(process=any_process)
def test_loss_rate_is_the_stationary_one(process):
    transition, loss, stationary = chain(process)
    assert process.share_bad == pytest.approx(stationary[1])
    assert process.loss_rate == pytest.approx(stationary @ loss)
    np.testing.assert_allclose(stationary @ transition, stationary, atol=1e-12)


@reproducible
@given(process=any_process, lag=st.integers(1, 200))
def test_autocorrelation_from_matrix_powers(process, lag):
    assume(1e-6 < process.loss_rate < 1 - 1e-6)
    assert process.autocorrelation(lag) == pytest.approx(autocorrelation_by_matrix(process, lag), abs=1e-8)
    assert process.autocorrelation(-lag) == process.autocorrelation(lag)
    assert process.autocorrelation(0) == 1


@reproducible
@given(process=any_process)
def test_mean_burst_is_the_mean_of_the_law_from_matrix_powers(process):
    assume(1e-6 < process.loss_rate < 1 - 1e-6)
    assert process.mean_burst_packets == pytest.approx(mean_burst_by_matrix(process), rel=1e-6)


@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)
def test_mean_burst_is_the_sum_of_the_law_of_bursts(process):
    by_series = sum(share_of_bursts_longer_than(process, packets) for packets in range(3000))
    assert process.mean_burst_packets == pytest.approx(by_series)


def test_closed_forms_of_a_process_that_never_varies():
    lossless, deaf = general(0.1, 0.2, loss_bad=0, loss_good=0), general(0.1, 0.2, loss_bad=1, loss_good=1)
    assert [lossless.loss_rate, lossless.mean_burst_packets, lossless.autocorrelation(1)] == [0, 0, 0]
    assert [deaf.loss_rate, deaf.mean_burst_packets, deaf.autocorrelation(1)] == [1, math.inf, 0]


@reproducible
@given(loss_rate=st.floats(1e-6, 0.999), factor=st.floats(1.0001, 1000))
def test_from_loss_and_burst_gives_what_was_asked_for(loss_rate, factor):
    mean_burst_packets = factor * max(1, loss_rate / (1 - loss_rate))
    process = simple(loss_rate, mean_burst_packets)
    assert process.loss_rate == pytest.approx(loss_rate, rel=1e-9)
    assert process.mean_burst_packets == pytest.approx(mean_burst_packets, rel=1e-6)
    assert (process.loss_good, process.loss_bad) == (0, 1)


@reproducible
@given(loss_rate=st.floats(0.001, 0.95))
def test_bernoullis_own_mean_burst_gives_an_uncorrelated_process(loss_rate):
    process = simple(loss_rate, Bernoulli(loss_rate=loss_rate).mean_burst_packets)
    assert process.autocorrelation(1) == pytest.approx(0, abs=1e-9)


# Edges, exactly


def test_two_certain_transitions_alternate():
    lost = general(1, 1, loss_bad=1, loss_good=0).losses(KEY).take(10_001)
    assert lost[0] in (0, 1)
    np.testing.assert_array_equal(lost, np.arange(lost[0], 10_001, 2))


def test_two_certain_transitions_start_in_either_state():
    process = general(1, 1, loss_bad=1, loss_good=0)
    assert {int(process.losses((link,)).take(4)[0]) for link in range(20)} == {0, 1}


def test_a_certain_return_makes_every_burst_one_packet_long():
    lost = general(0.4, 1, loss_bad=1, loss_good=0).losses(KEY).take(100_000)
    assert np.diff(lost).min() == 2


def test_a_certain_departure_makes_every_pause_one_packet_long():
    lost = general(1, 0.4, loss_bad=1, loss_good=0).losses(KEY).take(100_000)
    assert np.diff(lost).max() == 2


@pytest.mark.parametrize("num_packets", [0, 1, 1000, 10**12])
def test_a_link_that_never_turns_bad_loses_nothing(num_packets):
    assert len(general(0, 0.5, loss_bad=1, loss_good=0).losses(KEY).take(num_packets)) == 0


@pytest.mark.parametrize("num_packets", [0, 1, 100_000])
def test_a_link_that_never_turns_good_loses_everything(num_packets):
    lost = general(0.5, 0, loss_bad=1, loss_good=0).losses(KEY).take(num_packets)
    np.testing.assert_array_equal(lost, np.arange(num_packets))


@pytest.mark.parametrize(("leave", "back"), [(0, 0.5), (0.5, 0)])
def test_an_absorbing_state_loses_at_its_own_rate(leave, back):
    lost = general(leave, back, loss_bad=0.3, loss_good=0.3).losses(KEY).take(10**6)
    assert_within(batch_means(indicators(lost, 10**6)), 0.3, "loss rate")


@pytest.mark.parametrize("num_packets", [0, 1, 100_000])
def test_two_lossless_states_lose_nothing_and_two_deaf_ones_everything(num_packets):
    assert len(general(0.1, 0.2, loss_bad=0, loss_good=0).losses(KEY).take(num_packets)) == 0
    lost = general(0.1, 0.2, loss_bad=1, loss_good=1).losses(KEY).take(num_packets)
    np.testing.assert_array_equal(lost, np.arange(num_packets))


def test_two_equal_states_are_bernoulli():
    lost = general(0.1, 0.2, loss_bad=0.05, loss_good=0.05).losses(KEY).take(10**6)
    is_lost = indicators(lost, 10**6)
    assert_within(batch_means(is_lost), 0.05, "loss rate")
    assert_within(autocorrelation(is_lost, 1, 0.05), 0, "autocorrelation")
    assert_within(batch_means(burst_lengths(lost)), 1 / 0.95, "mean burst")


@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)
def test_losses_are_sorted_int64_indices_of_this_message(process):
    losses = process.losses(KEY)
    for n in (0, 1, 700, 0, 30_000):
        lost = losses.take(n)
        assert lost.dtype == np.int64
        assert (np.diff(lost) > 0).all()
        assert ((lost >= 0) & (lost < n)).all()


# Pieces and states

TOTAL = 40_000  # packets; in several processes more losses and sojourns than a block of 8192 holds
partitions = st.lists(st.integers(0, TOTAL), max_size=12).map(lambda cuts: [0, *sorted(cuts), TOTAL])
processes = st.sampled_from(
    [
        *PROCESSES.values(),
        simple(0.5, 2),
        general(1, 1, loss_bad=1, loss_good=0),
        general(1, 0.3, loss_bad=1, loss_good=0.9),
        general(0, 0.5, loss_bad=1, loss_good=0.4),
        general(0.5, 0, loss_bad=0.9, loss_good=0),
        general(0.1, 0.2, loss_bad=0, loss_good=0),
    ]
)


@reproducible
@given(process=processes, edges=partitions)
def test_any_pieces_lose_the_same_packets(process, edges):
    pieces = taken_in_pieces(process.losses(KEY), edges)
    np.testing.assert_array_equal(np.concatenate(pieces), process.losses(KEY).take(TOTAL))


@pytest.mark.parametrize("name", ["most are lost", "good state loses more", "states take turns"])
def test_packet_by_packet_loses_the_same_packets(name):
    losses = PROCESSES[name].losses(KEY)
    one_by_one = [n for n in range(20_000) if len(losses.take(1))]
    assert len(one_by_one) > LARGEST_BLOCK
    np.testing.assert_array_equal(one_by_one, PROCESSES[name].losses(KEY).take(20_000))


@reproducible
@given(process=processes, edges=partitions, cut=st.integers(0, 12))
def test_a_saved_state_resumes_with_the_same_losses(process, edges, cut):
    assert_a_saved_state_resumes(process, edges[: cut + 1], KEY)


# Cost


@pytest.mark.parametrize("num_packets", [10**9, 10**12])
@pytest.mark.parametrize(("mean_burst_packets", "bytes_per_loss"), [(1, 100), (8, 60), (100, 60)])
def test_memory_is_in_proportion_to_losses_not_packets(num_packets, mean_burst_packets, bytes_per_loss):
    """About 200,000 losses either way; besides them there are two sojourns a burst."""
    losses = simple(2e5 / num_packets, mean_burst_packets).losses(KEY)
    tracemalloc.start()
    lost = losses.take(num_packets)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(lost) == pytest.approx(2e5, rel=0.2)
    assert peak_bytes < bytes_per_loss * len(lost)


def test_rare_losses_cost_next_to_nothing():
    losses = simple(1e-6, 8).losses(KEY)
    before = time.perf_counter()
    lost = losses.take(10**9)
    assert time.perf_counter() - before < 0.5
    assert 500 < len(lost) < 1500


# What is refused


@pytest.mark.parametrize("name", ["p_good_to_bad", "p_bad_to_good", "loss_bad", "loss_good"])
@pytest.mark.parametrize("value", [-0.1, 1.5, math.nan, math.inf, "0.1"])
def test_impossible_probabilities_are_refused(name, value):
    values = {"p_good_to_bad": 0.1, "p_bad_to_good": 0.2} | {name: value}
    with pytest.raises(ValueError, match=rf"{name} = .* is not in \[0, 1\]") as refusal:
        GilbertElliott(**values)
    assert repr(value) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_chain_that_never_moves_is_refused():
    with pytest.raises(ValueError, match=r"p_good_to_bad = p_bad_to_good = 0 .* above 0"):
        GilbertElliott(p_good_to_bad=0, p_bad_to_good=0.0)


@pytest.mark.parametrize(
    ("loss_rate", "mean_burst_packets", "bound"),
    [(0.01, 0.99, 1), (0.01, 0, 1), (0.01, -8, 1), (0.01, math.nan, 1), (0.8, 3.9, 4), (0.5, 0.5, 1), (0, 0.5, 1)],
)
def test_bursts_too_short_for_the_rate_are_refused(loss_rate, mean_burst_packets, bound):
    """At a rate of 0.8 the pauses would have to be shorter than a packet for a mean burst below 4."""
    with pytest.raises(
        ValueError, match=rf"does not fit a loss rate of {loss_rate}: give a finite number of at least {bound} "
    ) as e:
        simple(loss_rate, mean_burst_packets)
    assert f"mean_burst_packets = {mean_burst_packets!r}" in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(("loss_rate", "message"), [(1, "use Bernoulli"), (1.2, "not in"), (math.nan, "not in")])
def test_rates_without_a_channel_are_refused(loss_rate, message):
    with pytest.raises(ValueError, match=message):
        simple(loss_rate, 8)
    with pytest.raises(ValueError, match="mean_burst_packets = inf"):
        simple(0.01, math.inf)


@pytest.mark.parametrize("mean_burst_packets", ["8", None, True])
def test_a_burst_that_is_no_number_is_refused(mean_burst_packets):
    with pytest.raises(ValueError, match=rf"^mean_burst_packets = {mean_burst_packets!r} does not .* of at least 1 "):
        simple(0.01, mean_burst_packets)
