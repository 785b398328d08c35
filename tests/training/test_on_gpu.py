"""Fine-tuning on a GPU, compared with the same run on the CPU; and what a GPU holds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lossytp.training import loop
from lossytp.training.config import TrainConfig
from lossytp.training.engine import Engine
from lossytp.training.loop import run
from tests.parallel.conftest import tiny_gpt2

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, on which the runs train")
LOSSY: dict[str, Any] = {"loss_rate": 0.2, "tensor_parallel_size": 2, "dropout": 0.0}


@pytest.mark.parametrize(
    "how", [{}, {"reliable_gather": False}, {"tensor_parallel_size": 1, "loss_rate": 0.0}], ids=str
)
def test_a_gpu_fine_tunes_as_the_cpu_does(toy: Callable[..., TrainConfig], tmp_path: Any, how: dict[str, Any]) -> None:
    on_gpu = run(toy(**LOSSY | how, output_dir=str(tmp_path / "gpu")))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "this_device", lambda layout: torch.device("cpu"))
        on_cpu = run(toy(**LOSSY | how, output_dir=str(tmp_path / "cpu")))
    assert [record["timing"]["device"] for record in (on_gpu, on_cpu)] == ["cuda:0", "cpu"]
    assert on_gpu["network"] == on_cpu["network"]
    losses = [[point["loss"] for point in record["curves"]["train_loss"]] for record in (on_gpu, on_cpu)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_gpu_never_holds_the_dense_model_beside_its_shard() -> None:
    config = TrainConfig(**LOSSY)
    dense = tiny_gpt2("classifier", dtype=torch.float32, n_embd=512, n_head=8, n_layer=4)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    built = Engine(config, dense, config.network.build(), config.layout(0, 1), torch.device("cuda:0"))
    held = sum(parameter.nbytes for parameter in built.module.parameters())
    assert torch.cuda.max_memory_allocated() - before < 1.5 * held
