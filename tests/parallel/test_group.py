"""Who the tensor-parallel ranks are, which process does what, and which TP degrees a model allows."""

import copy
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.group import AXES, Layout, RankGroup, check_divides
from tests.parallel.conftest import NUM_LAYERS, FakeProcessGroup, bernoulli, gradients, tiny_batch, tiny_gpt2
from tests.parallel.distributed_models import join, network, spread


def test_a_copy_of_a_model_shares_its_process_group() -> None:
    group = RankGroup(2, process_group=FakeProcessGroup(2, 0), first_rank=0)  # type: ignore[arg-type]
    assert copy.deepcopy({"group": group})["group"] is group


def test_groups_on_the_same_links_lose_packets_of_their_own() -> None:
    def losses(name: str) -> list:
        collective = LossyCollective(bernoulli(0.3), RankGroup(2, name))
        return collective.sum_(torch.ones(2, 20_000)).tolist()

    assert losses("tp 0") == losses("tp 0")
    assert losses("tp 0") != losses("tp 1")


def group_over_processes(size: int, processes: int, rank: int, **settings: Any) -> RankGroup:
    """Numbered from 0: a group that torch.distributed does not know cannot say where it begins."""
    group = FakeProcessGroup(processes, rank)
    return RankGroup(size, process_group=group, **{"first_rank": 0, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "processes", "here"),
    [(4, 1, [range(4)]), (4, 2, [range(2), range(2, 4)]), (4, 4, [range(1), range(1, 2), range(2, 3), range(3, 4)])],
)
def test_ranks_are_spread_evenly_over_the_processes_in_order(size: int, processes: int, here: list[range]) -> None:
    groups = [group_over_processes(size, processes, rank, first_rank=10) for rank in range(processes)]
    assert [group.local for group in groups] == here
    assert {group.ranks for group in groups} == {tuple(range(10, 10 + size))}, "every process knows all of them"
    assert {group.processes for group in groups} == {processes}


@pytest.mark.parametrize(("processes", "first"), [([0, 1], 0), ([2, 3], 4)])
def test_the_first_rank_follows_from_the_processes(
    processes: list[int], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: processes)
    assert group_over_processes(4, 2, 0, first_rank=-1).ranks == tuple(range(first, first + 4))


@pytest.mark.parametrize("size", [0, -2, 3])
def test_ranks_that_cannot_be_spread_evenly_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"^tensor_parallel_size = {size} is "):
        group_over_processes(size, 2, 0)


def test_processes_that_are_not_neighbours_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [0, 2])
    with pytest.raises(ValueError, match=r"^process_group = "):
        group_over_processes(4, 2, 0, first_rank=-1)
    assert group_over_processes(4, 2, 0, first_rank=8).ranks == (8, 9, 10, 11)


@pytest.mark.parametrize(("heads", "inner", "fits"), [(8, 256, [1, 2, 4, 8]), (8, 100, [1, 2, 4]), (7, 28, [1, 7])])
def test_sizes_that_do_not_divide_are_refused_with_those_that_fit(heads: int, inner: int, fits: list[int]) -> None:
    offered = [size for size in fits if size > 1]
    for size in range(-1, 17):
        if size in fits:
            check_divides(size, heads=heads, inner=inner)
            continue
        with pytest.raises(ValueError, match=f"^tensor_parallel_size = {size} .*: choose one of {str(offered)[1:-1]}$"):
            check_divides(size, heads=heads, inner=inner)


@pytest.mark.parametrize("size", ["4", 4.0, True, None])
def test_a_size_that_is_no_whole_number_is_refused(size):
    for refuse in (RankGroup, lambda size: check_divides(size, heads=4, inner=16)):
        with pytest.raises(TypeError, match=r"^tensor_parallel_size"):
            refuse(size)


# --- layouts


SIZES = list(itertools.product([1, 2, 4], [1, 2, 3], [1, 2, 3], [1, 2, 4]))  # TP, DP, PP, TP processes a replica
FITTING = [sizes for sizes in SIZES if sizes[0] % sizes[3] == 0]


def test_every_process_has_a_place_of_its_own() -> None:
    for tensor, data, pipeline, processes_each in FITTING:
        assert_places(tensor, data, pipeline, processes_each)


def assert_places(tensor: int, data: int, pipeline: int, processes_each: int) -> None:
    world = data * pipeline * processes_each
    layouts = [Layout(tensor, data, pipeline, rank, world) for rank in range(world)]
    assert {layout.tensor_processes for layout in layouts} == {processes_each}
    places = [(layout.pipeline_index, layout.data_index, rank % processes_each) for rank, layout in enumerate(layouts)]
    assert places == list(itertools.product(range(pipeline), range(data), range(processes_each))), "neighbours first"


def test_one_process_alone_has_no_groups_and_all_ranks_are_virtual() -> None:
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
                ("tp", 0, [0, 1, 2, 3], [0, 1]),
                ("tp", 0, [0, 1, 2, 3], [2, 3]),
                ("tp4", 4, [4, 5, 6, 7], [0, 1]),
                ("tp4", 4, [4, 5, 6, 7], [2, 3]),
            ],
        ),
    ],
    ids=["2 replicas of 2 ranks", "2 stages of 2 replicas of 2 virtual ranks", "2 stages of 4 ranks"],
)
def test_four_processes_in_groups(
    processes: Callable, sizes: dict, mesh: dict, groups: dict, tensor: list[tuple]
) -> None:
    answers = processes(4, on_rank_place, sizes)
    assert [answer["mesh"] for answer in answers] == [mesh] * 4
    for rank, answer in enumerate(answers):
        assert answer["groups"] == {axis: by_rank[rank] for axis, by_rank in groups.items()}
    assert [answer["tp"] for answer in answers] == tensor


def on_rank_replica_rows() -> list[dict]:
    lossy = network(0.3)
    layout = join(lossy, data_parallel_size=2, tensor_parallel_size=2)
    gradients(spread(tiny_gpt2(), lossy, layout), tiny_batch())
    return lossy.counters.rows()


def test_replicas_lose_other_packets_on_links_of_their_own(processes: Callable) -> None:
    """Their traffic is the same, so equal counts of losses would mean equal losses."""
    answers = processes(4, on_rank_replica_rows)
    assert answers[0] == answers[1]
    assert answers[2] == answers[3]
    for rows, group, links in ((answers[0], "tp", {(0, 1), (1, 0)}), (answers[2], "tp2", {(2, 3), (3, 2)})):
        assert {(row["src"], row["dst"]) for row in rows} == links
        assert {row["group"] for row in rows} == {group}
        assert len(rows) == NUM_LAYERS * 2 * 2 * len(links)
    assert [row["packets"] for row in answers[0]] == [row["packets"] for row in answers[2]]
    assert [row["lost"] for row in answers[0]] != [row["lost"] for row in answers[2]]


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
def test_processes_that_cannot_be_laid_out_are_refused_with_numbers_that_can(sizes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as refusal:
        Layout(**sizes)
    for named in re.findall(r"\d+", str(refusal.value).partition("nproc_per_node")[2]):
        Layout(**sizes | {"world_size": int(named)})  # does not raise
