"""Loss processes: closed forms against matrices, edges, pieces and states, cost, notation, what is refused."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lossytp.network import Bernoulli, FourState, GilbertElliott, from_netem, gilbert_elliott_preset
from lossytp.network.losses import PRESETS
from tests.network.loss_statistics import (
    assert_a_saved_state_resumes,
    assert_any_pieces_lose_the_same,
    autocorrelation_by_matrix,
    chain,
    mean_burst_by_matrix,
    partitions,
    reproducible,
)
from tests.network.processes import ALL, FOUR_STATE, KEY, MARKOV, general, shared_losses, simple

probabilities, lags = st.floats(0.001, 1), st.integers(1, 200)
any_gilbert_elliott = st.builds(
    general, probabilities, probabilities, loss_bad=st.floats(0, 1), loss_good=st.one_of(st.just(0), st.floats(0, 1))
)


@st.composite
def any_four_state(draw):
    two = st.tuples(st.floats(0.001, 0.999), st.floats(0.001, 1)).map(lambda two: (two[0], two[1] * (1 - two[0])))
    (p13, p14), (p31, p32) = draw(two), draw(two)
    zeros = draw(st.sampled_from([(1, 1), (0, 1), (1, 0)]))
    return FourState(p13, p31, p32 * zeros[0], draw(st.floats(0.001, 1)), p14 * zeros[1])


# Closed forms


@reproducible
@given(
    process=st.one_of(any_gilbert_elliott, any_four_state(), st.sampled_from([*MARKOV.values()])), lag=st.integers(1)
)
def test_closed_forms_are_those_of_the_transition_matrix(process, lag):
    lag %= 200
    transition, loss, stationary = chain(process)
    assert process.loss_rate == pytest.approx(stationary @ loss)
    np.testing.assert_allclose(stationary @ transition, stationary, atol=1e-12)
    assume(1e-6 < process.loss_rate < 1 - 1e-6)
    assert process.mean_burst_packets == pytest.approx(mean_burst_by_matrix(process), rel=1e-6)
    assert process.autocorrelation(lag) == pytest.approx(autocorrelation_by_matrix(process, lag), abs=1e-8)
    assert process.autocorrelation(-lag) == process.autocorrelation(lag)
    assert process.autocorrelation(0) == 1


@pytest.mark.parametrize("process", [*FOUR_STATE.values(), FourState(0.01, 0), FourState(0.01, 0.1, 0.2, 0)])
def test_four_states_have_the_law_that_the_kernel_s_chain_reaches_from_state_1(process):
    np.testing.assert_allclose(process.shares, chain(process)[2], atol=1e-9)


@pytest.mark.parametrize(
    ("processes", "rate", "burst"),
    [
        (
            [Bernoulli(loss_rate=0), general(0.1, 0.2, 0, 0), FourState(0, 0.5, 0.5, 0.5), shared_losses(0, 0.5, 8)],
            0,
            0,
        ),
        ([Bernoulli(loss_rate=1), general(0.1, 0.2, 1, 1), FourState(0.01, 0), shared_losses(1, 0.5)], 1, math.inf),
    ],
)
def test_processes_that_lose_nothing_or_everything(rate, burst, processes):
    for process in processes:
        assert (process.loss_rate, process.mean_burst_packets) == (rate, burst)
        assert [process.autocorrelation(lag) for lag in (0, 1)] == [1, 0]
        losses = process.losses(KEY)
        for num_packets in (0, 1, 1000):
            np.testing.assert_array_equal(losses.take(num_packets), np.arange(num_packets * rate))


@reproducible
@given(loss_rate=st.floats(1e-6, 0.999), factor=st.floats(1.0001, 1000))
def test_from_loss_and_burst(loss_rate, factor):
    mean_burst_packets = factor * max(1, loss_rate / (1 - loss_rate))
    process = simple(loss_rate, mean_burst_packets)
    assert process.loss_rate == pytest.approx(loss_rate, rel=1e-9)
    assert process.mean_burst_packets == pytest.approx(mean_burst_packets, rel=1e-6)
    alike = simple(loss_rate, max(Bernoulli(loss_rate=loss_rate).mean_burst_packets, 1))
    assert alike.autocorrelation(1) == pytest.approx(0, abs=1e-9)


@reproducible
@given(loss_rate=st.floats(1e-6, 0.95), shared=st.floats(0, 1), stretch=st.one_of(st.none(), st.floats(1, 100)))
def test_from_loss_and_share(loss_rate, shared, stretch):
    burst = None if stretch is None else stretch * max(1 / (1 - loss_rate), loss_rate / (1 - loss_rate))
    process = shared_losses(loss_rate, shared, burst)
    assert process.loss_rate == pytest.approx(loss_rate, rel=1e-9)
    assert process.mean_burst_packets == pytest.approx(burst or 1 / (1 - loss_rate), rel=1e-6)
    assert process.common.loss_rate == pytest.approx(shared * loss_rate, rel=1e-9, abs=1e-300)


# Edges, exactly


@pytest.mark.parametrize("process", [general(1, 1, 1, 0), FourState(1, 1)])
def test_certain_transitions_alternate_from_either_state(process):
    assert {int(process.losses((link,)).take(4)[0]) for link in range(20)} == {0, 1}
    lost = process.losses(KEY).take(10_001)
    np.testing.assert_array_equal(lost, np.arange(lost[0], 10_001, 2))


def test_transitions_that_are_certain_or_impossible():
    def lost(leave, back, num_packets=100_000):
        return general(leave, back, loss_bad=1, loss_good=0).losses(KEY).take(num_packets)

    assert np.diff(lost(0.4, 1)).min() == np.diff(lost(1, 0.4)).max() == 2
    assert len(lost(0, 0.5, 10**12)) == 0
    np.testing.assert_array_equal(lost(0.5, 0), np.arange(100_000))


# Pieces and states. In several processes 40,000 packets hold more losses and sojourns than a block of 8,192.


@reproducible
@given(name=st.sampled_from([*ALL]), edges=partitions(40_000))
def test_any_pieces_lose_the_same_packets(name, edges):
    assert_any_pieces_lose_the_same(ALL[name], edges, KEY)


@reproducible
@given(name=st.sampled_from([*ALL]), edges=partitions(40_000), cut=st.integers(1, 12))
def test_a_saved_state_resumes_with_the_same_losses(name, edges, cut):
    assert_a_saved_state_resumes(ALL[name], edges[:cut], KEY)


@pytest.mark.parametrize(
    ("name", "key", "packets", "lost"),
    [
        ("rate 0.1", (0, "training", 0, "tp", 0, 1), 60, [6, 21, 30, 31, 55]),
        ("all four states", (0, "test"), 60, [9, 10, 26, 27, 28, 29, 38, 39, 40, 41, 42]),
        ("bursts are shared", KEY, 400, [*range(244, 249), *range(270, 275), *range(275, 281), 395, 396, 397]),
    ],
)
def test_losses_stay_the_same_across_versions(name, key, packets, lost):
    """Recorded runs can be repeated only as long as these packets are the ones lost."""
    assert ALL[name].losses(key).take(packets).tolist() == lost


# Cost: that of the losses, not of the packets


@pytest.mark.parametrize("num_packets", [10**9, 10**12])
@pytest.mark.parametrize(
    ("process", "losses", "bytes_per_loss"),
    [
        (lambda packets: Bernoulli(loss_rate=1e6 / packets), 1e6, 40),
        *((lambda packets: simple(2e5 / packets, 1), 2e5, 100), (lambda packets: simple(2e5 / packets, 8), 2e5, 60)),
        (lambda packets: simple(2e5 / packets, 100), 2e5, 60),
        (lambda packets: FourState(2e4 / packets, 0.2, 0.1, 0.3, 2e4 / packets), 1.2e5, 100),
    ],
)
def test_memory_is_in_proportion_to_losses_not_packets(num_packets, process, losses, bytes_per_loss):
    link = process(num_packets).losses((0, "test"))
    tracemalloc.start()
    lost = link.take(num_packets)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(lost) == pytest.approx(losses, rel=0.2)
    assert peak_bytes < bytes_per_loss * len(lost)


# Presets and netem's notation

# id: loss rate and mean burst, from p / (p + r) and 1 / r by hand, the two general ones from the transition matrix
EXPECTED = {
    "zero": (0, 0), "default": (0.1, 1 / 0.45), "one": (0.05, 1 / 0.19), "one_precent": (0.0106557377, 1.8348623853),
    "half_percent": (0.00497512438, 5), "point2_percent": (0.00200665188, 1.8167652541),
    "long_point1_percent": (0.001, 1 / 0.04995), "long_point1percent": (0.000999000999, 1 / 0.98),
    "long_2percent": (0.02, 1 / 0.0196), "lomg_2percent": (0.02, 1 / 0.98), "short_2percent": (0.0199921599, 2),
    "short_1percent": (0.00999900999, 1 / 0.6), "short_half_percent": (0.00502462564, 1 / 0.6),
    "short_point_2percent": (0.00201260791, 1 / 0.6), "short_point1_percent": (0.001000999, 1 / 0.999),
    "20_loss": (0.2, 1 / 0.98), "long_50percent": (0.5, 1 / 0.98), "short_50percent": (0.5, 2),
    "90_loss": (0.9000009, 1 / 0.11111),
}  # fmt: skip


def test_presets_lose_what_their_values_say():
    assert set(PRESETS) == set(EXPECTED)
    for name, (rate, burst) in EXPECTED.items():
        process = gilbert_elliott_preset(name)
        assert process.loss_rate == pytest.approx(rate, rel=1e-8)
        assert process.mean_burst_packets == pytest.approx(burst, rel=1e-8)
    assert (PRESETS["point2_percent"].loss_good, PRESETS["point2_percent"].loss_bad) == (0.0001, 0.86)
    with pytest.raises(ValueError, match="ge_config"):
        gilbert_elliott_preset("one_percent")


rates = st.floats(0, 1)


@reproducible
@given(
    process=st.one_of(
        st.builds(Bernoulli, loss_rate=rates),
        st.builds(general, rates, st.floats(1e-12, 1), loss_bad=rates, loss_good=rates),
        any_four_state(),
    )
)
def test_netem_round_trip(process):
    text = process.to_netem()
    again = from_netem(text)
    assert type(again) is type(process)
    for name, value in vars(process).items():
        assert getattr(again, name) == pytest.approx(value, rel=1e-9)
    assert again.to_netem() == text


@pytest.mark.parametrize("p31", np.random.default_rng(0).uniform(0.9, 1, 20))
def test_netem_takes_back_probabilities_that_add_up_to_one(p31):
    process = FourState(p13=0.01, p31=p31, p32=1 - p31)
    assert from_netem(process.to_netem()).p31 == pytest.approx(p31)


@pytest.mark.parametrize(
    ("text", "process"),
    [
        *((loss, Bernoulli(loss_rate=0.01)) for loss in ("loss 1%", "loss random 1%", "loss 1", " loss   1.0% ")),
        *(("loss .5%", Bernoulli(loss_rate=0.005)), ("loss 1e-3%", Bernoulli(loss_rate=1e-5))),
        *(("loss gemodel 1%", general(0.01, 0.99, 1, 0)), ("loss gemodel 1% 20%", general(0.01, 0.2, 1, 0))),
        ("loss gemodel 1% 20% 70%", general(0.01, 0.2, 0.7, 0)),
        ("loss gemodel 1 20 70 0.1", general(0.01, 0.2, 0.7, 0.001)),
        ("loss state 1%", FourState(0.01, 0.99, 0, 1, 0)),
        ("loss state 1% 20% 5%", FourState(0.01, 0.2, 0.05, 1, 0)),
        ("loss state 1 20 5 30 0.1", FourState(0.01, 0.2, 0.05, 0.3, 0.001)),
    ],
)
def test_values_left_out_take_the_defaults_of_tc(text, process):
    """tc-netem(8) and iproute2's tc/q_netem.c. With p alone, or p13 alone, losses are Bernoulli."""
    again = from_netem(text)
    assert type(again) is type(process)
    assert [*vars(again).values()] == pytest.approx([*vars(process).values()])
    if len(text.split()) == 3:
        assert again.autocorrelation(1) == pytest.approx(0)


def test_what_is_written_for_tc():
    assert FOUR_STATE["all four states"].to_netem() == "loss state 2% 20% 10% 30% 1%"
    assert gilbert_elliott_preset("one").to_netem() == "loss gemodel 1% 19% 100% 0%"
    assert Bernoulli(loss_rate=0.015).to_netem() == "loss random 1.5%"


@pytest.mark.parametrize(
    "text",
    [
        *("", "loss", "loss gemodel", "loss state", "random 1%", "delay 1%", "loss x%", "loss 1%%", "loss 1 %"),
        *("loss nan%", "loss 1% loss 1%", "loss random 1% 25%", "loss gemodel 1% 2% 3% 4% 5%", "loss ge 1% 19%"),
        *("loss 101%", "loss -1%", "loss gemodel 1% 200%", "loss 1e999%", "loss 1.2.3%"),
    ],
)
def test_malformed_netem_text_is_refused(text):
    """Also netem's correlation, which is deprecated there."""
    with pytest.raises(ValueError, match="netem"):
        from_netem(text)


# What is refused

WRONG = [-0.1, 1.5, math.nan, math.inf, "0.1", None]
VALID = {
    Bernoulli: {"loss_rate": 0.1},
    GilbertElliott: {"p_good_to_bad": 0.1, "p_bad_to_good": 0.2, "loss_bad": 1, "loss_good": 0},
    FourState: {"p13": 0.1, "p31": 0.2, "p32": 0, "p23": 1, "p14": 0},
    shared_losses: {"loss_rate": 0.1, "shared": 0.5},
}


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize(("build", "name"), [(build, name) for build, valid in VALID.items() for name in valid])
def test_impossible_probabilities_are_refused(build, name, value):
    with pytest.raises(ValueError, match=name):
        build(**VALID[build] | {name: value})


@pytest.mark.parametrize(
    ("loss_rate", "burst"),
    [*((0.01, burst) for burst in (0.99, 0, -8, math.nan, math.inf, "8", None, True)), (0.8, 3.9), (0.5, 0.5), (1, 8)],
)
def test_bursts_that_no_channel_has_are_refused(loss_rate, burst):
    """At a rate of 0.8 the pauses would have to be shorter than a packet for a mean burst below 4."""
    with pytest.raises(ValueError, match="mean_burst_packets"):
        simple(loss_rate, burst)
    if burst is not None:
        with pytest.raises(ValueError, match="mean_burst_packets"):
            shared_losses(loss_rate, 0.5, burst)
    for rate, shortest in ((0.9, 9), (0.8, 4), (0.5, 1)):  # that the bound names
        assert simple(rate, shortest).mean_burst_packets == pytest.approx(shortest)


def test_chains_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="p_good_to_bad"):
        GilbertElliott(p_good_to_bad=0, p_bad_to_good=0.0)
    for values in ({"p13": 0.6, "p31": 0.2, "p14": 0.5}, {"p13": 0.1, "p31": 0.6, "p32": 0.5}):
        with pytest.raises(ValueError, match="is above 1"):
            FourState(**values)
