"""Test microbatches, gradient checkpointing, frozen layers, and saved models."""

from functools import partial

import pytest
import torch
from transformers import GPT2ForSequenceClassification

from lossytp.training.config import TrainConfig
from lossytp.training.loop import run
from lossytp.training.microbatches import counted, microbatches
from lossytp.training.models import build_model, load_tokenizer
from tests.training.killed_runs import result, started

RELIABLE = {"loss_type": "ber", "loss_rate": 0.0, "mean_burst_packets": None}
DDP, FSDP = {"data_parallel_size": 2}, {"data_parallel_size": 2, "data_parallel_type": "fsdp"}
OWN_STREAMS = {"tensor_parallel_size": 2, "reliable_gather": False}


def losses(record):
    return [point["loss"] for point in record["curves"]["train_loss"]]


def weights(folder):
    return GPT2ForSequenceClassification.from_pretrained(folder).state_dict()


def test_microbatches_hold_all_examples_and_weigh_by_size():
    batch = {"input_ids": torch.arange(14).view(7, 2), "labels": torch.arange(7)}
    pieces = list(microbatches(batch, 3))
    assert [len(piece["labels"]) for piece, _ in pieces] == [2, 2, 3]
    assert torch.equal(torch.cat([piece["input_ids"] for piece, _ in pieces]), batch["input_ids"])
    assert [share for _, share in pieces] == [2 / 7, 2 / 7, 3 / 7]
    assert len(list(microbatches(batch, 9))) == 7


def test_only_predicted_tokens_count():
    labels = torch.tensor([[5, -100, 6], [7, 8, 9]])
    assert counted(labels) == 3  # a first token is never predicted
    assert [share for _, share in microbatches({"labels": labels}, 2)] == [1 / 3, 2 / 3]


@pytest.mark.parametrize("values", [{}, OWN_STREAMS, {"fp16": True}], ids=str)
def test_without_losses_microbatches_change_nothing(toy, tmp_path, monkeypatch, values):
    """Also for an epoch's small last batch: the last two of 50 examples."""
    values = {"max_samples": 50, "max_steps": 8, "gradient_clipping": 1.0, **values}
    scaler = partial(
        torch.amp.GradScaler, "cpu", init_scale=256.0
    )  # a larger scale skips first steps, not the same ones in each run
    monkeypatch.setattr("lossytp.training.loop._scaler", lambda _, enabled: scaler(enabled=enabled))
    curves = [
        losses(run(toy(gradient_accumulation_steps=number, output_dir=str(tmp_path / str(number)), **values)))
        for number in (1, 3, 8)
    ]
    rounding = 1e-3 if "fp16" in values else 1e-5
    assert curves[1] == pytest.approx(curves[0], rel=rounding)
    assert curves[2] == pytest.approx(curves[0], rel=rounding)


@pytest.mark.parametrize(("values", "times"), [(DDP, 1), (FSDP, 3), ({**DDP, "tensor_parallel_size": 2}, 1)], ids=str)
def test_replicas_split_batches_into_microbatches_too(tmp_path, values, times):
    """DDP averages gradients once a batch; FSDP gathers parameters and scatters gradients for each microbatch.

    Replicas' messages have the layer None.
    """
    packets, curves = [], []
    for number in (1, 3):
        folder = str(tmp_path / str(number))
        assert started(tmp_path, 2, **values, **RELIABLE, gradient_accumulation_steps=number, output_dir=folder) == [
            0,
            0,
        ]
        record = result(tmp_path, str(number))
        packets.append(record["network"]["training"]["by_layer"]["None"]["packets"])
        curves.append(losses(record))
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)
    assert packets[1] == times * packets[0] > 0


@pytest.mark.parametrize(
    ("processes", "values"),
    [
        (1, {"tensor_parallel_size": 1, "loss_rate": 0.0}),
        (1, {"tensor_parallel_size": 4, "dropout": 0.1}),
        (1, {"tensor_parallel_size": 2, "repair": "stale", "max_length": 4}),
        (1, {**OWN_STREAMS, "unfreeze_last_layers": 2}),
        (2, {"tensor_parallel_size": 2}),
        (2, {**DDP, "tensor_parallel_size": 2}),
        (2, {"pipeline_parallel_size": 2}),
    ],
    ids=str,
)
def test_recomputed_activations_change_nothing(tmp_path, processes, values):
    """Nor do the packets sent and lost."""
    records = []
    for name in ("kept", "recomputed"):
        more = {"gradient_checkpointing": name == "recomputed", "max_steps": 4, "output_dir": str(tmp_path / name)}
        assert started(tmp_path, processes, **values, **more) == [0] * processes
        records.append(result(tmp_path, name))
        del records[-1]["config"]
    assert records[0] == records[1]


@pytest.mark.parametrize(("trained", "values"), [(0, {}), (1, {}), (2, OWN_STREAMS)], ids=str)
def test_only_the_last_blocks_norm_and_head_are_trained(toy, tmp_path, trained, values):
    values = {"loss_rate": 0.1, "save_model": True, **values}
    record = run(toy(unfreeze_last_layers=trained, **values))
    name = "gpt2-nano-scratch"
    settings = {"labels": ("first", "second"), "tokenizer": load_tokenizer(name), "dropout": 0.0, "seed": 0}
    dense = build_model(name, "classification", **settings)
    last = weights(tmp_path / "run" / "last")
    changed = {name for name, before in dense.state_dict().items() if not torch.equal(before, last[name])}
    expected = [f"transformer.h.{block}." for block in range(4 - trained, 4)] + ["transformer.ln_f.", "score."]
    assert changed == {name for name in last if name.startswith(tuple(expected))}
    whole = run(toy(output_dir=str(tmp_path / "whole"), **values))
    directions = [each["network"]["training"]["by_direction"] for each in (record, whole)]
    assert directions[0]["forward"]["packets"] == directions[1]["forward"]["packets"]
    frozen = directions[0].get("backward", {"packets": 0})["packets"]
    assert frozen == directions[1]["backward"]["packets"] * trained / 4


def test_the_best_and_the_last_model_are_kept(toy, tmp_path, monkeypatch):
    scores = iter([0.5, 0.9, 0.7, 0.5, 0.9])

    def evaluate(self, step):
        self.evaluations.append({"step": step, "score_lossy": next(scores), "seconds": 0.0})
        return self.evaluations[-1]

    monkeypatch.setattr("lossytp.training.loop._Run._evaluate", evaluate)
    values = {"eval_steps": 2, "schedule": "constant", "save_model": True}
    run(toy(max_steps=6, **values))
    run(toy(max_steps=4, output_dir=str(tmp_path / "shorter"), **values))
    best, last = weights(tmp_path / "run" / "best"), weights(tmp_path / "run" / "last")
    shorter = weights(tmp_path / "shorter" / "last")
    assert all(torch.equal(best[name], shorter[name]) for name in best)
    assert not torch.equal(best["score.weight"], last["score.weight"])
    assert {file.name for file in (tmp_path / "run").iterdir()} == {"best", "last", "record.json"}


@pytest.mark.parametrize(
    "values", [{"tensor_parallel_size": 2}, DDP, {**DDP, "tensor_parallel_size": 2}, FSDP], ids=str
)
def test_processes_save_the_model_that_one_process_trains(tmp_path, values):
    common = {**RELIABLE, "save_model": True, "max_steps": 3}
    assert started(tmp_path, 2, **values, **common) == [0, 0]
    assert started(tmp_path, 1, output_dir=str(tmp_path / "dense"), **common) == [0]
    whole, expected = weights(tmp_path / "run" / "last"), weights(tmp_path / "dense" / "last")
    for name, weight in expected.items():
        torch.testing.assert_close(whole[name], weight, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"unfreeze_last_layers": 5}, "above gpt2-nano's 4 blocks"),
        ({"unfreeze_last_layers": -1}, "below 0"),
        ({"unfreeze_last_layers": 1, "pipeline_parallel_size": 2}, "nothing to train"),
        ({"unfreeze_last_layers": 1, "lossy_direction": "backward", "lossy_layers": "0:3"}, "nothing is sent"),
        ({"gradient_accumulation_steps": 33}, "above batch_size = 32"),
        ({"gradient_accumulation_steps": 0}, "below 1"),
        ({"gradient_accumulation_steps": 2, "pipeline_parallel_size": 2}, "pipeline_microbatches"),
        ({"gradient_checkpointing": True, "implementation": "dtensor"}, "with dtensor"),
        ({"gradient_checkpointing": True, **FSDP}, "with fsdp"),
        ({"save_model": True, "implementation": "megatron"}, "cannot be gathered"),
        ({"save_model": True, "pipeline_parallel_size": 2}, "cannot be gathered"),
        ({"save_model": True, **FSDP}, "cannot be gathered"),
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
    TrainConfig(unfreeze_last_layers=1, lossy_direction="backward", lossy_layers="3:4")
    TrainConfig(unfreeze_last_layers=1, lossy_direction="backward")
