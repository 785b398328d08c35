"""Runs on a GPU, compared with the same runs on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lossytp.training import loop
from lossytp.training.config import PretrainConfig
from lossytp.training.loop import run
from tests.training.pretraining.tiny_runs import assert_same, losses, stopped

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, on which the runs train")
SETTINGS: dict[str, dict[str, Any]] = {
    "dense": {},
    "reduce phase": {"loss_rate": 0.2, "tensor_parallel_size": 2},
    "both phases": {"loss_rate": 0.2, "tensor_parallel_size": 2, "reliable_gather": False},
    "Hadamard": {"loss_rate": 0.2, "tensor_parallel_size": 2, "reliable_gather": False, "repair": "hadamard(64)"},
    "retransmitted": {"loss_rate": 0.2, "tensor_parallel_size": 2, "repair": "retransmit(1)"},
    "stale": {"loss_rate": 0.2, "tensor_parallel_size": 2, "repair": "stale"},
    "rescaled": {"loss_rate": 0.2, "tensor_parallel_size": 2, "repair": "rescale"},
    "ring": {"loss_rate": 0.2, "tensor_parallel_size": 2, "algorithm": "ring"},
    "sharded stream": {"loss_rate": 0.2, "tensor_parallel_size": 2, "sequence_parallel": True},
}
Pretrain = Callable[..., PretrainConfig]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_gpu_trains_and_loses_as_the_cpu_does(pretrain: Pretrain, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    on_gpu = run(pretrain("gpu", **SETTINGS[name]))
    monkeypatch.setattr(loop, "this_device", lambda layout: torch.device("cpu"))
    on_cpu = run(pretrain("cpu", **SETTINGS[name]))
    assert [record["timing"]["device"] for record in (on_gpu, on_cpu)] == ["cuda:0", "cpu"]
    assert on_gpu["network"] == on_cpu["network"]  # each packet that one lost, the other lost
    assert losses(on_gpu) == pytest.approx(losses(on_cpu), rel=1e-3)
    for network in ("clean", "lossy"):
        scores = [record["final"][f"cross_entropy_{network}"] for record in (on_gpu, on_cpu)]
        assert scores[0] == pytest.approx(scores[1], rel=1e-3)


def test_without_losses_two_ranks_on_a_gpu_train_as_one(pretrain: Pretrain) -> None:
    alone = run(pretrain("alone"))
    together = run(pretrain("together", tensor_parallel_size=2, reliable_gather=False))
    assert losses(together) == pytest.approx(losses(alone), rel=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_on_a_gpu_stays_near_fp32(pretrain: Pretrain, precision: str) -> None:
    lossy: dict[str, Any] = {
        "loss_rate": 0.2,
        "tensor_parallel_size": 2,
        "reliable_gather": False,
        "wire_dtype": "fp32",
    }
    full, half = run(pretrain("full", **lossy)), run(pretrain("half", **lossy, **{precision: True}))
    assert losses(half) == pytest.approx(losses(full), rel=0.05)


@pytest.mark.parametrize("repair", ["zero", "stale"])
def test_an_interrupted_run_on_a_gpu_ends_as_an_unbroken_one(pretrain: Pretrain, repair: str) -> None:
    lossy = {"loss_rate": 0.2, "tensor_parallel_size": 2, "repair": repair}
    unbroken, broken = pretrain("unbroken", **lossy), pretrain("broken", **lossy)
    stopped(broken, at_step=5)
    assert_same(broken, run(broken), unbroken, run(unbroken))
