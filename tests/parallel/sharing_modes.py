"""The ways in which tensor-parallel ranks may share activations and parameters, and what tests compare of them."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import lossytp as ltp
from lossytp.parallel.replicas import placed
from tests.parallel.conftest import bernoulli, gradient_error, gradients, relative_error, tiny_batch
from tests.parallel.rank_by_rank import training_loss

WIRE = ltp.Wire(mtu_bytes=108)  # 64 bytes of payload: 8 elements of float64
ALGORITHMS = ["direct", "ring", "tree", "switch", "sender"]
MODES: dict[str, dict[str, Any]] = {
    "shared": {},
    "own streams": {"reliable_gather": False},
    "own copies": {"reliable_gather": False, "own_copies": True},
    "sequence": {"sequence_parallel": True},
    "sequence, lossy gather": {"sequence_parallel": True, "reliable_gather": False},
    "exact adjoint": {"exact_adjoint": True},
}
ON_OWN_STREAMS = ["own streams", "own copies"]
# the sum of "sender" reaches all ranks alike
COMBINATIONS = [
    (mode, algorithm)
    for mode in MODES
    for algorithm in ALGORITHMS
    if not (mode in ON_OWN_STREAMS and algorithm == "sender")
]


def parallel(dense: PreTrainedModel, loss_rate: float, mode: str, *, size: int = 4, seed: int = 0, **how: Any) -> Any:
    network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=loss_rate), seed=seed, wire=WIRE)
    return ltp.parallelize(dense, network, tensor_parallel_size=size, **MODES[mode] | how)


def by_rank(model: PreTrainedModel, dense: PreTrainedModel, tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Parameters, or gradients, in the dense model's shapes, once for each copy that ranks here have."""
    copies = {id(parameter): copies for parameter, _, copies in placed(model)}
    of = {name: copies[id(parameter)] for name, parameter in model.named_parameters()}
    shapes = {name: parameter.shape for name, parameter in dense.named_parameters()}
    return [
        {
            name: (tensors[name][rank] if of[name] > 1 else tensors[name]).reshape(shape)
            for name, shape in shapes.items()
        }
        for rank in range(max(of.values()))
    ]


def parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def fresh_gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: torch.clone(parameter.grad) for name, parameter in model.named_parameters()}


REENTRANT = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


def lossy(dense: PreTrainedModel, loss_rate: float, *, seed: int = 0, size: int = 4, **how: Any) -> PreTrainedModel:
    return ltp.parallelize(dense, bernoulli(loss_rate, seed=seed), tensor_parallel_size=size, **how)


def network_of(parallel: PreTrainedModel) -> ltp.LossyNetwork:
    return parallel.transformer.h[0].attn.c_attn.collective.network


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
    torch.manual_seed(3)
    steps = [gradients(parallel, tiny_batch(padded=True)) for _ in range(2)]
    return steps, network_of(parallel).state_dict()


def assert_same_steps(actual: tuple, expected: tuple) -> None:
    assert actual[1] == expected[1]
    for gradients_, expected_gradients in zip(actual[0], expected[0], strict=True):
        assert all(torch.equal(gradient, expected_gradients[name]) for name, gradient in gradients_.items())


every_mode = pytest.mark.parametrize("mode", MODES)
# in the fast tests one mode alone
modes_mostly_slow = pytest.mark.parametrize(
    "mode", [mode if mode == "shared" else pytest.param(mode, marks=pytest.mark.slow) for mode in MODES]
)
every_kind = pytest.mark.parametrize("kind", ["language model", "classifier"])
on_own_streams = pytest.mark.parametrize("mode", ON_OWN_STREAMS)


def logits_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    output = model(**batch)
    return getattr(output, "rank_logits", output.logits.unsqueeze(0))


def float64_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean over streams of the training loss; transformers casts a language model's logits to fp32."""
    return torch.stack([training_loss(logits, batch) for logits in logits_of(model, batch)]).mean()


def assert_equals_dense(
    model: PreTrainedModel, dense: PreTrainedModel, batch: dict[str, Tensor], tolerance: float = 1e-12
) -> None:
    """Logits of every rank, training loss, and every gradient of every copy; with the same dropout."""
    torch.manual_seed(5)
    expected = fresh_gradients(dense, float64_loss(dense, batch))
    torch.manual_seed(5)
    found = fresh_gradients(model, float64_loss(model, batch))
    for of_rank in by_rank(model, dense, found):
        assert gradient_error(of_rank, expected) < tolerance
    torch.manual_seed(6)
    output = dense(**batch)
    torch.manual_seed(6)
    actual = model(**batch)
    each = getattr(actual, "rank_logits", actual.logits.unsqueeze(0))
    assert all(relative_error(logits, output.logits) < tolerance for logits in each)
    assert torch.equal(actual.logits, each[0])
    assert abs(actual.loss - output.loss) < max(tolerance, 1e-6)
