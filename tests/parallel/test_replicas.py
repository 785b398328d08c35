"""Replicas over processes and copies on ranks: norms, drift, means and decisions, gradients averaged or lost."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

import lossytp as ltp
from lossytp.network.scope import Site
from lossytp.parallel.group import Layout
from lossytp.parallel.pipeline import Pipeline
from lossytp.parallel.replicas import (
    clip_gradients_,
    gathered,
    mean_over_processes,
    merge_counters,
    on_rank_zero,
    placed,
    replica_drift,
    resynchronise_,
    synchronise_gradients_,
)
from tests.parallel.conftest import gradient_error, gradients, tiny_batch, tiny_gpt2, training_losses
from tests.parallel.distributed_models import IMPLEMENTATIONS, join, network, share, spread, whole
from tests.parallel.sharing_modes import WIRE, by_rank, network_of, parallel, parameters

# one float64 a packet, and nearly all packets lost: whatever is summed without saying reliable() is wrong
HOPELESS = ltp.Wire(mtu_bytes=52)


def classifier_batch() -> dict[str, torch.Tensor]:
    batch = {name: tensor[:6] for name, tensor in tiny_batch("classifier").items()}
    return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


def dense_gradients() -> dict[str, torch.Tensor]:
    return gradients(tiny_gpt2("classifier"), classifier_batch())


# --- clipping

# TP ranks, data-parallel replicas, implementation, kind of data parallelism
ON_TWO = {
    "lossytp": (2, 1, "lossytp", None),
    "lossytp, 2 ranks each": (4, 1, "lossytp", None),
    "dtensor": (2, 1, "dtensor", None),
    "megatron": (2, 1, "megatron", None),
    "DDP": (1, 2, "dense", "ddp"),
    "FSDP": (1, 2, "dense", "fsdp"),
    "DDP of virtual ranks": (2, 2, "lossytp", "ddp"),
    "the project's DDP": (1, 2, "dense", "custom ddp"),
    "the project's FSDP of virtual ranks": (2, 2, "lossytp", "custom fsdp"),
}
ON_FOUR = {f"lossytp x {kind}": (2, 2, "lossytp", kind) for kind in ("fsdp", "custom fsdp")}
ON_FOUR |= {f"{name} x ddp": (2, 2, name, "ddp") for name in ("lossytp", "megatron")}  # DDP knows no DTensor
ON_FOUR |= {f"{name} x fsdp": (2, 2, name, "fsdp") for name in ("dtensor", "megatron")}  # strided, and without marks


def on_rank_clip(cases: dict[str, tuple], max_norms: list[float | None]) -> dict[str, list[tuple[float, Any]]]:
    """Of each case and largest norm: the norm before, and all gradients after, in the dense model's shapes."""
    lossy = network(0.9, wire=HOPELESS)
    ltp.init_process_group(lossy)
    results = {}
    for name, (size, replicas, implementation, kind) in cases.items():
        layout = Layout(size, replicas, 1, dist.get_rank(), dist.get_world_size())
        results[name] = []
        for max_norm in max_norms:
            dense = tiny_gpt2("classifier")
            with lossy.reliable():
                model = spread(dense, lossy, layout, implementation, kind)
                model(**share(classifier_batch(), layout)).loss.backward()
            norm = clip_gradients_(model, max_norm, layout, lossy)
            results[name].append((norm, whole(model, tiny_gpt2("classifier"), lossy, layout, implementation)))
    assert not lossy.counters.rows(), "nothing of it is traffic that may be lost"
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "cases"), [(2, ON_TWO), *((4, {name: ON_FOUR[name]}) for name in ON_FOUR)], ids=["2 processes", *ON_FOUR]
)
def test_clipped_gradients_are_those_of_the_dense_model(processes: Callable, number: int, cases: dict) -> None:
    norm = torch.stack([gradient.norm() for gradient in dense_gradients().values()]).norm().item()
    max_norms = [None, norm / 3, norm * 3]
    answers = processes(number, on_rank_clip, cases, max_norms)
    for case in cases:
        for index, max_norm in enumerate(max_norms):
            dense = tiny_gpt2("classifier")
            expected = gradients(dense, classifier_batch())
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(dense.parameters(), max_norm)
                expected = {name: parameter.grad for name, parameter in dense.named_parameters()}
            for answer in answers:
                found, clipped = answer[case][index]
                assert found == pytest.approx(norm, rel=1e-9), case
                # torch divides by the norm and 1e-6 more
                assert gradient_error(clipped, expected) < 1e-6, (case, max_norm)


def on_rank_clip_pipeline(max_norm: float) -> tuple[float, float, dict]:
    """The norm before, that of this stage's gradients alone, and these clipped, by the dense model's names."""
    lossy = network(0.9, wire=HOPELESS)
    layout = join(lossy, pipeline_parallel_size=2)
    stages = layout.process_group("pp")
    pipeline = Pipeline(
        tiny_gpt2("classifier"), stages, schedule="gpipe", num_microbatches=2, device=torch.device("cpu")
    )
    with lossy.reliable():
        pipeline.forward_backward(classifier_batch())
    mine = torch.stack([p.grad.norm() for p in pipeline.stage.parameters()]).norm().item()
    norm = clip_gradients_(pipeline.stage, max_norm, layout, lossy)
    named = pipeline.stage.model.named_parameters()
    return norm, mine, {name.replace("h.0", f"h.{stages.rank()}"): parameter.grad for name, parameter in named}


def test_clipped_gradients_of_a_pipeline_are_those_of_the_dense_model(processes: Callable) -> None:
    expected = dense_gradients()
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
    answers = processes(2, on_rank_clip_pipeline, norm / 3)
    clipped: dict = {}
    for found, mine, part in answers:
        assert found == pytest.approx(norm, rel=1e-9)
        assert mine < 0.99 * norm
        clipped |= part
    assert gradient_error(clipped, {name: gradient / 3 for name, gradient in expected.items()}) < 1e-9


def test_a_parameter_without_a_gradient_counts_for_nothing() -> None:
    layer = torch.nn.Linear(2, 2)
    layer.weight.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    assert clip_gradients_(layer, 2.5, Layout(), network(0.0)) == 5
    assert layer.weight.grad.tolist() == [[1.5, 0.0], [0.0, 2.0]]
    assert layer.bias.grad is None


# --- drift


def on_rank_drift(implementation: str) -> dict[str, float]:
    lossy = network(0.9, wire=HOPELESS)
    layout = join(lossy, tensor_parallel_size=2)
    model = spread(tiny_gpt2(), lossy, layout, implementation)
    found = {"equal": replica_drift(model, layout, lossy)}
    block = model.transformer.h[1]
    with torch.no_grad():
        for layer in (block.attn.c_attn, block.attn.c_proj):
            weight = layer.weight.to_local() if implementation == "dtensor" else layer.weight
            weight += dist.get_rank()
        found["shards differ"] = replica_drift(model, layout, lossy)
        model.transformer.wte.weight[2, 3] += 0.001 * dist.get_rank()
        found["small"] = replica_drift(model, layout, lossy)
        for name, parameter in model.named_parameters():
            if not name.endswith((".attn.c_attn.weight", ".c_fc.weight", ".c_proj.weight", "c_attn.bias", "c_fc.bias")):
                parameter.zero_()
        block.ln_1.weight[:2] = torch.tensor([3.0, -4.0])
        block.ln_1.weight[0] -= 0.5 * dist.get_rank()
        found["one LayerNorm"] = replica_drift(model, layout, lossy)
    found["packets"] = len(lossy.counters.rows())
    return found


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_drift_is_the_relative_spread_of_replicated_parameters(processes: Callable, implementation: str) -> None:
    shards = ("attn.c_attn", "mlp.c_fc", "c_proj.weight")
    whole = [p for name, p in tiny_gpt2().named_parameters() if not any(shard in name for shard in shards)]
    size = torch.stack([parameter.norm() for parameter in whole]).norm().item()
    for found in processes(2, on_rank_drift, implementation):
        assert found["equal"] == found["shards differ"] == found["packets"] == 0
        assert found["small"] == pytest.approx(0.001 / size, rel=1e-3)
        assert found["one LayerNorm"] == pytest.approx(0.5 / (2.75**2 + 4**2) ** 0.5), "spread 0.5, between (3, -4)"


def on_rank_drift_of_replicas() -> float:
    lossy = network(0.0)
    layout = join(lossy, data_parallel_size=2, tensor_parallel_size=2)
    model = spread(tiny_gpt2(), lossy, layout, "lossytp")
    with torch.no_grad():
        model.transformer.ln_f.weight += layout.data_index
    return replica_drift(model, layout, lossy)


def test_data_parallel_replicas_are_compared_and_virtual_ranks_are_one_copy(processes: Callable) -> None:
    """ln_f's weights of one replica are larger by 1 each."""
    model = tiny_gpt2()
    with torch.no_grad():
        model.transformer.ln_f.weight += 0.5
    size = torch.stack([parameter.norm() for parameter in model.parameters()]).norm().item()
    expected = len(model.transformer.ln_f.weight) ** 0.5 / size
    assert processes(4, on_rank_drift_of_replicas) == pytest.approx([expected] * 4)
    assert replica_drift(tiny_gpt2(), Layout(2), network(0.0)) == 0


# --- what processes tell each other


def on_rank_tell() -> dict[str, Any]:
    lossy, calls = network(0.9, wire=HOPELESS), []
    ltp.init_process_group(lossy)
    rank = dist.get_rank()

    def decide() -> dict:
        calls.append(rank)
        return {"of": rank}

    def fail() -> None:
        raise KeyError(f"rank {rank}")

    answers: dict[str, Any] = {
        "gathered": gathered({"rank": rank, "numbers": list(range(50))}, lossy),
        "agreed": on_rank_zero(decide, lossy),
        "calls": calls,
        "mean": mean_over_processes(0.1 + rank, lossy),
        "mean of two": mean_over_processes(None if rank == 1 else 0.1 + rank, lossy),
        "mean of zero": mean_over_processes(0.0 if rank == 1 else None, lossy),
    }
    try:
        on_rank_zero(fail, lossy)
    except BaseException as error:
        answers["failed"] = repr(error)
    answers["rows"] = lossy.counters.rows()
    return answers


def test_what_processes_tell_each_other_is_not_lost(processes: Callable) -> None:
    answers = processes(3, on_rank_tell)
    assert [answer["failed"] for answer in answers] == ["KeyError('rank 0')", "SystemExit(2)", "SystemExit(2)"]
    assert [answer["calls"] for answer in answers] == [[0], [], []]
    for answer in answers:
        assert answer["gathered"] == [{"rank": rank, "numbers": list(range(50))} for rank in range(3)]
        assert answer["agreed"] == {"of": 0}
        assert answer["mean"] == pytest.approx(1.1, rel=1e-15), "in float64"
        assert answer["mean of two"] == pytest.approx(1.1, rel=1e-15)
        assert answer["mean of zero"] == 0
        assert answer["rows"] == []


def test_a_process_alone_agrees_with_itself() -> None:
    lossy = network(0.0)
    assert gathered(3, lossy) == [3]
    assert on_rank_zero(lambda: 4, lossy) == 4
    assert mean_over_processes(0.5, lossy) == 0.5
    merge_counters(lossy)
    assert lossy.counters.rows() == []


def on_rank_merge(disagree: bool) -> Any:
    lossy = network(0.3)
    ltp.init_process_group(lossy)
    rank = dist.get_rank()
    lossy.lost_packets(0, 1, 100, site=Site(0, "mlp", "forward"))  # both know of it
    lossy.lost_packets(rank, 1 - rank, 50 + rank, group=f"from {rank}")  # only the sender does
    lossy.counters.add_message(("training", None, f"from {rank}"), True)
    if disagree and rank == 1:
        lossy.lost_packets(0, 1, 1, site=Site(0, "mlp", "forward"))
    try:
        merge_counters(lossy)
    except ValueError as error:
        return str(error)
    state = lossy.counters.state_dict()
    return {name: sorted(state[name], key=repr) for name in state}


def test_merged_counters_hold_what_any_process_sent_once(processes: Callable) -> None:
    answers = processes(2, on_rank_merge, False)
    assert answers[0] == answers[1]
    expected = network(0.3)
    expected.lost_packets(0, 1, 100, site=Site(0, "mlp", "forward"))
    for rank in (0, 1):
        expected.lost_packets(rank, 1 - rank, 50 + rank, group=f"from {rank}")
        expected.counters.add_message(("training", None, f"from {rank}"), True)
    state = expected.counters.state_dict()
    assert answers[0] == {name: sorted(state[name], key=repr) for name in state}


def test_processes_that_lost_different_packets_do_not_merge(processes: Callable) -> None:
    for message in processes(2, on_rank_merge, True):
        assert message.startswith("processes disagree on the traffic of ('training', Site(layer=0, module='mlp'")


def on_rank_clip_drifting() -> tuple[list[float], list[float], float]:
    """Norms of two ranks of one replica whose gradients lost different packets, and how far they drift."""
    lossy = network(0.05)
    layout = join(lossy, tensor_parallel_size=2, data_parallel_size=2)
    model = spread(tiny_gpt2("classifier"), lossy, layout, "lossytp", "ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**tiny_batch("classifier")).loss.backward()
    norm = clip_gradients_(model, 1.0, layout, lossy)
    after = clip_gradients_(model, None, layout, lossy)
    optimizer.step()
    return gathered(norm, lossy), gathered(after, lossy), replica_drift(model, layout, lossy)


def test_tensor_parallel_ranks_clip_alike_where_their_copies_differ(processes: Callable) -> None:
    for norms, after, drift in processes(4, on_rank_clip_drifting):
        assert (norms[0], norms[2]) == (norms[1], norms[3])
        assert after == pytest.approx([1.0] * 4)
        assert drift > 1e-4, "the control: their gradients lost different packets"


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
