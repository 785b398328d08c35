"""Check PyTorch's tensor parallelism against the dense perceptron, and what is said of processes that cannot meet."""

import socket

import pytest

from lab import BackendLabConfig, perceptron
from tensor_parallel_native import run
from tests.labs.dense import SMALL, dense_losses, refusal, run_lab

pytestmark = pytest.mark.slow

LAB = ("tensor_parallel_native", "BackendLabConfig")


@pytest.mark.parametrize("number", [1, 2])
def test_without_losses_it_trains_as_the_dense_perceptron(processes, tmp_path, number):
    config = BackendLabConfig(**SMALL, output_dir=str(tmp_path))
    for rank in processes(number, run_lab, *LAB, config.as_dict()):
        assert rank["without_losses"]["losses"] == pytest.approx(dense_losses(config, perceptron(config, 64)), rel=1e-5)


def test_losses_strike_both_passes(processes, tmp_path):
    values = {**SMALL, "loss_rate": 0.2, "output_dir": str(tmp_path)}
    for rank in processes(2, run_lab, *LAB, values):
        assert all(rank["network"]["by_direction"][direction]["lost"] > 0 for direction in ("forward", "backward"))
        assert rank["network"]["by_operation"].keys() == {"all_reduce"}


def test_a_single_process_and_indivisible_sizes_are_refused(processes):
    with pytest.raises(
        ValueError, match=r"^tensor_parallel_native needs a process for each rank: start it with torchrun"
    ):
        run(BackendLabConfig())
    message = "hidden_dim = 63 cannot be split over 2 ranks: give a multiple of 2"
    assert processes(2, refusal, *LAB, {"hidden_dim": 63}) == [message, message]


def test_a_port_in_use_and_an_unknown_address_are_one_line(processes):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        variables = {"MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        (message,) = processes(1, refusal, *LAB, {}, variables)
    assert message == f"MASTER_PORT = {port} is in use on 127.0.0.1: choose another, the same for all ranks"
    (message,) = processes(1, refusal, *LAB, {}, {"MASTER_ADDR": "nowhere.invalid", "WORLD_SIZE": "2"})
    assert message.startswith("MASTER_ADDR = 'nowhere.invalid' names no machine ")
