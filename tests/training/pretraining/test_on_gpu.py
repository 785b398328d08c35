"""Pretraining and fine-tuning on a GPU, compared with the same runs on the CPU, and what a GPU holds."""

from typing import Any

import pytest
import torch

from lossytp.network.repairs import Hadamard
from lossytp.training import loop
from lossytp.training.config import TrainConfig
from lossytp.training.engine import Engine
from lossytp.training.loop import run
from tests.parallel.conftest import tiny_gpt2
from tests.training.pretraining.tiny_runs import assert_same, losses, stopped

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, on which the runs train")
LOSSY: dict[str, Any] = {"loss_rate": 0.2, "tensor_parallel_size": 2, "mtu_bytes": 60}  # 4 elements a packet
SETTINGS: list[dict[str, Any]] = [{}, {"reliable_gather": False}, {"reliable_gather": False, "repair": "hadamard(64)"}]
SETTINGS += [{"repair": repair} for repair in ("retransmit(1)", "stale", "rescale")]
SETTINGS += [{"algorithm": "ring"}, {"sequence_parallel": True}]


def on_the_cpu(config: Any) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "this_device", lambda layout: torch.device("cpu"))
        return run(config)


def test_a_gpu_trains_one_rank_as_the_cpu_does(pretrain):
    on_gpu, on_cpu = run(pretrain("gpu")), on_the_cpu(pretrain("cpu"))
    assert [record["timing"]["device"] for record in (on_gpu, on_cpu)] == ["cuda:0", "cpu"]
    assert on_gpu["environment"]["gpu"] == torch.cuda.get_device_name(0)
    assert losses(on_gpu) == pytest.approx(losses(on_cpu), rel=1e-3)


@pytest.mark.parametrize("how", SETTINGS, ids=str)
def test_a_gpu_trains_over_losses_as_the_cpu_does(pretrain, how):
    """Packets change these losses little more than devices may. `parallel/test_on_gpu.py` compares the sums."""
    settings = LOSSY | how
    on_gpu, on_cpu = run(pretrain("gpu", **settings)), on_the_cpu(pretrain("cpu", **settings))
    assert on_gpu["network"] == on_cpu["network"]  # as many packets on each link, in each layer and direction
    assert losses(on_gpu) == pytest.approx(losses(on_cpu), rel=1e-3)
    for network in ("clean", "lossy"):
        scores = [record["final"][f"cross_entropy_{network}"] for record in (on_gpu, on_cpu)]
        assert scores[0] == pytest.approx(scores[1], rel=1e-3)


def test_the_blocks_of_hadamard_are_whole_here():
    assert Hadamard(64).block_for(256, 4) == 64  # half of a message of 2 x 16 x 16 elements, by two ranks


def test_without_losses_two_ranks_on_a_gpu_train_as_one(pretrain):
    alone = run(pretrain("alone"))
    together = run(pretrain("together", tensor_parallel_size=2, reliable_gather=False))
    assert losses(together) == pytest.approx(losses(alone), rel=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_on_a_gpu_stays_near_fp32(pretrain, precision):
    lossy = LOSSY | {"reliable_gather": False, "wire_dtype": "fp32"}
    full, half = run(pretrain("full", **lossy)), run(pretrain("half", **lossy, **{precision: True}))
    assert losses(half) == pytest.approx(losses(full), rel=0.05)
    assert losses(half) != losses(full)


@pytest.mark.parametrize("repair", ["zero", "stale"])
def test_an_interrupted_run_on_a_gpu_ends_as_an_unbroken_one(pretrain, repair):
    lossy = LOSSY | {"repair": repair, "dropout": 0.1}
    unbroken, broken = pretrain("unbroken", **lossy), pretrain("broken", **lossy)
    stopped(broken, at_step=5)
    resumed = run(broken)
    assert resumed["timing"]["resumed_behind_steps"] == [3]
    assert_same(broken, resumed, unbroken, run(unbroken))


FINE_TUNED: dict[str, Any] = {"loss_rate": 0.2, "tensor_parallel_size": 2, "dropout": 0.0}


@pytest.mark.parametrize(
    "how", [{}, {"reliable_gather": False}, {"tensor_parallel_size": 1, "loss_rate": 0.0}], ids=str
)
def test_a_gpu_fine_tunes_as_the_cpu_does(toy, tmp_path, how):
    settings = FINE_TUNED | how
    on_gpu, on_cpu = run(toy(**settings)), on_the_cpu(toy(**settings, output_dir=str(tmp_path / "cpu")))
    assert [record["timing"]["device"] for record in (on_gpu, on_cpu)] == ["cuda:0", "cpu"]
    assert on_gpu["network"] == on_cpu["network"]
    assert losses(on_gpu) == pytest.approx(losses(on_cpu), rel=1e-3)


def test_a_gpu_never_holds_the_dense_model_beside_its_shard():
    config = TrainConfig(**FINE_TUNED)
    dense = tiny_gpt2("classifier", dtype=torch.float32, n_embd=512, n_head=8, n_layer=4)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    built = Engine(config, dense, config.network.build(), config.layout(0, 1), torch.device("cuda:0"))
    held = sum(parameter.nbytes for parameter in built.module.parameters())
    assert torch.cuda.max_memory_allocated() - before < 1.5 * held
