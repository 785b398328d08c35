import re
import subprocess
import sys

import pytest

from lossytp.network import Bernoulli, GilbertElliott
from lossytp.training.config import TrainConfig


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"los_rate": 0.1}, ["los_rate", "did you mean loss_rate"]),
        ({"zzz": 1}, ["zzz", "known are", "loss_rate"]),
        ({"loss_rate": 1.5}, ["loss_rate", "1.5", "[0, 1]"]),
        ({"loss_rate": float("nan")}, ["loss_rate", "nan"]),
        ({"loss_rate": "0.1"}, ["loss_rate", "'0.1'", "float"]),
        ({"loss_rate": True}, ["loss_rate", "True"]),
        ({"bf16": 1}, ["bf16", "bool"]),
        ({"loss_type": "burst"}, ["loss_type", "burst", "ber, g-e"]),
        (
            {"loss_type": "g-e", "loss_rate": 0.5, "mean_burst_packets": 0.5},
            ["mean_burst_packets", "0.5", "at least 1"],
        ),
        ({"loss_type": "g-e", "loss_rate": 0.8, "mean_burst_packets": 2.0}, ["mean_burst_packets", "at least 4"]),
        ({"loss_type": "g-e"}, ["needs ge_config"]),
        ({"mean_burst_packets": 8.0}, ["mean_burst_packets", "g-e"]),
        ({"loss_type": "g-e", "ge_config": "nope"}, ["ge_config", "nope", "short_1percent"]),
        ({"loss_type": "g-e", "ge_config": "one", "loss_rate": 0.1}, ["ge_config", "leave out"]),
        ({"tensor_parallel_size": 3}, ["tensor_parallel_size", "3", "1, 2, 4, 8"]),
        ({"dataset": "sst3"}, ["dataset", "sst3", "docstrings"]),
        ({"model_name": "gpt5"}, ["model_name", "gpt5", "gpt2-nano"]),
        ({"max_length": 129}, ["max_length", "129", "128"]),
        ({"algorithm": "star"}, ["algorithm", "star", "direct"]),
        ({"repair": "hope"}, ["repair", "hope", "rescale"]),
        ({"mtu_bytes": 40}, ["mtu_bytes", "40", "52"]),
        ({"batch_size": 0}, ["batch_size", "0"]),
        ({"learning_rate": -1.0}, ["learning_rate", "-1"]),
        ({"bf16": True, "fp16": True}, ["bf16", "fp16"]),
        ({"implementation": "deepspeed"}, ["implementation", "deepspeed", "lossytp, dtensor, megatron"]),
        ({"data_parallel_type": "zero"}, ["data_parallel_type", "zero", "ddp, fsdp"]),
        ({"data_parallel_size": 0}, ["data_parallel_size", "0", "positive"]),
        ({"pipeline_parallel_size": 0}, ["pipeline_parallel_size", "0", "positive"]),
        ({"pipeline_microbatches": 0}, ["pipeline_microbatches", "0", "positive"]),
        ({"gradient_clipping": 0.0}, ["gradient_clipping", "0.0", "leave it out"]),
        ({"gradient_clipping": float("nan")}, ["gradient_clipping", "nan"]),
        (
            {"pipeline_parallel_size": 2, "data_parallel_size": 2},
            ["pipeline_parallel_size", "data_parallel_size", "choose one"],
        ),
        ({"pipeline_parallel_size": 2, "fp16": True}, ["fp16", "pipeline", "bf16"]),
        (
            {"pipeline_parallel_size": 2, "batch_size": 6},
            ["batch_size = 6", "pipeline_microbatches = 4", "multiple"],
        ),
        (
            {"pipeline_parallel_size": 4, "pipeline_schedule": "1f1b", "pipeline_microbatches": 2},
            ["pipeline_microbatches = 2", "pipeline_parallel_size = 4", "1f1b"],
        ),
        ({"data_parallel_size": 3}, ["batch_size = 32", "data_parallel_size = 3", "multiple"]),
        ({"implementation": "megatron", "bf16": True}, ["megatron", "bf16", "autocast"]),
        ({"implementation": "dtensor", "data_parallel_size": 2}, ["dtensor", "ddp", "choose fsdp"]),
        ({"implementation": "dtensor", "fp16": True}, ["dtensor", "fp16", "choose bf16"]),
        ({"pipeline_parallel_size": 5}, ["pipeline_parallel_size = 5", "4 blocks"]),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_that_names_it(values, words):
    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        TrainConfig.from_dict(values)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


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
    assert layout.tensor_parallel_size == config.tensor_parallel_size


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


def test_changes_are_the_fields_that_are_not_at_their_default():
    assert TrainConfig().changes() == {}
    config = TrainConfig(seed=1234, max_steps=5, gradient_clipping=1, dropout=0)
    assert config.changes() == {"max_steps": 5, "gradient_clipping": 1.0}
    assert TrainConfig(**config.changes()) == config


def test_processes():
    assert TrainConfig(loss_rate=0.1).process() == Bernoulli(loss_rate=0.1)
    bursty = TrainConfig(loss_type="g-e", loss_rate=0.1, mean_burst_packets=8.0).process()
    assert bursty == GilbertElliott.from_loss_and_burst(loss_rate=0.1, mean_burst_packets=8)
    assert TrainConfig(loss_type="g-e", ge_config="one").process().loss_rate == pytest.approx(0.05)


def test_dict_round_trip_and_ints_for_floats():
    config = TrainConfig.from_dict({"loss_rate": 0, "seed": 3})
    assert TrainConfig.from_dict(config.as_dict()) == config


def test_checking_a_configuration_does_not_wait_for_torch():
    code = "import sys, lossytp.study.grid, lossytp.training.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
