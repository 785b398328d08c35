"""Text that a tensor-parallel GPT-2 generates."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lossytp.parallel.convert import parallelize
from tests.parallel.conftest import bernoulli, tiny_batch, tiny_gpt2
from tests.parallel.converted_gpt2 import lossy

NUM_PROMPT_TOKENS = 6


def generate(model: PreTrainedModel, padded: bool = False, **settings: Any) -> torch.Tensor:
    """Ten more tokens for three prompts; padded: the second prompt has two tokens less than the others."""
    prompts = tiny_batch()["input_ids"][:3, :NUM_PROMPT_TOKENS].clone()
    mask = torch.ones_like(prompts)
    if padded:
        prompts[1, :2] = mask[1, :2] = 0
    torch.manual_seed(4)
    return model.generate(prompts, attention_mask=mask, max_new_tokens=10, min_new_tokens=10, **settings)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "left-padded"])
@pytest.mark.parametrize(
    "caching",
    [{"use_cache": True}, {"use_cache": False}, {"use_cache": True, "cache_implementation": "static"}],
    ids=["cache", "no cache", "static cache"],
)
@pytest.mark.parametrize(
    "search",
    [{"do_sample": False}, {"num_beams": 3, "do_sample": False}, {"do_sample": True, "top_k": 20}],
    ids=["greedy", "beam", "sampling"],
)
def test_without_losses_generated_tokens_equal_dense(search: dict, caching: dict, padded: bool) -> None:
    dense = tiny_gpt2().eval()
    parallel = lossy(dense, 0.0)
    tokens = [generate(model, padded, **search, **caching) for model in (dense, parallel)]
    assert torch.equal(*tokens)
    assert tokens[0].shape[1] == NUM_PROMPT_TOKENS + 10


@pytest.mark.parametrize("settings", [{"use_cache": True}, {"num_beams": 3}, {"do_sample": True}], ids=str)
def test_with_losses_generate_runs_and_writes_something_else(settings: dict) -> None:
    """Also the control of the test above: losses do reach the generated tokens."""
    dense = tiny_gpt2().eval()
    network = bernoulli(0.3)
    tokens = generate(parallelize(dense, network, tensor_parallel_size=4), **settings)
    assert tokens.shape == (3, NUM_PROMPT_TOKENS + 10)
    assert not torch.equal(tokens, generate(dense, **settings))
    assert set(network.report()["direction"]) == {"forward"}
