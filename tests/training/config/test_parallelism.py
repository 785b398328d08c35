import dataclasses
import re

import pytest

from lossytp.training.config import TrainConfig

OWN = {"reliable_gather": False}


@pytest.mark.parametrize(
    "values",
    [
        {"data_parallel_size": 2, "fp16": True, "batch_size": 6},  # only a pipeline scales no loss, or cuts batches
        {"pipeline_parallel_size": 4, "pipeline_microbatches": 2},
        {"pipeline_parallel_size": 2, "pipeline_schedule": "1f1b", "pipeline_microbatches": 2},
        {"pipeline_parallel_size": 2, "bf16": True},
        {"implementation": "dtensor", "bf16": True, "data_parallel_size": 2, "data_parallel_type": "fsdp"},
        {"implementation": "megatron", "data_parallel_size": 2},
        {"implementation": "dtensor", "data_parallel_size": 2, "tensor_parallel_size": 1, "fp16": True},
    ],
)
def test_what_can_be_combined_is_not_refused(values):
    assert TrainConfig.from_dict(values).changes() == values


def test_virtual_ranks_copies_are_not_sharded():
    """Only where each rank has a process can FSDP take them."""
    config = TrainConfig(**OWN, replicated_gradients="none", data_parallel_size=2, data_parallel_type="fsdp")
    assert config.layout(0, 8).tensor_processes == 4
    with pytest.raises(ValueError, match="replicated_gradients") as error:
        config.layout(0, 2)
    assert str(error.value) == (
        "replicated_gradients = 'none' does not work with fsdp, which would shard the axis on which a process holds "
        "its ranks' copies: choose ddp, or start with torchrun --standalone --nproc_per_node 8"
    )
    config.replace(data_parallel_type="ddp").layout(0, 2)
    config.replace(replicated_gradients="reliable").layout(0, 2)


@pytest.mark.parametrize(
    ("values", "rank", "world_size", "expected"),
    [  # of the processes: a replica's, which replica, which stage
        ({}, 0, 1, (1, 0, 0)),
        ({}, 1, 2, (2, 0, 0)),
        ({"data_parallel_size": 2}, 3, 8, (4, 0, 0)),
        ({"data_parallel_size": 2}, 4, 8, (4, 1, 0)),
        ({"pipeline_parallel_size": 2}, 4, 8, (4, 0, 1)),
        ({"pipeline_parallel_size": 2}, 1, 2, (1, 0, 1)),
        ({"implementation": "dtensor", "data_parallel_size": 2, "data_parallel_type": "fsdp"}, 5, 8, (4, 1, 0)),
        ({"implementation": "megatron", "tensor_parallel_size": 1}, 0, 1, (1, 0, 0)),
    ],
)
def test_layout_is_this_process_place(values, rank, world_size, expected):
    config = TrainConfig.from_dict(values)
    layout = config.layout(rank, world_size)
    assert (layout.tensor_processes, layout.data_index, layout.pipeline_index) == expected
    assert (layout.rank, layout.world_size) == (rank, world_size)
    assert layout.tensor_parallel_size == config.network.tensor_parallel_size


@pytest.mark.parametrize(
    ("values", "world_size", "words"),
    [
        ({}, 3, ["tensor_parallel_size = 4", "3 processes", "--nproc_per_node 4"]),
        ({}, 8, ["tensor_parallel_size = 4", "8 processes"]),
        ({"data_parallel_size": 2}, 1, ["data_parallel_size = 2", "there are 1", "--nproc_per_node 2"]),
        ({"pipeline_parallel_size": 2}, 3, ["pipeline_parallel_size = 2", "there are 3", "--nproc_per_node 2"]),
        ({"implementation": "dtensor"}, 1, ["implementation = 'dtensor'", "--nproc_per_node 4"]),
        ({"implementation": "megatron", "data_parallel_size": 2}, 2, ["'megatron'", "--nproc_per_node 8"]),
        ({"implementation": "dtensor", "pipeline_parallel_size": 2}, 4, ["'dtensor'", "--nproc_per_node 8"]),
    ],
)
def test_too_few_or_too_many_processes_are_refused(values, world_size, words):
    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        TrainConfig.from_dict(values).layout(0, world_size)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words)
