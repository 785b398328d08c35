"""From dense GPT-2 to tensor-parallel and back: nothing is changed on the way, and copies are independent."""

import copy
from pathlib import Path

import torch

import lossytp as ltp
from lossytp.parallel.convert import assert_converted, gather, parallelize
from tests.parallel.conftest import MODELS, gradients, relative_error, tiny_batch, tiny_gpt2, training_losses
from tests.parallel.converted_gpt2 import every_kind, every_size, lossy, network_of, unchanged


@every_size
@every_kind
def test_gather_gives_the_dense_model_back_bitwise(kind: str, tensor_parallel_size: int) -> None:
    dense, batch = tiny_gpt2(kind, dtype=torch.float32), tiny_batch(kind, padded=True)
    back = gather(lossy(dense, 0.1, size=tensor_parallel_size))
    assert type(back) is type(dense)
    assert [(name, type(module)) for name, module in back.named_modules()] == [
        (name, type(module)) for name, module in dense.named_modules()
    ]
    assert back.config.to_dict() == dense.config.to_dict()
    assert list(back.state_dict()) == list(dense.state_dict())
    assert all(torch.equal(back.state_dict()[name], tensor) for name, tensor in dense.state_dict().items())
    assert torch.equal(back(**batch).logits, dense(**batch).logits)
    expected = gradients(dense, batch)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(back, batch).items())


@every_kind
def test_what_was_trained_in_parallel_loads_in_plain_transformers(kind: str, tmp_path: Path) -> None:
    batch = tiny_batch(kind, padded=True)
    parallel = lossy(tiny_gpt2(kind, dtype=torch.float32), 0.1)
    training_losses(parallel, batch, steps=3)
    trained = gather(parallel).eval()
    trained.save_pretrained(tmp_path)
    loaded = MODELS[kind].from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(**batch).logits, trained(**batch).logits)
    with network_of(parallel).reliable():
        assert relative_error(parallel(**batch).logits, trained(**batch).logits) < 1e-5
    assert relative_error(tiny_gpt2(kind, dtype=torch.float32)(**batch).logits, trained(**batch).logits) > 1e-3


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
        training_losses(gather(parallel), batch, steps=2)
    assert training_losses(parallel, batch, steps=3) == training_losses(untouched, batch, steps=3)


def test_tied_embeddings_stay_tied() -> None:
    parallel = lossy(tiny_gpt2(), 0.1)
    assert parallel.lm_head.weight is parallel.transformer.wte.weight
    training_losses(parallel, tiny_batch(), steps=1)
    back = gather(parallel)
    assert back.lm_head.weight is back.transformer.wte.weight
    assert torch.equal(back.lm_head.weight, parallel.lm_head.weight)


def test_untied_embeddings_stay_apart() -> None:
    parallel = lossy(tiny_gpt2(tie_word_embeddings=False), 0.1)
    for model in (parallel, gather(parallel)):
        assert not torch.equal(model.lm_head.weight, model.transformer.wte.weight)


def test_frozen_parameters_stay_frozen() -> None:
    dense = tiny_gpt2()
    for parameter in (*dense.transformer.h[0].parameters(), dense.transformer.h[1].mlp.c_fc.bias):
        parameter.requires_grad_(False)
    parallel = lossy(dense, 0.1)
    frozen = {name for name, parameter in dense.named_parameters() if not parameter.requires_grad}
    assert {name for name, parameter in parallel.named_parameters() if not parameter.requires_grad} == frozen
    parallel(**tiny_batch()).loss.backward()
    assert {name for name, parameter in parallel.named_parameters() if parameter.grad is None} == frozen


def test_parallelize_draws_nothing_from_the_global_generator() -> None:
    dense, before = tiny_gpt2(), torch.get_rng_state()
    lossy(dense, 0.1)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_package_offers_both_ways() -> None:
    assert (ltp.parallelize, ltp.gather) == (parallelize, gather)


def test_a_copy_trains_independently() -> None:
    dense, batch = tiny_gpt2(), tiny_batch()
    parallel, untouched = lossy(dense, 0.1), lossy(dense, 0.1)
    first = training_losses(parallel, batch, steps=1)
    again = copy.deepcopy(parallel)
    weights = {name: tensor.clone() for name, tensor in parallel.state_dict().items()}
    copied = training_losses(again, batch, steps=3)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in parallel.state_dict().items())
    assert not torch.equal(again.transformer.wte.weight, parallel.transformer.wte.weight)
    assert again.lm_head.weight is again.transformer.wte.weight
    assert_converted(again)
    # a copy has a network of its own, which goes on from where the first one was
    assert training_losses(parallel, batch, steps=3) == copied
    assert [*first, copied[0]] == [*training_losses(untouched, batch, steps=1), untouched(**batch).loss.item()]
