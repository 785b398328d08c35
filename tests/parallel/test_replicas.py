"""Replicas over processes, copies and streams of the ranks: norms, drift, decisions, gradients averaged or lost."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

import lossytp as ltp
from lossytp.network.scope import Site
from lossytp.parallel.group import Layout
from lossytp.parallel.own_streams import SharedDropout, stream_distance
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
from tests.parallel.conftest import (
    NUM_EXAMPLES,
    NUM_LAYERS,
    NUM_TOKENS,
    WIDTH,
    gradient_error,
    gradients,
    relative_error,
    tiny_batch,
    tiny_gpt2,
    training_losses,
)
from tests.parallel.distributed_models import IMPLEMENTATIONS, join, network, share, spread, whole
from tests.parallel.sharing_modes import (
    WIRE,
    by_rank,
    every_kind,
    logits_of,
    network_of,
    on_own_streams,
    parallel,
    parameters,
)

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
def test_clipped_gradients_are_those_of_the_dense_model(processes, number, cases):
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


def test_a_parameter_without_a_gradient_counts_for_nothing():
    layer = torch.nn.Linear(2, 2)
    layer.weight.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    assert clip_gradients_(layer, 2.5, Layout(), network(0.0)) == 5
    assert layer.weight.grad.tolist() == [[1.5, 0.0], [0.0, 2.0]]
    assert layer.bias.grad is None


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
def test_drift_is_the_relative_spread_of_replicated_parameters(processes, implementation):
    shards = ("attn.c_attn", "mlp.c_fc", "c_proj.weight")
    whole = [p for name, p in tiny_gpt2().named_parameters() if not any(shard in name for shard in shards)]
    size = torch.stack([parameter.norm() for parameter in whole]).norm().item()
    for found in processes(2, on_rank_drift, implementation):
        assert found["equal"] == found["shards differ"] == found["packets"] == 0
        assert found["small"] == pytest.approx(0.001 / size, rel=1e-3)
        assert found["one LayerNorm"] == pytest.approx(0.5 / (2.75**2 + 4**2) ** 0.5), "spread 0.5, between (3, -4)"


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


def test_what_processes_tell_each_other_is_not_lost(processes):
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


def test_a_process_alone_agrees_with_itself():
    lossy = network(0.0)
    assert gathered(3, lossy) == [3]
    assert on_rank_zero(lambda: 4, lossy) == 4
    assert mean_over_processes(0.5, lossy) == 0.5
    merge_counters(lossy)
    assert lossy.counters.rows() == []


def on_rank_merge() -> dict[str, list]:
    lossy = network(0.3)
    ltp.init_process_group(lossy)
    rank = dist.get_rank()
    lossy.lost_packets(0, 1, 100, site=Site(0, "mlp", "forward"))  # both know of it
    lossy.lost_packets(rank, 1 - rank, 50 + rank, group=f"from {rank}")  # only the sender does
    lossy.counters.add_message(("training", None, f"from {rank}"), True)
    merge_counters(lossy)
    state = lossy.counters.state_dict()
    return {name: sorted(state[name], key=repr) for name in state}


def test_merged_counters_hold_what_any_process_sent_once(processes):
    answers = processes(2, on_rank_merge)
    assert answers[0] == answers[1]
    expected = network(0.3)
    expected.lost_packets(0, 1, 100, site=Site(0, "mlp", "forward"))
    for rank in (0, 1):
        expected.lost_packets(rank, 1 - rank, 50 + rank, group=f"from {rank}")
        expected.counters.add_message(("training", None, f"from {rank}"), True)
    state = expected.counters.state_dict()
    assert answers[0] == {name: sorted(state[name], key=repr) for name in state}


def on_rank_clip_drifting() -> tuple[list[float], list[float], float]:
    lossy = network(0.05)
    layout = join(lossy, tensor_parallel_size=2, data_parallel_size=2)
    model = spread(tiny_gpt2("classifier"), lossy, layout, "lossytp", "ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**tiny_batch("classifier")).loss.backward()
    norm = clip_gradients_(model, 1.0, layout, lossy)
    after = clip_gradients_(model, None, layout, lossy)
    optimizer.step()
    return gathered(norm, lossy), gathered(after, lossy), replica_drift(model, layout, lossy)


def test_tensor_parallel_ranks_clip_alike_where_their_copies_differ(processes):
    for norms, after, drift in processes(4, on_rank_clip_drifting):
        assert (norms[0], norms[2]) == (norms[1], norms[3])
        assert after == pytest.approx([1.0] * 4)
        assert drift > 1e-4, "the control: their gradients lost different packets"


SIZE = 4
LAYOUT = Layout(SIZE)


def own_copies(loss_rate: float, **how: Any) -> PreTrainedModel:
    return parallel(tiny_gpt2("classifier"), loss_rate, "own copies", size=SIZE, **how)


def replicated(model: PreTrainedModel) -> dict[str, bool]:
    axes = {id(parameter): axes for parameter, axes, _ in placed(model)}
    return {name: not axes[id(parameter)] for name, parameter in model.named_parameters()}


def taken(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_gradients_become_the_mean_over_ranks_and_shards_keep_theirs():
    model = own_copies(0.1)
    before, network = gradients(model, tiny_batch("classifier")), network_of(model)
    state = network.state_dict()
    synchronise_gradients_(model, LAYOUT, network)
    for name, is_replicated in replicated(model).items():
        expected = before[name].mean(0).expand_as(before[name]) if is_replicated else before[name]
        torch.testing.assert_close(taken(model)[name], expected, rtol=1e-14, atol=1e-16)
        assert not is_replicated or not torch.equal(before[name][0], before[name][1]), "control"
    assert network.state_dict() == state, "without losses nothing is sent"


@pytest.mark.parametrize("repair", ["zero", "rescale", "local", "hadamard(4)"])
@pytest.mark.parametrize("algorithm", ["direct", "ring", "tree", "switch"])
def test_lossy_gradients_are_one_all_reduce_of_all_of_them(algorithm, repair):
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


def test_resynchronised_copies_are_their_mean_and_shards_stay():
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


def test_drift_of_copies_is_that_of_all_parameters_together():
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


def test_the_norm_of_copies_gradients_counts_them_once():
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


@pytest.mark.parametrize("lossy", [False, True])
@pytest.mark.parametrize("trained", [("score", "transformer.h.1"), (".c_attn.", ".c_fc.", "c_proj.weight")])
def test_parameters_without_a_gradient_are_left_out(trained, lossy):
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
def test_shared_parameters_have_one_gradient_already_and_no_lossy_mean(mode):
    model = parallel(tiny_gpt2("classifier"), 0.1, mode)
    before = gradients(model, tiny_batch("classifier"))
    synchronise_gradients_(model, LAYOUT, network_of(model))
    assert all(torch.equal(gradient, before[name]) for name, gradient in taken(model).items())
    with pytest.raises(ValueError, match=r"^lossy = True"):
        synchronise_gradients_(model, LAYOUT, network_of(model), lossy=True)


@every_kind
@on_own_streams
def test_results_may_be_a_tuple(mode, kind):
    batch, dense = tiny_batch(kind), tiny_gpt2(kind)
    expected = parallel(dense, 0.1, mode)(**batch)
    loss, logits = parallel(dense, 0.1, mode)(**batch, return_dict=False)
    assert torch.equal(loss, expected.loss)
    assert torch.equal(logits, expected.logits)
    model = parallel(dense, 0.1, mode)
    (logits,) = model(batch["input_ids"], return_dict=False)
    assert torch.equal(logits, expected.logits)


@on_own_streams
def test_a_training_loss_over_a_given_number_of_tokens_is_the_mean_over_ranks(mode):
    dense, batch = tiny_gpt2(), tiny_batch(padded=True)
    for number in (50, torch.tensor(50)):
        expected = dense(**batch, num_items_in_batch=number).loss
        actual = parallel(dense, 0.0, mode)(**batch, num_items_in_batch=number).loss
        assert actual.item() == pytest.approx(expected.item(), rel=1e-6)


@on_own_streams
@every_kind
def test_embeddings_may_be_given(kind, mode):
    dense = tiny_gpt2(kind)
    generator = torch.Generator().manual_seed(2)
    embeddings_BTD = torch.randn(NUM_EXAMPLES, NUM_TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    before = embeddings_BTD.clone()
    batch = {"inputs_embeds": embeddings_BTD.requires_grad_(), "labels": tiny_batch(kind)["labels"]}
    found = []
    for model in (dense, parallel(dense, 0.0, mode)):
        model(**batch).loss.backward()
        found.append((logits_of(model, batch)[-1], embeddings_BTD.grad))
        embeddings_BTD.grad = None
    assert relative_error(found[1][0], found[0][0]) < 1e-12
    assert relative_error(found[1][1], found[0][1]) < (1e-6 if kind == "language model" else 1e-12)
    assert torch.equal(embeddings_BTD, before)


@on_own_streams
def test_other_inputs_are_those_of_the_dense_model(mode):
    dense, batch = tiny_gpt2(), tiny_batch(padded=True)
    positions = torch.arange(NUM_TOKENS).flip(0)
    types = batch["input_ids"] % 5
    settings: list[dict[str, Any]] = [
        {"position_ids": positions.expand(NUM_EXAMPLES, -1)},
        {"position_ids": positions.unsqueeze(0)},
        {"token_type_ids": types},
        {"logits_to_keep": 2},
    ]
    model = parallel(dense, 0.0, mode)
    plain = dense(batch["input_ids"]).logits
    for setting in settings:
        expected = dense(batch["input_ids"], **setting).logits
        assert relative_error(model(batch["input_ids"], **setting).logits, expected) < 1e-12
        assert expected.shape != plain.shape or relative_error(expected, plain) > 0.01, "control"
    first = batch["input_ids"], None, batch["attention_mask"], types, positions.expand(NUM_EXAMPLES, -1)
    assert relative_error(model(*first).logits, dense(*first).logits) < 1e-12


def test_attentions_own_dropout_is_of_a_ranks_heads():
    model = parallel(tiny_gpt2(attn_pdrop=0.5, embd_pdrop=0.1, resid_pdrop=0.1), 0.0, "own streams")
    kinds = {name.split(".")[-1]: type(module) for name, module in model.named_modules() if "drop" in name}
    assert kinds == dict.fromkeys(("drop", "resid_dropout", "dropout"), SharedDropout) | {"attn_dropout": nn.Dropout}
    logits = model(**tiny_batch()).rank_logits
    assert relative_error(*logits[:2]) < 1e-12, "what heads give is summed over ranks"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_distance_is_that_of_the_streams_from_their_mean(checkpointing):
    """Over two passes of different batches: squares add up."""
    model, squares = parallel(tiny_gpt2(), 0.1, "own streams"), torch.zeros(NUM_LAYERS, 2, dtype=torch.float64)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    with stream_distance(model) as distance:
        for batch in (tiny_batch(), {name: tensor[:2] for name, tensor in tiny_batch().items()}):
            output = model(**batch, output_hidden_states=True)
            for layer, hidden in enumerate(output.hidden_states[1:-1]):  # the last is behind ln_f
                each = hidden.detach().view(4, -1)
                mean = each.mean(0)
                squares[layer, 0] += sum((stream - mean).norm() ** 2 for stream in each) / 4
                squares[layer, 1] += mean.norm() ** 2
            if checkpointing:
                output.loss.backward()
    expected = (squares[:-1, 0] / squares[:-1, 1]).sqrt().tolist()
    assert distance()[:-1] == pytest.approx(expected, rel=1e-12)
    assert distance()[-1] > 0
    before = distance()
    model(**tiny_batch())
    assert distance() == before, "nothing is measured after the block"
