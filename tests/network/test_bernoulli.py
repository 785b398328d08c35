"""Bernoulli packet loss: its closed forms, its law over 10^7 packets, and that it may be taken in any pieces."""

import json
import math
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossytp.network.losses import LARGEST_BLOCK, LONGEST_GAP, Bernoulli, BernoulliLosses, geometric
from tests.network.loss_statistics import (
    assert_within,
    autocorrelation,
    batch_means,
    burst_lengths,
    indicators,
    is_within,
    lengths_to_compare,
    longer_than,
    reproducible,
    taken_in_pieces,
)

NUM_PACKETS = 10**7
KEY = (0, "test")


@pytest.fixture(scope="module", params=[0.001, 0.01, 0.1, 0.5, 0.9])
def drawn(request):
    """A process and its losses among 10^7 packets, held against the closed forms."""
    process = Bernoulli(loss_rate=request.param)
    return process, process.losses(KEY).take(NUM_PACKETS)


def test_loss_rate(drawn):
    process, lost = drawn
    observed = batch_means(indicators(lost, NUM_PACKETS))
    assert_within(observed, process.loss_rate, "loss rate")
    assert not is_within(observed, process.loss_rate + 0.05 * min(process.loss_rate, 1 - process.loss_rate))


def test_burst_lengths(drawn):
    process, lost = drawn
    lengths = burst_lengths(lost)
    assert_within(batch_means(lengths), process.mean_burst_packets, "mean burst")
    for packets in lengths_to_compare(lengths):
        assert_within(longer_than(lengths, packets), process.loss_rate**packets, f"bursts longer than {packets}")


@pytest.mark.parametrize("lag", [1, 2, 10, 1000])
def test_autocorrelation(drawn, lag):
    process, lost = drawn
    observed = autocorrelation(indicators(lost, NUM_PACKETS), lag, process.loss_rate)
    assert_within(observed, process.autocorrelation(lag), f"lag {lag}")


def test_gaps_between_losses_are_geometric(drawn):
    process, lost = drawn
    gaps = np.diff(lost)
    for packets in lengths_to_compare(gaps):
        expected = (1 - process.loss_rate) ** packets
        assert_within(longer_than(gaps, packets), expected, f"gaps longer than {packets}")


@pytest.mark.parametrize("loss_rate", [1e-9, 0.2, 0.75])
def test_closed_forms(loss_rate):
    process = Bernoulli(loss_rate=loss_rate)
    by_series = sum(loss_rate**longer for longer in range(1000))  # E[length] = sum of P(length > k)
    assert process.mean_burst_packets == pytest.approx(by_series)
    assert [process.autocorrelation(lag) for lag in (-1, 0, 1, 2)] == [0, 1, 0, 0]


def test_a_link_that_loses_everything_is_one_endless_burst_and_one_that_loses_nothing_has_none():
    assert Bernoulli(loss_rate=1).mean_burst_packets == math.inf
    assert Bernoulli(loss_rate=0).mean_burst_packets == 0


@pytest.mark.parametrize("loss_rate", [0, 0.0, -0.0])
def test_rate_0_loses_nothing(loss_rate):
    losses = Bernoulli(loss_rate=loss_rate).losses(KEY)
    assert [len(losses.take(n)) for n in (0, 1, 10**12)] == [0, 0, 0]


@pytest.mark.parametrize("loss_rate", [1, 1.0])
def test_rate_1_loses_everything(loss_rate):
    losses = Bernoulli(loss_rate=loss_rate).losses(KEY)
    for n in (3, 0, 10_000):
        np.testing.assert_array_equal(losses.take(n), np.arange(n))


@pytest.mark.parametrize("loss_rate", [0, 1e-15, 0.01, 1 - 2**-53, 1])
def test_losses_are_sorted_int64_indices_of_this_message(loss_rate):
    losses = Bernoulli(loss_rate=loss_rate).losses(KEY)
    for n in (0, 1, 700, 0, 30_000):
        lost = losses.take(n)
        assert lost.dtype == np.int64
        assert (np.diff(lost) > 0).all()
        assert ((lost >= 0) & (lost < n)).all()


@reproducible
@given(probability=st.floats(1e-6, 1), uniform=st.floats(0, 1, exclude_max=True, width=32))
def test_geometric_inverts_the_distribution_function(probability, uniform):
    """The smallest n with P(X <= n) = 1 - (1 - p)^n above the uniform number, to rounding."""
    trials = int(geometric(probability, np.array([uniform]))[0])
    assert trials >= 1
    assert 1 - (1 - probability) ** trials >= uniform - 1e-9
    assert 1 - (1 - probability) ** (trials - 1) <= uniform + 1e-9


def test_the_longest_gaps_of_the_rarest_losses_stay_inside_int64():
    gaps = geometric(1e-300, np.full(LARGEST_BLOCK, 1 - 2.0**-52))
    assert (gaps == LONGEST_GAP + 1).all()
    assert 0 < np.cumsum(gaps)[-1] < 2**62


processes = st.sampled_from([0.0, 0.001, 0.3, 0.97, 1.0])
TOTAL = 40_000  # packets; from a rate of 0.3 on, more losses than a block of 8192 gaps holds
partitions = st.lists(st.integers(0, TOTAL), max_size=12).map(lambda cuts: [0, *sorted(cuts), TOTAL])


@reproducible
@given(loss_rate=processes, edges=partitions)
def test_any_pieces_lose_the_same_packets(loss_rate, edges):
    process = Bernoulli(loss_rate=loss_rate)
    pieces = taken_in_pieces(process.losses(KEY), edges)
    np.testing.assert_array_equal(np.concatenate(pieces), process.losses(KEY).take(TOTAL))


def test_packet_by_packet_loses_the_same_packets():
    process = Bernoulli(loss_rate=0.9)
    losses = process.losses(KEY)
    one_by_one = [n for n in range(12_000) if len(losses.take(1))]
    assert len(one_by_one) > LARGEST_BLOCK
    np.testing.assert_array_equal(one_by_one, process.losses(KEY).take(12_000))


@reproducible
@given(loss_rate=processes, edges=partitions, cut=st.integers(0, 12))
def test_a_saved_state_resumes_with_the_same_losses(loss_rate, edges, cut):
    """Saved through JSON after any piece, loaded into losses that have moved elsewhere."""
    process = Bernoulli(loss_rate=loss_rate)
    losses = process.losses(KEY)
    taken_in_pieces(losses, edges[: cut + 1])
    resumed = process.losses(KEY)
    resumed.take(1234)
    resumed.load_state_dict(json.loads(json.dumps(losses.state_dict())))
    for num_packets in (0, 17, 20_000):
        np.testing.assert_array_equal(resumed.take(num_packets), losses.take(num_packets))
    assert resumed.state_dict() == losses.state_dict()


@pytest.mark.parametrize("num_packets", [10**9, 10**12])
def test_memory_is_in_proportion_to_losses_not_packets(num_packets):
    losses = Bernoulli(loss_rate=1e6 / num_packets).losses(KEY)
    tracemalloc.start()
    lost = losses.take(num_packets)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(lost) == pytest.approx(10**6, rel=0.005)
    assert peak_bytes < 40 * len(lost)


def test_rare_losses_cost_next_to_nothing():
    """A number a packet would take 10^9 of them seconds; a thousand gaps take a millisecond."""
    losses = Bernoulli(loss_rate=1e-6).losses(KEY)
    before = time.perf_counter()
    lost = losses.take(10**9)
    assert time.perf_counter() - before < 0.5
    assert 800 < len(lost) < 1200


@pytest.mark.parametrize("loss_rate", [-0.01, 1.01, 2, math.nan, math.inf, "0.1", None])
def test_impossible_rates_are_refused(loss_rate):
    with pytest.raises(ValueError, match=r"loss_rate = .* is not in \[0, 1\]") as refusal:
        Bernoulli(loss_rate=loss_rate)
    assert repr(loss_rate) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_losses_of_different_keys_differ():
    one, other = (BernoulliLosses(0.1, (0, name)).take(1000) for name in ("a", "b"))
    assert not np.array_equal(one, other)
