"""Gradient checkpointing of a tensor-parallel GPT-2: what is computed again loses the same packets."""

import copy
from contextlib import nullcontext

import pytest
import torch

import lossytp as ltp
from lossytp.parallel.convert import gather
from tests.parallel.conftest import gradient_error, gradients, tiny_batch, tiny_gpt2, training_losses
from tests.parallel.converted_gpt2 import (
    ALGORITHMS,
    REENTRANT,
    REPAIRS,
    assert_same_steps,
    lossy,
    network_of,
    two_steps,
    unchanged,
)


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
