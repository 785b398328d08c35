"""Check that labs over processes train as the dense model does, what they lose, and what they say if they cannot."""

import socket

import pytest

from data_parallel import DataParallelConfig
from lab import BackendLabConfig, perceptron
from pipeline import PipelineLabConfig, batch_of, transformer
from tensor_parallel_native import run
from tests.labs.dense import SMALL, dense_losses, refusal, run_lab

pytestmark = pytest.mark.slow

NATIVE = ("tensor_parallel_native", "BackendLabConfig")
REPLICAS = ("data_parallel", "DataParallelConfig")
STAGES = ("pipeline", "PipelineLabConfig")
TINY = {"steps": 5, "batch_size": 8, "hidden_dim": 16, "input_dim": 16, "num_layers": 2, "learning_rate": 0.01}
DDP, FSDP = ({"data_parallel_type": kind} for kind in ("ddp", "fsdp"))


@pytest.mark.parametrize(
    ("number", "lab", "config"),
    [
        *((number, NATIVE, BackendLabConfig(**SMALL)) for number in (1, 2)),
        *((2, REPLICAS, DataParallelConfig(**SMALL, **kind)) for kind in (DDP, FSDP)),
        *((number, STAGES, PipelineLabConfig(**TINY)) for number in (1, 2)),
    ],
)
def test_without_losses_processes_train_as_the_dense_model(processes, tmp_path, number, lab, config):
    if lab is STAGES:
        expected = dense_losses(config, transformer(config, 16), lambda images: (batch_of(images)["input_ids"],))
    else:
        expected = dense_losses(config, perceptron(config, 64))
    assert len(set(expected)) == len(expected)
    for rank in processes(number, run_lab, *lab, config.as_dict() | {"output_dir": str(tmp_path)}):
        assert rank["without_losses"]["losses"] == pytest.approx(expected, rel=1e-5)
    assert list(tmp_path.glob(f"{lab[0]}*.json"))


@pytest.mark.parametrize(
    ("lab", "values", "operations"),
    [
        (NATIVE, SMALL, {"all_reduce"}),
        (REPLICAS, SMALL | DDP, {"all_reduce"}),
        (REPLICAS, SMALL | FSDP, {"all_gather", "reduce_scatter"}),
        (STAGES, TINY | {"hidden_dim": 64}, {"send"}),
    ],
)
def test_each_lab_loses_packets_of_its_own_operations_in_its_passes(processes, tmp_path, lab, values, operations):
    values = {**values, "loss_rate": 0.2, "output_dir": str(tmp_path)}
    for rank in processes(2, run_lab, *lab, values):
        by_operation, by_direction = rank["network"]["by_operation"], rank["network"]["by_direction"]
        assert {name: each["lost"] > 0 for name, each in by_operation.items()} == dict.fromkeys(operations, True)
        passes = ("backward",) if operations == {"all_reduce"} and lab is REPLICAS else ("forward", "backward")
        assert all(by_direction[direction]["lost"] > 0 for direction in passes)


@pytest.mark.parametrize(
    ("lab", "values", "message"),
    [
        (REPLICAS, {"batch_size": 15}, "batch_size = 15 cannot be split over 2 ranks: give a multiple of 2"),
        (NATIVE, {"hidden_dim": 63}, "hidden_dim = 63 cannot be split over 2 ranks: give a multiple of 2"),
        (STAGES, {"batch_size": 30}, "batch_size = 30 cannot be split over 4 microbatches: give a multiple of 4"),
        (STAGES, {"hidden_dim": 30}, "hidden_dim = 30 cannot be split over 4 heads: give a multiple of 4"),
        (STAGES, {"num_layers": 1}, "pipeline_parallel_size = 2 is above the model's 1 blocks: give fewer"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(processes, lab, values, message):
    assert processes(2, refusal, *lab, values) == [message, message]


def test_a_single_process_a_port_in_use_and_an_unknown_address_are_one_line(processes):
    with pytest.raises(
        ValueError, match=r"^tensor_parallel_native needs a process for each rank: start it with torchr"
    ):
        run(BackendLabConfig())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        variables = {"MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        (message,) = processes(1, refusal, *NATIVE, {}, variables)
    assert message == f"MASTER_PORT = {port} is in use on 127.0.0.1: choose another, the same for all ranks"
    (message,) = processes(1, refusal, *NATIVE, {}, {"MASTER_ADDR": "nowhere.invalid", "WORLD_SIZE": "2"})
    assert message.startswith("MASTER_ADDR = 'nowhere.invalid' names no machine ")
