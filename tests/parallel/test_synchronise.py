"""Copies of replicated parameters: gradients averaged, with and without losses, and copies set to their mean."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import lossytp as ltp
from lossytp.network.scope import Site
from lossytp.parallel.group import Layout
from lossytp.parallel.replicas import clip_gradients_, placed, replica_drift, resynchronise_, synchronise_gradients_
from tests.parallel.conftest import gradients, tiny_batch, tiny_gpt2, training_losses
from tests.parallel.sharing_modes import WIRE, by_rank, network_of, parallel, parameters

SIZE = 4
LAYOUT = Layout(SIZE)


def own_copies(loss_rate: float, **how: Any) -> PreTrainedModel:
    return parallel(tiny_gpt2("classifier"), loss_rate, "own copies", size=SIZE, **how)


def replicated(model: PreTrainedModel) -> dict[str, bool]:
    """By name of the parameter."""
    axes = {id(parameter): axes for parameter, axes, _ in placed(model)}
    return {name: not axes[id(parameter)] for name, parameter in model.named_parameters()}


def taken(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_gradients_become_the_mean_over_ranks_and_shards_keep_theirs() -> None:
    model = own_copies(0.1)
    before, network = gradients(model, tiny_batch("classifier")), network_of(model)
    state = network.state_dict()
    synchronise_gradients_(model, LAYOUT, network)
    for name, is_replicated in replicated(model).items():
        expected = before[name].mean(0).expand_as(before[name]) if is_replicated else before[name]
        torch.testing.assert_close(taken(model)[name], expected, rtol=1e-14, atol=1e-16)
        assert not is_replicated or not torch.equal(before[name][0], before[name][1]), "control"
    assert network.state_dict() == state, "without losses nothing is sent"


def test_with_equal_gradients_own_copies_train_as_shared_ones_do() -> None:
    batch = tiny_batch("classifier")
    shared, own = (parallel(tiny_gpt2("classifier"), 0.1, mode) for mode in ("own streams", "own copies"))
    expected = training_losses(shared, batch, steps=4)
    optimizer, losses = torch.optim.AdamW(own.parameters(), lr=1e-3), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = own(**batch).loss
        loss.backward()
        synchronise_gradients_(own, LAYOUT, network_of(own))
        optimizer.step()
        losses.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-12)
    assert replica_drift(own, LAYOUT, network_of(own)) == 0
    assert training_losses(parallel(tiny_gpt2("classifier"), 0.1, "own copies"), batch, steps=4) != pytest.approx(
        expected, rel=1e-6
    ), "control"


@pytest.mark.parametrize("repair", ["zero", "rescale", "local", "hadamard(4)"])
@pytest.mark.parametrize("algorithm", ["direct", "ring", "tree", "switch"])
def test_lossy_gradients_are_one_all_reduce_of_all_of_them(algorithm: str, repair: str) -> None:
    """Twice, as links carry on; divided by the number of ranks."""
    model = own_copies(0.1, algorithm=algorithm, repair=repair)
    names = [name for name, is_replicated in replicated(model).items() if is_replicated]
    order = [id(parameter) for parameter, *_ in placed(model)]
    names.sort(key=lambda name: order.index(id(model.get_parameter(name))))
    twin = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.1), wire=WIRE)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        before = taken(model)
        synchronise_gradients_(model, LAYOUT, network_of(model), lossy=True)
        found = taken(model)
        message_RN = torch.cat([before[name].view(SIZE, -1) for name in names], 1)
        reduced = ltp.all_reduce(message_RN, twin, algorithm=algorithm, repair=repair, reliable_gather=False) / SIZE
        assert torch.equal(torch.cat([found[name].view(SIZE, -1) for name in names], 1), reduced)
        assert not torch.equal(reduced[0], reduced[1]), "of which each rank lacks other packets"
        for name, is_replicated in replicated(model).items():
            assert is_replicated or torch.equal(found[name], before[name])
    network = network_of(model)
    assert network.state_dict()["links"] == twin.state_dict()["links"]
    sites = [Site(*site) for _, site, *_ in network.counters.state_dict()["messages"]]
    assert sites == [Site(None, None, "backward", "all_reduce", phase) for phase in ("reduce", "gather")]


def test_resynchronised_copies_are_their_mean_and_shards_stay() -> None:
    model, dense = own_copies(0.1), tiny_gpt2("classifier")
    training_losses(model, tiny_batch("classifier"), steps=2)
    network = network_of(model)
    before = {name: parameter.clone() for name, parameter in parameters(model).items()}
    state = network.state_dict()
    assert replica_drift(model, LAYOUT, network) > 1e-6
    resynchronise_(model, LAYOUT, network)
    assert replica_drift(model, LAYOUT, network) == 0
    for name, is_replicated in replicated(model).items():
        expected = before[name].mean(0).expand_as(before[name]) if is_replicated else before[name]
        torch.testing.assert_close(parameters(model)[name], expected, rtol=1e-14, atol=1e-16)
    first, *others = by_rank(model, dense, parameters(model))
    assert all(torch.equal(other[name], tensor) for other in others for name, tensor in first.items())
    assert network.state_dict() == state
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())
    training_losses(model, tiny_batch("classifier"), steps=1)


def test_drift_of_copies_is_that_of_all_parameters_together() -> None:
    model = own_copies(0.0)
    with torch.no_grad():
        for name, copies in replicated(model).items():
            if copies:
                model.get_parameter(name)[:] = 0
        model.transformer.ln_f.weight[:, :2] = torch.tensor([3.0, -4.0])
        model.transformer.ln_f.weight[2, 0] -= 0.5
        model.transformer.ln_f.bias[1, 5] = -0.5
        model.transformer.h[0].attn.c_attn.weight[:, 1:5] += 1  # shards
    middle = (2.75**2 + 4**2 + 0.25**2) ** 0.5
    assert replica_drift(model, LAYOUT, network_of(model)) == pytest.approx(0.5**0.5 / middle)


def test_the_norm_of_copies_gradients_counts_them_once() -> None:
    """At p = 0 that of the dense model; where they differ the root mean square over ranks."""
    dense, batch = tiny_gpt2("classifier"), tiny_batch("classifier")
    norm = torch.stack([gradient.norm() for gradient in gradients(dense, batch).values()]).norm().item()
    model = own_copies(0.0)
    gradients(model, batch)
    assert clip_gradients_(model, None, LAYOUT, network_of(model)) == pytest.approx(norm, rel=1e-12)
    model = own_copies(0.2)
    found = gradients(model, batch)
    squares = sum(
        found[name].square().sum().item() / (SIZE if copies else 1) for name, copies in replicated(model).items()
    )
    assert clip_gradients_(model, norm / 5, LAYOUT, network_of(model)) == pytest.approx(squares**0.5, rel=1e-12)
    for name, gradient in taken(model).items():
        torch.testing.assert_close(gradient, found[name] * (norm / 5 / squares**0.5))


def test_lossy_over_a_network_that_loses_nothing_is_the_mean() -> None:
    for loss_rate in (0.0, 0.5):
        model = own_copies(loss_rate)
        before, network = gradients(model, tiny_batch("classifier")), network_of(model)
        with network.reliable() if loss_rate else nullcontext():
            synchronise_gradients_(model, LAYOUT, network, lossy=True)
        for name, is_replicated in replicated(model).items():
            expected = before[name].mean(0).expand_as(before[name]) if is_replicated else before[name]
            torch.testing.assert_close(taken(model)[name], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("lossy", [False, True])
@pytest.mark.parametrize("trained", [("score", "transformer.h.1"), (".c_attn.", ".c_fc.", "c_proj.weight")])
def test_parameters_without_a_gradient_are_left_out(trained: tuple[str, ...], lossy: bool) -> None:
    """Also if all that is replicated is frozen, so that there is nothing to do."""
    model = own_copies(0.1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained))
    model(**tiny_batch("classifier")).loss.backward()
    before, copies = taken(model), replicated(model)
    synchronise_gradients_(model, LAYOUT, network_of(model), lossy=lossy)
    assert taken(model).keys() == before.keys() != copies.keys()
    assert all(torch.equal(gradient, before[name]) != copies[name] for name, gradient in taken(model).items())


@pytest.mark.parametrize("mode", ["shared", "own streams", "sequence"])
def test_shared_parameters_have_one_gradient_already_and_no_lossy_mean(mode: str) -> None:
    model = parallel(tiny_gpt2("classifier"), 0.1, mode)
    before = gradients(model, tiny_batch("classifier"))
    synchronise_gradients_(model, LAYOUT, network_of(model))
    assert all(torch.equal(gradient, before[name]) for name, gradient in taken(model).items())
    with pytest.raises(ValueError, match=r"^lossy = True"):
        synchronise_gradients_(model, LAYOUT, network_of(model), lossy=True)
