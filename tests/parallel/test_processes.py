"""Ranks in processes against virtual ranks: the same training losses, lost packets and weights, and only a shard."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.pytorch_utils import Conv1D

import lossytp as ltp
from lossytp.parallel.group import Layout
from lossytp.parallel.layers import ColumnParallelLinear, RowParallelLinear
from lossytp.parallel.replicas import replica_drift
from tests.parallel.conftest import NUM_EXAMPLES, NUM_LAYERS, NUM_TOKENS, WIDTH, tiny_batch, tiny_gpt2, training_losses
from tests.parallel.distributed_models import join

pytestmark = pytest.mark.slow

WIRE = ltp.Wire(mtu_bytes=300)  # 32 elements of float64: a message of 5,824 fills 182 packets
PROCESSES = {
    "bernoulli": ltp.Bernoulli(loss_rate=0.05),
    "gilbert-elliott": ltp.GilbertElliott.from_loss_and_burst(loss_rate=0.05, mean_burst_packets=8),
}
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}  # relative, of training losses
# transformers computes a language model's training loss in fp32, whatever the model's dtype
KINDS = {torch.float64: "classifier", torch.float32: "language model"}
NUM_STEPS = 50


def network(process: str = "bernoulli", *, seed: int = 0) -> ltp.LossyNetwork:
    return ltp.LossyNetwork(PROCESSES[process], seed=seed, wire=WIRE)


def train(lossy: ltp.LossyNetwork, layout: Layout, steps: int, how: dict) -> dict[torch.dtype, dict]:
    """Whatever must not depend on where the ranks live, by dtype; the network goes on from one to the next."""
    results = {}
    for dtype in TOLERANCES:
        parallel = ltp.parallelize(tiny_gpt2(KINDS[dtype], dtype=dtype), lossy, **how)
        results[dtype] = {
            "losses": training_losses(parallel, tiny_batch(KINDS[dtype]), steps=steps),
            "gathered": ltp.gather(parallel).state_dict(),
            "drift": replica_drift(parallel, layout, lossy),
            "replicated": {
                name: parameter.detach()
                for name, parameter in parallel.named_parameters()
                if ".c_" not in name or name.endswith("c_proj.bias")
            },
            "table": lossy.report(),
            "state": lossy.state_dict(),
        }
    return results


def on_rank_train(process: str, seed: int, steps: int, how: dict) -> dict[torch.dtype, dict]:
    lossy = network(process, seed=seed)
    return train(lossy, join(lossy, tensor_parallel_size=how["tensor_parallel_size"]), steps, how)


def virtually(process: str, seed: int, steps: int, how: dict) -> dict[torch.dtype, dict]:
    return train(network(process, seed=seed), Layout(how["tensor_parallel_size"]), steps, how)


def relative(actual: list[float], expected: list[float]) -> float:
    return max(abs(a - e) / e for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("algorithm", ["sender", "direct"])
@pytest.mark.parametrize("size", [2, 4])
def test_two_processes_train_as_virtual_ranks_do(processes: Callable, size: int, algorithm: str, process: str) -> None:
    how = {"tensor_parallel_size": size, "algorithm": algorithm}
    answers = processes(2, on_rank_train, process, 0, NUM_STEPS, how)
    virtual = virtually(process, 0, NUM_STEPS, how)
    for dtype, tolerance in TOLERANCES.items():
        expected = virtual[dtype]
        table = expected["table"]
        assert 0.03 < table["lost"].sum() / table["packets"].sum() < 0.07
        assert set(table["src"]) == set(range(size))
        assert len(table) == NUM_LAYERS * 2 * 2 * size * (1 if algorithm == "sender" else size - 1)
        assert table["lost"].gt(0).all(), "somebody loses something at every site and on every link"
        for answer in (answer[dtype] for answer in answers):
            assert len(answer["losses"]) == NUM_STEPS
            assert relative(answer["losses"], expected["losses"]) < tolerance
            assert answer["table"].equals(table)
            assert answer["state"] == expected["state"], "also every link's, and the number of lossy messages"
            assert answer["drift"] == 0
            assert answer["gathered"].keys() == expected["gathered"].keys()
            for name, tensor in expected["gathered"].items():
                assert (answer["gathered"][name] - tensor).norm() < 1000 * tolerance * tensor.norm(), name
        first, second = (answer[dtype] for answer in answers)
        assert first["losses"] == second["losses"]
        assert len(first["replicated"]) == 6 * NUM_LAYERS + 4 + (KINDS[dtype] == "classifier"), "its head"
        assert all(torch.equal(tensor, second["replicated"][name]) for name, tensor in first["replicated"].items())


@pytest.mark.parametrize("wire_dtype", ["int8", "fp8", "int4"])
def test_blocks_with_scales_are_those_of_virtual_ranks(processes: Callable, wire_dtype: str) -> None:
    """In float64, where no sum is so close to the middle of two numbers that the order of its terms decides."""
    how = {"tensor_parallel_size": 4, "wire_dtype": wire_dtype}
    expected = virtually("bernoulli", 0, 10, how)[torch.float64]
    plain = virtually("bernoulli", 0, 10, {"tensor_parallel_size": 4})[torch.float64]
    assert expected["table"]["packets"].sum() < 0.3 * plain["table"]["packets"].sum()
    assert relative(expected["losses"], plain["losses"]) > 1e-4
    for answer in processes(2, on_rank_train, "bernoulli", 0, 10, how):
        assert relative(answer[torch.float64]["losses"], expected["losses"]) < 1e-9
        assert answer[torch.float64]["table"].equals(expected["table"])


def test_another_seed_gives_other_curves(processes: Callable) -> None:
    """Control of the test above, also of its tolerance: curves of one seed are not equal because all are."""
    how = {"tensor_parallel_size": 2}
    expected = virtually("bernoulli", 0, 5, how)[torch.float64]
    for answer in processes(2, on_rank_train, "bernoulli", 1, 5, how):
        assert relative(answer[torch.float64]["losses"], expected["losses"]) > 1e-4
        assert not answer[torch.float64]["table"].equals(expected["table"])


def test_rescaled_sums_are_those_of_virtual_ranks(processes: Callable) -> None:
    zero, rescale = ({"tensor_parallel_size": 4, "repair": repair} for repair in ("zero", "rescale"))
    expected, other = (virtually("bernoulli", 0, 5, how)[torch.float64]["losses"] for how in (rescale, zero))
    assert relative(other, expected) > 1e-4
    for answer in processes(2, on_rank_train, "bernoulli", 0, 5, rescale):
        assert relative(answer[torch.float64]["losses"], expected) < 1e-9


# --- the losses of a recomputed pass, and of evaluation


def train_otherwise(how: str) -> tuple[list[float], list]:
    """Training losses of three steps, and the training links' states and totals after them."""
    lossy = network()
    parallel = ltp.parallelize(tiny_gpt2(), lossy, tensor_parallel_size=2)
    if how == "checkpointed":
        parallel.activation_checkpointing_enable()
    losses = []
    for step in range(3):
        losses += training_losses(parallel, tiny_batch(), steps=1)
        if how == "evaluated":
            with torch.no_grad(), lossy.evaluation(step):
                parallel(**tiny_batch())
        elif how == "evaluated outside":
            with torch.no_grad():
                parallel(**tiny_batch())
    return losses, [lossy.state_dict()["links"], lossy.counters.rows("training")]


def on_rank_train_otherwise() -> dict[str, tuple[list[float], list]]:
    join(network(), tensor_parallel_size=2)
    return {how: train_otherwise(how) for how in ("plain", "checkpointed", "evaluated", "evaluated outside")}


def test_neither_checkpointing_nor_evaluation_shifts_the_losses(processes: Callable) -> None:
    for answer in processes(2, on_rank_train_otherwise):
        assert answer["checkpointed"] == answer["plain"]
        assert answer["evaluated"] == answer["plain"]
        assert answer["evaluated outside"][0] != answer["plain"][0], "control"


def on_rank_gather_a_copy() -> tuple[dict[str, Tensor], list]:
    lossy = network()
    join(lossy, tensor_parallel_size=2)
    parallel = ltp.parallelize(tiny_gpt2(), lossy, tensor_parallel_size=2)
    return ltp.gather(copy.deepcopy(parallel)).state_dict(), lossy.counters.rows()


def test_gathering_a_copy_loses_and_counts_nothing(processes: Callable) -> None:
    dense = tiny_gpt2().state_dict()
    for gathered, counted in processes(2, on_rank_gather_a_copy):
        assert all(torch.equal(gathered[name], tensor) for name, tensor in dense.items())
        assert counted == []


# --- what a process holds and sends


def on_rank_hold(width: int, size: int) -> dict:
    lossy = network()
    join(lossy, tensor_parallel_size=size)
    gc.collect()
    dense = tiny_gpt2(n_embd=width)
    convs = [module for module in dense.modules() if isinstance(module, Conv1D)]
    sizes = {conv.weight.untyped_storage().nbytes() for conv in convs}
    num_weights = sum(conv.weight.numel() for conv in convs)

    def full_sized() -> int:
        tensors = [thing for thing in gc.get_objects() if isinstance(thing, Tensor)]
        return sum(tensor.untyped_storage().nbytes() in sizes for tensor in tensors)

    before = full_sized()
    parallel = ltp.parallelize(dense, lossy, tensor_parallel_size=size)
    del dense, convs
    gc.collect()
    after = full_sized()
    training_losses(parallel, tiny_batch(), steps=2)
    layers = [module for module in parallel.modules() if isinstance(module, ColumnParallelLinear | RowParallelLinear)]
    return {
        "full-sized": (before, after, full_sized()),
        "share": sum(layer.weight.numel() for layer in layers) / num_weights,
        "columns' biases": sum(layer.bias.numel() for layer in layers if isinstance(layer, ColumnParallelLinear)),
        "own": all(p.untyped_storage().nbytes() == p.numel() * p.element_size() for p in parallel.parameters()),
    }


@pytest.mark.parametrize("size", [2, 4])
def test_a_process_keeps_its_shard_alone(processes: Callable, size: int) -> None:
    """An unusual width, so that nothing else is as large as one of the dense weights."""
    width = 48
    for answer in processes(2, on_rank_hold, width, size):
        assert answer["full-sized"] == (4 * NUM_LAYERS, 0, 0)
        assert answer["share"] == 1 / 2
        assert answer["columns' biases"] == NUM_LAYERS * (3 + 4) * width / 2
        assert answer["own"]


class Spy:
    """The process group that carries the sums, which it counts."""

    def __init__(self, group: Any) -> None:
        self.group, self.sums = group, []

    def allreduce(self, tensors: list[Tensor]) -> Any:
        self.sums += [tensor.numel() for tensor in tensors]
        return self.group.allreduce(tensors)

    def shutdown(self) -> None:
        self.group.shutdown()


def on_rank_send(size: int) -> dict:
    lossy = network()
    join(lossy, tensor_parallel_size=size)
    dense = tiny_gpt2()
    with torch.no_grad():
        for block in dense.transformer.h:
            block.attn.c_proj.weight.zero_()
    parallel, outputs = ltp.parallelize(dense, lossy, tensor_parallel_size=size), []
    dist.group.WORLD.wrapped = Spy(dist.group.WORLD.wrapped)
    for block in parallel.transformer.h:
        block.attn.c_proj.register_forward_hook(lambda *arguments: outputs.append(arguments[2]))
    parallel(**tiny_batch()).loss.backward()
    biases = [block.attn.c_proj.bias for block in dense.transformer.h]
    return {
        "bias added once": all(
            torch.equal(*torch.broadcast_tensors(*pair)) for pair in zip(outputs, biases, strict=True)
        ),
        "sums": dist.group.WORLD.wrapped.sums,
        "messages": {
            tuple(site): (group, called) for _, site, group, called, _ in lossy.counters.state_dict()["messages"]
        },
    }


@pytest.mark.parametrize("size", [2, 4])
def test_each_module_sums_once_each_way_and_adds_its_bias_once(processes: Callable, size: int) -> None:
    """In backward that is one message for q, k and v together."""
    for answer in processes(2, on_rank_send, size):
        assert answer["bias added once"]
        assert answer["sums"] == [NUM_EXAMPLES * NUM_TOKENS * WIDTH] * 4 * NUM_LAYERS
        assert answer["messages"] == {
            (layer, module, direction, "all_reduce", "reduce"): ("tp", 1)
            for layer in range(NUM_LAYERS)
            for module in ("attention", "mlp")
            for direction in ("forward", "backward")
        }
