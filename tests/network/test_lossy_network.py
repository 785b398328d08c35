"""Links of a lossy network: independent, reproducible, counted; evaluation and reliable blocks; lost elements."""

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

from lossytp.network import SWITCH, Bernoulli, GilbertElliott, LossyNetwork, Site, Wire
from lossytp.network.routes import Hop, LostSpans, direct, sender
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

BERNOULLI = Bernoulli(loss_rate=0.1)
BURSTS = GilbertElliott.from_loss_and_burst(loss_rate=0.1, mean_burst_packets=8)
NOTHING, EVERYTHING = Bernoulli(loss_rate=0), Bernoulli(loss_rate=1)
TWO_FLOATS = Wire(mtu_bytes=52, header_bytes=44)  # a packet carries two fp32 elements
RANKS = (0, 1, 2, 3)
both_processes = pytest.mark.parametrize("process", [BERNOULLI, BURSTS], ids=["bernoulli", "bursts"])


def lost_in(spans):
    """(row, start, stop) of each lost span."""
    return list(zip(spans.rows, spans.starts, spans.stops, strict=True))


def drawn(network, src=0, dst=1, num_packets=1000, **where):
    return network.lost_packets(src, dst, num_packets, **where).tolist()


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
    spans = network.lost_spans(sender(200_000, (0, 1)), 4)
    lost = np.zeros((2, 200_000))
    for row, start, stop in lost_in(spans):
        lost[row, start:stop] = 1
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
    with pytest.raises(ValueError, match=rf"num_packets = {num_packets} is negative: give 0 or more") as refusal:
        network.lost_packets(0, 1, num_packets)
    assert "\n" not in str(refusal.value)
    assert drawn(network) == drawn(LossyNetwork(BERNOULLI))


def test_no_packets_lose_nothing_and_advance_nothing():
    network = LossyNetwork(BERNOULLI)
    assert drawn(network, num_packets=0) == []
    assert drawn(network) == drawn(LossyNetwork(BERNOULLI))


# Evaluation and reliable blocks


@both_processes
def test_evaluation_does_not_shift_trainings_losses(process):
    """Wherever it falls; control: the same traffic outside the block does shift them."""
    with_evaluation, without, shifted = (LossyNetwork(process) for _ in range(3))
    expected = drawn(without) + drawn(without)
    first = drawn(with_evaluation)
    with with_evaluation.evaluation(step=20):
        drawn(with_evaluation, num_packets=333)
        drawn(with_evaluation, 1, 0)
    assert first + drawn(with_evaluation) == expected
    first = drawn(shifted)
    drawn(shifted, num_packets=333)
    assert first + drawn(shifted) != expected


@both_processes
def test_an_evaluation_loses_the_same_packets_at_the_same_step(process):
    """However far training is, and however often; other packets at other steps, and than training."""

    def evaluate(network, step):
        with network.evaluation(step):
            return drawn(network) + drawn(network, 1, 0)

    fresh, trained = LossyNetwork(process), LossyNetwork(process)
    training = drawn(trained) + drawn(trained, 1, 0)
    assert evaluate(trained, 20) == evaluate(trained, 20) == evaluate(fresh, 20)
    losses = [tuple(evaluate(fresh, step)) for step in (0, 20, 40)]
    assert len({*losses, tuple(training)}) == 4


def test_an_evaluation_is_independent_of_training():
    network = LossyNetwork(BERNOULLI)
    training = indicators(network.lost_packets(0, 1, 400_000), 400_000)
    with network.evaluation(step=0):
        evaluation = indicators(network.lost_packets(0, 1, 400_000), 400_000)
    assert_within(correlation(training, evaluation, 0.1), 0, "correlation")


def test_evaluations_nest():
    network, plain = LossyNetwork(BERNOULLI), LossyNetwork(BERNOULLI)
    with plain.evaluation(1):
        expected = [drawn(plain), drawn(plain), drawn(plain, 1, 0)]
    with network.evaluation(1):
        first = drawn(network)
        with network.evaluation(2):
            assert drawn(network) != first
        assert [first, drawn(network), drawn(network, 1, 0)] == expected
    assert drawn(network) == drawn(plain)


def spans_of(network):
    return network.lost_spans(direct(4000, RANKS), 4)


def test_reliable_loses_nothing_advances_nothing_counts_nothing():
    network = LossyNetwork(EVERYTHING, wire=TWO_FLOATS)
    assert spans_of(network).rows
    state = network.state_dict()
    assert not network.suspended
    with network.reliable():
        assert network.suspended
        assert spans_of(network) == LostSpans([], [], [], reliable=True)
    assert not network.suspended
    assert network.state_dict() == state
    assert not spans_of(network).reliable
    assert spans_of(network).rows


def test_reliable_does_not_shift_what_follows():
    network, plain = LossyNetwork(BURSTS, wire=TWO_FLOATS), LossyNetwork(BURSTS, wire=TWO_FLOATS)
    first = spans_of(network)
    with network.reliable():
        spans_of(network)
    assert [first, spans_of(network)] == [spans_of(plain), spans_of(plain)]


def test_a_message_without_losses_is_not_taken_for_a_reliable_one():
    """A repair scales what crossed a lossy link, whether or not anything was lost on the way."""
    assert spans_of(LossyNetwork(NOTHING)) == LostSpans([], [], [], reliable=False)


def test_reliable_blocks_nest():
    network = LossyNetwork(EVERYTHING)
    with network.reliable():
        with network.reliable():
            assert network.suspended
        assert network.suspended
        assert spans_of(network).rows == []
    assert spans_of(network).rows


def test_an_evaluation_can_be_made_reliable():
    network = LossyNetwork(EVERYTHING)
    with network.evaluation(3), network.reliable():
        assert spans_of(network).rows == []
    assert network.counters.rows() == []


@pytest.mark.parametrize("block", ["reliable", "evaluation"])
def test_an_exception_ends_a_block(block):
    network, plain = LossyNetwork(BERNOULLI, wire=TWO_FLOATS), LossyNetwork(BERNOULLI, wire=TWO_FLOATS)

    def fail_within():
        with network.reliable() if block == "reliable" else network.evaluation(7):
            spans_of(network)
            raise KeyError

    with pytest.raises(KeyError):
        fail_within()
    assert not network.suspended
    assert spans_of(network) == spans_of(plain)
    assert {row["purpose"] for row in network.counters.rows("training")} == {"training"}


# Lost elements


def test_what_one_dead_link_takes_by_hand():
    """Ten elements over four ranks, two to a packet: chunks [0, 3), [3, 6), [6, 9), [9, 10).

    Rank 12, at position 2, sends rank 10's chunk [0, 3) as packets [0, 2) and [2, 3); both are lost.
    """
    network = LossyNetwork({(12, 10): EVERYTHING}, wire=TWO_FLOATS)
    spans = network.lost_spans(direct(10, (10, 11, 12, 13)), 4)
    assert spans == LostSpans(rows=[2, 2], starts=[0, 2], stops=[2, 3])


def test_a_dead_uplink_takes_a_rank_s_whole_contribution():
    network = LossyNetwork({(7, SWITCH): EVERYTHING}, wire=TWO_FLOATS)
    spans = network.lost_spans(sender(5, (6, 7)), 4)
    assert spans == LostSpans(rows=[1, 1, 1], starts=[0, 2, 4], stops=[2, 4, 5])


def test_a_packet_s_elements_follow_their_size():
    network = LossyNetwork(EVERYTHING, wire=TWO_FLOATS)
    for itemsize, stops in ((2, [4, 5]), (4, [2, 4, 5]), (8, [1, 2, 3, 4, 5])):
        assert network.lost_spans(sender(5, (0,)), itemsize).stops == stops


def test_a_lost_packet_takes_all_it_carries():
    """As in a ring, where the partial sum of several ranks rides on one hop."""
    network = LossyNetwork(EVERYTHING, wire=TWO_FLOATS)
    spans = network.lost_spans((Hop(0, 1, 4, 7, positions=(3, 0)),), 4)
    assert set(lost_in(spans)) == {(3, 4, 6), (0, 4, 6), (3, 6, 7), (0, 6, 7)}


def test_an_owners_own_part_is_never_lost():
    network = LossyNetwork(EVERYTHING, wire=TWO_FLOATS)
    spans = network.lost_spans(direct(40, RANKS), 4)
    lost = {(row, element) for row, start, stop in lost_in(spans) for element in range(start, stop)}
    assert lost == {(row, element) for row in RANKS for element in range(40) if element // 10 != row}


@reproducible
@given(
    num_elements=st.integers(0, 300),
    ranks=st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True).map(tuple),
    route=st.sampled_from([sender, direct]),
    itemsize=st.sampled_from([2, 4, 8]),
    num_messages=st.integers(1, 3),
)
def test_lost_elements_are_those_of_the_lost_packets(num_elements, ranks, route, itemsize, num_messages):
    """Element by element: element e of a hop rides on packet (e - start) // elements of that link."""
    process = GilbertElliott.from_loss_and_burst(loss_rate=0.3, mean_burst_packets=2)
    network, twin = (LossyNetwork(process, wire=TWO_FLOATS) for _ in range(2))
    for _ in range(num_messages):
        spans = network.lost_spans(route(num_elements, ranks), itemsize)
        expected = set()
        for hop in route(num_elements, ranks):
            packets = TWO_FLOATS.num_packets(hop.stop - hop.start, itemsize)
            lost = drawn(twin, hop.src, hop.dst, packets)
            for element in range(hop.start, hop.stop):
                if (element - hop.start) // TWO_FLOATS.elements_per_packet(itemsize) in lost:
                    expected |= {(row, element) for row in hop.positions}
        listed = [(row, e) for row, start, stop in lost_in(spans) for e in range(start, stop)]
        assert len(listed) == len(set(listed))
        assert set(listed) == expected


# Counting


def test_counters_and_report_say_what_was_drawn():
    network = LossyNetwork(BERNOULLI)
    attention, mlp = Site(0, "attention", "forward"), Site(3, "mlp", "backward")
    lost = {"training": 0, "evaluation": 0}
    for size in (0, 10, 700):
        lost["training"] += len(drawn(network, 0, 1, size, site=attention))
        lost["training"] += len(drawn(network, 1, 0, size, site=mlp))
        lost["training"] += len(drawn(network, 1, 0, size, group="dp"))
        with network.evaluation(size):
            lost["evaluation"] += len(drawn(network, 0, 1, size, site=attention))
    report = network.report()
    for purpose, packets in (("training", 3 * 710), ("evaluation", 710)):
        rows = report[report["purpose"] == purpose]
        assert rows["packets"].sum() == network.counters.summary(purpose)["packets"] == packets
        assert rows["lost"].sum() == network.counters.summary(purpose)["lost"] == lost[purpose] > 0
    assert list(zip(report["layer"].fillna(-1), report["direction"].fillna("none"), strict=True)) == [
        (0, "forward"),
        (3, "backward"),
        (-1, "none"),
        (0, "forward"),
    ]
    assert (report["observed_loss_rate"] == report["lost"] / report["packets"]).all()
    assert 0.05 < report["lost"].sum() / report["packets"].sum() < 0.15


def test_a_collectives_packets_are_counted_on_every_link_it_uses():
    """4,000 floats over four ranks: chunks of 1,000, three packets of 364 each, on 12 links."""
    network = LossyNetwork(EVERYTHING)
    network.lost_spans(direct(4000, RANKS), 4, site=Site(1, "mlp", "forward"))
    summary = network.counters.summary("training")
    assert (summary["packets"], summary["lost"], summary["observed_loss_rate"]) == (36, 36, 1)
    assert set(summary["by_link"]) == {f"{src}->{dst}" for src, dst in itertools.permutations(RANKS, 2)}
    assert {link["packets"] for link in summary["by_link"].values()} == {3}
    assert set(summary["by_layer"]) == {"1"}


def test_a_report_of_nothing_is_an_empty_table():
    report = LossyNetwork(BERNOULLI).report()
    assert len(report) == 0
    assert {"purpose", "layer", "module", "direction", "src", "dst", "packets", "lost"} < set(report)


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
        losses = [spans_of(network), drawn(network), drawn(network, 1, 0)]
        with network.evaluation(1):
            losses.append(spans_of(network))
        network.load_state_dict(network.state_dict())
        return [*losses, spans_of(network)]

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
