"""Tensor-parallel GPT-2 against transformers' dense one: equal without losses, and far from it with them."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.parallel.conftest import (
    NUM_LAYERS,
    gradient_error,
    gradients,
    relative_error,
    tiny_batch,
    tiny_gpt2,
    training_losses,
)
from tests.parallel.converted_gpt2 import (
    ALGORITHMS,
    REPAIRS,
    assert_equals_dense,
    every_kind,
    every_size,
    lossy,
    lossy_gradients,
    network_of,
    padded_or_not,
)


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


def test_one_rank_has_nobody_to_send_to() -> None:
    dense = tiny_gpt2()
    parallel = lossy(dense, 0.5, size=1, algorithm="direct")
    assert_equals_dense(parallel, dense, tiny_batch(), 1e-12)
    assert network_of(parallel).report().empty


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
