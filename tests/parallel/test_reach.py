"""Which links can lose something: named, in a scope, or between nodes. Settings that lose nothing are refused."""

import itertools
import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import lossytp as ltp
from lossytp.network.lossy_network import CommConfig
from lossytp.network.routes import ALGORITHMS, SWITCH
from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.group import RankGroup, check_layers, check_reaches
from tests.parallel.conftest import bernoulli, tiny_gpt2
from tests.parallel.operations import LOSSY, WIRE

SOME = ltp.Bernoulli(loss_rate=0.1)
OWN = {"reliable_gather": False}


def named(*links: tuple[int, int]) -> ltp.LossyNetwork:
    return ltp.LossyNetwork(dict.fromkeys(links, SOME))


def parallelize(network: ltp.LossyNetwork, **comm: object) -> None:
    ltp.parallelize(tiny_gpt2(), network, tensor_parallel_size=4, **comm)


def all_reduce(network: ltp.LossyNetwork, **comm: object) -> None:
    ltp.all_reduce(torch.ones(4, 8), network, **comm)


IGNORED = [
    (named((0, 99)), {}, "link 0>99 names rank 99"),
    (named((0, 1), (4, 1)), {}, "link 4>1 names rank 4"),
    (named((0, 2)), {"algorithm": "ring"}, "names 0>2, over which 'ring'"),
    (named((0, 1)), {"algorithm": "sender"}, "name some of 0>-1, 1>-1, 2>-1, 3>-1"),
    (named((-1, 0)), {"algorithm": "switch"}, "name some of 0>-1, 1>-1, 2>-1, 3>-1"),
    (bernoulli(0.1, scope=ltp.Scope(phase="gather")), {}, "scope = Scope(phase='gather')"),
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
    with pytest.raises(ValueError, match=re.escape(message)):
        entry(network, **comm)
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
    with pytest.raises(ValueError, match=r"^layers = "):
        parallelize(bernoulli(0.1, scope=ltp.Scope(layers=layers)))


@pytest.mark.parametrize("part", [{"direction": "forward"}, {"module": "mlp"}, {"layers": (0, 1)}])
def test_a_single_sum_lies_outside_every_part_of_a_model(part) -> None:
    with pytest.raises(ValueError, match=r"^scope = "):
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
            with pytest.raises(ValueError, match=r"^scope = "):
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
    with pytest.raises(ValueError, match="link 0>8"):
        check_reaches(named((0, 8)), group, CommConfig())


def test_one_rank_alone_sends_nothing_and_may_have_any_scope() -> None:
    network, alone = bernoulli(0.1, scope=ltp.Scope(phase="gather")), torch.ones(1, 8)
    assert torch.equal(ltp.all_reduce(alone, network), alone)
    assert network.counters.rows() == []


LEAVING = ("sender", "switch")  # the node: their links go to the switch
WAYS = [
    (algorithm, how)
    for algorithm in ALGORITHMS
    for how in ({}, OWN, {"sequence_parallel": True}, {"sequence_parallel": True, **OWN})
    if not (algorithm == "sender" and how == OWN)
]


HALF = ltp.Bernoulli(loss_rate=0.5)


def nodes(ranks_per_node: int, process: ltp.Bernoulli = HALF) -> ltp.LossyNetwork:
    return ltp.LossyNetwork(process, seed=4, wire=WIRE, ranks_per_node=ranks_per_node)


def named_between(of: dict[int, int], process: ltp.Bernoulli = HALF) -> ltp.LossyNetwork:
    """Name the links between ranks whose nodes, `of` each rank, differ."""
    between = [(src, dst) for src, dst in itertools.permutations(of, 2) if of[src] != of[dst]]
    return ltp.LossyNetwork(dict.fromkeys(between, process), seed=4, wire=WIRE)


@pytest.mark.parametrize(("algorithm", "how"), WAYS, ids=str)
def test_only_links_between_nodes_lose_packets(algorithm: str, how: dict) -> None:
    """Ranks 3 to 8, three a node: the first is alone with ranks 4 and 5. Each switch port is between nodes."""
    of = {3: 1, 4: 1, 5: 1, 6: 2, 7: 2, 8: 2, SWITCH: None}
    results, tables = [], []
    for network in (nodes(3), named_between(of)):
        comm = CommConfig.named(algorithm=algorithm, repair="rescale", **how)
        collective = LossyCollective(network, RankGroup(6, first_rank=3, name="any"), comm)
        results.append(collective.sum_(torch.arange(1.0, 1201).repeat(6, 1)))
        if comm.sequence_parallel:
            results[-1] = collective.all_gather(results[-1])
        tables.append(network.report().set_index(["operation", "phase", "src", "dst"])[["packets", "lost"]])
    assert torch.equal(*results)
    assert tables[0].equals(tables[1])
    lost = tables[0].reset_index().groupby(["src", "dst"])["lost"].sum()
    assert {link for link, count in lost.items() if count} == {
        link for link in lost.index if of[link[0]] != of[link[1]]
    }


def on_rank_use_every_operation(network: ltp.LossyNetwork) -> tuple[list, list]:
    """What each operation leaves on this rank, and what each lost on each link."""
    ltp.init_process_group(network)
    x = torch.arange(1.0, 1201) + 1000 * dist.get_rank()
    results = [[each.tolist() for each in run(x, dist.group.WORLD)] for run, _ in LOSSY.values()]
    return results, network.report()[["operation", "src", "dst", "packets", "lost"]].values.tolist()


def test_every_operation_of_pytorch_knows_nodes(processes: Callable) -> None:
    of = {0: 0, 1: 0, 2: 1, 3: 1}
    by_nodes = processes(4, on_rank_use_every_operation, nodes(2))
    assert by_nodes == processes(4, on_rank_use_every_operation, named_between(of))
    rows = [row for _, report in by_nodes for row in report]
    assert {row[0] for row in rows} == {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send"}
    for _, src, dst, packets, lost in rows:
        assert (lost > 0) == (of[src] != of[dst] and packets > 1)


def on_rank_share_a_node() -> None:
    with pytest.raises(ValueError, match=r"^ranks_per_node = 2 "):
        ltp.init_process_group(nodes(2))


def test_a_single_node_is_refused(processes: Callable) -> None:
    for ranks_per_node in (4, 5):
        with pytest.raises(ValueError, match=f"^ranks_per_node = {ranks_per_node} "):
            ltp.parallelize(tiny_gpt2(), nodes(ranks_per_node), tensor_parallel_size=4)
    processes(2, on_rank_share_a_node)
    check_reaches(nodes(4), RankGroup(4, first_rank=4), CommConfig())  # the other replica is another node
    for algorithm in ALGORITHMS:
        ltp.all_reduce(torch.ones(4, 8), nodes(4 if algorithm in LEAVING else 3), algorithm=algorithm)
        if algorithm not in LEAVING:
            with pytest.raises(ValueError, match=r"^ranks_per_node = 4 "):
                ltp.all_reduce(torch.ones(4, 8), nodes(4), algorithm=algorithm)


def test_named_links_within_a_node_lose_nothing() -> None:
    with pytest.raises(ValueError, match="names 0>1, over which"):
        ltp.all_reduce(torch.ones(4, 8), ltp.LossyNetwork({(0, 1): HALF}, ranks_per_node=2))
    across = ltp.LossyNetwork({(0, 1): HALF, (0, 2): HALF}, ranks_per_node=2)
    ltp.all_reduce(torch.ones(4, 40_000), across)
    table = across.report().set_index(["src", "dst"])["lost"]
    assert set(table[table > 0].index) == {(0, 2)}
