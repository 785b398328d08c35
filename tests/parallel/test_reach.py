"""Settings of a network that could lose nothing are refused before anything is sent."""

import re

import pytest
import torch

import lossytp as ltp
from lossytp.network.lossy_network import CommConfig
from lossytp.network.routes import ALGORITHMS
from lossytp.parallel.group import RankGroup, check_layers, check_reaches
from tests.parallel.conftest import bernoulli, tiny_gpt2

SOME = ltp.Bernoulli(loss_rate=0.1)
OWN = {"reliable_gather": False}


def named(*links: tuple[int, int]) -> ltp.LossyNetwork:
    return ltp.LossyNetwork(dict.fromkeys(links, SOME))


def parallelize(network: ltp.LossyNetwork, **comm: object) -> None:
    ltp.parallelize(tiny_gpt2(), network, tensor_parallel_size=4, **comm)


def all_reduce(network: ltp.LossyNetwork, **comm: object) -> None:
    ltp.all_reduce(torch.ones(4, 8), network, **comm)


IGNORED = [
    (named((0, 99)), {}, "link 0>99 names rank 99, which is above 3, the last of 4 ranks: name links among ranks 0"),
    (named((0, 1), (4, 1)), {}, "link 4>1 names rank 4, which is above 3"),
    (named((0, 2)), {"algorithm": "ring"}, "names 0>2, over which 'ring' of 4 ranks sends nothing that may be lost: "),
    (named((0, 1)), {"algorithm": "sender"}, "nothing that may be lost: name some of 0>-1, 1>-1, 2>-1, 3>-1"),
    (named((-1, 0)), {"algorithm": "switch"}, "nothing that may be lost: name some of 0>-1, 1>-1, 2>-1, 3>-1"),
    (bernoulli(0.1, scope=ltp.Scope(phase="gather")), {}, "scope = Scope(phase='gather') loses nothing, because the"),
]
USED = [
    (named((0, 1)), {}),
    (named((0, 1), (0, 2)), {"algorithm": "ring"}),
    (named((-1, 0)), {"algorithm": "switch", **OWN}),
    (bernoulli(0.1, scope=ltp.Scope(phase="gather")), OWN),
    (bernoulli(0.1, scope=ltp.Scope(phase="reduce")), {}),
]


@pytest.mark.parametrize("entry", [parallelize, all_reduce])
@pytest.mark.parametrize(("network", "comm", "message"), IGNORED)
def test_what_could_lose_nothing_is_refused(entry, network, comm, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        entry(network, **comm)
    assert "\n" not in str(refusal.value)
    assert network.counters.rows() == []


@pytest.mark.parametrize(("network", "comm"), USED)
def test_what_can_lose_something_is_taken(network, comm) -> None:
    parallelize(network, **comm)
    all_reduce(network, **comm)
    assert sum(row["packets"] for row in network.counters.rows()) > 0


@pytest.mark.parametrize("layers", [(50, 60), (0, 4)])
def test_layers_that_a_model_does_not_have_are_refused(layers) -> None:
    blocks = tiny_gpt2().config.n_layer
    assert blocks < 4
    check_layers(bernoulli(0.1, scope=ltp.Scope(layers=(0, blocks))), blocks)
    with pytest.raises(ValueError, match=rf"layers = \({layers[0]}, {layers[1]}\) ends above the model's {blocks} bl"):
        parallelize(bernoulli(0.1, scope=ltp.Scope(layers=layers)))


@pytest.mark.parametrize("part", [{"direction": "forward"}, {"module": "mlp"}, {"layers": (0, 1)}])
def test_a_single_sum_lies_outside_every_part_of_a_model(part) -> None:
    with pytest.raises(
        ValueError, match=r"^scope = Scope\(.*\) leaves out a single sum, which belongs to no layer, module or"
    ):
        all_reduce(bernoulli(0.1, scope=ltp.Scope(**part)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("phase", [None, "reduce", "gather"])
def test_lossy_links_are_those_that_are_counted(algorithm, phase) -> None:
    """The links that an all-reduce of many packets does use, in what may be lost of it."""
    for reliable_gather in (True, False):
        if ALGORITHMS[algorithm].sum_reaches_all and not reliable_gather:
            continue
        comm = CommConfig.named(algorithm=algorithm, reliable_gather=reliable_gather)
        expected = comm.lossy_links((0, 1, 2, 3), phase)
        network = bernoulli(0.1, scope=ltp.Scope(phase=phase))
        if not expected:
            with pytest.raises(ValueError, match="because the gather phase is reliable"):
                ltp.all_reduce(torch.ones(4, 1000), network, algorithm=algorithm, reliable_gather=reliable_gather)
            continue
        ltp.all_reduce(torch.ones(4, 1000), network, algorithm=algorithm, reliable_gather=reliable_gather)
        assert {(row["src"], row["dst"]) for row in network.counters.rows()} == expected


def test_a_group_among_others_leaves_the_others_their_links() -> None:
    """Rank 4 is the first of this replica, and ranks 0 to 3 another's."""
    group = RankGroup(4, first_rank=4)
    assert group.num_global_ranks == 8
    check_reaches(named((0, 4)), group, CommConfig())
    check_reaches(bernoulli(0.1, scope=ltp.Scope(phase="gather")), group, CommConfig())
    with pytest.raises(ValueError, match="link 0>8 names rank 8, which is above 7, the last of 8 ranks"):
        check_reaches(named((0, 8)), group, CommConfig())


def test_one_rank_alone_sends_nothing_and_may_have_any_scope() -> None:
    network, alone = bernoulli(0.1, scope=ltp.Scope(phase="gather")), torch.ones(1, 8)
    assert torch.equal(ltp.all_reduce(alone, network), alone)
    assert network.counters.rows() == []
