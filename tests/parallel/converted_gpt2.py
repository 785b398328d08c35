"""Tiny GPT-2s converted to share one stream of activations, and what their tests compare."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import lossytp as ltp
from lossytp.parallel.convert import parallelize
from tests.parallel.conftest import (
    MODELS,
    bernoulli,
    dense_layout,
    gradient_error,
    gradients,
    relative_error,
    tiny_batch,
)

ALGORITHMS, REPAIRS = ["sender", "direct"], ["zero", "rescale"]
every_kind = pytest.mark.parametrize("kind", MODELS)
every_size = pytest.mark.parametrize("tensor_parallel_size", [2, 4, 8])
padded_or_not = pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
REENTRANT = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


def lossy(dense: PreTrainedModel, loss_rate: float, *, seed: int = 0, size: int = 4, **how: Any) -> PreTrainedModel:
    return parallelize(dense, bernoulli(loss_rate, seed=seed), tensor_parallel_size=size, **how)


def network_of(parallel: PreTrainedModel) -> ltp.LossyNetwork:
    return parallel.transformer.h[0].attn.c_attn.collective.network


def lossy_gradients(parallel: PreTrainedModel, dense: PreTrainedModel, batch: dict) -> dict[str, torch.Tensor]:
    return dense_layout(gradients(parallel, batch), dense)


def assert_equals_dense(parallel: PreTrainedModel, dense: PreTrainedModel, batch: dict, tolerance: float) -> None:
    """Compare logits, loss and every gradient, with the same dropout."""
    torch.manual_seed(5)
    expected = gradients(dense, batch)
    torch.manual_seed(5)
    assert gradient_error(lossy_gradients(parallel, dense, batch), expected) < tolerance
    with torch.no_grad():
        torch.manual_seed(6)
        expected = dense(**batch)
        torch.manual_seed(6)
        actual = parallel(**batch)
    assert relative_error(actual.logits, expected.logits) < tolerance
    assert abs(actual.loss - expected.loss) < tolerance


@contextmanager
def unchanged(model: PreTrainedModel) -> Iterator[None]:
    """Fail unless the model has the same modules, attributes and parameters after the block."""

    def snapshot() -> list:
        modules = [(name, id(module), type(module), set(vars(module))) for name, module in model.named_modules()]
        parameters = [(name, id(tensor), tensor.requires_grad) for name, tensor in model.named_parameters()]
        return [modules, parameters, model.config.to_dict(), model.training]

    before, weights = snapshot(), copy.deepcopy(model.state_dict())
    yield
    assert snapshot() == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def two_steps(parallel: PreTrainedModel) -> tuple[list[dict[str, torch.Tensor]], dict]:
    """Gradients of two steps, and where they leave the network's links and counters."""
    torch.manual_seed(3)
    steps = [gradients(parallel, tiny_batch(padded=True)) for _ in range(2)]
    return steps, network_of(parallel).state_dict()


def assert_same_steps(actual: tuple, expected: tuple) -> None:
    assert actual[1] == expected[1]
    for gradients_, expected_gradients in zip(actual[0], expected[0], strict=True):
        assert all(torch.equal(gradient, expected_gradients[name]) for name, gradient in gradients_.items())
