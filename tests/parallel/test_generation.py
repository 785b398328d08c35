"""Text that models generate in every way of sharing activations, and compiled, exported and traced models."""

import pkgutil
from typing import Any

import pytest
import torch
from torch import Tensor

import lossytp as ltp
from tests.parallel.conftest import NUM_EXAMPLES, relative_error, tiny_batch, tiny_gpt2
from tests.parallel.sharing_modes import ON_OWN_STREAMS, every_mode, network_of, on_own_streams, parallel


def generate(model: Any, **settings: Any) -> Tensor:
    prompts = tiny_batch()["input_ids"][:3, :6].clone()
    mask = torch.ones_like(prompts)
    prompts[1, :2] = mask[1, :2] = 0
    torch.manual_seed(4)
    return model.generate(prompts, attention_mask=mask, max_new_tokens=8, min_new_tokens=8, **settings)


CACHING: list[dict[str, Any]] = [{"use_cache": True}, {"use_cache": False}]
CACHING += [{"use_cache": True, "cache_implementation": "static"}]
every_caching = pytest.mark.parametrize("caching", CACHING, ids=["cache", "no cache", "static cache"])


@every_caching
@every_mode
def test_without_losses_generated_tokens_equal_dense(mode, caching):
    dense = tiny_gpt2().eval()
    for search in ({"do_sample": False}, {"do_sample": True, "top_k": 20}):
        tokens = [generate(model, **search, **caching) for model in (dense, parallel(dense, 0.0, mode))]
        assert torch.equal(*tokens)


@on_own_streams
def test_a_cache_goes_on_where_it_stopped(mode):
    """Also where nobody says at which positions; its rows are the ranks' along the batch."""
    ids_BT, dense = tiny_batch()["input_ids"], tiny_gpt2().eval()
    model, results = parallel(dense, 0.0, mode), []
    for each in (dense, model):
        cache = each(ids_BT[:, :5], use_cache=True).past_key_values
        results.append((cache, each(ids_BT[:, 5:], past_key_values=cache, use_cache=True).logits))
    assert relative_error(results[1][1], results[0][1]) < 1e-12
    assert relative_error(results[1][1], dense(ids_BT).logits[:, 5:]) < 1e-12
    keys = [cache.layers[0].keys for cache, _ in results]
    assert keys[1].shape == (4 * NUM_EXAMPLES, 8 // 4, *keys[0].shape[2:])


@every_mode
def test_with_losses_generate_writes_something_else(mode):
    """Also the control of the tests above: losses do reach the generated tokens."""
    dense = tiny_gpt2().eval()
    for search in ({"do_sample": False}, {"do_sample": True}):
        model = parallel(dense, 0.3, mode)
        tokens = generate(model, **search)
        assert tokens.shape == (3, 14)
        assert not torch.equal(tokens, generate(dense, **search))
        assert set(network_of(model).report()["direction"]) == {"forward"}


@every_caching
@every_mode
def test_beam_search_is_refused_or_right(mode, caching):
    """It reorders the rows of a cache as if they were the batch's; without a cache there is nothing to reorder."""
    dense = tiny_gpt2().eval()
    model = parallel(dense, 0.0, mode)
    if mode in ON_OWN_STREAMS and caching["use_cache"]:
        with pytest.raises(ValueError, match="beam search does not work if ranks have their own streams"):
            generate(model, num_beams=3, do_sample=False, **caching)
        return
    assert torch.equal(*(generate(each, num_beams=3, do_sample=False, **caching) for each in (dense, model)))


def lossy_model(**settings: Any) -> tuple[Any, ltp.LossyNetwork]:
    network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.3), seed=1, wire=ltp.Wire(mtu_bytes=128))
    return ltp.parallelize(tiny_gpt2(dtype=torch.float32), network, tensor_parallel_size=4, **settings), network


def two_steps(model: Any, run: Any) -> list[torch.Tensor]:
    tokens = torch.arange(24).view(2, 12) % 30
    losses = []
    for _ in range(2):
        loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"reliable_gather": False}, {"sequence_parallel": True}], ids=str)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_loses_the_same_packets(backend, settings):
    torch._dynamo.reset()
    (eager, network), (model, networks_twin) = lossy_model(**settings), lossy_model(**settings)
    expected = two_steps(eager, eager)
    actual = two_steps(model, torch.compile(model, backend=backend))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    summary = network.summary("training")
    assert networks_twin.summary("training") == summary
    assert summary["lost"] > 0
    assert not torch.equal(expected[0], expected[1]), "each call draws losses of its own"


@pytest.mark.slow
def test_what_lies_between_lossy_layers_is_compiled():
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    model, _ = lossy_model()
    two_steps(model, torch.compile(model, backend=backend))
    assert sum(len(graph.graph.nodes) for graph in graphs) > 20


@pytest.mark.slow
@pytest.mark.parametrize("way", ["torch.export.export", "torch.jit.trace"])
def test_an_exported_or_traced_model_is_refused(way):
    model, _ = lossy_model()
    with pytest.raises(Exception, match="would repeat one call's losses"):
        pkgutil.resolve_name(way)(model, (torch.zeros(1, 4, dtype=torch.long),))
