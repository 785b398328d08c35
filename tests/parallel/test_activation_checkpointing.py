"""Gradient checkpointing in every way of sharing activations: what is computed again loses the same packets."""

import pytest
import torch

from tests.parallel.conftest import gradient_error, gradients, tiny_batch, tiny_gpt2
from tests.parallel.sharing_modes import MODES, network_of, parallel


@pytest.mark.parametrize(
    ("mode", "repair"),
    [
        *((mode, repair) for mode in MODES if mode != "shared" for repair in ("zero", "stale")),
        ("shared", "stale"),
        ("shared", "local"),
        ("own copies", "local"),
        ("own streams", "hadamard(8)"),
        ("sequence, lossy gather", "retransmit(1)"),
    ],
    ids=lambda value: value,
)
def test_checkpointing_replays_the_losses(mode: str, repair: str) -> None:
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
def test_recomputing_after_another_pass_puts_in_what_was_stale_in_its_own(mode: str) -> None:
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
