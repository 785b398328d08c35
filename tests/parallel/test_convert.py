"""Tensor-parallel GPT-2 against transformers' dense one: without losses, with them, there and back."""

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, GPT2DoubleHeadsModel, GPT2Model, PreTrainedModel
from transformers.pytorch_utils import Conv1D

import lossytp as ltp
from lossytp.network.wiring import Wiring
from lossytp.parallel.convert import assert_converted, gather, parallelize
from lossytp.parallel.layers import ColumnParallelLinear, RowParallelLinear
from tests.parallel.conftest import (
    MODELS,
    NUM_HEADS,
    NUM_LAYERS,
    WIDTH,
    bernoulli,
    dense_layout,
    gradient_error,
    gradients,
    relative_error,
    tiny_batch,
    tiny_gpt2,
    training_losses,
)

ALGORITHMS, REPAIRS = ["sender", "direct"], ["zero", "rescale"]
every_kind = pytest.mark.parametrize("kind", MODELS)
every_size = pytest.mark.parametrize("tensor_parallel_size", [2, 4, 8])
padded_or_not = pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])


def lossy(dense: PreTrainedModel, loss_rate: float, *, seed: int = 0, size: int = 4, **how: Any) -> PreTrainedModel:
    return parallelize(dense, bernoulli(loss_rate, seed=seed), tensor_parallel_size=size, **how)


def network_of(parallel: PreTrainedModel) -> ltp.LossyNetwork:
    return parallel.transformer.h[0].attn.c_attn.collective.network


def lossy_gradients(parallel: PreTrainedModel, dense: PreTrainedModel, batch: dict) -> dict[str, torch.Tensor]:
    return dense_layout(gradients(parallel, batch), dense)


def assert_equals_dense(parallel: PreTrainedModel, dense: PreTrainedModel, batch: dict, tolerance: float) -> None:
    """Logits, loss and every gradient, with the same dropout."""
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


# --- without losses it is the dense model


@padded_or_not
@every_size
@every_kind
def test_without_losses_logits_and_gradients_equal_dense(kind: str, tensor_parallel_size: int, padded: bool) -> None:
    dense = tiny_gpt2(kind)
    parallel = lossy(dense, 0.0, size=tensor_parallel_size)
    assert_equals_dense(parallel, dense, tiny_batch(kind, padded=padded), 1e-9)


@padded_or_not
@every_size
@every_kind
def test_without_losses_ten_training_steps_equal_dense(kind: str, tensor_parallel_size: int, padded: bool) -> None:
    dense = tiny_gpt2(kind)
    parallel = lossy(dense, 0.0, size=tensor_parallel_size)
    batch = tiny_batch(kind, padded=padded)
    expected = training_losses(dense, batch, steps=10)
    assert training_losses(parallel, batch, steps=10) == pytest.approx(expected, abs=1e-9, rel=0)
    assert expected[-1] < 0.9 * expected[0], "ten steps must move the model"


@padded_or_not
@every_size
@every_kind
def test_without_losses_fp32_equals_dense_to_rounding(kind: str, tensor_parallel_size: int, padded: bool) -> None:
    dense, batch = tiny_gpt2(kind, dtype=torch.float32), tiny_batch(kind, padded=padded)
    parallel = lossy(dense, 0.0, size=tensor_parallel_size)
    with torch.no_grad():
        assert relative_error(parallel(**batch).logits, dense(**batch).logits) < 1e-5
    expected, actual = gradients(dense, batch), gradients(parallel, batch)
    largest = max(gradient.norm() for gradient in expected.values())
    assert all(abs(actual[name].norm() - expected[name].norm()) < 1e-5 * largest for name in expected)


@pytest.mark.parametrize("repair", REPAIRS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_without_losses_every_algorithm_and_repair_equals_dense(algorithm: str, repair: str) -> None:
    dense = tiny_gpt2()
    assert_equals_dense(lossy(dense, 0.0, algorithm=algorithm, repair=repair), dense, tiny_batch(), 1e-9)


@padded_or_not
@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        (torch.float64, {"attn_implementation": "eager"}),
        (torch.float64, {"embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1}),
        (torch.float64, {"attn_pdrop": 0.2, "attn_implementation": "eager"}),
        (torch.float64, {"scale_attn_by_inverse_layer_idx": True}),
        (torch.float64, {"scale_attn_weights": False}),
        (torch.float64, {"n_inner": 48, "activation_function": "relu"}),
        (torch.float64, {"tie_word_embeddings": False}),
        (torch.float32, {"reorder_and_upcast_attn": True, "attn_implementation": "eager"}),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_without_losses_other_configurations_equal_dense(dtype: torch.dtype, changes: dict, padded: bool) -> None:
    dense = tiny_gpt2(dtype=dtype, **changes)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    assert_equals_dense(lossy(dense, 0.0), dense, tiny_batch(padded=padded), tolerance)


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_implementation": "eager"},
        {"attn_pdrop": 0.2},
        {"scale_attn_by_inverse_layer_idx": True},
        {"activation_function": "relu"},
    ],
    ids=",".join,
)
def test_those_configurations_do_change_the_logits(changes: dict) -> None:
    """Control: a setting that did nothing would prove nothing. Attention in eager mode alone is the same formula."""
    torch.manual_seed(5)
    batch = tiny_batch()
    with torch.no_grad():
        error = relative_error(tiny_gpt2(**changes)(**batch).logits, tiny_gpt2()(**batch).logits)
    assert (error > 1e-3) == ("attn_implementation" not in changes)


@every_kind
def test_with_losses_the_same_comparison_fails_by_far(kind: str) -> None:
    """Control of everything above."""
    dense, batch = tiny_gpt2(kind), tiny_batch(kind)
    parallel = lossy(dense, 0.1)
    assert gradient_error(lossy_gradients(parallel, dense, batch), gradients(dense, batch)) > 0.01
    with torch.no_grad():
        assert relative_error(parallel(**batch).logits, dense(**batch).logits) > 0.01
    expected = training_losses(dense, batch, steps=10)
    assert max(map(abs, np.subtract(training_losses(parallel, batch, steps=10), expected))) > 0.01


def test_hidden_states_and_attention_weights_equal_dense() -> None:
    dense = tiny_gpt2(attn_implementation="eager")
    settings = {"output_hidden_states": True, "output_attentions": True}
    expected, actual = (model(**tiny_batch(), **settings) for model in (dense, lossy(dense, 0.0)))
    assert (len(actual.hidden_states), len(actual.attentions)) == (NUM_LAYERS + 1, NUM_LAYERS)
    for name in ("hidden_states", "attentions"):
        assert all(relative_error(*pair) < 1e-12 for pair in zip(actual[name], expected[name], strict=True))


def test_when_everything_is_lost_only_biases_remain_of_each_row_parallel_layer() -> None:
    dense, batch = tiny_gpt2(), tiny_batch()
    parallel = lossy(dense, 1.0, algorithm="sender")
    for block in dense.transformer.h:
        nn.init.zeros_(block.attn.c_proj.weight)
        nn.init.zeros_(block.mlp.c_proj.weight)
    with torch.no_grad():
        assert relative_error(parallel(**batch).logits, dense(**batch).logits) < 1e-14


# --- what is sent


def test_a_training_step_sends_four_messages_a_layer() -> None:
    """Attention and MLP, forward and backward: q, k and v share one backward message, the biases add none."""
    parallel = lossy(tiny_gpt2(dtype=torch.float32), 0.0)
    gradients(parallel, tiny_batch())
    table = network_of(parallel).report()
    sites = table.groupby(["layer", "module", "direction"])["packets"].agg(["count", "sum"])
    assert sorted(sites.index) == [
        (layer, module, direction)
        for layer in range(NUM_LAYERS)
        for module in ("attention", "mlp")
        for direction in ("backward", "forward")
    ]
    assert set(sites["count"]) == {4 * 3}  # links of four ranks
    assert set(table["packets"]) == {4}  # a quarter of B * T * D = 5,824 elements, 364 a packet


def test_one_rank_has_nobody_to_send_to() -> None:
    dense = tiny_gpt2()
    parallel = lossy(dense, 0.5, size=1, algorithm="direct")
    assert_equals_dense(parallel, dense, tiny_batch(), 1e-12)
    assert network_of(parallel).report().empty


def test_the_callers_embeddings_are_not_modified() -> None:
    embeddings_BTD = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before = embeddings_BTD.clone()
    parallel = lossy(tiny_gpt2(), 0.5)
    parallel(inputs_embeds=embeddings_BTD.requires_grad_()).logits.sum().backward()
    assert torch.equal(embeddings_BTD, before)


def test_evaluating_without_gradients_sends_forward_only() -> None:
    parallel = lossy(tiny_gpt2(), 0.0)
    with torch.no_grad():
        parallel(**tiny_batch())
    assert set(network_of(parallel).report()["direction"]) == {"forward"}


# --- there and back


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


@contextmanager
def unchanged(model: PreTrainedModel) -> Iterator[None]:
    """Fails unless the model has the same modules, attributes and parameters after the block."""

    def snapshot() -> list:
        modules = [(name, id(module), type(module), set(vars(module))) for name, module in model.named_modules()]
        parameters = [(name, id(tensor), tensor.requires_grad) for name, tensor in model.named_parameters()]
        return [modules, parameters, model.config.to_dict(), model.training]

    before, weights = snapshot(), copy.deepcopy(model.state_dict())
    yield
    assert snapshot() == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


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


# --- every block is converted


@every_size
def test_every_block_is_sharded(tensor_parallel_size: int) -> None:
    """An earlier study sharded nothing: it looked for `nn.Linear`, and GPT-2's blocks have `Conv1D`."""
    dense = tiny_gpt2()
    parallel = lossy(dense, 0.0, size=tensor_parallel_size)
    assert_converted(parallel)
    kinds = [type(module) for module in parallel.modules()]
    assert kinds.count(ColumnParallelLinear) == kinds.count(RowParallelLinear) == 2 * NUM_LAYERS
    assert Conv1D not in kinds
    for block in parallel.transformer.h:
        assert block.attn.c_attn.weight.shape == (WIDTH, 3 * WIDTH)
        assert block.attn.c_proj.weight.shape == (tensor_parallel_size, WIDTH // tensor_parallel_size, WIDTH)
        assert block.mlp.c_fc.weight.shape == (WIDTH, 4 * WIDTH)
        assert block.mlp.c_proj.weight.shape == (tensor_parallel_size, 4 * WIDTH // tensor_parallel_size, WIDTH)
    assert parallel.num_parameters() == dense.num_parameters(), "nothing is kept twice"


def test_a_rank_holds_whole_heads() -> None:
    dense = tiny_gpt2()
    shards, weight = lossy(dense, 0.0, size=2).transformer.h[1].attn.c_attn.weight, dense.transformer.h[1].attn.c_attn
    head = WIDTH // NUM_HEADS
    for rank, heads in enumerate([range(4), range(4, 8)]):
        for projection, name in enumerate("qkv"):
            columns = [projection * WIDTH + h * head + i for h in heads for i in range(head)]
            assert torch.equal(shards.view(WIDTH, 3, 2, -1)[:, projection, rank], weight.weight[:, columns]), name


def test_parallelize_checks_its_own_result(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[PreTrainedModel] = []
    monkeypatch.setattr("lossytp.parallel.convert.assert_converted", lambda model, plan: checked.append(model))
    parallel = lossy(tiny_gpt2(), 0.0)
    assert len(checked) == 1
    assert checked[0] is parallel


@pytest.mark.parametrize("name", ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"])
@pytest.mark.parametrize("kind", [Conv1D, nn.Linear])
def test_a_half_converted_model_is_refused(kind: type, name: str) -> None:
    parallel = lossy(tiny_gpt2(), 0.0)
    parallel.transformer.h[1].set_submodule(name, kind(WIDTH, WIDTH))
    with pytest.raises(AssertionError, match=r"block 1 was not converted: .* left as they were"):
        assert_converted(parallel)


def test_layers_that_changed_places_are_refused() -> None:
    parallel = lossy(tiny_gpt2(), 0.0)
    parallel.transformer.h[0].mlp.c_proj = parallel.transformer.h[0].mlp.c_fc
    with pytest.raises(AssertionError, match=r"block 0 was not converted: \['mlp.c_proj'\] left as they were"):
        assert_converted(parallel)


def test_the_dense_model_is_not_taken_for_a_converted_one() -> None:
    with pytest.raises(AssertionError, match="block 0 was not converted"):
        assert_converted(tiny_gpt2())


# --- bf16 autocast


@every_kind
def test_under_bf16_autocast_it_is_as_close_to_dense_as_autocast_is_to_fp32(kind: str) -> None:
    dense, batch = tiny_gpt2(kind, dtype=torch.float32), tiny_batch(kind, padded=True)
    parallel, exact = lossy(dense, 0.0), gradients(dense, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, actual = gradients(dense, batch), lossy_gradients(parallel, dense, batch)
        logits, dense_logits = parallel(**batch).logits, dense(**batch).logits
    assert logits.dtype == dense_logits.dtype
    assert relative_error(logits.float(), dense_logits.float()) < 0.03
    assert {gradient.dtype for gradient in actual.values()} == {torch.float32}
    rounding = gradient_error(expected, exact)
    assert rounding > 1e-3, "autocast must be at work"
    assert gradient_error(actual, exact) < 1.5 * rounding


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_under_bf16_autocast_packets_carry_twice_the_elements(algorithm: str) -> None:
    plain, autocast = (lossy(tiny_gpt2(dtype=torch.float32), 0.1, algorithm=algorithm) for _ in range(2))
    gradients(plain, tiny_batch())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gradients(autocast, tiny_batch())
    tables = [
        network_of(model).report().set_index(["layer", "module", "direction", "src", "dst"])
        for model in (plain, autocast)
    ]
    assert tables[1].index.equals(tables[0].index)
    assert (2 * tables[1]["packets"]).equals(tables[0]["packets"])
    assert 0 < tables[1]["lost"].sum() < tables[1]["packets"].sum()


# --- gradient checkpointing

REENTRANT = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


def two_steps(parallel: PreTrainedModel) -> tuple[list[dict[str, torch.Tensor]], dict]:
    """Gradients of two steps, and where they leave the network's links and counters."""
    torch.manual_seed(3)
    steps = [gradients(parallel, tiny_batch(padded=True)) for _ in range(2)]
    return steps, network_of(parallel).state_dict()


def assert_same_steps(actual: tuple, expected: tuple) -> None:
    assert actual[1] == expected[1]
    for gradients_, expected_gradients in zip(actual[0], expected[0], strict=True):
        assert all(torch.equal(gradient, expected_gradients[name]) for name, gradient in gradients_.items())


@REENTRANT
@pytest.mark.parametrize("repair", REPAIRS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_checkpointing_replays_the_losses(algorithm: str, repair: str, reentrant: bool) -> None:
    dense = tiny_gpt2(attn_pdrop=0.1, resid_pdrop=0.1)
    plain, checkpointed = (lossy(dense, 0.2, algorithm=algorithm, repair=repair) for _ in range(2))
    checkpointed.activation_checkpointing_enable({"use_reentrant": reentrant})
    assert checkpointed.is_activation_checkpointing
    expected = two_steps(plain)
    assert_same_steps(two_steps(checkpointed), expected)
    assert not torch.equal(*(step["transformer.wte.weight"] for step in expected[0])), "new losses at each step"


@REENTRANT
def test_checkpointing_that_the_dense_model_already_had_replays_the_losses(reentrant: bool) -> None:
    dense = tiny_gpt2()
    expected = two_steps(lossy(dense, 0.2))
    dense.activation_checkpointing_enable({"use_reentrant": reentrant})
    with unchanged(dense):
        checkpointed = lossy(dense, 0.2)
        assert checkpointed.is_activation_checkpointing
        assert_same_steps(two_steps(checkpointed), expected)


@REENTRANT
def test_without_the_replay_checkpointing_computes_other_gradients(
    reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the recomputed forward pass would draw losses of its own."""
    dense = tiny_gpt2()
    expected = two_steps(lossy(dense, 0.2))
    checkpointed = lossy(dense, 0.2)
    checkpointed.activation_checkpointing_enable({"use_reentrant": reentrant})

    monkeypatch.setattr(ltp.LossyNetwork, "recording", lambda *_: nullcontext())
    actual = two_steps(checkpointed)
    assert gradient_error(actual[0][0], expected[0][0]) > 0.01
    assert actual[1]["counters"] != expected[1]["counters"]


@REENTRANT
def test_checkpointing_does_run_the_blocks_twice(reentrant: bool) -> None:
    """Control: equal gradients would prove nothing if nothing was recomputed."""
    parallel = lossy(tiny_gpt2(), 0.2)
    parallel.activation_checkpointing_enable({"use_reentrant": reentrant})
    runs = []
    parallel.transformer.h[0].mlp.c_fc.register_forward_hook(lambda *_: runs.append(1))
    gradients(parallel, tiny_batch())
    assert len(runs) == 2


@REENTRANT
def test_checkpointing_replays_the_losses_as_often_as_a_graph_is_gone_through(reentrant: bool) -> None:
    results = []
    for checkpointing in (False, True):
        parallel = lossy(tiny_gpt2(), 0.2)
        if checkpointing:
            parallel.activation_checkpointing_enable({"use_reentrant": reentrant})
        loss = parallel(**tiny_batch()).loss
        loss.backward(retain_graph=True)
        loss.backward()
        results.append({name: parameter.grad for name, parameter in parallel.named_parameters()})
    assert gradient_error(*results) == 0


@REENTRANT
def test_checkpointing_replays_the_losses_under_autocast(reentrant: bool) -> None:
    dense = tiny_gpt2(dtype=torch.float32)
    plain, checkpointed = lossy(dense, 0.2), lossy(dense, 0.2)
    checkpointed.activation_checkpointing_enable({"use_reentrant": reentrant})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_steps(two_steps(checkpointed), two_steps(plain))


def test_checkpointing_can_be_switched_off_again() -> None:
    expected, parallel = two_steps(lossy(tiny_gpt2(), 0.2)), lossy(tiny_gpt2(), 0.2)
    parallel.activation_checkpointing_enable()
    parallel.activation_checkpointing_disable()
    assert not parallel.is_activation_checkpointing
    assert_same_steps(two_steps(parallel), expected)


def test_checkpointing_every_second_layer_replays_the_losses() -> None:
    expected, parallel = two_steps(lossy(tiny_gpt2(), 0.2)), lossy(tiny_gpt2(), 0.2)
    parallel.activation_checkpointing_enable(every_n_layers=2)
    assert [block.gradient_checkpointing for block in parallel.transformer.h] == [True, False]
    assert_same_steps(two_steps(parallel), expected)


@REENTRANT
def test_gathering_a_checkpointed_model_leaves_no_replay_behind(reentrant: bool) -> None:
    dense, batch = tiny_gpt2(), tiny_batch()
    parallel = lossy(dense, 0.2)
    parallel.activation_checkpointing_enable({"use_reentrant": reentrant})
    gradients(parallel, batch)
    back, counted = gather(parallel), network_of(parallel).state_dict()
    assert back.is_activation_checkpointing
    assert "_set_gradient_checkpointing" not in vars(back)
    for module in back.modules():
        function = getattr(module, "_gradient_checkpointing_func", torch.utils.checkpoint.checkpoint)
        assert getattr(function, "func", function) is torch.utils.checkpoint.checkpoint
    again = copy.deepcopy(back)
    expected = training_losses(dense, batch, steps=2)
    assert training_losses(back, batch, steps=2) == expected
    assert training_losses(again, batch, steps=2) == expected
    assert network_of(parallel).state_dict() == counted
    again.activation_checkpointing_disable()
    again.activation_checkpointing_enable()
    training_losses(again, batch, steps=1)


# --- text generation

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


# --- determinism


def test_the_same_seed_gives_the_same_training_losses_bitwise() -> None:
    dense, batch = tiny_gpt2(dtype=torch.float32), tiny_batch()
    runs = [training_losses(lossy(dense, 0.1, seed=seed), batch, steps=4) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[2][0]


def test_training_draws_nothing_from_the_global_generators() -> None:
    parallel = lossy(tiny_gpt2(), 0.1)
    before, numpy_before = torch.get_rng_state(), repr(np.random.get_state())  # noqa: NPY002
    training_losses(parallel, tiny_batch(), steps=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert repr(np.random.get_state()) == numpy_before  # noqa: NPY002
    training_losses(lossy(tiny_gpt2(resid_pdrop=0.1), 0.1), tiny_batch(), steps=1)
    assert not torch.equal(torch.get_rng_state(), before), "control: dropout does"


def test_global_seeds_do_not_change_the_losses() -> None:
    dense, runs = tiny_gpt2(), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        runs.append(gradients(lossy(dense, 0.1), tiny_batch()))
    assert gradient_error(*runs) == 0


# --- losses switched off, and evaluation


def test_reliable_is_the_clean_result_on_the_same_model_and_then_losses_go_on() -> None:
    dense, batch = tiny_gpt2(), tiny_batch()
    parallel, untouched = lossy(dense, 0.1), lossy(dense, 0.1)
    network = network_of(parallel)
    assert gradient_error(gradients(parallel, batch), gradients(untouched, batch)) == 0
    with network.reliable():
        clean = lossy_gradients(parallel, dense, batch)
    assert gradient_error(clean, gradients(dense, batch)) < 1e-12
    assert network.state_dict() == network_of(untouched).state_dict()
    after = gradients(parallel, batch)
    assert gradient_error(after, gradients(untouched, batch)) == 0
    assert gradient_error(dense_layout(after, dense), clean) > 0.01


def test_losses_go_on_after_an_error_within_reliable() -> None:
    parallel, batch = lossy(tiny_gpt2(), 0.1), tiny_batch()
    with pytest.raises(ZeroDivisionError), network_of(parallel).reliable():
        raise ZeroDivisionError
    assert gradient_error(gradients(parallel, batch), gradients(lossy(tiny_gpt2(), 0.1), batch)) == 0


def train_and_evaluate(parallel: PreTrainedModel, context: Any) -> tuple[list[float], list[float]]:
    """Training losses of three steps, and the loss found after each within `context(network, step)`, if not None."""
    training, evaluations = [], []
    for step in range(3):
        training += training_losses(parallel, tiny_batch(), steps=1)
        if context is not None:
            with torch.no_grad(), context(network_of(parallel), step):
                evaluations.append(parallel(**tiny_batch()).loss.item())
    return training, evaluations


def test_evaluation_does_not_shift_the_losses_of_training() -> None:
    dense = tiny_gpt2()
    alone, _ = train_and_evaluate(lossy(dense, 0.1), None)
    with_clean, clean = train_and_evaluate(lossy(dense, 0.1), lambda network, _: network.reliable())
    with_lossy, noisy = train_and_evaluate(lossy(dense, 0.1), lambda network, step: network.evaluation(step))
    assert with_clean == with_lossy == alone
    assert all(a != b for a, b in zip(clean, noisy, strict=True))


def test_evaluation_outside_a_block_does_shift_them() -> None:
    """Control of the test above."""
    alone, _ = train_and_evaluate(lossy(tiny_gpt2(), 0.1), None)
    shifted, _ = train_and_evaluate(lossy(tiny_gpt2(), 0.1), lambda *_: nullcontext())
    assert shifted[0] == alone[0]
    assert shifted[1] != alone[1]


def test_evaluation_at_the_same_step_loses_the_same_packets() -> None:
    parallel, batch = lossy(tiny_gpt2(), 0.1), tiny_batch()
    losses = []
    for step in (10, 10, 20):
        with torch.no_grad(), network_of(parallel).evaluation(step):
            losses.append(parallel(**batch).loss.item())
    assert losses[0] == losses[1] != losses[2]


# --- copies


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


# --- what is refused


def bert(**_: Any) -> PreTrainedModel:
    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=9)
    return BertForSequenceClassification(config)


@pytest.mark.parametrize(
    ("model", "how", "error", "message"),
    [
        (
            tiny_gpt2,
            {"tensor_parallel_size": 3},
            ValueError,
            "tensor_parallel_size = 3 does not divide the model's 8 heads and its MLP of 256: choose one of 1, 2, 4, 8",
        ),
        (
            lambda: tiny_gpt2(n_inner=100),
            {"tensor_parallel_size": 8},
            ValueError,
            "tensor_parallel_size = 8 does not divide the model's 8 heads and its MLP of 100: choose one of 1, 2, 4",
        ),
        (
            tiny_gpt2,
            {"tensor_parallel_size": 0},
            ValueError,
            "tensor_parallel_size = 0 does not divide the model's 8 heads and its MLP of 256: choose one of 1, 2, 4, 8",
        ),
        (
            tiny_gpt2,
            {"algorithm": "rings"},
            ValueError,
            "algorithm = 'rings' is unknown: choose one of direct, ring, sender, switch, tree",
        ),
        (
            tiny_gpt2,
            {"repair": "magic"},
            ValueError,
            "repair = 'magic' is unknown: choose one of zero, rescale, rescale_counted, stale, local, fec, hadamard, "
            "retransmit",
        ),
        (
            tiny_gpt2,
            {"own_copies": True},
            ValueError,
            "own_copies = True where all ranks share a stream: give reliable_gather = False, or leave it out",
        ),
        (
            bert,
            {},
            TypeError,
            "BertForSequenceClassification has no tensor-parallel plan: give plan, such as "
            '{"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}, or another model',
        ),
        (
            lambda: GPT2Model(tiny_gpt2().config),
            {},
            TypeError,
            "GPT2Model cannot be parallelized: give a GPT2LMHeadModel or GPT2ForSequenceClassification",
        ),
        (
            lambda: GPT2DoubleHeadsModel(tiny_gpt2().config),
            {},
            TypeError,
            "GPT2DoubleHeadsModel cannot be parallelized: give a GPT2LMHeadModel or GPT2ForSequenceClassification",
        ),
        (
            lambda: lossy(tiny_gpt2(), 0.0),
            {},
            TypeError,
            "the model is tensor-parallel already: give the dense model, or gather() it first",
        ),
        (
            lambda: tiny_gpt2(add_cross_attention=True),
            {},
            ValueError,
            "add_cross_attention = True is not supported: give a decoder without cross-attention",
        ),
    ],
    ids=[
        "heads",
        "n_inner",
        "no ranks",
        "algorithm",
        "repair",
        "own_copies",
        "another model",
        "no head",
        "two heads",
        "parallel already",
        "cross-attention",
    ],
)
def test_what_cannot_be_parallelized_is_refused(model: Any, how: dict, error: type[Exception], message: str) -> None:
    dense = model()
    with unchanged(dense), pytest.raises(error, match=f"^{re.escape(message)}$"):
        parallelize(dense, bernoulli(0.0), **{"tensor_parallel_size": 4} | how)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"network": 0.1},
            "network = 0.1 is of type float, not LossyNetwork: give one, such as LossyNetwork(Bernoulli",
        ),
        ({"group": 4}, "group = 4 is of type int, not RankGroup: give one, such as RankGroup(4)"),
        ({"own_copies": "no"}, "own_copies = 'no' is of type str, not bool: give True or False"),
        ({"reliable_gather": "no"}, "reliable_gather = 'no' is of type str, not bool: give True or False"),
        ({"tensor_parallel_size": "4"}, "tensor_parallel_size = '4' is no whole number: give the number of ranks"),
        ({"repair": None}, "repair = None is of type NoneType, not str: give a name, or name(1, option=2)"),
        ({"wiring": "ring"}, "wiring = 'ring' is of type str, not Wiring: give one, such as Wiring.named(algorithm="),
    ],
)
def test_an_argument_of_another_type_is_refused(given: dict, message: str) -> None:
    arguments = {"network": ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.1)), "tensor_parallel_size": 4, **given}
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        parallelize(tiny_gpt2(), **arguments)


def test_a_wiring_and_its_settings_are_not_given_both() -> None:
    network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.1))
    with pytest.raises(ValueError, match=r"^wiring and repair, seed were both given: give one of the two$"):
        parallelize(tiny_gpt2(), network, tensor_parallel_size=4, wiring=Wiring(), repair="zero", seed=1)
