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
    ],
)
def test_what_cannot_be_is_refused_in_one_line_that_names_it(values, words):
    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        TrainConfig.from_dict(values)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


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
