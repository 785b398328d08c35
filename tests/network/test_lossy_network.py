"""Links of a lossy network: independent, reproducible; noise and states."""

import itertools
import json
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lossytp.network import SWITCH, Bernoulli, GilbertElliott, LossyNetwork, Scope, Site
from lossytp.network.losses import Normals
from lossytp.network.routes import RING as ring
from lossytp.network.routes import SENDER as sender
from lossytp.network.routes import Hop
from tests.network.loss_statistics import (
    assert_within,
    batch_means,
    burst_lengths,
    correlation,
    indicators,
    is_within,
    longer_than,
    reproducible,
)
from tests.network.lossy_traffic import (
    BERNOULLI,
    BURSTS,
    EVERYTHING,
    NOTHING,
    RANKS,
    TWO_FLOATS,
    both_processes,
    drawn,
    elements_missing,
    sent,
)

# Links


def test_a_mapping_names_links_and_the_others_take_the_default():
    network = LossyNetwork({(0, 1): EVERYTHING, (2, SWITCH): BERNOULLI}, default=NOTHING)
    assert network.process(0, 1) == EVERYTHING
    assert network.process(1, 0) == NOTHING
    assert network.process(2, SWITCH) == BERNOULLI
    assert [len(drawn(network, *link)) for link in ((0, 1), (1, 0))] == [1000, 0]


def test_links_that_a_mapping_does_not_name_are_lossless():
    assert len(drawn(LossyNetwork({(0, 1): EVERYTHING}), 0, 2)) == 0


def test_one_process_is_every_links():
    network = LossyNetwork(BURSTS)
    assert {network.process(src, dst) for src, dst in itertools.permutations((*RANKS, SWITCH), 2)} == {BURSTS}


@both_processes
def test_the_same_seed_loses_the_same_packets_whatever_else_was_sent(process):
    """So every rank can compute any link's losses alone."""
    busy, idle = LossyNetwork(process, seed=5), LossyNetwork(process, seed=5)
    for link in itertools.permutations(RANKS, 2):
        drawn(busy, *link, group="other")
        if link != (0, 1):
            drawn(busy, *link)
    assert drawn(busy) == drawn(idle)


def test_losses_stay_the_same_across_versions():
    """Recorded runs can be repeated only as long as these packets are the ones lost."""
    assert drawn(LossyNetwork(BERNOULLI), num_packets=60) == [6, 21, 30, 31, 55]
    assert drawn(LossyNetwork(BURSTS), num_packets=200) == [134, 135, 136, 137, 138, 139, 140, 141, 142]


NAMED = [
    pytest.param({}, {"seed": 1}, id="seeds"),
    pytest.param({"src": 0, "dst": 1}, {"src": 1, "dst": 0}, id="directions"),
    pytest.param({"dst": 1}, {"dst": 2}, id="destinations"),
    pytest.param({"dst": 1}, {"dst": SWITCH}, id="a rank and the switch"),
    pytest.param({"group": "tp"}, {"group": "dp"}, id="groups"),
]


@both_processes
@pytest.mark.parametrize(("one", "other"), NAMED)
def test_what_names_a_stream_makes_its_losses_independent(process, one, other):
    """Correlation 0 within four standard errors over 400,000 packets; the same name twice has correlation 1."""

    def indicators_of(*, seed=0, **link):
        lost = LossyNetwork(process, seed=seed).lost_packets(**{"src": 0, "dst": 1} | link, num_packets=400_000)
        return indicators(lost, 400_000)

    assert_within(correlation(indicators_of(**one), indicators_of(**other), 0.1), 0, "correlation")
    assert not is_within(correlation(indicators_of(**one), indicators_of(**one), 0.1), 0)


@both_processes
def test_links_are_independent(process):
    """All pairs of the 16 links among four ranks and the switch, at equal packets and one packet apart."""
    links = [*itertools.permutations(RANKS, 2), *((rank, SWITCH) for rank in RANKS)]
    network = LossyNetwork(process)
    is_lost = [indicators(network.lost_packets(*link, 100_000), 100_000) for link in links]
    for (name, one), (other_name, other) in itertools.combinations(zip(links, is_lost, strict=True), 2):
        assert_within(correlation(one, other, 0.1), 0, f"{name} and {other_name}")
        assert_within(correlation(one[1:], other[:-1], 0.1), 0, f"{name} and {other_name}, one later")
        assert_within(correlation(one[:-1], other[1:], 0.1), 0, f"{name} and {other_name}, one earlier")


def test_ranks_do_not_share_one_mask():
    """Two ranks both lose an element at the product of their rates; in an earlier study all lost the same ones."""
    network = LossyNetwork(BERNOULLI, wire=TWO_FLOATS)
    hops = sender.reduce(200_000, (0, 1))
    lost = np.zeros((2, 200_000))
    for position, element in elements_missing(hops, network.send(hops, 4), 2):
        lost[position, element] = 1
    assert_within(batch_means(lost[0]), 0.1, "rank 0")
    assert_within(batch_means(lost[1]), 0.1, "rank 1")
    assert_within(batch_means(lost[0] * lost[1]), 0.01, "both")


# Packets and messages


@both_processes
@reproducible
@given(sizes=st.lists(st.integers(0, 5000), max_size=12), cut=st.integers(0, 12))
def test_a_links_losses_carry_over_from_message_to_message(process, sizes, cut):
    """Whatever the messages' sizes, sites and the other links' traffic, and through a saved state."""
    network, at_once = LossyNetwork(process), LossyNetwork(process)
    lost, start = [], 0
    for number, size in enumerate(sizes):
        if number == cut:
            state = json.loads(json.dumps(network.state_dict()))
            network = LossyNetwork(process)
            network.load_state_dict(state)
        lost += [start + packet for packet in drawn(network, num_packets=size, site=Site(number, "mlp", "forward"))]
        drawn(network, 1, 0, num_packets=17)
        start += size
    assert lost == drawn(at_once, num_packets=sum(sizes))


def bursts_over_messages(lost_packets, message_packets, num_messages):
    """Bursts of one link over many messages, the link's packets counted through."""
    lost = [number * message_packets + lost_packets(message_packets) for number in range(num_messages)]
    return burst_lengths(np.concatenate(lost))


def test_a_burst_is_counted_in_packets_not_in_messages():
    """An earlier study stepped its chain once a message, so a burst of 20 was 20 whole tensors."""
    process = GilbertElliott.from_loss_and_burst(loss_rate=0.05, mean_burst_packets=20)
    network = LossyNetwork(process)
    lengths = bursts_over_messages(lambda packets: network.lost_packets(0, 1, packets), 700, 3000)
    assert_within(batch_means(lengths), 20, "mean burst")
    assert_within(longer_than(lengths, 20), 0.95**20, "bursts longer than 20")

    once_a_message = process.losses((0, "test"))
    whole = bursts_over_messages(lambda packets: np.arange(packets * len(once_a_message.take(1))), 700, 3000)
    assert whole.min() >= 700
    assert whole.mean() > 20 * 350


@pytest.mark.parametrize("num_packets", [-1, -700])
def test_a_negative_number_of_packets_is_refused(num_packets):
    network = LossyNetwork(BERNOULLI)
    with pytest.raises(ValueError, match=rf"num_packets = {num_packets} is below 0: give 0 or more") as refusal:
        network.lost_packets(0, 1, num_packets)
    assert "\n" not in str(refusal.value)
    assert drawn(network) == drawn(LossyNetwork(BERNOULLI))


def test_no_packets_lose_nothing_and_advance_nothing():
    network = LossyNetwork(BERNOULLI)
    assert drawn(network, num_packets=0) == []
    assert drawn(network) == drawn(LossyNetwork(BERNOULLI))


# Noise


def test_each_link_has_normal_numbers_of_its_own_that_carry_over():
    """One for each element of a hop, and the same whatever else was sent."""
    network, at_once = LossyNetwork(BERNOULLI), LossyNetwork(BERNOULLI)
    pieces = [network.normals((Hop(0, 1, 3, stop, (0,)), Hop(1, 0, 3, stop, (1,)))) for stop in (5, 8, 3, 103)]
    whole = at_once.normals((Hop(1, 0, 0, 107, (1,)), Hop(0, 1, 0, 107, (0,))))
    for number, link in enumerate(((0, 1), (1, 0))):
        assert np.concatenate([piece[number] for piece in pieces]).tolist() == whole[1 - number].tolist()
        key = (0, "training", 0, "tp", *link, "normals")
        assert whole[1 - number].tolist() == Normals(key).take(107).tolist()
    assert network.counters.rows() == []
    assert drawn(network) == drawn(LossyNetwork(BERNOULLI)), "a link's losses go on as they were"


def test_evaluation_does_not_shift_training_s_noise_and_a_saved_state_holds_it():
    network, plain, resumed = (LossyNetwork(BERNOULLI) for _ in range(3))
    hops = ring.reduce(30, (0, 1))

    def noise(of):
        return [numbers.tolist() for numbers in of.normals(hops)]

    assert noise(network) == noise(plain)
    with network.evaluation(1):
        assert noise(network) != noise(LossyNetwork(BERNOULLI))
    resumed.load_state_dict(json.loads(json.dumps(network.state_dict())))
    assert noise(network) == noise(resumed) == noise(plain)


# States


@both_processes
def test_a_saved_state_holds_every_link_and_all_counters(process):
    network, resumed = LossyNetwork(process), LossyNetwork(process)
    for group, link in itertools.product(("tp", "dp"), itertools.permutations(RANKS, 2)):
        drawn(network, *link, 50 * sum(link), group=group, site=Site(0, "mlp", "forward"))
    with network.evaluation(1):
        drawn(network)
    drawn(resumed, 3, 2, 999)
    resumed.load_state_dict(json.loads(json.dumps(network.state_dict())))
    assert resumed.state_dict() == network.state_dict()
    assert resumed.counters.rows() == network.counters.rows()
    for group, link in itertools.product(("tp", "dp"), itertools.permutations(RANKS, 2)):
        assert drawn(resumed, *link, group=group) == drawn(network, *link, group=group)


def test_a_state_is_not_saved_within_evaluation():
    network = LossyNetwork(BERNOULLI)
    with network.evaluation(1), pytest.raises(ValueError, match=r"state_dict\(\) within evaluation\(\)"):
        network.state_dict()


def test_a_state_of_another_seed_is_refused():
    state = LossyNetwork(BERNOULLI, seed=3).state_dict()
    with pytest.raises(ValueError, match="the state is of seed 3, this network of 4: give the same seed"):
        LossyNetwork(BERNOULLI, seed=4).load_state_dict(state)


# The house


def test_global_random_generators_are_neither_read_nor_moved():
    def lossy_run():
        network = LossyNetwork({(0, 1): BERNOULLI, (1, 0): BURSTS}, default=BURSTS)
        losses = [sent(network), drawn(network), drawn(network, 1, 0)]
        with network.evaluation(1):
            losses.append(sent(network))
        network.load_state_dict(network.state_dict())
        return [*losses, sent(network)]

    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002

    before = states()
    losses = lossy_run()
    assert states() == before
    random.random()
    np.random.random(1)  # noqa: NPY002
    torch.rand(1)
    assert all(one != other for one, other in zip(states(), before, strict=True))
    assert lossy_run() == losses


def test_the_network_needs_neither_torch_nor_pandas():
    """Control: the same check finds torch where it is imported."""
    check = "import sys, lossytp.network as n; n.LossyNetwork(n.Bernoulli(loss_rate=.1)).lost_packets(0, 1, 100)"
    tell = "print(*sorted({'torch', 'pandas', 'transformers'} & set(sys.modules)))"
    for extra, imported in (("", ""), ("; import torch", "torch")):
        run = subprocess.run(
            [sys.executable, "-c", f"{check}{extra}; {tell}"], capture_output=True, text=True, check=True
        )
        assert run.stdout.strip() == imported


def test_packets_taken_by_hand_are_lost_within_the_scope_alone():
    network = LossyNetwork(Bernoulli(loss_rate=0.5), scope=Scope(direction="forward"))
    assert len(network.lost_packets(0, 1, 100, site=Site(0, "mlp", "backward"))) == 0
    assert network.counters.rows() == []
    assert len(network.lost_packets(0, 1, 100, site=Site(0, "mlp", "forward"))) > 20
