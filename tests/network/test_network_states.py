"""Which states a network takes, and what a copy of it has of its own."""

import copy
import json
import pickle
import threading

import pytest

from lossytp.network import Bernoulli, GilbertElliott, LossyNetwork, PerPacket, Scope, Trace, Wire

SOME, MORE = Bernoulli(loss_rate=0.1), Bernoulli(loss_rate=0.2)
BURSTS = GilbertElliott.from_loss_and_burst(loss_rate=0.1, mean_burst_packets=8)


def every(number):
    return PerPacket(lambda packets, uniforms: packets % number == 0)


def drawn(network, src=0, dst=1):
    return network.lost_packets(src, dst, 1000).tolist()


def saved(network):
    """The state after some traffic, as a checkpoint holds it."""
    drawn(network)
    drawn(network, 1, 0)
    return json.loads(json.dumps(network.state_dict()))


OTHERS = [
    (LossyNetwork(SOME), LossyNetwork(MORE), "process"),
    (LossyNetwork(SOME), LossyNetwork(BURSTS), "process"),
    (LossyNetwork(every(10)), LossyNetwork(every(5)), "process"),
    (LossyNetwork(Trace(lost=[1], num_packets=9)), LossyNetwork(Trace(lost=[1], num_packets=8)), "process"),
    (LossyNetwork({(0, 1): SOME}), LossyNetwork({(0, 1): MORE}), "process of 0>1"),
    (LossyNetwork({(0, 1): SOME}), LossyNetwork({(0, 2): SOME}), "process of"),
    (LossyNetwork({(0, 1): SOME}), LossyNetwork(SOME), "process"),
    (LossyNetwork(SOME), LossyNetwork(SOME, wire=Wire(mtu_bytes=900)), "wire"),
    (LossyNetwork(SOME), LossyNetwork(SOME, scope=Scope(direction="forward")), "scope"),
]


@pytest.mark.parametrize(("one", "other", "name"), OTHERS)
@pytest.mark.parametrize("used", [True, False])
def test_a_state_of_a_network_with_other_settings_is_refused(one, other, name, used):
    state = saved(copy.deepcopy(one)) if used else json.loads(json.dumps(one.state_dict()))
    before = other.state_dict()
    with pytest.raises(ValueError, match=f"^the state is of a network with {name}.* = .*: give the same {name}") as no:
        other.load_state_dict(state)
    assert "\n" not in str(no.value)
    assert other.state_dict() == before


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (LossyNetwork(SOME), LossyNetwork(Bernoulli(loss_rate=0.1))),
        (LossyNetwork({(0, 1): SOME}, default=SOME), LossyNetwork(SOME)),
        (LossyNetwork(every(10)), LossyNetwork(every(10))),
        (LossyNetwork(SOME, wire=Wire(mtu_bytes=900)), LossyNetwork(SOME, wire=Wire(mtu_bytes=900))),
    ],
)
def test_a_state_of_a_network_with_the_same_settings_is_taken(one, other):
    other.load_state_dict(saved(one))
    assert drawn(other) == drawn(one)


def test_a_state_from_before_settings_were_saved_is_taken():
    network, resumed = LossyNetwork(BURSTS), LossyNetwork(BURSTS)
    state = saved(network)
    del state["settings"]
    resumed.load_state_dict(state)
    assert drawn(resumed) == drawn(network)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"links": [[1, 2]]}, "cannot be loaded"),
        ({"links": [[1, 2, 3]]}, "cannot be loaded"),
        ({"links": 5}, "cannot be loaded"),
        ({"links": [[["tp", 0, 1], {}]]}, "cannot be loaded"),
        ({"links": [[["tp", 0, 1], {"packets": 1, "losses": "x", "last_lost": 0}]]}, "cannot be loaded"),
        ({"normals": [[["tp", 0, 1], None]]}, "cannot be loaded"),
        ({"counters": {}}, "cannot be loaded"),
        ({"counters": {"packets": [[1]], "messages": []}}, "cannot be loaded"),
        ({"seed": None}, "the state is of seed None, this network of 0: give the same seed"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(change, message):
    network = LossyNetwork(SOME)
    state, plain = saved(network), LossyNetwork(SOME)
    plain.load_state_dict(state)
    with pytest.raises(ValueError, match=message) as refusal:
        network.load_state_dict({**state, **change})
    assert "\n" not in str(refusal.value)
    assert "give " in str(refusal.value)
    assert drawn(network) == drawn(plain)


@pytest.mark.parametrize("lacking", [["seed"], ["links", "counters"], ["seed", "links", "normals", "counters"]])
def test_a_state_that_lacks_something_is_refused(lacking):
    state = LossyNetwork(SOME).state_dict()
    for name in lacking:
        del state[name]
    with pytest.raises(ValueError, match=f"lacks {', '.join(lacking)}: give what state_dict\\(\\) returned$"):
        LossyNetwork(SOME).load_state_dict(state)
    if len(lacking) == 4:
        with pytest.raises(ValueError, match="lacks seed, links, normals, counters"):
            LossyNetwork(SOME).load_state_dict({})


@pytest.mark.parametrize("state", [None, [], "state", 5])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(TypeError, match=r"^state = .* is of type \w+, not dict: give what state_dict\(\) returned$"):
        LossyNetwork(SOME).load_state_dict(state)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda network: pickle.loads(pickle.dumps(network))])
def test_a_copy_goes_on_by_itself(copied):
    """It loses what the original would lose next, and neither moves, or counts for, the other."""
    network, plain = LossyNetwork(BURSTS, scope=Scope(phase="reduce")), LossyNetwork(BURSTS)
    expected = [drawn(plain), drawn(plain), drawn(plain)]
    assert drawn(network) == expected[0]
    other = copied(network)
    assert [drawn(other), drawn(other)] == expected[1:]
    assert [drawn(network), drawn(network)] == expected[1:]
    drawn(other)
    assert network.summary("training")["packets"] == 3000
    assert other.summary("training")["packets"] == 4000


def test_reliable_holds_for_other_threads_too():
    network = LossyNetwork(Bernoulli(loss_rate=1))

    def in_a_thread():
        lost = []
        thread = threading.Thread(target=lambda: lost.extend(drawn(network)))
        thread.start()
        thread.join()
        return len(lost)

    with network.reliable():
        assert in_a_thread() == 0
    assert in_a_thread() == 1000


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
    assert not len(drawn(network)), "the other block has not ended"
    leave.set()
    thread.join()
    assert len(drawn(network)) == 1000
