"""Gradient checkpointing in every way of sharing activations: what is computed again loses the same packets."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import lossytp as ltp
from lossytp.parallel.convert import gather
from tests.parallel.conftest import gradient_error, gradients, tiny_batch, tiny_gpt2, training_losses
from tests.parallel.sharing_modes import (
    MODES,
    REENTRANT,
    assert_same_steps,
    lossy,
    network_of,
    parallel,
    two_steps,
    unchanged,
)


@pytest.mark.parametrize(
    ("mode", "repair"),
    [
        *((mode, repair) for mode in MODES for repair in ("zero", "stale")),
        *(("shared", repair) for repair in ("rescale", "local", "protect(0.1) + hadamard(8)", "protect(0.1) + stale")),
        *(("own copies", "local"), ("own streams", "hadamard(8)"), ("sequence, lossy gather", "retransmit(1)")),
    ],
    ids=lambda value: value,
)
def test_checkpointing_replays_the_losses(mode, repair):
    dense, batch = tiny_gpt2("classifier", resid_pdrop=0.1), tiny_batch("classifier", padded=True)
    batch = {name: tensor[:3] for name, tensor in batch.items()}
    results = []
    for settings in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model = parallel(dense, 0.1, mode, repair=repair)
        if settings is not None:
            model.activation_checkpointing_enable(settings)
        runs: list[int] = []
        model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        torch.manual_seed(3)
        results.append(([gradients(model, batch) for _ in range(3)], network_of(model).state_dict()))
        assert len(runs) == (3 if settings is None else 6)
    for steps, network in results[1:]:
        assert network == results[0][1]
        assert all(gradient_error(*pair) == 0 for pair in zip(steps, results[0][0], strict=True))
    first, second, _ = results[0][0]
    assert gradient_error(first, second) > 1e-3, "new losses at each step"


@pytest.mark.parametrize("mode", ["shared", "own streams"])
def test_recomputing_after_another_pass_puts_in_what_was_stale_in_its_own(mode):
    dense, batch = tiny_gpt2("classifier"), tiny_batch("classifier")
    halves = [{name: tensor[rows] for name, tensor in batch.items()} for rows in (slice(0, 2), slice(2, 4))]
    results = []
    for checkpointing in (False, True):
        model = parallel(dense, 0.1, mode, repair="stale")
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        for _ in range(3):  # so that there is something to put in
            losses = [model(**half, use_cache=False).loss for half in halves]
        model.zero_grad()
        sum(losses).backward()
        results.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert all(torch.equal(gradient, results[0][name]) for name, gradient in results[1].items())


@REENTRANT
def test_checkpointing_that_the_dense_model_already_had_replays_the_losses(reentrant):
    dense = tiny_gpt2()
    expected = two_steps(lossy(dense, 0.2))
    dense.activation_checkpointing_enable({"use_reentrant": reentrant})
    with unchanged(dense):
        checkpointed = lossy(dense, 0.2)
        assert checkpointed.is_activation_checkpointing
        assert_same_steps(two_steps(checkpointed), expected)


@REENTRANT
def test_without_the_replay_checkpointing_computes_other_gradients(reentrant, monkeypatch):
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
def test_checkpointing_replays_the_losses_as_often_as_a_graph_is_gone_through(reentrant):
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
def test_checkpointing_replays_the_losses_under_autocast(reentrant):
    dense = tiny_gpt2(dtype=torch.float32)
    plain, checkpointed = lossy(dense, 0.2), lossy(dense, 0.2)
    checkpointed.activation_checkpointing_enable({"use_reentrant": reentrant})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_steps(two_steps(checkpointed), two_steps(plain))


@REENTRANT
def test_gathering_a_checkpointed_model_leaves_no_replay_behind(reentrant):
    dense, batch = tiny_gpt2(), tiny_batch()
    parallel = lossy(dense, 0.2)
    parallel.activation_checkpointing_enable({"use_reentrant": reentrant})
    gradients(parallel, batch)
    back, counted = gather(parallel), network_of(parallel).state_dict()
    assert back.is_activation_checkpointing
    assert "_set_gradient_checkpointing" not in vars(back)
    for module in back.modules():
        assert_plain(module)
    again = copy.deepcopy(back)
    expected = training_losses(dense, batch, steps=2)
    assert training_losses(back, batch, steps=2) == expected
    assert training_losses(again, batch, steps=2) == expected
    assert network_of(parallel).state_dict() == counted
    again.activation_checkpointing_disable()
    again.activation_checkpointing_enable()
    training_losses(again, batch, steps=1)


@pytest.mark.parametrize("forward_reliable", [True, False])
def test_rescale_weights_are_replayed_with_the_losses(forward_reliable):
    results = []
    for checkpointing in (False, True):
        parallel = lossy(tiny_gpt2(), 0.2, repair="rescale")
        if checkpointing:
            parallel.activation_checkpointing_enable()
        reliable = network_of(parallel).reliable
        with reliable() if forward_reliable else nullcontext():
            loss = parallel(**tiny_batch()).loss
        with nullcontext() if forward_reliable else reliable():
            loss.backward()
        results.append({name: parameter.grad for name, parameter in parallel.named_parameters()})
    assert gradient_error(results[1], results[0]) == 0


def test_checkpointing_can_be_switched_off_and_on_for_some_layers():
    expected = two_steps(lossy(tiny_gpt2(), 0.2))
    parallel = lossy(tiny_gpt2(), 0.2)
    parallel.activation_checkpointing_enable()
    parallel.activation_checkpointing_disable()
    assert not parallel.is_activation_checkpointing
    for module in gather(parallel).modules():
        assert_plain(module)
    copied = copy.deepcopy(parallel)
    assert_same_steps(two_steps(parallel), expected)
    copied.activation_checkpointing_enable(every_n_layers=2)
    for model in (copied, gather(copied)):
        assert [block.gradient_checkpointing for block in model.transformer.h] == [True, False]
    assert_same_steps(two_steps(copied), expected)


def assert_plain(module: nn.Module) -> None:
    function = getattr(module, "_gradient_checkpointing_func", torch.utils.checkpoint.checkpoint)
    assert getattr(function, "func", function) is torch.utils.checkpoint.checkpoint
