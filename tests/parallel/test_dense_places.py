"""Test where shards lie in the dense model: put together, the boxes of all processes are its parameters, bit by bit."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import lossytp as ltp
from lossytp.parallel.group import Layout
from lossytp.parallel.places import Box, is_first_copy, places
from lossytp.parallel.vocabulary import split_vocabulary_
from tests.parallel.conftest import bernoulli, tiny_gpt2
from tests.parallel.distributed_models import in_replicas, join, spread
from tests.parallel.families import FAMILIES, GATHERING
from tests.parallel.families import tiny as tiny_family

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


def put_together(everyones: list[list[Box]], *, first_copies: bool = True) -> dict[str, Tensor]:
    """Return the tensors that the boxes fill. Assert that they fill them, and agree where they overlap."""
    tensors: dict[str, Tensor] = {}
    for box in (box for boxes in everyones for box in boxes):
        name = f"{box.name}{box.copy}"
        if first_copies and not is_first_copy(name):
            continue
        tensor = tensors.setdefault(name, torch.full(box.shape, math.nan, dtype=box.view.dtype))
        part = tensor[box.slices]
        assert torch.all(part.isnan() | (part == box.view))
        part.copy_(box.view)
    assert not any(tensor.isnan().any() for tensor in tensors.values())
    return tensors


def boxes(model: torch.nn.Module, layout: Layout) -> list[Box]:
    found = [box for place in places(model, layout) for box in place.boxes(place.parameter)]
    return [box._replace(view=box.view.detach().clone()) for box in found]


def on_rank(
    name: str, sizes: dict[str, int], replicas: str | None, vocabulary: bool = False, implementation: str = "lossytp"
) -> list[Box]:
    network = bernoulli(0.0)
    layout = join(network, **sizes)
    model = spread(tiny(name), network, layout, implementation if layout.tensor_parallel_size > 1 else "dense")
    if vocabulary:
        split_vocabulary_(model)
    return boxes(in_replicas(model, layout, replicas) if replicas else model, layout)


def same(found: dict[str, Tensor], dense: PreTrainedModel) -> bool:
    expected = dict(dense.named_parameters())
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", ["gpt2", "llama, biases"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_boxes_of_all_processes_are_the_dense_model(processes: Callable, layout: str, name: str) -> None:
    number, sizes, replicas = LAYOUTS[layout]
    assert same(put_together(processes(number, on_rank, name, sizes, replicas)), tiny(name))


@pytest.mark.parametrize("implementation", ["dtensor", "megatron"])
@pytest.mark.parametrize("replicas", [None, "fsdp"])
def test_so_are_they_in_the_layers_of_other_libraries(
    processes: Callable, implementation: str, replicas: str | None
) -> None:
    number, sizes = (2, {"tensor_parallel_size": 2}) if replicas is None else (4, TP_DP)
    everyones = processes(number, on_rank, "gpt2", sizes, replicas, False, implementation)
    assert same(put_together(everyones), tiny("gpt2"))
    first_copies = [box.name for boxes in everyones for box in boxes if not box.copy]
    assert first_copies.count("transformer.h.0.mlp.c_proj.bias") == (1 if replicas is None else 2)


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama, tied"])
@pytest.mark.parametrize("replicas", [None, "custom fsdp"])
def test_so_are_they_if_the_ranks_share_the_vocabulary(processes: Callable, name: str, replicas: str | None) -> None:
    number, sizes = (2, {"tensor_parallel_size": 2}) if replicas is None else (4, TP_DP)
    assert same(put_together(processes(number, on_rank, name, sizes, replicas, True)), tiny(name))


@pytest.mark.parametrize("name", ["gpt2", *FAMILIES, *GATHERING])
def test_virtual_ranks_are_the_dense_model_and_boxes_are_their_memory(name: str) -> None:
    model = ltp.parallelize(tiny(name), bernoulli(0.0), tensor_parallel_size=2)
    layout = Layout(tensor_parallel_size=2)
    assert same(put_together([boxes(model, layout)]), tiny(name))
    for place in places(model, layout):
        for box in place.boxes(place.parameter):
            box.view.fill_(5.0)
    assert all((parameter == 5).all() for parameter in model.parameters())


def test_copies_that_drift_have_names_of_their_own() -> None:
    model = ltp.parallelize(tiny_gpt2(), bernoulli(0.1), tensor_parallel_size=2, own_copies=True, reliable_gather=False)
    with torch.no_grad():
        for place in places(model, Layout(tensor_parallel_size=2)):
            for number, box in enumerate(place.boxes(place.parameter)):
                box.view.add_(100.0 * number * bool(box.copy))
    found = put_together([boxes(model, Layout(tensor_parallel_size=2))], first_copies=False)
    drifted = {name for name in found if not is_first_copy(name)}
    assert drifted == {f"{name} of replica 0, rank 1" for name, each in tiny_gpt2().named_parameters() if copied(name)}
    assert same({name: tensor for name, tensor in found.items() if name not in drifted}, tiny_gpt2())
    name = "transformer.wte.weight"
    assert torch.equal(found[f"{name} of replica 0, rank 1"], found[name] + 100)


def copied(name: str) -> bool:
    """Return whether each rank has its own copy: of embeddings, norms, and biases after a sum."""
    return not name.endswith(("c_attn.weight", "c_attn.bias", "c_fc.weight", "c_fc.bias", "c_proj.weight"))
