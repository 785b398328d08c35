"""Coherence of made-up contributions, and of a small GPT-2's, against sums worked out part by part."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from lossytp.study.coherence import coherence


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=50, n_positions=8)).eval()


@pytest.fixture
def batch():
    torch.manual_seed(1)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    return {"input_ids": torch.randint(50, (2, 6)), "attention_mask": mask}


def test_equal_contributions_are_coherent_and_opposite_ones_cancel(model, batch):
    with torch.no_grad():
        for block in model.transformer.h:
            for layer in (block.attn.c_proj, block.mlp.c_proj):
                layer.weight.copy_(layer.weight[: len(layer.weight) // 2].repeat(2, 1))

    def halves_alike(sign):
        hooks = [
            layer.register_forward_pre_hook(
                lambda _, args: (torch.cat([first := args[0].chunk(2, -1)[0], sign * first], -1),)
            )
            for block in model.transformer.h
            for layer in (block.attn.c_proj, block.mlp.c_proj)
        ]
        value = coherence(model, [batch], 2)
        for hook in hooks:
            hook.remove()
        return value

    assert halves_alike(1) == pytest.approx(1, abs=1e-5)
    assert halves_alike(-1) == pytest.approx(-1, abs=1e-5)


@pytest.mark.parametrize("ranks", [2, 4])
def test_it_is_the_mean_product_over_the_mean_square_of_real_tokens(model, batch, ranks):
    seen = []
    layers = [layer for block in model.transformer.h for layer in (block.attn.c_proj, block.mlp.c_proj)]
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, args: seen.append((module.weight.detach(), args[0].detach())))
    with torch.no_grad():
        model.transformer(**batch)
    each = []
    for weight, hidden in seen:
        rows = hidden[batch["attention_mask"].bool()]
        width = len(weight) // ranks
        parts = [rows[:, r * width : (r + 1) * width] @ weight[r * width : (r + 1) * width] for r in range(ranks)]
        products = [(parts[r] * parts[s]).mean() for r in range(ranks) for s in range(ranks) if r != s]
        each.append(torch.stack(products).mean() / torch.stack([(part**2).mean() for part in parts]).mean())
    assert coherence(model, [batch], ranks) == pytest.approx(float(torch.stack(each).mean()), rel=1e-4)


def test_one_rank_shares_no_sum(model, batch):
    with pytest.raises(ValueError, match="ranks = 1 share no sum"):
        coherence(model, [batch], 1)
