"""From every way of sharing activations back to the dense model, which nothing changes; copies are independent."""

import copy
import pickle
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import lossytp as ltp
from tests.parallel.conftest import tiny_batch, tiny_gpt2, training_losses
from tests.parallel.sharing_modes import (
    by_rank,
    every_kind,
    every_mode,
    lossy,
    network_of,
    parallel,
    parameters,
    unchanged,
)


def assert_is_dense(back: PreTrainedModel, dense: PreTrainedModel) -> None:
    assert type(back) is type(dense)
    kinds = [
        [(name, type(module), module.training) for name, module in model.named_modules()] for model in (back, dense)
    ]
    assert kinds[0] == kinds[1]
    assert vars(back).keys() == vars(dense).keys()
    assert back.config.to_dict() == dense.config.to_dict()
    assert list(back.state_dict()) == list(dense.state_dict())
    for (name, parameter), expected in zip(back.named_parameters(), dense.parameters(), strict=True):
        assert parameter.requires_grad == expected.requires_grad, name
        assert parameter.dtype == expected.dtype, name
        assert torch.equal(parameter, expected), name


@every_kind
@every_mode
def test_gather_gives_the_dense_model_back_bitwise(mode: str, kind: str) -> None:
    for changes in ({}, {"tie_word_embeddings": False}):
        dense, batch = tiny_gpt2(kind, dtype=torch.float32, resid_pdrop=0.1, **changes), tiny_batch(kind)
        dense.transformer.ln_f.bias.requires_grad_(False)
        dense.transformer.h[0].eval()
        model = parallel(dense, 0.1, mode, size=2)
        back = ltp.gather(model)
        assert_is_dense(back, dense)
        assert torch.equal(back.eval()(**batch).logits, dense.eval()(**batch).logits)
        if kind == "language model":
            tied = not changes
            for each in (model, back):
                assert (each.lm_head.weight is each.transformer.wte.weight) == tied
        assert torch.is_tensor(model(**batch).logits), "the parallel model is as it was"


@every_mode
def test_gather_follows_what_happened_to_the_parallel_model(mode: str) -> None:
    """Its dtype, what was frozen since, whether it trains."""
    dense = tiny_gpt2("classifier")
    model = parallel(dense, 0.1, mode)
    for each in (dense, model):
        each.float().eval()
        each.transformer.wte.weight.requires_grad_(False)
        each.transformer.h[1].attn.c_attn.weight.requires_grad_(False)
        each.transformer.h[1].attn.c_proj.bias.requires_grad_(False)
    assert_is_dense(ltp.gather(model), dense)


@every_kind
def test_gather_after_training_takes_the_first_ranks_copies(kind: str) -> None:
    dense, batch = tiny_gpt2(kind), tiny_batch(kind)
    model = parallel(dense, 0.1, "own copies")
    training_losses(model, batch, steps=2)
    back, first = ltp.gather(model), by_rank(model, dense, parameters(model))[0]
    assert all(torch.equal(parameter, first[name]) for name, parameter in back.named_parameters())
    assert not torch.equal(back.transformer.wte.weight, dense.transformer.wte.weight)
    if kind == "language model":
        assert back.lm_head.weight is back.transformer.wte.weight
    assert model(**batch).rank_logits.shape[0] == 4


@every_kind
@every_mode
def test_a_state_dict_goes_into_another_model_of_the_same_ranks(mode: str, kind: str) -> None:
    dense, batch = tiny_gpt2(kind), tiny_batch(kind)
    trained = parallel(dense, 0.1, mode)
    training_losses(trained, batch, steps=2)
    other = parallel(dense, 0.1, mode)
    other.load_state_dict(trained.state_dict())
    network_of(other).load_state_dict(network_of(trained).state_dict())
    assert training_losses(other, batch, steps=2) == training_losses(trained, batch, steps=2)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@every_mode
def test_a_copy_trains_independently(mode: str, copied: Any) -> None:
    """It has a network of its own, which goes on from where the first one was."""
    batch = tiny_batch("classifier")
    model = parallel(tiny_gpt2("classifier"), 0.1, mode, repair="stale")
    training_losses(model, batch, steps=1)
    again, before = copied(model), copy.deepcopy(model.state_dict())
    losses = training_losses(again, batch, steps=2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert training_losses(model, batch, steps=2) == losses


def test_neither_parallelize_nor_gather_draws_from_the_global_generator() -> None:
    dense, before = tiny_gpt2(), torch.get_rng_state()
    ltp.gather(lossy(dense, 0.1))
    assert torch.equal(torch.get_rng_state(), before)


@every_kind
def test_the_dense_model_is_not_changed(kind: str) -> None:
    dense, batch = tiny_gpt2(kind), tiny_batch(kind)
    with unchanged(dense):
        parallel = lossy(dense, 0.1)
        training_losses(parallel, batch, steps=2)
    assert all(parameter.grad is None for parameter in dense.parameters())


@every_kind
def test_the_parallel_model_is_not_changed_by_gather(kind: str) -> None:
    parallel, batch = lossy(tiny_gpt2(kind), 0.1), tiny_batch(kind)
    untouched = lossy(tiny_gpt2(kind), 0.1)
    with unchanged(parallel):
        training_losses(ltp.gather(parallel), batch, steps=2)
    assert training_losses(parallel, batch, steps=3) == training_losses(untouched, batch, steps=3)


def test_frozen_parameters_stay_frozen() -> None:
    dense = tiny_gpt2()
    for parameter in (*dense.transformer.h[0].parameters(), dense.transformer.h[1].mlp.c_fc.bias):
        parameter.requires_grad_(False)
    parallel = lossy(dense, 0.1)
    frozen = {name for name, parameter in dense.named_parameters() if not parameter.requires_grad}
    assert {name for name, parameter in parallel.named_parameters() if not parameter.requires_grad} == frozen
    parallel(**tiny_batch()).loss.backward()
    assert {name for name, parameter in parallel.named_parameters() if parameter.grad is None} == frozen
