"""Where packets may be lost, packets sent and lost, and recorded losses for what is computed a second time."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossytp.network import Bernoulli, LossyNetwork, Wire
from lossytp.network.routes import SENDER
from lossytp.network.scope import EVERYWHERE, NOWHERE, Counters, LossTape, Scope, Site, links_named, range_named
from tests.network.loss_statistics import reproducible

SITES = [
    Site(layer, module, direction, "all_reduce", phase)
    for layer, module, direction, phase in itertools.product(
        (None, 0, 1, 2, 3), (None, "attention", "mlp"), (None, "forward", "backward"), ("reduce", "gather")
    )
]


@pytest.mark.parametrize(
    ("scope", "inside"),
    [
        (Scope(direction="forward"), lambda site: site.direction == "forward"),
        (Scope(module="mlp"), lambda site: site.module == "mlp"),
        (Scope(phase="gather"), lambda site: site.phase == "gather"),
        (Scope(layers=(1, 3)), lambda site: site.layer in (1, 2)),
        (Scope(layers=(0, 1)), lambda site: site.layer == 0),
        (
            Scope(direction="backward", module="attention", layers=(2, 4), phase="reduce"),
            lambda site: site.layer in (2, 3) and site[1:] == ("attention", "backward", "all_reduce", "reduce"),
        ),
    ],
)
def test_a_scope_covers_its_part_and_no_other(scope, inside):
    covered = [site for site in SITES if scope.covers(site)]
    assert covered == [site for site in SITES if inside(site)]
    assert 0 < len(covered) < len(SITES)
    assert all(EVERYWHERE.covers(site) for site in (*SITES, None))
    assert Scope(layers=[1, 3]) == Scope(layers=(1, 3))


def test_a_message_of_no_known_place_is_a_reduction_outside_all_layers():
    parts = [Scope(phase="reduce"), Scope(phase="gather"), Scope(layers=(0, 100)), Scope(direction="forward")]
    assert [scope.covers(None) for scope in parts] == [True, False, False, False]


@pytest.mark.parametrize(
    ("name", "value"),
    [("direction", "up"), ("module", "ffn"), ("phase", "scatter")]
    + [("layers", bad) for bad in ((2, 2), (0, 2, 5), (), (-1, 2), "1:3", 5, range(2), {0, 2})],
)
def test_a_part_that_there_is_not_is_refused(name, value):
    with pytest.raises((TypeError, ValueError), match=name):
        Scope(**{name: value})


def test_links_and_layers_are_read_from_text():
    assert links_named("0>1, 2>-1,-1>3") == [(0, 1), (2, -1), (-1, 3)]
    assert range_named("lossy_layers", " 0:2") == (0, 2)
    for text in ("0>1,0>1", "0>1,00>1", "0>0", "0>1,", "", "0-1"):
        with pytest.raises(ValueError, match="link"):
            links_named(text)
    with pytest.raises(ValueError, match="lossy_layers"):
        range_named("lossy_layers", "0-2")


# Counters

sites = st.builds(
    Site,
    st.integers(0, 2),
    st.sampled_from(["attention", "mlp"]),
    st.sampled_from(["forward", "backward"]),
    st.sampled_from(["all_reduce", "all_gather"]),
    st.sampled_from(["reduce", "gather"]),
)
keys = st.tuples(
    st.sampled_from(["training", "evaluation"]),
    st.none() | sites,
    st.sampled_from(["tp", "dp"]),
    st.integers(-1, 2),
    st.integers(-1, 2),
)
counts = st.integers(0, 1000)
additions = st.lists(st.tuples(keys, counts, counts, counts, counts), max_size=12)
messages = st.lists(st.tuples(keys.map(lambda key: key[:3]), st.booleans()), max_size=12)


def counters_of(calls, called=()):
    counters = Counters()
    for row, packets, lost, *repaired in calls:
        counters.add(row, packets, lost, *(repaired or (0, lost)))
    for key, lossy in called:
        counters.add_message(key, lossy)
    return counters


def test_a_summary_by_hand():
    """Two layers, both directions, two links; evaluation and other purposes stay apart."""
    counters = Counters()
    counters.add(("training", Site(0, "attention", "forward"), "tp", 0, 1), 10, 1, 2, 0)
    counters.add(("training", Site(0, "attention", "forward"), "tp", 0, 1), 10, 2, 2, 1)
    counters.add(("training", Site(0, "mlp", "backward", "all_reduce", "gather"), "tp", 1, 0), 30, 3, 0, 3)
    counters.add(("training", Site(1, "mlp", "forward"), "tp", 0, 1), 50, 4, 5, 2)
    counters.add(("evaluation", Site(1, "mlp", "forward"), "tp", 0, 1), 7, 7, 0, 7)

    def total(packets, lost, extra, missing):
        rate = lost / packets
        return {"packets": packets, "lost": lost, "extra": extra, "missing": missing, "observed_loss_rate": rate}

    assert counters.summary("training") == {
        **total(100, 10, 9, 6),
        "by_direction": {"forward": total(70, 7, 9, 3), "backward": total(30, 3, 0, 3)},
        "by_operation": {"all_reduce": total(100, 10, 9, 6)},
        "by_phase": {"reduce": total(70, 7, 9, 3), "gather": total(30, 3, 0, 3)},
        "by_module": {"attention": total(20, 3, 4, 1), "mlp": total(80, 7, 5, 5)},
        "by_layer": {"0": total(50, 6, 4, 4), "1": total(50, 4, 5, 2)},
        "by_link": {"0->1": total(70, 7, 9, 3), "1->0": total(30, 3, 0, 3)},
        "messages": {"called": 0, "lossy": 0, "by_direction": {}, "by_operation": {}},
    }
    assert counters.summary("evaluation")["packets"] == 7
    counters.add(("training", None, "replicas", 0, 1), 1, 1, 0, 1)  # another end's 0 and 1
    links = counters.summary("training")["by_link"]
    assert {name: row["packets"] for name, row in links.items()} == {"tp: 0->1": 70, "1->0": 30, "replicas: 0->1": 1}
    with pytest.raises(ValueError, match="purpose"):
        counters.summary("eval")
    summary = Counters().summary("training")
    assert (summary["packets"], summary["lost"], summary["observed_loss_rate"]) == (0, 0, None)


@reproducible
@given(called=messages)
def test_messages_are_totalled_by_direction_and_operation_for_a_purpose(called):
    counters = counters_of([], called)
    for purpose in ("training", "evaluation"):
        messages = counters.summary(purpose)["messages"]
        for grouping in ("direction", "operation"):
            total, lossy = Counter(), Counter()
            for (of, site, _), lost_something in called:
                if of == purpose:
                    group = str(getattr(site or NOWHERE, grouping))
                    total[group] += 1
                    lossy[group] += lost_something
            assert (messages["called"], messages["lossy"]) == (total.total(), lossy.total())
            expected = {name: {"called": total[name], "lossy": lossy[name]} for name in total}
            assert messages[f"by_{grouping}"] == expected


def everything(counters):
    """In an order of its own."""
    return {name: sorted(map(repr, table)) for name, table in counters.state_dict().items()}


@reproducible
@given(calls=additions, called=messages)
def test_what_two_processes_saw_is_counted_once(calls, called):
    merged = counters_of(calls, called)
    merged.merge(counters_of(calls, called))
    assert merged.state_dict() == counters_of(calls, called).state_dict()


@reproducible
@given(calls=additions, called=messages)
def test_what_only_one_process_saw_is_taken_in(calls, called):
    """Each group has rows of its own."""

    def part(group):
        return counters_of([c for c in calls if c[0][2] == group], [c for c in called if c[0][2] == group])

    for first, second in (("tp", "dp"), ("dp", "tp")):
        merged, other = part(first), part(second)
        before = other.state_dict()
        merged.merge(other)
        assert everything(merged) == everything(counters_of(calls, called))
        merged.add(("training", None, second, 0, 1), 1, 1, 1, 1)
        merged.add_message(("training", None, second), True)
        assert other.state_dict() == before, "the other process's counters are now the same object"


@pytest.mark.parametrize("theirs", [(5, 2), (6, 1), (5, 1, 2, 0), (5, 1, 0, 0)])
def test_processes_that_disagree_ran_apart(theirs):
    key = ("training", Site(None, None, "forward"), "tp", 0, 1)
    with pytest.raises(ValueError, match="processes disagree on the traffic"):
        counters_of([(key, 5, 1)]).merge(counters_of([(key, *theirs)]))
    with pytest.raises(ValueError, match="processes disagree on the traffic"):
        counters_of([], [(key[:3], False)]).merge(counters_of([], [(key[:3], True)]))


# Tapes


@pytest.fixture
def network():
    return LossyNetwork(Bernoulli(loss_rate=0.3), wire=Wire(mtu_bytes=60, header_bytes=44))


def send(network):
    """One message of 100 packets from each of two ranks: a replay by chance alone has odds of 2^-170."""
    missing = network.send(SENDER.reduce(400, (0, 1)), 4)
    return [packets.tolist() for packets in missing.packets], missing.reliable


def numbers(network):
    """Of each element of such a message."""
    return [numbers.tolist() for numbers in network.normals(SENDER.reduce(400, (0, 1)))]


def test_a_recomputed_collective_loses_the_same_and_advances_nothing(network):
    """Control: without the tape the second message loses other packets, and is counted."""
    tape = LossTape()
    with network.recording(tape):
        first, second = send(network), send(network)
    state = network.state_dict()
    for _ in range(2):
        with network.recording(tape):
            assert [send(network), send(network)] == [first, second]
    assert network.state_dict() == state
    assert send(network) not in (first, second)
    assert network.state_dict() != state


def test_each_tape_has_losses_of_its_own_and_tapes_nest(network):
    outer, inner = LossTape(), LossTape()
    with network.recording(outer):
        first = send(network)
        with network.recording(inner):
            second = send(network)
        third = send(network)
    with network.recording(inner):
        assert send(network) == second
    with network.recording(outer):
        assert [send(network), send(network)] == [first, third]


def test_recording_ends_with_its_block_even_by_an_exception(network):
    tape = LossTape()

    def record_and_fail():
        with network.recording(tape):
            send(network)
            raise KeyError

    with pytest.raises(KeyError):
        record_and_fail()
    assert send(network) != send(network)  # neither recorded nor replayed
    assert tape.replaying


def test_recorded_noise_comes_again_between_recorded_losses(network):
    """Control: without the tape other numbers follow."""
    tape = LossTape()
    with network.recording(tape):
        recorded = [send(network), numbers(network), send(network), numbers(network)]
    with network.recording(tape):
        assert [send(network), numbers(network), send(network), numbers(network)] == recorded
    assert numbers(network) not in recorded
