"""Thirty steps of DDP and FSDP, this project's and PyTorch's, beside one process on all examples: GPT-2 and a Llama."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.parallel.conftest import tiny_batch, tiny_gpt2, training_losses
from tests.parallel.distributed_models import REPLICAS, in_replicas, join, network, share
from tests.parallel.families import tiny

pytestmark = pytest.mark.slow

STEPS = 30


def shape(family: str) -> PreTrainedModel:
    return tiny_gpt2(dtype=torch.float32) if family == "gpt2" else tiny(family, dtype=torch.float32)


def whole_batch() -> dict[str, Tensor]:
    return {name: tensor[:6] for name, tensor in tiny_batch().items()}


def on_rank_train(family: str) -> dict[str, list[float]]:
    layout = join(network(0.0), data_parallel_size=2)
    return {
        replicas: training_losses(
            in_replicas(shape(family), layout, replicas), share(whole_batch(), layout), steps=STEPS
        )
        for replicas in REPLICAS
    }


@pytest.mark.parametrize("family", ["gpt2", "llama", "llama, tied"])
def test_every_way_has_the_single_process_curve(processes: Callable, family: str) -> None:
    expected = training_losses(shape(family), whole_batch(), steps=STEPS)
    assert expected[-1] < 0.7 * expected[0]
    answers = processes(2, on_rank_train, family)
    for replicas in REPLICAS:
        mean = torch.tensor([answer[replicas] for answer in answers]).mean(0)
        assert mean.tolist() == pytest.approx(expected, rel=1e-4), replicas
