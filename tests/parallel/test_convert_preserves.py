"""What else a conversion must leave as it was: copies, settings, frozen parameters, generators, modes."""

import copy
import pickle

import pytest
import torch

from lossytp.parallel.convert import gather
from tests.parallel.conftest import gradient_error, gradients, relative_error, tiny_batch, tiny_gpt2
from tests.parallel.converted_gpt2 import assert_same_steps, lossy, network_of, two_steps


def test_checkpointing_in_a_copy_replays_the_losses():
    expected = two_steps(lossy(tiny_gpt2(), 0.2))
    again = copy.deepcopy(lossy(tiny_gpt2(), 0.2))
    again.activation_checkpointing_enable()
    assert_same_steps(two_steps(again), expected)


def test_frozen_parameters_stay_frozen_through_gather():
    dense = tiny_gpt2()
    for parameter in dense.transformer.h[0].parameters():
        parameter.requires_grad_(False)
    frozen = {name for name, p in dense.named_parameters() if not p.requires_grad}
    assert {n for n, p in gather(lossy(dense, 0.1)).named_parameters() if not p.requires_grad} == frozen


def test_gather_draws_nothing_from_the_global_generator():
    parallel, before = lossy(tiny_gpt2(), 0.1), torch.get_rng_state()
    gather(parallel)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("error")
def test_checkpointing_keeps_its_settings_through_parallelize_and_gather():
    dense = tiny_gpt2()
    dense.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=2)
    parallel = lossy(dense, 0.1)
    for model in (parallel, gather(parallel)):
        assert [b.gradient_checkpointing for b in model.transformer.h] == [True, False]
        gradients(model, tiny_batch())


def test_gathering_after_checkpointing_was_switched_off_leaves_no_replay_behind():
    parallel = lossy(tiny_gpt2(), 0.1)
    parallel.activation_checkpointing_enable()
    parallel.activation_checkpointing_disable()
    function = gather(parallel).transformer._gradient_checkpointing_func
    assert getattr(function, "func", function) is torch.utils.checkpoint.checkpoint


@pytest.mark.parametrize("forward_reliable", [True, False])
def test_rescale_weights_are_replayed_with_the_losses(forward_reliable):
    results = []
    for checkpointing in (False, True):
        parallel = lossy(tiny_gpt2(), 0.2, repair="rescale")
        if checkpointing:
            parallel.activation_checkpointing_enable()
        network = network_of(parallel)
        if forward_reliable:
            with network.reliable():
                loss = parallel(**tiny_batch()).loss
            loss.backward()
        else:
            loss = parallel(**tiny_batch()).loss
            with network.reliable():
                loss.backward()
        results.append({n: p.grad for n, p in parallel.named_parameters()})
    assert gradient_error(results[1], results[0]) == 0


def test_a_float64_model_under_autocast_equals_dense():
    dense = tiny_gpt2()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert relative_error(lossy(dense, 0.0)(**tiny_batch()).logits, dense(**tiny_batch()).logits) < 1e-9


def test_gathering_a_dense_model_says_what_is_wrong():
    with pytest.raises(TypeError, match="not tensor-parallel"):
        gather(tiny_gpt2())


def test_evaluation_mode_is_kept():
    parallel = lossy(tiny_gpt2().eval(), 0.1)
    for model in (parallel, gather(parallel)):
        assert not any(module.training for module in model.modules())


def test_a_parallel_model_can_be_pickled():
    parallel = lossy(tiny_gpt2(), 0.1)
    again = pickle.loads(pickle.dumps(parallel))
    assert_same_steps(two_steps(again), two_steps(parallel))
