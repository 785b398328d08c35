"""Test batches that are split into microbatches, in one process and in replicas."""

from functools import partial

import pytest
import torch

from lossytp.training.engine import loss_terms, microbatches
from lossytp.training.loop import run
from tests.training.killed_runs import DDP, FSDP, RELIABLE, result, started

OWN_STREAMS = {"tensor_parallel_size": 2, "reliable_gather": False}


def losses(record):
    return [point["loss"] for point in record["curves"]["train_loss"]]


def test_microbatches_hold_all_examples_and_weigh_by_size():
    batch = {"input_ids": torch.arange(14).view(7, 2), "labels": torch.arange(7)}
    pieces = list(microbatches(batch, 3))
    assert [len(piece["labels"]) for piece, _ in pieces] == [2, 2, 3]
    assert torch.equal(torch.cat([piece["input_ids"] for piece, _ in pieces]), batch["input_ids"])
    assert [share for _, share in pieces] == [2 / 7, 2 / 7, 3 / 7]
    assert len(list(microbatches(batch, 9))) == 7


def test_only_predicted_tokens_count():
    labels = torch.tensor([[5, -100, 6], [7, 8, 9]])
    assert loss_terms(labels) == 3  # a first token is never predicted
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
