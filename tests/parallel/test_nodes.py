"""Links within a node are reliable, links between nodes lossy: the same as a network that names those between nodes."""

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
from lossytp.parallel.group import RankGroup, check_reaches
from tests.parallel.backend_reference import WIRE
from tests.parallel.conftest import tiny_gpt2
from tests.parallel.operations import LOSSY
from tests.parallel.test_wire_dtype import WAYS

HALF = ltp.Bernoulli(loss_rate=0.5)


def nodes(ranks_per_node: int, process: ltp.Bernoulli = HALF) -> ltp.LossyNetwork:
    return ltp.LossyNetwork(process, seed=4, wire=WIRE, ranks_per_node=ranks_per_node)


def named(of: dict[int, int], process: ltp.Bernoulli = HALF) -> ltp.LossyNetwork:
    """Name the links between ranks whose nodes, `of` each rank, differ."""
    between = [(src, dst) for src, dst in itertools.permutations(of, 2) if of[src] != of[dst]]
    return ltp.LossyNetwork(dict.fromkeys(between, process), seed=4, wire=WIRE)


@pytest.mark.parametrize(("algorithm", "how"), WAYS, ids=str)
def test_only_links_between_nodes_lose_packets(algorithm: str, how: dict) -> None:
    """Ranks 3 to 8, three a node: the first is alone with ranks 4 and 5. Each switch port is between nodes."""
    of = {3: 1, 4: 1, 5: 1, 6: 2, 7: 2, 8: 2, SWITCH: None}
    results, tables = [], []
    for network in (nodes(3), named(of)):
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


def test_a_rank_a_node_is_a_network_without_nodes_and_its_packets_are_the_same() -> None:
    x_RN = torch.arange(1.0, 4801).view(4, 1200)
    plain = ltp.LossyNetwork(HALF, seed=4, wire=WIRE)
    assert torch.equal(ltp.all_reduce(x_RN, nodes(1)), ltp.all_reduce(x_RN, plain))


def on_rank_use_every_operation(network: ltp.LossyNetwork) -> tuple[list, list]:
    """What each operation leaves on this rank, and what each lost on each link."""
    ltp.init_process_group(network)
    x = torch.arange(1.0, 1201) + 1000 * dist.get_rank()
    results = [[each.tolist() for each in run(x, dist.group.WORLD)] for run, _ in LOSSY.values()]
    return results, network.report()[["operation", "src", "dst", "packets", "lost"]].values.tolist()


def test_every_operation_of_pytorch_knows_nodes(processes: Callable) -> None:
    of = {0: 0, 1: 0, 2: 1, 3: 1}
    by_nodes = processes(4, on_rank_use_every_operation, nodes(2))
    assert by_nodes == processes(4, on_rank_use_every_operation, named(of))
    rows = [row for _, report in by_nodes for row in report]
    assert {row[0] for row in rows} == {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send"}
    for _, src, dst, packets, lost in rows:
        assert (lost > 0) == (of[src] != of[dst] and packets > 1)


def on_rank_share_a_node() -> str:
    with pytest.raises(ValueError, match="ranks_per_node") as refusal:
        ltp.init_process_group(nodes(2))
    return str(refusal.value)


ONE_NODE = (
    "ranks_per_node = {} puts all {} ranks into one node, so nothing can be lost: give {} or less, or leave it out"
)


def test_a_single_node_is_refused(processes: Callable) -> None:
    for ranks_per_node in (4, 5):
        with pytest.raises(ValueError, match=f"^{re.escape(ONE_NODE.format(ranks_per_node, 4, 3))}$"):
            ltp.parallelize(tiny_gpt2(), nodes(ranks_per_node), tensor_parallel_size=4)
    assert processes(2, on_rank_share_a_node) == [ONE_NODE.format(2, 2, 1)] * 2
    check_reaches(nodes(4), RankGroup(4, first_rank=4), CommConfig())  # the other replica is another node
    for algorithm in ALGORITHMS:
        if algorithm in ("sender", "switch"):  # whose links leave the node
            ltp.all_reduce(torch.ones(4, 8), nodes(4), algorithm=algorithm)
            continue
        ltp.all_reduce(torch.ones(4, 8), nodes(3), algorithm=algorithm)
        with pytest.raises(ValueError, match="so nothing can be lost"):
            ltp.all_reduce(torch.ones(4, 8), nodes(4), algorithm=algorithm)


def test_named_links_within_a_node_are_refused() -> None:
    network = ltp.LossyNetwork({(0, 1): HALF}, ranks_per_node=2)
    with pytest.raises(
        ValueError, match="the network names 0>1, over which 'direct' of 4 ranks sends nothing that may"
    ):
        ltp.all_reduce(torch.ones(4, 8), network)
    across = ltp.LossyNetwork({(0, 1): HALF, (0, 2): HALF}, ranks_per_node=2)
    ltp.all_reduce(torch.ones(4, 40_000), across)
    table = across.report().set_index(["src", "dst"])["lost"]
    assert set(table[table > 0].index) == {(0, 2)}
