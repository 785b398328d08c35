"""Check that replicas train as the dense perceptron does, and what each kind sends."""

import pytest

from data_parallel import DataParallelConfig
from lab import perceptron
from tests.labs.dense import SMALL, dense_losses, refusal, run_lab

pytestmark = pytest.mark.slow

OPERATIONS = {"ddp": {"all_reduce"}, "fsdp": {"all_gather", "reduce_scatter"}}


@pytest.mark.parametrize("kind", OPERATIONS)
def test_without_losses_replicas_train_as_the_dense_perceptron(processes, tmp_path, kind):
    config = DataParallelConfig(**SMALL, data_parallel_type=kind, output_dir=str(tmp_path))
    for rank in processes(2, run_lab, "data_parallel", "DataParallelConfig", config.as_dict()):
        assert rank["without_losses"]["losses"] == pytest.approx(dense_losses(config, perceptron(config, 64)), rel=1e-5)
    assert (tmp_path / f"data_parallel_{kind}.json").exists()


@pytest.mark.parametrize("kind", OPERATIONS)
def test_each_kind_loses_packets_of_its_own_operations(processes, tmp_path, kind):
    values = {**SMALL, "data_parallel_type": kind, "loss_rate": 0.2, "output_dir": str(tmp_path)}
    for rank in processes(2, run_lab, "data_parallel", "DataParallelConfig", values):
        assert {name: each["lost"] > 0 for name, each in rank["network"]["by_operation"].items()} == dict.fromkeys(
            OPERATIONS[kind], True
        )


def test_a_batch_that_replicas_cannot_share_is_refused(processes):
    message = "batch_size = 15 cannot be split over 2 ranks: give a multiple of 2"
    values = {"batch_size": 15}
    assert processes(2, refusal, "data_parallel", "DataParallelConfig", values) == [message, message]
