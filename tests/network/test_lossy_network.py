"""A lossy network: links, streams, blocks, counters and reports, states and copies, what is refused."""

import contextlib
import copy
import itertools
import json
import pickle
import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lossytp.network import (
    SWITCH,
    Bernoulli,
    FourState,
    GilbertElliott,
    LossyNetwork,
    PerPacket,
    Scope,
    Site,
    Trace,
    Wire,
)
from lossytp.network.lossy_network import CommConfig, described, process_described
from lossytp.network.random_numbers import Normals
from lossytp.network.repairs import Chain, Rescale, Zero
from lossytp.network.routes import DIRECT as direct
from lossytp.network.routes import RING as ring
from lossytp.network.routes import Hop
from lossytp.network.scope import LossTape
from tests.network.loss_statistics import assert_within, correlation, indicators, is_within, reproducible
from tests.network.lossy_traffic import (
    BERNOULLI,
    BURSTS,
    EVERYTHING,
    NOTHING,
    RANKS,
    TWO_FLOATS,
    both_processes,
    drawn,
    loses,
    sent,
)
from tests.network.processes import shared_losses

MORE = Bernoulli(loss_rate=0.2)
duplicated = pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda network: pickle.loads(pickle.dumps(network))])


def every(number):
    return PerPacket(lambda packets, uniforms: packets % number == 0)


def saved(network):
    """The state after some traffic, as a checkpoint holds it."""
    drawn(network)
    drawn(network, 1, 0)
    return json.loads(json.dumps(network.state_dict()))


# Links and their streams


def test_a_mapping_names_links_and_the_others_take_the_default():
    network = LossyNetwork({(0, 1): EVERYTHING, (2, SWITCH): BERNOULLI}, default=NOTHING)
    assert [network.process(*link) for link in ((0, 1), (1, 0), (2, SWITCH))] == [EVERYTHING, NOTHING, BERNOULLI]
    assert network.named_links == ((0, 1), (2, SWITCH))
    assert network.loss_rate(0, 1) == 1
    assert [len(drawn(network, *link)) for link in ((0, 1), (1, 0))] == [1000, 0]
    assert len(drawn(LossyNetwork({(0, 1): EVERYTHING}), 0, 2)) == 0, "without a default, others are lossless"
    assert LossyNetwork({}, default=MORE).process(0, 1) == MORE
    assert LossyNetwork(BURSTS).process(3, SWITCH) == BURSTS


@both_processes
def test_the_same_seed_loses_the_same_packets_whatever_else_was_sent(process):
    """So every rank can compute any link's losses alone."""
    busy, idle = LossyNetwork(process, seed=5), LossyNetwork(process, seed=np.int64(5))
    for link in itertools.permutations(RANKS, 2):
        drawn(busy, *link, group="other")
        if link != (0, 1):
            drawn(busy, *link)
    assert drawn(busy) == drawn(idle, np.int64(0), np.int32(1), np.int64(1000))


@both_processes
@pytest.mark.parametrize("other", [{"seed": 1}, {"group": "dp"}, {"evaluation": 0}], ids=str)
def test_seeds_groups_and_evaluations_lose_independently(process, other):
    """Correlation 0 within four standard errors over 400,000 packets; the same name twice has correlation 1."""

    def is_lost(*, seed=0, group="tp", evaluation=None):
        network = LossyNetwork(process, seed=seed)
        with contextlib.nullcontext() if evaluation is None else network.evaluation(evaluation):
            return indicators(network.lost_packets(0, 1, 400_000, group=group), 400_000)

    assert_within(correlation(is_lost(), is_lost(**other), 0.1), 0, "correlation")
    assert not is_within(correlation(is_lost(**other), is_lost(**other), 0.1), 0)


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


def test_evaluation_does_not_shift_training_s_normals_and_a_saved_state_holds_them():
    network, plain, resumed = (LossyNetwork(BERNOULLI) for _ in range(3))

    def noise(of):
        return [numbers.tolist() for numbers in of.normals(ring.reduce(30, (0, 1)))]

    first = noise(network)
    with network.evaluation(1):
        assert noise(network) != first
    resumed.load_state_dict(json.loads(json.dumps(network.state_dict())))
    assert [first, noise(network)] == [noise(plain), second := noise(plain)]
    assert noise(resumed) == second


# Blocks: evaluation apart from training, and reliable messages


@both_processes
def test_evaluation_does_not_shift_trainings_losses(process):
    """Control: the same traffic outside the block does shift them."""
    with_evaluation, without, shifted = (LossyNetwork(process) for _ in range(3))
    expected = [drawn(without), drawn(without)]
    assert [drawn(with_evaluation), drawn(shifted)] == [expected[0]] * 2
    with with_evaluation.evaluation(step=20):
        drawn(with_evaluation, num_packets=333)
    drawn(shifted, num_packets=333)
    assert drawn(with_evaluation) == expected[1] != drawn(shifted)


@both_processes
def test_an_evaluation_loses_the_same_packets_at_the_same_step(process):
    """However far training is, and however often; other packets at other steps, and than training."""

    def evaluate(network, step):
        with network.evaluation(step):
            return drawn(network) + drawn(network, 1, 0)

    fresh, trained = LossyNetwork(process), LossyNetwork(process)
    training = drawn(trained) + drawn(trained, 1, 0)
    assert evaluate(trained, 20) == evaluate(trained, np.int64(20)) == evaluate(fresh, 20)
    losses = [tuple(evaluate(fresh, step)) for step in (0, 20, 40)]
    assert len({*losses, tuple(training)}) == 4


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


def test_reliable_loses_nothing_advances_nothing_counts_nothing():
    network, plain = (LossyNetwork(BURSTS, wire=TWO_FLOATS) for _ in range(2))
    assert sent(network) == sent(plain)
    state = network.state_dict()
    with network.reliable():
        with network.reliable():
            assert network.suspended
        assert network.suspended
        assert sent(network) == ([], True)
        assert drawn(network) == network.normals(direct.reduce(4000, RANKS)) == []
        with network.evaluation(3):
            assert not loses(network)
    assert not network.suspended
    assert network.state_dict() == state
    assert sent(network) == sent(plain)


def test_a_message_without_losses_is_not_taken_for_a_reliable_one():
    """A repair scales what crossed a lossy link, whether or not anything was lost on the way."""
    assert sent(LossyNetwork(NOTHING)) == ([[]] * 12, False)
    assert not LossyNetwork(NOTHING).send(direct.reduce(4000, RANKS), 4).any
    assert LossyNetwork({(2, 0): EVERYTHING}).send(direct.reduce(4000, RANKS), 4).any


@pytest.mark.parametrize("block", [lambda network: network.reliable(), lambda network: network.evaluation(7)])
def test_an_exception_ends_a_block(block):
    network, plain = LossyNetwork(BERNOULLI, wire=TWO_FLOATS), LossyNetwork(BERNOULLI, wire=TWO_FLOATS)

    def fail_within():
        with block(network):
            raise KeyError

    with pytest.raises(KeyError):
        fail_within()
    assert not network.suspended
    assert network.block == ("training", 0)
    assert sent(network) == sent(plain)


def test_reliable_blocks_of_several_threads_may_overlap():
    network, entered, leave = LossyNetwork(Bernoulli(loss_rate=1)), threading.Event(), threading.Event()

    def outlasts():
        with network.reliable():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=outlasts, daemon=True)  # a failed assertion leaves it waiting
    with network.reliable():
        thread.start()
        entered.wait()
    assert not len(drawn(network)), "the other thread's block has not ended, and holds here too"
    leave.set()
    thread.join()
    assert len(drawn(network)) == 1000


def test_packets_taken_by_hand_are_lost_within_the_scope_alone():
    network = LossyNetwork(Bernoulli(loss_rate=0.5), scope=Scope(direction="forward"))
    assert len(network.lost_packets(0, 1, 100, site=Site(0, "mlp", "backward"))) == 0
    assert network.counters.rows() == []
    assert len(network.lost_packets(0, 1, 100, site=Site(0, "mlp", "forward"))) > 20


# Counters and reports


def test_counters_and_report_say_what_was_drawn():
    network = LossyNetwork(BERNOULLI)
    attention, mlp = Site(0, "attention", "forward"), Site(3, "mlp", "backward")
    lost = {"training": 0, "evaluation": 0}
    for size in (0, 10, 700):
        lost["training"] += len(drawn(network, 0, 1, size, site=attention))
        lost["training"] += len(drawn(network, 1, 0, size, site=mlp))
        with network.evaluation(size):
            lost["evaluation"] += len(drawn(network, 0, 1, size, group="dp"))
    report = network.report()
    for purpose, packets in (("training", 2 * 710), ("evaluation", 710)):
        rows = report[report["purpose"] == purpose]
        assert rows["packets"].sum() == network.counters.summary(purpose)["packets"] == packets
        assert rows["lost"].sum() == network.counters.summary(purpose)["lost"] == lost[purpose] > 0
    assert report["layer"].fillna(-1).tolist() == [0, 3, -1]
    assert report["direction"].fillna("none").tolist() == ["forward", "backward", "none"]
    assert (report["observed_loss_rate"] == report["lost"] / report["packets"]).all()


def test_a_summary_counts_how_often_a_recording_began_again():
    recorded, resumed = (LossyNetwork({(0, 1): Trace(lost=[2], num_packets=5)}) for _ in range(2))
    recorded.lost_packets(0, 1, 100)
    assert recorded.summary("training")["wraps"] in (19, 20)
    assert "wraps" not in recorded.summary("evaluation") | LossyNetwork(BERNOULLI).summary("training")
    resumed.load_state_dict(recorded.state_dict())
    assert resumed.summary("training") == recorded.summary("training")


# States and copies


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


def test_a_state_is_neither_saved_nor_loaded_within_evaluation():
    network = LossyNetwork(BERNOULLI)
    state = network.state_dict()
    for use in (network.state_dict, lambda: network.load_state_dict(state)):
        with network.evaluation(1), pytest.raises(ValueError, match="outside of evaluation"):
            use()


OTHERS = [
    (LossyNetwork(BERNOULLI), LossyNetwork(MORE), "process"),
    (LossyNetwork(every(10)), LossyNetwork(every(5)), "process"),
    (LossyNetwork(Trace(lost=[1], num_packets=9)), LossyNetwork(Trace(lost=[1], num_packets=8)), "process"),
    (LossyNetwork({(0, 1): BERNOULLI}), LossyNetwork({(0, 1): MORE}), "process of 0>1"),
    (LossyNetwork({(0, 1): BERNOULLI}), LossyNetwork({(0, 2): BERNOULLI}), "process of"),
    (LossyNetwork(BERNOULLI, ranks_per_node=4), LossyNetwork(BERNOULLI, ranks_per_node=2), "process"),
    (LossyNetwork(BERNOULLI), LossyNetwork(BERNOULLI, wire=Wire(mtu_bytes=900)), "wire"),
    (LossyNetwork(BERNOULLI), LossyNetwork(BERNOULLI, scope=Scope(direction="forward")), "scope"),
    (LossyNetwork(BERNOULLI, seed=3), LossyNetwork(BERNOULLI, seed=4), "seed"),
]


@pytest.mark.parametrize(("one", "other", "name"), OTHERS)
def test_a_state_of_a_network_with_other_settings_is_refused(one, other, name):
    for state in (one.state_dict(), saved(copy.deepcopy(one))):
        before = other.state_dict()
        with pytest.raises(ValueError, match=f"^the state is of a network with {name}"):
            other.load_state_dict(state)
        assert other.state_dict() == before


SAME = [(LossyNetwork(every(10)), LossyNetwork(every(10))), (LossyNetwork({}, default=MORE), LossyNetwork(MORE))]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_a_state_of_a_network_with_the_same_settings_is_taken(one, other):
    state = saved(one)
    other.load_state_dict(state)
    assert drawn(other) == drawn(one)
    del state["settings"]  # as before settings were saved
    other.load_state_dict(state)


NOT_LINKS = ({"links": None}, {"links": [[["tp", 0]]]}, {"links": [[["tp", 0, 1], {}]]})


@pytest.mark.parametrize("change", [*NOT_LINKS, {"normals": [[["tp", 0, 1], None]]}, {"counters": {}}, {"seed": None}])
def test_a_damaged_state_is_refused_and_changes_nothing(change):
    network, plain = LossyNetwork(BERNOULLI), LossyNetwork(BERNOULLI)
    state = saved(network)
    plain.load_state_dict(state)
    for damaged in (state | change, {name: value for name, value in state.items() if name not in change}):
        with pytest.raises(ValueError, match="state"):
            network.load_state_dict(damaged)
    assert drawn(network) == drawn(plain)


@duplicated
def test_a_copy_goes_on_by_itself(duplicate):
    """It loses what the original would lose next, and neither moves, or counts for, the other."""
    network, plain = LossyNetwork(BURSTS, scope=Scope(phase="reduce")), LossyNetwork(BURSTS)
    expected = [drawn(plain), drawn(plain), drawn(plain)]
    assert drawn(network) == expected[0]
    other = duplicate(network)
    assert [drawn(other), drawn(other)] == expected[1:]
    assert [drawn(network), drawn(network)] == expected[1:]
    drawn(other)
    assert network.summary("training")["packets"] == 3000
    assert other.summary("training")["packets"] == 4000


BLOCKS = [LossyNetwork.reliable, lambda of: of.evaluation(7), lambda of: of.recording(LossTape())]


@duplicated
@pytest.mark.parametrize("block", BLOCKS)
def test_a_copy_made_within_a_block_is_outside_of_it(block, duplicate):
    network, plain = (LossyNetwork(BERNOULLI, wire=TWO_FLOATS) for _ in range(2))
    assert sent(network) == sent(plain)
    with block(network), network.evaluation(8):
        sent(network)
        copied = duplicate(network)
    assert (copied.tape, copied.block) == (None, ("training", 0))
    assert sent(copied) == sent(plain)
    copied.load_state_dict(plain.state_dict())
    assert sent(duplicate(copied)) == sent(plain), "what was loaded is copied too"


SETTINGS = [
    *(Bernoulli(loss_rate=0.1), MORE, BURSTS, GilbertElliott(p_good_to_bad=0.2, p_bad_to_good=0.2, loss_bad=0.2)),
    *(FourState(p13=0.1, p31=0.9), shared_losses(0.1, 0.5), shared_losses(0.1, 0.9), shared_losses(0.1, 0.5, switch=1)),
    *(Trace(lost=[1, 5], num_packets=20), Trace(lost=[1, 6], num_packets=20), every(10), every(5)),
]


def test_equal_settings_are_described_alike_and_others_apart_without_an_address():
    lines = {process_described(process) for process in SETTINGS}
    assert len(lines) == len(SETTINGS)
    assert not any("\n" in line or "0x" in line for line in lines)
    half = Bernoulli(loss_rate=0.5), Bernoulli(loss_rate=np.float32(0.5))
    wires = Wire(mtu_bytes=1500), Wire(mtu_bytes=np.int64(1500))
    for one, other in (half, wires, (Bernoulli(loss_rate=0), NOTHING), (Scope(layers=(0, 2)), Scope(layers=[0, 2]))):
        assert described(one) == described(other)


# What is refused, and what is left alone


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *(("link", {"process": {key: MORE}}) for key in ("0>1", (0, 1, 2), 3, (0, 0), (0, -2), (0, 1.0))),
        *(("default", {"default": MORE}), ("process", {"process": {}}), ("wire", {"wire": 1500})),
        *(("scope", {"scope": scope}) for scope in ("forward", None)),
        *(("seed", {"seed": seed}) for seed in ("1", True, 0.5)),
        *(("ranks_per_node", {"ranks_per_node": ranks}) for ranks in (0, 2.5, True, "2")),
    ],
)
def test_arguments_that_cannot_be_are_refused(name, arguments):
    with pytest.raises((TypeError, ValueError), match=name):
        LossyNetwork(**{"process": BERNOULLI} | arguments)


def test_a_negative_number_of_packets_is_refused_and_none_advance_nothing():
    network = LossyNetwork(BERNOULLI)
    with pytest.raises(ValueError, match="num_packets"):
        network.lost_packets(0, 1, -1)
    with pytest.raises(TypeError, match="step"), network.evaluation(0.5):
        pass
    assert drawn(network, num_packets=0) == []
    assert drawn(network) == drawn(LossyNetwork(BERNOULLI))


def test_global_random_generators_are_neither_read_nor_moved():
    def losses():
        network = LossyNetwork({(0, 1): BERNOULLI, (1, 0): BURSTS}, default=BURSTS)
        with network.evaluation(1):
            evaluated = sent(network)
        return evaluated, sent(network), drawn(network)

    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002

    before, first = states(), losses()
    assert states() == before
    for move in (random.random, np.random.random, lambda: torch.rand(1)):
        move()
    assert all(one != other for one, other in zip(states(), before, strict=True))
    assert losses() == first


# How ranks exchange messages

SHARDS = {"sequence_parallel": True}


@pytest.mark.parametrize(
    ("comm", "name"),
    [
        ({"algorithm": "rings"}, "algorithm"),
        *(({"repair": repair}, "repair") for repair in ("magic", "hadamard(6)")),
        *(({"wire_dtype": "fp64"}, "wire_dtype"), ({"control": "loud"}, "control")),
        ({"repair": "local", "algorithm": "sender"}, "repair"),
        ({"repair": "local", "sequence_parallel": True, "reliable_gather": False}, "repair"),
        ({"repair": "local", "exact_adjoint": True}, "repair"),
        *(({"exact_adjoint": True, **how}, "exact_adjoint") for how in ({"reliable_gather": False}, SHARDS)),
        ({"masked_backward": True}, "masked_backward"),
        ({"masked_backward": True, "reliable_gather": False, "sequence_parallel": True}, "masked_backward"),
        ({"masked_backward": True, "reliable_gather": False, "repair": "local"}, "masked_backward"),
        ({"algorithm": "sender", "reliable_gather": False}, "reliable_gather"),
        *(({"control": "noise", **how}, "control") for how in ({"repair": "rescale"}, {"exact_adjoint": True})),
        ({"control": "noise", "masked_backward": True, "reliable_gather": False}, "control"),
        *(({"control": "noise", "algorithm": name, **SHARDS}, "control") for name in ("sender", "switch")),
        *(({"control": "noise", "algorithm": name}, "control") for name in ("ring", "tree")),
        ({"reliable_gathers": False}, "did you mean reliable_gather"),
    ],
)
def test_ways_of_exchange_that_cannot_be_are_refused(comm, name):
    with pytest.raises(ValueError, match=name):
        CommConfig.named(**comm)


def test_a_repair_that_chooses_packets_unknown_to_senders_is_refused():
    class Head(Zero):
        name, stage = "head", "select"

    for repair in (Head(), Chain((Head(), Rescale()))):
        with pytest.raises(ValueError, match=r"repair = 'head.*' chooses packets, but is no subclass of Protect"):
            CommConfig(repair=repair)
