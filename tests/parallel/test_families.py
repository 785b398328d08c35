"""Decoders of other families than GPT-2, by their own tensor-parallel plans, against transformers' dense ones."""

import copy
import pickle
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import lossytp as ltp
from lossytp.parallel.layers import ColumnParallelLinear
from tests.parallel.conftest import (
    bernoulli,
    gradient_error,
    gradients,
    relative_error,
    tiny_batch,
    training_losses,
)
from tests.parallel.families import FAMILIES, GATHERING, NUM_LAYERS, shifted, tiny
from tests.parallel.sharing_modes import MODES

pytestmark = pytest.mark.slow

KINDS = ["language model", "classifier"]
ONE_HEAD = {"granite"}  # no classifier in transformers
every_family = pytest.mark.parametrize("family", [*FAMILIES, *GATHERING])
REFUSED = {("qwen3", "own copies")}  # test_plans.py shows it


def lossy(dense: PreTrainedModel, loss_rate: float, *, size: int = 4, **how: Any) -> PreTrainedModel:
    return ltp.parallelize(dense, bernoulli(loss_rate, wire=ltp.Wire(mtu_bytes=108)), tensor_parallel_size=size, **how)


def heads_of(family: str) -> list[str]:
    return KINDS[:1] if family in ONE_HEAD else KINDS


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("size", [2, 4])
@every_family
def test_without_losses_logits_and_gradients_equal_dense(family: str, size: int, padded: bool) -> None:
    for kind in heads_of(family):
        dense, batch = tiny(family, kind), tiny_batch(kind, padded=padded)
        expected, logits = gradients(dense, batch), dense(**batch).logits
        parallel = lossy(dense, 0.0, size=size)
        assert relative_error(parallel(**batch).logits, logits) < 1e-9
        gradients(parallel, batch)
        assert gradient_error(shifted(parallel), expected) < 1e-9


@every_family
def test_without_losses_fp32_equals_dense_to_rounding(family: str) -> None:
    dense, batch = tiny(family, dtype=torch.float32), tiny_batch(padded=True)
    expected, logits = gradients(dense, batch), dense(**batch).logits
    parallel = lossy(dense, 0.0)
    assert relative_error(parallel(**batch).logits, logits) < 1e-5
    gradients(parallel, batch)
    assert gradient_error(shifted(parallel), expected) < 1e-5


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        (family, mode)
        for family in (*FAMILIES, *GATHERING)
        for mode in MODES
        if mode != "shared" and (family, mode) not in REFUSED
    ],
)
def test_without_losses_every_way_of_sharing_equals_dense(family: str, mode: str) -> None:
    for kind in heads_of(family):
        dense, batch = tiny(family, kind), tiny_batch(kind, padded=True)
        expected = gradients(dense, batch)
        parallel = lossy(dense, 0.0, **MODES[mode])
        assert relative_error(parallel(**batch).logits, dense(**batch).logits) < 1e-9
        if mode == "own copies":
            trained = training_losses(parallel, batch, steps=3)
            own_streams = lossy(tiny(family, kind), 0.0, **MODES["own streams"])
            assert trained[0] == pytest.approx(training_losses(own_streams, batch, steps=1)[0], abs=1e-9)
        else:
            gradients(parallel, batch)
            assert gradient_error(shifted(parallel), expected) < 1e-8  # some compute norms in fp32


@every_family
def test_with_losses_the_same_comparison_fails_by_far(family: str) -> None:
    """Control of everything above."""
    dense, batch = tiny(family), tiny_batch()
    expected, logits = gradients(dense, batch), dense(**batch).logits
    parallel = lossy(dense, 0.1)
    assert relative_error(parallel(**batch).logits, logits) > 0.01
    gradients(parallel, batch)
    assert gradient_error(shifted(parallel), expected) > 0.01


@pytest.mark.parametrize("size", [2, 4])
@every_family
def test_gather_gives_the_dense_model_back_bitwise(family: str, size: int) -> None:
    for kind in heads_of(family):
        dense = tiny(family, kind, dtype=torch.float32)
        parallel = lossy(dense, 0.1, size=size)
        assert type(parallel).__name__ == type(dense).__name__
        back = ltp.gather(parallel)
        assert type(back) is type(dense)
        assert [(name, type(module)) for name, module in back.named_modules()] == [
            (name, type(module)) for name, module in dense.named_modules()
        ]
        assert list(back.state_dict()) == list(dense.state_dict())
        assert all(torch.equal(back.state_dict()[name], tensor) for name, tensor in dense.state_dict().items())
        assert parallel.num_parameters() == dense.num_parameters(), "nothing is kept twice"


def test_a_training_step_sends_four_messages_a_layer() -> None:
    """q, k and v share one backward message, and so do gate and up."""
    parallel = lossy(tiny("llama"), 0.0)
    gradients(parallel, tiny_batch())
    network = next(layer for layer in parallel.modules() if isinstance(layer, ColumnParallelLinear)).collective.network
    sites = network.report().groupby(["layer", "module", "direction"])["packets"].agg(["count", "sum"])
    assert sorted(sites.index) == [
        (layer, module, direction)
        for layer in range(NUM_LAYERS)
        for module in ("attention", "mlp")
        for direction in ("backward", "forward")
    ]
    assert set(sites["count"]) == {4 * 3}
    assert len(set(sites["sum"])) == 1


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize(
    ("family", "mode"),
    [(family, mode) for family in ("llama", "phi", "olmo2") for mode in ("shared", "own streams")],
)
def test_checkpointing_replays_the_losses(family: str, reentrant: bool, mode: str) -> None:
    plain, checkpointed = (lossy(tiny(family), 0.1, **MODES[mode]) for _ in range(2))
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for _ in range(2):
        expected = gradients(plain, tiny_batch())
        assert gradient_error(gradients(checkpointed, tiny_batch()), expected) == 0


CACHES = {"none": {"use_cache": False}, "dynamic": {"use_cache": True}, "static": {"cache_implementation": "static"}}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("mode", ["shared", "own streams", "own copies"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "olmo2", "qwen2"])
def test_without_losses_generated_tokens_equal_dense(family: str, mode: str, cache: str) -> None:
    """Gemma 2 and Qwen 2 make one mask for each kind of layer before a static cache is filled."""
    dense, prompts = tiny(family).eval(), tiny_batch()["input_ids"][:3, :6]
    how = {"do_sample": False, "min_new_tokens": 8, "max_new_tokens": 8, "use_cache": True, **CACHES[cache]}
    tokens = [
        model.generate(prompts, attention_mask=torch.ones_like(prompts), **how)
        for model in (dense, lossy(dense, 0.0, **MODES[mode]), lossy(dense, 0.5, **MODES[mode]))
    ]
    assert torch.equal(tokens[1], tokens[0])
    assert not torch.equal(tokens[2], tokens[0]), "control"


def test_under_bf16_autocast_it_is_as_close_to_dense_as_autocast_is_to_fp32() -> None:
    dense, batch = tiny("llama", dtype=torch.float32), tiny_batch()
    exact = dense(**batch).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, actual = dense(**batch).logits, lossy(dense, 0.0)(**batch).logits
    assert actual.dtype == expected.dtype
    assert relative_error(actual.float(), expected.float()) < 2 * relative_error(expected.float(), exact)


@pytest.mark.parametrize("mode", ["shared", "own streams"])
def test_copies_and_pickles_train_alike(mode: str) -> None:
    parallel, batch = lossy(tiny("qwen2"), 0.1, **MODES[mode]), tiny_batch()
    parallel(**batch, output_hidden_states=True, output_attentions=True)  # transformers adds hooks that have no pickle
    parallel.model.layers[0].self_attn.q_proj(torch.randn(4, 1, 64, dtype=torch.float64))  # k and v were never asked
    others = [copy.deepcopy(parallel), pickle.loads(pickle.dumps(parallel))]
    expected = training_losses(parallel, batch, steps=2)
    assert [training_losses(other, batch, steps=2) for other in others] == [expected, expected]
    assert all(len(other(**batch, output_hidden_states=True).hidden_states) == NUM_LAYERS + 1 for other in others)


def test_frozen_projections_stay_frozen_and_the_others_learn() -> None:
    dense = tiny("llama")
    dense.model.layers[0].self_attn.k_proj.requires_grad_(False)
    parallel = lossy(dense, 0.0)
    parallel(**tiny_batch()).loss.backward()
    back = ltp.gather(parallel)
    assert {name for name, each in back.named_parameters() if not each.requires_grad} == {
        "model.layers.0.self_attn.k_proj.weight"
    }
    dense(**tiny_batch()).loss.backward()
    want = {name: each.grad for name, each in dense.named_parameters() if each.grad is not None}
    have = shifted(parallel)
    assert gradient_error({name: have[name] for name in want}, want) < 1e-9


def test_a_saved_model_is_the_dense_one(tmp_path: Any) -> None:
    dense = tiny("llama, tied", dtype=torch.float32)
    lossy(dense, 0.1, reliable_gather=False).save_pretrained(tmp_path)
    loaded = type(dense).from_pretrained(tmp_path)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in dense.state_dict().items())
