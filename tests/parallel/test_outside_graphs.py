"""Compiled tensor-parallel models lose the same packets; exported and traced ones are refused."""

from typing import Any

import pytest
import torch

import lossytp as ltp
from tests.parallel.conftest import tiny_gpt2

pytestmark = pytest.mark.slow

REFUSED = r"would repeat one call's packet losses: use torch\.compile, or gather\(model\) first"


def lossy_model(**settings: Any) -> tuple[Any, ltp.LossyNetwork]:
    network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.3), seed=1, wire=ltp.Wire(mtu_bytes=128))
    return ltp.parallelize(tiny_gpt2(dtype=torch.float32), network, tensor_parallel_size=4, **settings), network


def two_steps(model: Any, run: Any) -> list[torch.Tensor]:
    """Return the losses of two forward passes, and the gradients of both."""
    tokens = torch.arange(24).view(2, 12) % 30
    losses = []
    for _ in range(2):
        loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("settings", [{}, {"reliable_gather": False}, {"sequence_parallel": True}], ids=str)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_loses_the_same_packets(backend: str, settings: dict) -> None:
    torch._dynamo.reset()
    (eager, network), (model, networks_twin) = lossy_model(**settings), lossy_model(**settings)
    expected = two_steps(eager, eager)
    actual = two_steps(model, torch.compile(model, backend=backend))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    summary = network.summary("training")
    assert networks_twin.summary("training") == summary
    assert summary["lost"] > 0
    assert not torch.equal(expected[0], expected[1]), "each call draws losses of its own"


def test_what_lies_between_lossy_layers_is_compiled() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    model, _ = lossy_model()
    two_steps(model, torch.compile(model, backend=backend))
    assert sum(len(graph.graph.nodes) for graph in graphs) > 20


def test_an_exported_model_is_refused() -> None:
    model, _ = lossy_model()
    with pytest.raises(Exception, match=f"torch.export {REFUSED}"):
        torch.export.export(model, (torch.zeros(1, 4, dtype=torch.long),))


def test_a_traced_model_is_refused() -> None:
    model, _ = lossy_model()
    with pytest.raises(ValueError, match=f"^torch.jit.trace {REFUSED}$"):
        torch.jit.trace(model, (torch.zeros(1, 4, dtype=torch.long),))
