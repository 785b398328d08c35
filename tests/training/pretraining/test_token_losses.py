"""The cross-entropy of every token, over the ranks' own logits."""

from types import SimpleNamespace

import pytest
import torch

from lossytp.training.text import token_losses
from paper.damage import losses_by_block


def by_hand(logits_TV, ids_T):
    probabilities = torch.softmax(logits_TV[:-1], -1)
    return [-probabilities[place, token].log().item() for place, token in enumerate(ids_T[1:].tolist())]


def test_it_is_the_mean_over_ranks_of_each_tokens_own():
    ids = torch.tensor([[3, 0, 2], [1, 1, 4]])
    logits = torch.randn(2, 2, 3, 5, generator=torch.Generator().manual_seed(0))
    found = token_losses(lambda **_: SimpleNamespace(logits=logits[0], rank_logits=logits), ids)
    for text in (0, 1):
        ranks = [by_hand(logits[rank, text], ids[text]) for rank in (0, 1)]
        assert found[text].tolist() == pytest.approx([(one + other) / 2 for one, other in zip(*ranks, strict=True)])


def test_blocks_pass_one_by_one():
    sizes = []

    def model(input_ids, use_cache):
        sizes.append(tuple(input_ids.shape))
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 5))

    found = losses_by_block(model, torch.zeros(3, 4, dtype=torch.long))
    assert sizes == [(1, 4)] * 3
    assert found == pytest.approx(torch.full((3, 3), torch.log(torch.tensor(5.0)).item()).numpy())
