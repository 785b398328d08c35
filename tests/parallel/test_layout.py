"""Which process does what: coordinates, meshes, and the tensor-parallel ranks of each replica."""

import itertools
import re
from collections.abc import Callable

import pytest
import torch.distributed as dist

from lossytp.parallel.group import AXES, Layout
from tests.parallel.conftest import NUM_LAYERS, gradients, tiny_batch, tiny_gpt2
from tests.parallel.distributed_models import join, network, spread

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


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"data_parallel_size": 2, "world_size": 3},
            "data_parallel_size = 2 and pipeline_parallel_size = 1 need 2 processes, or a multiple, and there are 3: "
            "start with torchrun --standalone --nproc_per_node 2",
        ),
        (
            {"data_parallel_size": 2, "pipeline_parallel_size": 3, "world_size": 4},
            "data_parallel_size = 2 and pipeline_parallel_size = 3 need 6 processes, or a multiple, and there are 4: "
            "start with torchrun --standalone --nproc_per_node 6",
        ),
        (
            {"pipeline_parallel_size": 2},
            "data_parallel_size = 1 and pipeline_parallel_size = 2 need 2 processes, or a multiple, and there are 1: "
            "start with torchrun --standalone --nproc_per_node 2",
        ),
        (
            {"tensor_parallel_size": 4, "world_size": 3},
            "tensor_parallel_size = 4 cannot be spread evenly over 3 processes: "
            "start with torchrun --standalone --nproc_per_node 4 or 2 or 1",
        ),
        (
            {"tensor_parallel_size": 2, "data_parallel_size": 2, "world_size": 8},
            "tensor_parallel_size = 2 cannot be spread evenly over 4 processes: "
            "start with torchrun --standalone --nproc_per_node 4 or 2",
        ),
        (
            {"world_size": 2},
            "tensor_parallel_size = 1 cannot be spread evenly over 2 processes: "
            "start with torchrun --standalone --nproc_per_node 1",
        ),
    ],
    ids=str,
)
def test_processes_that_cannot_be_laid_out_are_refused(sizes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Layout(**sizes)
    for named in re.findall(r"\d+", message.partition("nproc_per_node")[2]):
        Layout(**sizes | {"world_size": int(named)})  # does not raise


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
