import hashlib
import json
import re
from pathlib import Path

import pytest

from lossytp.network import Scope
from lossytp.training.config import TrainConfig, settings_class
from tests.training.killed_runs import FSDP


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"los_rate": 0.1}, ["los_rate", "did you mean loss_rate"]),
        ({"zzz": 1}, ["zzz", "known are", "loss_rate"]),
        ({"loss_rate": 1.5}, ["loss_rate", "1.5", "[0, 1]"]),
        ({"loss_rate": float("nan")}, ["loss_rate", "nan"]),
        ({"loss_rate": "0.1"}, ["loss_rate", "'0.1'", "float"]),
        ({"loss_rate": True}, ["loss_rate", "True"]),
        ({"bf16": 1}, ["bf16", "true or false"]),
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
        ({"model_name": "output/none/best"}, ["output/none/best", "does not exist", "folder"]),
        ({"max_length": 129}, ["max_length", "129", "128"]),
        ({"algorithm": "star"}, ["algorithm", "star", "direct"]),
        ({"repair": "hope"}, ["repair", "hope", "rescale"]),
        ({"mtu_bytes": 40}, ["mtu_bytes", "40", "52"]),
        ({"batch_size": 0}, ["batch_size", "0"]),
        ({"dropout": 1.0}, ["dropout = 1.0 is not below 1: give a smaller number"]),
        ({"dropout": float("nan")}, ["dropout = nan is not finite: give a finite number"]),
        ({"dropout": -0.1}, ["dropout = -0.1 is below 0: give 0 or more"]),
        ({"target_accuracy": 1.5, "eval_steps": 5}, ["target_accuracy = 1.5 is not in [0, 1]"]),
        ({"warmup_steps": 31, "max_steps": 30}, ["warmup_steps = 31 is above max_steps = 30: give as many or fewer"]),
        ({"warmup_steps": -1}, ["warmup_steps = -1 is below 0"]),
        ({"max_samples": -1}, ["max_samples = -1 is below 0"]),
        ({"eval_samples": 0}, ["eval_samples = 0 is below 1"]),
        ({"learning_rate": -1.0}, ["learning_rate", "-1"]),
        ({"bf16": True, "fp16": True}, ["bf16", "fp16"]),
        ({"implementation": "custom"}, ["'custom'", "no replicas", "data_parallel_size"]),
        ({"implementation": "deepspeed"}, ["implementation", "deepspeed", "lossytp, dtensor, megatron"]),
        ({"data_parallel_type": "zero"}, ["data_parallel_type", "zero", "ddp, fsdp"]),
        ({"data_parallel_size": 0}, ["data_parallel_size", "0", "give 1 or more"]),
        ({"pipeline_parallel_size": 0}, ["pipeline_parallel_size", "0", "give 1 or more"]),
        ({"pipeline_microbatches": 0}, ["pipeline_microbatches", "0", "give 1 or more"]),
        ({"gradient_clipping": -1.0}, ["gradient_clipping", "-1.0", "give 0 or more"]),
        ({"gradient_clipping": float("nan")}, ["gradient_clipping", "nan"]),
        (
            {"pipeline_parallel_size": 2, "data_parallel_size": 2},
            ["pipeline_parallel_size", "data_parallel_size", "set one to 1"],
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


def test_what_did_not_exist_changes_no_older_configuration():
    """Folders of records are named by what their configuration changes."""
    new = {"reliable_gather", "sequence_parallel", "replicated_gradients", "resync_every", "exact_adjoint"}
    new |= {"wire_dtype", "control"} | {name for name in TrainConfig().as_dict() if name.startswith("lossy_")}
    old = {name: value for name, value in TrainConfig(loss_rate=0.1, seed=3).as_dict().items() if name not in new}
    assert TrainConfig.from_dict(old).changes() == {"loss_rate": 0.1, "seed": 3}
    records = Path(__file__).parents[3] / "results" / "paper" / "runs"
    folders = [file.parent for file in records.glob("*/record.json")]
    assert len(folders) >= 48
    for folder in folders:
        record = json.loads((folder / "record.json").read_text())
        if settings_class(record["config"]) is not TrainConfig:
            continue  # pretraining cells set what records leave out, such as eval_steps; the grids' tests cover them
        changes = TrainConfig.from_dict(record["config"]).changes()
        if record["processes"] > 1:
            changes["processes"] = record["processes"]
        digest = hashlib.sha256(json.dumps(changes, sort_keys=True).encode()).hexdigest()[:10]
        assert folder.name.endswith(digest)


def test_no_training_examples_are_all_of_them_as_in_earlier_studies():
    assert TrainConfig(max_samples=0) == TrainConfig()
    assert TrainConfig(max_samples=0).as_dict()["max_samples"] is None


def test_the_warm_up_fills_a_run_at_most_but_its_default_stays_in_short_trials():
    assert TrainConfig(warmup_steps=30, max_steps=30).warmup_steps == 30
    assert TrainConfig(max_steps=2).warmup_steps == 20


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"unfreeze_last_layers": 5}, "above gpt2-nano's 4 blocks"),
        ({"unfreeze_last_layers": -1}, "below 0"),
        ({"unfreeze_last_layers": 1, "pipeline_parallel_size": 2}, "nothing to train"),
        ({"unfreeze_last_layers": 1, "lossy_direction": "backward", "lossy_layers": "0:3"}, "send nothing"),
        ({"gradient_accumulation_steps": 33}, "above batch_size = 32"),
        ({"gradient_accumulation_steps": 0}, "below 1"),
        ({"gradient_accumulation_steps": 2, "pipeline_parallel_size": 2}, "pipeline_microbatches"),
        ({"gradient_checkpointing": True, "implementation": "dtensor"}, "with dtensor"),
        ({"gradient_checkpointing": True, **FSDP}, "with fsdp"),
        ({"checkpoint_steps": 0}, "below 1"),
        ({"schedule": "step"}, "linear, cosine, constant"),
        ({"link_gbits": 0.0}, "link_gbits = 0.0 is below 1e-06: give 1e-06 or more"),
        ({"link_gbits": 1e300}, "link_gbits = 1e\\+300 is above 1e\\+06"),
        ({"gradient_clipping": float("inf")}, "gradient_clipping = inf is not finite"),
        ({"patience": 2}, "patience = 2 needs several evaluations: give eval_steps"),
        ({"target_accuracy": 0.5}, "target_accuracy = 0.5 needs several evaluations"),
        ({"round_trip_us": -1.0}, "round_trip_us = -1.0 is below 0"),
        ({"round_trip_us": 1e300}, "round_trip_us = 1e\\+300 is above 1e\\+09"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**values)


def test_losses_in_backward_only_are_allowed_if_a_trained_block_is_named():
    for layers in ("3:4", None):
        config = TrainConfig(unfreeze_last_layers=1, lossy_direction="backward", lossy_layers=layers)
        assert config.network.build().scope == Scope(direction="backward", layers=layers and (3, 4))
