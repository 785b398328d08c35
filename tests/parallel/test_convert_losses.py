"""What a tensor-parallel GPT-2 sends and loses: messages, seeds, losses switched off, evaluation."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.parallel.conftest import (
    NUM_LAYERS,
    WIDTH,
    dense_layout,
    gradient_error,
    gradients,
    tiny_batch,
    tiny_gpt2,
    training_losses,
)
from tests.parallel.converted_gpt2 import ALGORITHMS, lossy, lossy_gradients, network_of

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
