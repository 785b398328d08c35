"""PyTorch's own parallelisms, unchanged, over the backend `lossy`: without losses they train as one process does."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import lossytp as ltp
from tests.parallel.backend_reference import network

Gradients = dict[str, Tensor]


def tiny_model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 6)).double()


def tiny_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(8, width, generator=generator, dtype=torch.float64) for width in (12, 6))  # type: ignore[return-value]


def half_of_the_batch() -> tuple[Tensor, Tensor]:
    inputs, targets = (tensor.chunk(2)[dist.get_rank()] for tensor in tiny_batch())
    return inputs, targets


def gradients(model: nn.Module) -> Gradients:
    """Whole ones, read without losses where they are sharded."""
    with ltp.reliable():
        return {
            name: (parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad).clone()
            for name, parameter in model.named_parameters()
        }


def single_process() -> Gradients:
    model, (inputs, targets) = tiny_model(), tiny_batch()
    mse_loss(model(inputs), targets).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def distributed_data_parallel() -> Gradients:
    model, (inputs, targets) = DistributedDataParallel(tiny_model()), half_of_the_batch()
    mse_loss(model(inputs), targets).backward()
    return gradients(model.module)


def fully_sharded_data_parallel() -> Gradients:
    model, (inputs, targets) = tiny_model(), half_of_the_batch()
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    mse_loss(model(inputs), targets).backward()
    return gradients(model)


def tensor_parallel() -> Gradients:
    model, (inputs, targets) = tiny_model(), tiny_batch()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    mse_loss(model(inputs.requires_grad_()), targets).backward()
    return gradients(model)


def pipeline() -> Gradients:
    whole, rank, (inputs, targets) = tiny_model(), dist.get_rank(), tiny_batch()
    part = copy.deepcopy(whole)
    for index in (2,) if rank == 0 else (0, 1):
        part[index] = nn.Identity()
    schedule = ScheduleGPipe(PipelineStage(part, rank, 2, torch.device("cpu")), n_microbatches=2, loss_fn=mse_loss)
    schedule.step(*([inputs] if rank == 0 else []), target=None if rank == 0 else targets)
    return gradients(part)


PARALLELISMS: dict[str, tuple[Callable[[], Gradients], set[tuple[str, str]]]] = {
    "DDP": (distributed_data_parallel, {("all_reduce", "backward")}),
    "FSDP2": (
        fully_sharded_data_parallel,
        {("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward")},
    ),
    "DTensor": (tensor_parallel, {("all_reduce", "forward"), ("all_reduce", "backward")}),
    "pipelining": (pipeline, {("send", "forward"), ("send", "backward")}),
}


def on_rank_train(name: str, loss_rate: float) -> tuple[Gradients, set[tuple[str, str]]]:
    """Gradients, and the operations that may have lost packets, and which way."""
    lossy = network(loss_rate)
    ltp.init_process_group(lossy)
    result = PARALLELISMS[name][0]()
    return result, {(row["operation"], row["direction"]) for row in lossy.counters.rows()}


@pytest.mark.parametrize("name", PARALLELISMS)
def test_gradients_are_those_of_a_single_process_but_for_lost_packets(processes: Callable, name: str) -> None:
    expected = single_process()
    for loss_rate in (0.0, 0.3):
        answers = processes(2, on_rank_train, name, loss_rate)
        for rank_gradients, _ in answers:
            error = max((rank_gradients[key] - expected[key]).norm() / expected[key].norm() for key in rank_gradients)
            assert error < 1e-12 if loss_rate == 0 else error > 0.01, loss_rate
        assert {parameter for rank_gradients, _ in answers for parameter in rank_gradients} == expected.keys()
        assert set.union(*(operations for _, operations in answers)) == PARALLELISMS[name][1]
