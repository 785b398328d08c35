"""Links of a lossy network: independent, reproducible, counted; evaluation and reliable blocks; messages over hops."""

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

from lossytp.network import ALGORITHMS, SWITCH, Bernoulli, GilbertElliott, LossyNetwork, Scope, Site, Wire
from lossytp.network.algorithms import direct, ring, sender
from lossytp.network.repairs import repair_named
from lossytp.network.routes import Hop, Missing
from lossytp.network.streams import Normals
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


def packets_of(missing):
    """As lists, which can be compared."""
    return [packets.tolist() for packets in missing.packets]


def elements_missing(hops, missing, elements_per_packet):
    """(position, element) of all that a lost packet carried, as often as one was lost."""
    lost = []
    for hop, packets in zip(hops, packets_of(missing), strict=True):
        for packet in packets:
            start = hop.start + packet * elements_per_packet
            stop = min(start + elements_per_packet, hop.stop)
            lost += [(position, element) for position in hop.positions for element in range(start, stop)]
    return lost


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


def sent(network):
    missing = network.send(direct.reduce(4000, RANKS), 4)
    return packets_of(missing), missing.reliable


def loses(network):
    return any(sent(network)[0])


def test_reliable_loses_nothing_advances_nothing_counts_nothing():
    network = LossyNetwork(EVERYTHING, wire=TWO_FLOATS)
    assert loses(network)
    state = network.state_dict()
    assert not network.suspended
    with network.reliable():
        assert network.suspended
        assert sent(network) == ([], True)
        assert network.normals(direct.reduce(4000, RANKS)) == []
    assert not network.suspended
    assert network.state_dict() == state
    lost, reliable = sent(network)
    assert any(lost)
    assert not reliable


def test_reliable_does_not_shift_what_follows():
    network, plain = LossyNetwork(BURSTS, wire=TWO_FLOATS), LossyNetwork(BURSTS, wire=TWO_FLOATS)
    first = sent(network)
    with network.reliable():
        sent(network)
    assert [first, sent(network)] == [sent(plain), sent(plain)]


def test_a_message_without_losses_is_not_taken_for_a_reliable_one():
    """A repair scales what crossed a lossy link, whether or not anything was lost on the way."""
    assert sent(LossyNetwork(NOTHING)) == ([[]] * 12, False)
    assert not LossyNetwork(NOTHING).send(direct.reduce(4000, RANKS), 4).any
    assert LossyNetwork({(2, 0): EVERYTHING}).send(direct.reduce(4000, RANKS), 4).any


def test_reliable_blocks_nest():
    network = LossyNetwork(EVERYTHING)
    with network.reliable():
        with network.reliable():
            assert network.suspended
        assert network.suspended
        assert not loses(network)
    assert loses(network)


def test_an_evaluation_can_be_made_reliable():
    network = LossyNetwork(EVERYTHING)
    with network.evaluation(3), network.reliable():
        assert not loses(network)
    assert network.counters.rows() == []


@pytest.mark.parametrize("block", ["reliable", "evaluation"])
def test_an_exception_ends_a_block(block):
    network, plain = LossyNetwork(BERNOULLI, wire=TWO_FLOATS), LossyNetwork(BERNOULLI, wire=TWO_FLOATS)

    def fail_within():
        with network.reliable() if block == "reliable" else network.evaluation(7):
            sent(network)
            raise KeyError

    with pytest.raises(KeyError):
        fail_within()
    assert not network.suspended
    assert sent(network) == sent(plain)
    assert {row["purpose"] for row in network.counters.rows("training")} == {"training"}


# Messages over hops


def test_what_one_dead_link_takes_by_hand():
    """Ten elements over four ranks, two to a packet: chunks [0, 3), [3, 6), [6, 9), [9, 10).

    Rank 12, at position 2, sends rank 10's chunk [0, 3) as packets [0, 2) and [2, 3); both are lost.
    """
    network = LossyNetwork({(12, 10): EVERYTHING}, wire=TWO_FLOATS)
    hops = direct.reduce(10, (10, 11, 12, 13))
    missing = network.send(hops, 4)
    assert packets_of(missing) == [[0, 1] if (hop.src, hop.dst) == (12, 10) else [] for hop in hops]
    assert missing.reliable is False
    assert elements_missing(hops, missing, 2) == [(2, 0), (2, 1), (2, 2)]


def test_a_dead_uplink_takes_a_rank_s_whole_contribution():
    network = LossyNetwork({(7, SWITCH): EVERYTHING}, wire=TWO_FLOATS)
    assert packets_of(network.send(sender.reduce(5, (6, 7)), 4)) == [[], [0, 1, 2]]


def test_a_packet_s_elements_follow_their_size():
    network = LossyNetwork(EVERYTHING, wire=TWO_FLOATS)
    for itemsize, packets in ((2, [0, 1]), (4, [0, 1, 2]), (8, [0, 1, 2, 3, 4])):
        assert packets_of(network.send(sender.reduce(5, (0,)), itemsize)) == [packets]


def test_a_lost_packet_takes_all_it_carries():
    """As in a ring, where the partial sum of several ranks rides on one hop."""
    network = LossyNetwork(EVERYTHING, wire=TWO_FLOATS)
    hops = (Hop(0, 1, 4, 7, positions=(3, 0)),)
    lost = elements_missing(hops, network.send(hops, 4), 2)
    assert sorted(lost) == [(0, 4), (0, 5), (0, 6), (3, 4), (3, 5), (3, 6)]


def test_an_owners_own_part_is_never_lost():
    network = LossyNetwork(EVERYTHING, wire=TWO_FLOATS)
    hops = direct.reduce(40, RANKS)
    lost = elements_missing(hops, network.send(hops, 4), 2)
    assert set(lost) == {(row, element) for row in RANKS for element in range(40) if element // 10 != row}


@reproducible
@given(
    num_elements=st.integers(0, 300),
    ranks=st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True).map(tuple),
    algorithm=st.sampled_from(sorted(ALGORITHMS)),
    phase=st.sampled_from(["reduce", "gather", "reduce_scatter", "all_gather"]),
    itemsize=st.sampled_from([2, 4, 8]),
    num_messages=st.integers(1, 3),
)
def test_missing_packets_are_those_that_the_links_lost(num_elements, ranks, algorithm, phase, itemsize, num_messages):
    """Hop by hop, in the order in which they are given; element e of a hop is on packet (e - start) // elements."""
    process = GilbertElliott.from_loss_and_burst(loss_rate=0.3, mean_burst_packets=2)
    network, twin = (LossyNetwork(process, wire=TWO_FLOATS) for _ in range(2))
    hops = getattr(ALGORITHMS[algorithm], phase)(num_elements, ranks)
    carried = TWO_FLOATS.elements_per_packet(itemsize)
    for _ in range(num_messages):
        missing = network.send(hops, itemsize)
        assert all(packets.dtype == np.int64 for packets in missing.packets)
        expected = []
        for hop in hops:
            lost = drawn(twin, hop.src, hop.dst, -(-(hop.stop - hop.start) // carried))
            for element in range(hop.start, hop.stop):
                if (element - hop.start) // carried in lost:
                    expected += [(position, element) for position in hop.positions]
        assert sorted(elements_missing(hops, missing, carried)) == sorted(expected)


def test_a_repair_s_packets_are_on_the_wire_and_counted():
    """Two packets of the message and one of parity; sent again twice; half a block of padding."""
    hops = (Hop(0, 1, 0, 4, positions=(0,)),)
    for repair, packets, lost, extra, lacks in (
        ("zero", 2, 2, 0, [0, 1]),
        ("fec(3, 2)", 3, 3, 1, [0, 1]),
        ("retransmit(2)", 6, 6, 4, [0, 1]),
    ):
        network = LossyNetwork(EVERYTHING, wire=TWO_FLOATS)
        assert packets_of(network.send(hops, 4, repair=repair_named(repair))) == [lacks]
        row = network.counters.rows()[0]
        assert [row[name] for name in ("packets", "lost", "extra", "missing")] == [packets, lost, extra, 2]
    network = LossyNetwork(EVERYTHING, wire=TWO_FLOATS)
    network.send((Hop(0, 1, 0, 9, positions=(0,)),), 4, repair=repair_named("hadamard(4)"))
    total = network.counters.summary("training")
    assert (total["packets"], total["extra"]) == (6, 1), "twelve coefficients of nine elements"


@pytest.mark.parametrize("repair", ["zero", "retransmit(3)", "fec(4, 2)"])
def test_a_repair_s_packets_advance_their_link_and_no_other(repair):
    network, twin = LossyNetwork(BURSTS, wire=TWO_FLOATS), LossyNetwork(BURSTS)
    network.send((Hop(0, 1, 0, 400, positions=(0,)),), 4, repair=repair_named(repair))
    sent_packets = network.counters.rows()[0]["packets"]
    assert (sent_packets > 200) == (repair != "zero")
    drawn(twin, num_packets=sent_packets)
    assert drawn(network) == drawn(twin)
    assert drawn(network, 1, 0) == drawn(twin, 1, 0)


def test_what_lies_outside_the_scope_is_reliable_and_advances_nothing():
    network, everywhere = LossyNetwork(BURSTS, scope=Scope(direction="forward")), LossyNetwork(BURSTS)
    hops = direct.reduce(40_000, RANKS)
    backward, forward = Site(0, "mlp", "backward"), Site(0, "mlp", "forward")
    before = network.state_dict()
    assert network.send(hops, 4, site=backward) == Missing([], reliable=True)
    assert network.send(hops, 4) == Missing([], reliable=True), "of no direction"
    assert network.normals(hops, site=backward) == []
    assert network.state_dict() == before
    inside = network.send(hops, 4, site=forward)
    assert not inside.reliable
    assert packets_of(inside) == packets_of(everywhere.send(hops, 4, site=forward))


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
    network.send(direct.reduce(4000, RANKS), 4, site=Site(1, "mlp", "forward"))
    summary = network.counters.summary("training")
    assert (summary["packets"], summary["lost"], summary["observed_loss_rate"]) == (36, 36, 1)
    assert set(summary["by_link"]) == {f"{src}->{dst}" for src, dst in itertools.permutations(RANKS, 2)}
    assert {link["packets"] for link in summary["by_link"].values()} == {3}
    assert set(summary["by_layer"]) == {"1"}


def test_a_report_of_nothing_is_an_empty_table():
    report = LossyNetwork(BERNOULLI).report()
    assert len(report) == 0
    places = {"purpose", "layer", "module", "direction", "operation", "phase", "group", "src", "dst"}
    assert places | {"packets", "lost", "extra", "missing", "observed_loss_rate"} == set(report)


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


def test_a_summary_counts_what_repairs_sent():
    network = LossyNetwork(Bernoulli(loss_rate=0.1), wire=Wire(mtu_bytes=900))
    network.send(sender.reduce(800 * 214, (0,)), 4, repair=repair_named("fec(10, 8)"))
    summary = network.summary("training")
    assert (summary["packets"], summary["extra"]) == (1000, 200)
