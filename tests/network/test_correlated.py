"""Losses that links of one switch share: each link's own law, and what two of them lose together."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lossytp.network import Bernoulli, Correlated, FourState, GilbertElliott, LossyNetwork, Trace
from lossytp.network.routes import ALGORITHMS
from lossytp.network.traces import Replay
from tests.network.loss_statistics import (
    assert_a_saved_state_resumes,
    assert_any_pieces_lose_the_same,
    assert_closed_forms_hold,
    assert_within,
    autocorrelation_by_matrix,
    batch_means,
    correlation,
    indicators,
    is_within,
    mean_burst_by_matrix,
    partitions,
    reproducible,
)

NUM_PACKETS = 10**6
KEY = (0, "training", 0, "tp", 0, 1)
BURSTS = GilbertElliott.from_loss_and_burst(loss_rate=0.02, mean_burst_packets=10)


def shared_losses(loss_rate, shared, mean_burst_packets=None, switch=0):
    return Correlated.from_loss_and_share(
        loss_rate=loss_rate, shared=shared, mean_burst_packets=mean_burst_packets, switch=switch
    )


PROCESSES = {
    "half": shared_losses(0.05, 0.5),
    "bursts": shared_losses(0.05, 0.6, 8),
    "little": shared_losses(0.2, 0.1, 2),
    "most are lost": shared_losses(0.7, 0.5, 6),
    "parts of one's own": Correlated(common=BURSTS, private=Bernoulli(loss_rate=0.03)),
    "four states": Correlated(common=FourState(0.02, 0.2, 0.1, 0.3, 0.01), private=BURSTS),
}
ALL = {**PROCESSES, "all": shared_losses(0.1, 1, 8), "none": shared_losses(0.1, 0, 8)}
processes = pytest.mark.parametrize("process", ALL.values(), ids=ALL)


def both_lost(process):
    """P(two links lose a packet at the same time): the switch loses it, or both links do."""
    common, private = process.common.loss_rate, process.private.loss_rate
    return common + (1 - common) * private**2


# Closed forms


@reproducible
@given(loss_rate=st.floats(1e-6, 0.95), shared=st.floats(0, 1), stretch=st.one_of(st.none(), st.floats(1, 100)))
def test_a_link_has_the_rate_and_burst_asked_for(loss_rate, shared, stretch):
    burst = None if stretch is None else stretch * max(1 / (1 - loss_rate), loss_rate / (1 - loss_rate))
    process = shared_losses(loss_rate, shared, burst)
    assert process.loss_rate == pytest.approx(loss_rate, rel=1e-9)
    assert process.mean_burst_packets == pytest.approx(burst or 1 / (1 - loss_rate), rel=1e-6)
    assert process.common.loss_rate == pytest.approx(shared * loss_rate, rel=1e-9, abs=1e-300)


@reproducible
@given(name=st.sampled_from([*PROCESSES]), lag=st.integers(1, 100))
def test_closed_forms_from_matrices(name, lag):
    """Of both parts' chains at once, the product of their states."""
    process = PROCESSES[name]
    assert process.mean_burst_packets == pytest.approx(mean_burst_by_matrix(process))
    assert process.autocorrelation(lag) == pytest.approx(autocorrelation_by_matrix(process, lag), abs=1e-9)
    assert process.autocorrelation(0) == 1


def test_all_or_nothing_is_shared():
    assert shared_losses(0.1, 1) == Correlated(common=Bernoulli(loss_rate=0.1), private=Bernoulli(loss_rate=0))
    assert shared_losses(0.1, 0) == Correlated(common=Bernoulli(loss_rate=0), private=Bernoulli(loss_rate=0.1))
    assert shared_losses(0.1, 1, 8).common == GilbertElliott.from_loss_and_burst(loss_rate=0.1, mean_burst_packets=8)
    assert shared_losses(0.1, 0, 8).private == GilbertElliott.from_loss_and_burst(loss_rate=0.1, mean_burst_packets=8)


@pytest.mark.parametrize("shared", [0, 0.5, 1])
def test_links_that_lose_nothing_or_everything(shared):
    nothing, quiet, everything = shared_losses(0, shared), shared_losses(0, shared, 8), shared_losses(1, shared)
    for process, rate, burst in ((nothing, 0, 0), (quiet, 0, 0), (everything, 1, math.inf)):
        assert (process.loss_rate, process.mean_burst_packets) == (rate, burst)
        assert process.autocorrelation(1) == 0
        np.testing.assert_array_equal(process.losses(KEY).take(1000), np.arange(1000 * rate))


# What is drawn


@processes
def test_a_links_own_law(process):
    lost = process.losses(KEY).take(NUM_PACKETS)
    assert_closed_forms_hold(process, lost, NUM_PACKETS)
    assert not is_within(batch_means(indicators(lost, NUM_PACKETS)), 1.2 * process.loss_rate)


@processes
def test_two_links_lose_together_what_the_closed_form_says(process):
    """At equal packets; and a burst of the switch shows on the other link a packet later, too."""
    network = LossyNetwork(process, seed=3)
    one, other = (indicators(network.lost_packets(*link, NUM_PACKETS), NUM_PACKETS) for link in ((0, 1), (2, 1)))
    assert_within(batch_means(one * other), both_lost(process), "both lost")
    common = process.common
    later = common.autocorrelation(1) * common.loss_rate * (1 - common.loss_rate) * (1 - process.private.loss_rate) ** 2
    later /= process.loss_rate * (1 - process.loss_rate)
    assert_within(correlation(one[1:], other[:-1], process.loss_rate), later, "one later")


def test_what_the_switch_loses_every_link_loses():
    """And beyond that nothing in common: each link's further losses are its own."""
    process = PROCESSES["bursts"]
    lost = [set(process.losses((*KEY[:-2], src, dst)).take(20_000).tolist()) for src, dst in ((0, 1), (1, 0), (5, -1))]
    switch = set(process.common.losses((*KEY[:-2], "switch", 0)).take(20_000).tolist())
    assert switch
    assert all(switch < link for link in lost)
    own = [link - switch for link in lost]
    assert not (own[0] & own[1] & own[2])


@pytest.mark.parametrize(
    "apart",
    [
        ({"seed": 1}, {"seed": 2}),
        ({"group": "tp"}, {"group": "dp"}),
        ({"switch": "left"}, {"switch": "right"}),
    ],
    ids=["seeds", "groups", "switches"],
)
def test_other_seeds_groups_and_switches_have_nothing_in_common(apart):
    def drawn(*, seed=0, group="tp", switch=0, src=0):
        network = LossyNetwork(shared_losses(0.1, 1, 4, switch), seed=seed)
        return indicators(network.lost_packets(src, 1, 200_000, group=group), 200_000)

    one, other = apart
    assert_within(correlation(drawn(**one), drawn(**other, src=2), 0.1), 0, "correlation")
    assert np.array_equal(drawn(**one), drawn(**one, src=2))  # control: all is shared among links of one switch


def test_only_the_links_of_the_switch_share():
    process = shared_losses(0.1, 1, 4)
    network = LossyNetwork({(0, 1): process, (2, 1): process}, default=shared_losses(0.1, 0, 4))
    one, same, other = (network.lost_packets(*link, 10_000).tolist() for link in ((0, 1), (2, 1), (1, 0)))
    assert one == same != other


def test_the_same_time_is_the_same_number_of_packets_sent():
    process = shared_losses(0.1, 1, 4)
    network = LossyNetwork(process)
    ahead = np.concatenate([network.lost_packets(0, 1, 700), 700 + network.lost_packets(0, 1, 300)])
    network.lost_packets(2, 1, 1)
    behind = 1 + network.lost_packets(2, 1, 999)
    np.testing.assert_array_equal(ahead[ahead > 0], behind)


def test_an_evaluation_shares_losses_of_its_own():
    network = LossyNetwork(shared_losses(0.1, 1, 4))
    training = network.lost_packets(0, 1, 1000).tolist()
    with network.evaluation(1):
        one, other = network.lost_packets(0, 1, 1000).tolist(), network.lost_packets(2, 1, 1000).tolist()
    assert one == other != training


# Pieces and states


@reproducible
@given(name=st.sampled_from([*ALL]), edges=partitions(40_000))
def test_any_pieces_lose_the_same_packets(name, edges):
    assert_any_pieces_lose_the_same(ALL[name], edges, KEY)


@reproducible
@given(name=st.sampled_from([*ALL]), edges=partitions(40_000), cut=st.integers(1, 12))
def test_a_saved_state_resumes_with_the_same_losses(name, edges, cut):
    assert_a_saved_state_resumes(ALL[name], edges[:cut], KEY)


def test_a_part_may_be_recorded():
    """The switch's recording starts at one offset for all its links."""
    process = Correlated(common=Trace(lost=[0, 1], num_packets=50), private=Bernoulli(loss_rate=0))
    one, other = (process.losses((*KEY[:-2], src, 1)).take(200).tolist() for src in (0, 2))
    assert one == other
    assert process.loss_rate == 0.04


def test_wraps_of_recorded_parts_are_counted():
    common, private = Trace(lost=[0], num_packets=50), Trace(lost=[1], num_packets=10)
    network = LossyNetwork(
        Correlated(common=common, private=Correlated(common=Bernoulli(loss_rate=0), private=private))
    )
    network.send(ALGORITHMS["direct"].reduce(100_000, (0, 1)), 4)
    packets = network.summary("training")["packets"] / 2
    assert abs(network.summary("training")["wraps"] - packets / 10) <= 1


def test_switches_below_a_switch_share_their_losses():
    rack = Correlated(common=Bernoulli(loss_rate=0.3), private=Bernoulli(loss_rate=0), switch="rack")
    network = LossyNetwork(Correlated(common=Bernoulli(loss_rate=0), private=rack, switch="spine"))
    lost = [network.lost_packets(*link, 1000).tolist() for link in ((0, 1), (0, 2), (1, 2))]
    assert lost[0] == lost[1] == lost[2] != []


def test_a_recording_of_links_may_be_private_but_not_common():
    recording = Replay((((0, 1), Trace(lost=[2], num_packets=5)),))
    network = LossyNetwork(Correlated(common=Bernoulli(loss_rate=0), private=recording))
    assert network.lost_packets(0, 1, 6).tolist() == [2]
    with pytest.raises(ValueError, match=r"^common = Replay.* holds losses of single links: give it as private, or "):
        Correlated(common=recording, private=Bernoulli(loss_rate=0))


def test_losses_stay_the_same_across_versions():
    assert PROCESSES["bursts"].losses(KEY).take(400).tolist() == [
        244,
        245,
        246,
        247,
        248,
        270,
        271,
        272,
        273,
        274,
        275,
        276,
        277,
        278,
        279,
        280,
        395,
        396,
        397,
    ]


# What is refused


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loss_rate": 1.5}, ["loss_rate = 1.5", "[0, 1]"]),
        ({"shared": -0.1}, ["shared = -0.1", "[0, 1]"]),
        ({"shared": "0.5"}, ["shared = '0.5'", "[0, 1]"]),
        ({"mean_burst_packets": 0.5}, ["mean_burst_packets = 0.5", "0.1", "at least 1"]),
        ({"loss_rate": 1, "mean_burst_packets": 8}, ["loss_rate = 1 has no finite burst"]),
        (
            {"loss_rate": 0.4, "mean_burst_packets": 1},
            ["mean_burst_packets = 1", "0.4", "shared = 0.5", "at least 1.33333"],
        ),
    ],
)
def test_what_cannot_be_is_refused(values, words):
    with pytest.raises(ValueError, match=r"give|use") as refusal:
        Correlated.from_loss_and_share(**{"loss_rate": 0.1, "shared": 0.5, **values})
    assert all(word in str(refusal.value) for word in words)
    assert "\n" not in str(refusal.value)


@reproducible
@given(loss_rate=st.floats(0.01, 0.49), shared=st.floats(0.01, 0.99))
def test_the_shortest_burst_that_the_refusal_names_is_taken(loss_rate, shared):
    """There both parts lose one packet at a time."""
    with pytest.raises(ValueError, match="at least") as refusal:
        shared_losses(loss_rate, shared, max(1, loss_rate / (1 - loss_rate)))
    shortest = float(str(refusal.value).rsplit("at least ", 1)[1].split()[0])
    assume(shortest > max(1, loss_rate / (1 - loss_rate)) + 1e-5)
    process = shared_losses(loss_rate, shared, shortest * (1 + 1e-5))
    assert process.common.p_bad_to_good == pytest.approx(1, abs=1e-3)
    with pytest.raises(ValueError, match="at least"):
        shared_losses(loss_rate, shared, shortest * (1 - 1e-5))


@pytest.mark.parametrize("part", ["common", "private"])
def test_a_part_that_is_no_process_is_refused(part):
    parts = {"common": Bernoulli(loss_rate=0.1), "private": Bernoulli(loss_rate=0.1)} | {part: 0.1}
    with pytest.raises(ValueError, match=rf"^{part} = 0.1 is not a loss process: give one, such as Bernoulli"):
        Correlated(**parts)


def test_a_switch_has_a_number_or_a_name():
    with pytest.raises(TypeError, match=r"^switch = None is of type NoneType, not int or str: give its number or"):
        Correlated.from_loss_and_share(loss_rate=0.1, shared=0.5, switch=None)
