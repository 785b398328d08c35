"""Test where shards lie in the dense model: put together, those of all processes are its parameters, bit by bit."""

import math

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import lossytp as ltp
from lossytp.parallel.group import Layout
from lossytp.parallel.replicas import local
from lossytp.parallel.shards import FIRST, Copy, Shard, assembled, shards
from lossytp.parallel.vocabulary import split_vocabulary_
from tests.parallel.conftest import bernoulli, tiny_gpt2
from tests.parallel.distributed_models import in_replicas, join, spread
from tests.parallel.families import ALL
from tests.parallel.families import tiny as tiny_family

pytestmark = pytest.mark.slow

Held = list[tuple[Shard, Tensor]]
TP_DP = {"tensor_parallel_size": 2, "data_parallel_size": 2}
LAYOUTS = {
    "tp": (2, {"tensor_parallel_size": 2}, None),
    "virtual ranks in processes": (2, {"tensor_parallel_size": 4}, None),
    "ddp": (2, {"data_parallel_size": 2}, "ddp"),
    "fsdp": (2, {"data_parallel_size": 2}, "fsdp"),
    "custom fsdp": (2, {"data_parallel_size": 2}, "custom fsdp"),
    "tp x fsdp": (4, TP_DP, "fsdp"),
    "tp x custom fsdp": (4, TP_DP, "custom fsdp"),
    "virtual ranks in fsdp": (2, TP_DP, "custom fsdp"),
}


def tiny(name: str) -> PreTrainedModel:
    return tiny_gpt2() if name == "gpt2" else tiny_family(name)


def held_by(model: torch.nn.Module, layout: Layout) -> Held:
    return [(shard, local(parameter).detach().clone()) for parameter, shard in shards(model, layout)]


def on_rank(
    names: list[str], sizes: dict[str, int], replicas: str | None, vocabulary: bool = False, layers: str = "lossytp"
) -> list[Held]:
    network, found = bernoulli(0.0), []
    layout = join(network, **sizes)
    for name in names:
        model = spread(tiny(name), network, layout, layers if layout.tensor_parallel_size > 1 else "dense")
        if vocabulary:
            split_vocabulary_(model)
        found.append(held_by(in_replicas(model, layout, replicas) if replicas else model, layout))
    return found


def dense(everyones: list[Held], copy: Copy = FIRST) -> dict[str, Tensor]:
    """Return the tensors that the shards make up. Assert that they fill them."""
    held = [each for theirs in everyones for each in theirs]
    names = dict.fromkeys(part.name for shard, _ in held for part in shard.parts if shard.has(part.name, copy))
    nan = [(shard, torch.full_like(values, math.nan)) for shard, values in held]
    for name in names:
        filled = torch.zeros(assembled(nan, name, copy).shape)
        for shard, values in nan:
            shard.put(values, name, copy, filled)
        assert filled.isnan().all(), f"no process has all of {name}"
    return {name: assembled(held, name, copy) for name in names}


def same(found: dict[str, Tensor], model: PreTrainedModel) -> bool:
    expected = dict(model.named_parameters())
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_shards_of_all_processes_are_the_dense_model(processes, layout):
    number, sizes, replicas = LAYOUTS[layout]
    names = ["gpt2", "llama, biases", "qwen2_moe"]
    if replicas in (None, "ddp"):
        names.append("qwen2, one key-value head")
    for name, *everyones in zip(names, *processes(number, on_rank, names, sizes, replicas), strict=True):
        assert same(dense(everyones), tiny(name))


@pytest.mark.parametrize("layers", ["dtensor", "megatron"])
@pytest.mark.parametrize("replicas", [None, "fsdp"])
def test_so_are_they_in_the_layers_of_other_libraries(processes, layers, replicas):
    number, sizes = (2, {"tensor_parallel_size": 2}) if replicas is None else (4, TP_DP)
    (everyones,) = zip(*processes(number, on_rank, ["gpt2"], sizes, replicas, False, layers), strict=True)
    assert same(dense(list(everyones)), tiny("gpt2"))
    first = [shard.has("transformer.h.0.mlp.c_proj.bias", FIRST) for held in everyones for shard, _ in held]
    assert sum(first) == (1 if replicas is None else 2)


@pytest.mark.parametrize("replicas", [None, "custom fsdp"])
def test_so_are_they_if_the_ranks_share_the_vocabulary(processes, replicas):
    number, sizes = (2, {"tensor_parallel_size": 2}) if replicas is None else (4, TP_DP)
    names = ["gpt2", "llama", "llama, tied"]
    for name, *everyones in zip(names, *processes(number, on_rank, names, sizes, replicas, True), strict=True):
        assert same(dense(everyones), tiny(name))


@pytest.mark.parametrize("name", ["gpt2", *ALL])
def test_virtual_ranks_are_the_dense_model_and_take_another(name):
    model, layout = ltp.parallelize(tiny(name), bernoulli(0.0), tensor_parallel_size=2), Layout(2)
    assert same(dense([held_by(model, layout)]), tiny(name))
    torch.manual_seed(0)
    other = {each: torch.randn_like(values) for each, values in tiny(name).named_parameters()}
    for parameter, shard in shards(model, layout):
        shard.take_(parameter.detach(), lambda part: other[part.name])
    found = dense([held_by(model, layout)])
    assert all(torch.equal(found[each], values) for each, values in other.items())


def test_copies_that_drift_are_told_apart():
    model, layout = tiny_gpt2(), Layout(tensor_parallel_size=2)
    model = ltp.parallelize(model, bernoulli(0.1), tensor_parallel_size=2, own_copies=True, reliable_gather=False)
    with torch.no_grad():
        for parameter, shard in shards(model, layout):
            if shard.parts[0].stacked:
                parameter[1] += 100
    found, second = (dense([held_by(model, layout)], copy) for copy in (FIRST, (0, 1)))
    assert same(found, tiny_gpt2())
    assert set(second) == {name for name, _ in tiny_gpt2().named_parameters() if copied(name)}
    assert all(torch.equal(second[name], found[name] + 100) for name in second)


def copied(name: str) -> bool:
    return not name.endswith(("c_attn.weight", "c_attn.bias", "c_fc.weight", "c_fc.bias", "c_proj.weight"))
