"""Who the tensor-parallel ranks are, which process does what, and which TP degrees a model allows."""

import copy
import itertools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lossytp as ltp
from lossytp.network.lossy_network import CommConfig
from lossytp.network.routes import ALGORITHMS, SWITCH
from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.group import AXES, Layout, RankGroup, check_divides, check_layers, check_reaches
from tests.parallel.conftest import FakeProcessGroup, bernoulli, tiny_gpt2
from tests.parallel.distributed_models import join, network
from tests.parallel.operations import LOSSY, WIRE


def test_a_copy_of_a_model_shares_its_process_group():
    group = RankGroup(2, process_group=FakeProcessGroup(2, 0), first_rank=0)  # type: ignore[arg-type]
    assert copy.deepcopy({"group": group})["group"] is group


def group_over_processes(size: int, processes: int, rank: int, **settings: Any) -> RankGroup:
    """Numbered from 0: a group that torch.distributed does not know cannot say where it begins."""
    group = FakeProcessGroup(processes, rank)
    return RankGroup(size, process_group=group, **{"first_rank": 0, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "processes", "here"),
    [(4, 1, [range(4)]), (4, 2, [range(2), range(2, 4)]), (4, 4, [range(1), range(1, 2), range(2, 3), range(3, 4)])],
)
def test_ranks_are_spread_evenly_over_the_processes_in_order(size, processes, here):
    groups = [group_over_processes(size, processes, rank, first_rank=10) for rank in range(processes)]
    assert [group.local for group in groups] == here
    assert {group.ranks for group in groups} == {tuple(range(10, 10 + size))}, "every process knows all of them"
    assert {group.processes for group in groups} == {processes}


@pytest.mark.parametrize(("processes", "first"), [([0, 1], 0), ([2, 3], 4)])
def test_the_first_rank_follows_from_the_processes(processes, first, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: processes)
    assert group_over_processes(4, 2, 0, first_rank=-1).ranks == tuple(range(first, first + 4))


def test_processes_that_are_not_neighbours_are_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [0, 2])
    with pytest.raises(ValueError, match=r"^process_group = "):
        group_over_processes(4, 2, 0, first_rank=-1)
    assert group_over_processes(4, 2, 0, first_rank=8).ranks == (8, 9, 10, 11)


@pytest.mark.parametrize(("heads", "inner", "fits"), [(8, 256, [1, 2, 4, 8]), (8, 100, [1, 2, 4]), (7, 28, [1, 7])])
def test_sizes_that_do_not_divide_are_refused_with_those_that_fit(heads, inner, fits):
    offered = [size for size in fits if size > 1]
    for size in range(-1, 17):
        if size in fits:
            check_divides(size, heads=heads, inner=inner)
            continue
        with pytest.raises(ValueError, match=f"^tensor_parallel_size = {size} .*: choose one of {str(offered)[1:-1]}$"):
            check_divides(size, heads=heads, inner=inner)


def test_one_process_alone_has_no_groups_and_all_ranks_are_virtual():
    layout = Layout(tensor_parallel_size=4)
    assert layout.mesh is None
    assert [layout.process_group(axis) for axis in AXES] == [None] * 3
    group = layout.tensor_group()
    assert (group.name, group.ranks, group.local, group.process_group) == ("tp", (0, 1, 2, 3), range(4), None)


def on_rank_place(sizes: dict) -> dict:
    layout = join(network(0.0), **sizes)
    groups = {axis: layout.process_group(axis) for axis in AXES}
    tensor = layout.tensor_group()
    return {
        "mesh": dict(zip(layout.mesh.mesh_dim_names, layout.mesh.shape, strict=True)),
        "groups": {axis: dist.get_process_group_ranks(group) for axis, group in groups.items() if group},
        "tp": (tensor.name, tensor.first_rank, list(tensor.ranks), list(tensor.local)),
    }


@pytest.mark.parametrize(
    ("sizes", "mesh", "groups", "tensor"),
    [
        (
            {"data_parallel_size": 2, "tensor_parallel_size": 2},
            {"pp": 1, "dp": 2, "tp": 2},
            {"dp": [[0, 2], [1, 3], [0, 2], [1, 3]], "tp": [[0, 1], [0, 1], [2, 3], [2, 3]]},
            [("tp", 0, [0, 1], [0]), ("tp", 0, [0, 1], [1]), ("tp2", 2, [2, 3], [0]), ("tp2", 2, [2, 3], [1])],
        ),
        (
            {"pipeline_parallel_size": 2, "data_parallel_size": 2, "tensor_parallel_size": 2},
            {"pp": 2, "dp": 2, "tp": 1},
            {"pp": [[0, 2], [1, 3], [0, 2], [1, 3]], "dp": [[0, 1], [0, 1], [2, 3], [2, 3]]},
            [(f"tp{first}" if first else "tp", first, [first, first + 1], [0, 1]) for first in (0, 2, 4, 6)],
        ),
        (
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 4},
            {"pp": 2, "dp": 1, "tp": 2},
            {"pp": [[0, 2], [1, 3], [0, 2], [1, 3]], "tp": [[0, 1], [0, 1], [2, 3], [2, 3]]},
            [
                (name, first, [*range(first, first + 4)], here)
                for name, first in (("tp", 0), ("tp4", 4))
                for here in ([0, 1], [2, 3])
            ],
        ),
    ],
    ids=["2 replicas of 2 ranks", "2 stages of 2 replicas of 2 virtual ranks", "2 stages of 4 ranks"],
)
def test_four_processes_in_groups(processes, sizes, mesh, groups, tensor):
    answers = processes(4, on_rank_place, sizes)
    assert [answer["mesh"] for answer in answers] == [mesh] * 4
    for rank, answer in enumerate(answers):
        assert answer["groups"] == {axis: by_rank[rank] for axis, by_rank in groups.items()}
    assert [answer["tp"] for answer in answers] == tensor


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data_parallel_size": 2, "world_size": 3}, r"data_parallel_size \* pipeline_parallel_size = 2 "),
        (
            {"data_parallel_size": 2, "pipeline_parallel_size": 3, "world_size": 4},
            r"data_parallel_size \* pipeline_parallel_size = 6 ",
        ),
        ({"tensor_parallel_size": 4, "world_size": 3}, "tensor_parallel_size = 4"),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2, "world_size": 8}, "tensor_parallel_size = 2"),
        ({"world_size": 2}, "tensor_parallel_size = 1"),
    ],
    ids=str,
)
def test_processes_that_cannot_be_laid_out_are_refused_with_numbers_that_can(sizes, message):
    with pytest.raises(ValueError, match=f"^{message}") as refusal:
        Layout(**sizes)
    for named in re.findall(r"\d+", str(refusal.value).partition("nproc_per_node")[2]):
        Layout(**sizes | {"world_size": int(named)})  # does not raise


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
def test_what_could_lose_nothing_is_refused(entry, network, comm, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        entry(network, **comm)
    assert network.counters.rows() == []


@pytest.mark.parametrize(("network", "comm"), USED)
def test_what_can_lose_something_is_taken(network, comm):
    parallelize(network, **comm)
    all_reduce(network, **comm)
    assert sum(row["packets"] for row in network.counters.rows()) > 0


@pytest.mark.parametrize("layers", [(50, 60), (0, 4)])
def test_layers_that_a_model_does_not_have_are_refused(layers):
    blocks = tiny_gpt2().config.n_layer
    assert blocks < 4
    check_layers(bernoulli(0.1, scope=ltp.Scope(layers=(0, blocks))), blocks)
    with pytest.raises(ValueError, match=r"^layers = "):
        parallelize(bernoulli(0.1, scope=ltp.Scope(layers=layers)))


@pytest.mark.parametrize("part", [{"direction": "forward"}, {"module": "mlp"}, {"layers": (0, 1)}])
def test_a_single_sum_lies_outside_every_part_of_a_model(part):
    with pytest.raises(ValueError, match=r"^scope = "):
        all_reduce(bernoulli(0.1, scope=ltp.Scope(**part)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("phase", [None, "reduce", "gather"])
def test_lossy_links_are_those_that_are_counted(algorithm, phase):
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


def test_a_group_among_others_leaves_the_others_their_links():
    """Rank 4 is the first of this replica, and ranks 0 to 3 another's."""
    group = RankGroup(4, first_rank=4)
    assert group.num_global_ranks == 8
    check_reaches(named((0, 4)), group, CommConfig())
    check_reaches(bernoulli(0.1, scope=ltp.Scope(phase="gather")), group, CommConfig())
    with pytest.raises(ValueError, match="link 0>8"):
        check_reaches(named((0, 8)), group, CommConfig())


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
    between = [(src, dst) for src, dst in itertools.permutations(of, 2) if of[src] != of[dst]]
    return ltp.LossyNetwork(dict.fromkeys(between, process), seed=4, wire=WIRE)


@pytest.mark.parametrize(("algorithm", "how"), WAYS, ids=str)
def test_only_links_between_nodes_lose_packets(algorithm, how):
    """Ranks 3 to 8, three a node: the first is alone with ranks 4 and 5. Each switch port is between nodes."""
    of = {3: 1, 4: 1, 5: 1, 6: 2, 7: 2, 8: 2, SWITCH: None}
    results, tables = [], []
    for lossy in (nodes(3), named_between(of)):
        comm = CommConfig.named(algorithm=algorithm, repair="rescale", **how)
        collective = LossyCollective(lossy, RankGroup(6, first_rank=3, name="any"), comm)
        results.append(collective.sum_(torch.arange(1.0, 1201).repeat(6, 1)))
        if comm.sequence_parallel:
            results[-1] = collective.all_gather(results[-1])
        tables.append(lossy.report().set_index(["operation", "phase", "src", "dst"])[["packets", "lost"]])
    assert torch.equal(*results)
    assert tables[0].equals(tables[1])
    lost = tables[0].reset_index().groupby(["src", "dst"])["lost"].sum()
    assert {link for link, count in lost.items() if count} == {
        link for link in lost.index if of[link[0]] != of[link[1]]
    }


def on_rank_use_every_operation(network: ltp.LossyNetwork) -> tuple[list, list]:
    ltp.init_process_group(network)
    x = torch.arange(1.0, 1201) + 1000 * dist.get_rank()
    results = [[each.tolist() for each in run(x, dist.group.WORLD)] for run, _ in LOSSY.values()]
    return results, network.report()[["operation", "src", "dst", "packets", "lost"]].values.tolist()


def test_every_operation_of_pytorch_knows_nodes(processes):
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


def test_a_single_node_is_refused(processes):
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


def test_named_links_within_a_node_lose_nothing():
    with pytest.raises(ValueError, match="names 0>1, over which"):
        ltp.all_reduce(torch.ones(4, 8), ltp.LossyNetwork({(0, 1): HALF}, ranks_per_node=2))
    across = ltp.LossyNetwork({(0, 1): HALF, (0, 2): HALF}, ranks_per_node=2)
    ltp.all_reduce(torch.ones(4, 40_000), across)
    table = across.report().set_index(["src", "dst"])["lost"]
    assert set(table[table > 0].index) == {(0, 2)}
