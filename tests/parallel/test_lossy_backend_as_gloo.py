"""What PyTorch does over gloo, it does over the backend `lossy`: state dicts, sparse tensors, compilation, profiles.

Functions named `on_rank_...` run in every process, over the backend they name, without losses.
"""

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import lossytp as ltp
from tests.parallel.operations import network, new_group


def start(backend: str) -> None:
    if backend == "gloo":
        dist.init_process_group("gloo")
    else:
        ltp.init_process_group(network(0.0), reliable_gather=backend == "lossy")


def tiny_model(*, buffers: bool = False, rank: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(rank)
        return nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32) if buffers else nn.Tanh(), nn.Linear(32, 6))


def data() -> Tensor:
    """Give each rank examples of its own."""
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(dist.get_rank()))


def total(tensors: Any) -> float:
    return sum(tensor.double().sum().item() for tensor in tensors)


def state_dict_of_rank_0() -> list[float]:
    """Load rank 0's state dict into sharded models, and put it together again."""
    model = tiny_model()
    given = dict(tiny_model(rank=5).state_dict()) if dist.get_rank() == 0 else {}
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    set_model_state_dict(model, given, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return [total(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)).values())]


def full_state_dict_of_fsdp() -> list[float]:
    model = FullyShardedDataParallel(tiny_model(), device_id=torch.device("cpu"))
    model(data()).sum().backward()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return [total(model.state_dict().values())]


def sparse_sum() -> list[float]:
    x_N = torch.sparse_coo_tensor([[dist.get_rank(), 30]], [1.0, 2.0], (100,))
    dist.all_reduce(x_N)
    return x_N.to_dense().tolist()


def sparse_embedding() -> list[float]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Embedding(40, 12, sparse=True))
    model(torch.tensor([dist.get_rank(), 3])).square().sum().backward()
    gradient: Any = model.module.weight.grad
    return gradient.to_dense().flatten().tolist()


def join_uneven_inputs() -> list[float]:
    """Let rank 1 see one batch more than rank 0, and divide by the ranks that still have one."""
    model = DistributedDataParallel(tiny_model())
    with model.join(divide_by_initial_world_size=False):
        for _ in range(2 + dist.get_rank()):
            model(data()).square().sum().backward()
    return [total(parameter.grad for parameter in model.parameters())]


def compiled(*, static_graph: bool) -> list[float]:
    torch._dynamo.reset()
    model = DistributedDataParallel(tiny_model(buffers=True), static_graph=static_graph)
    run = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        run(data()).square().sum().backward()
    return [total(parameter.grad for parameter in model.parameters()), total(model.buffers())]


def profiled() -> list[str]:
    """Name the operations that a profile shows."""
    with profile(activities=[ProfilerActivity.CPU]) as record:
        dist.all_reduce(torch.ones(60))
        dist.all_gather_into_tensor(torch.ones(120), torch.ones(60))
        dist.broadcast(torch.ones(60), 0)
    return sorted({event.name for event in record.events() if event.name.startswith(("gloo:", "c10d::"))})


def monitored_barriers() -> list[str]:
    """Wait for all ranks, in vain for one that does not come; set the time to wait."""
    dist.monitored_barrier()
    dist.monitored_barrier(dist.new_group([0, 1]), timedelta(seconds=30), wait_all_ranks=True)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=7))
    group: Any = dist.group.WORLD
    told = [str(group._get_backend(torch.device("cpu")).options._timeout)]
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier"):
            dist.monitored_barrier(timeout=timedelta(milliseconds=50))
    return told


FEATURES: dict[str, Callable[[], list]] = {
    "a state dict of rank 0": state_dict_of_rank_0,
    "FSDP's full state dict": full_state_dict_of_fsdp,
    "a sparse sum": sparse_sum,
    "DDP with a sparse embedding": sparse_embedding,
    "DDP with uneven inputs": join_uneven_inputs,
    "DDP compiled, with buffers": lambda: compiled(static_graph=False),
    "DDP compiled, with buffers and a static graph": lambda: compiled(static_graph=True),
    "a profile": profiled,
    "monitored barriers and a timeout": monitored_barriers,
}


def on_rank_run(name: str, backend: str) -> list:
    start(backend)
    return FEATURES[name]()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["lossy", "lossy gather"])
@pytest.mark.parametrize("name", FEATURES)
def test_without_losses_it_is_as_over_gloo(processes: Callable, name: str, backend: str) -> None:
    assert processes(2, on_rank_run, name, backend) == processes(2, on_rank_run, name, "gloo")


def on_rank_sum_sparse_ones() -> float:
    ltp.init_process_group(network(1.0))
    x_N = torch.sparse_coo_tensor([list(range(100))], torch.ones(100), (100,))
    dist.all_reduce(x_N, group=new_group(network(1.0), algorithm="sender"))
    return x_N.to_dense().sum().item()


def test_a_sparse_sum_is_reliable(processes: Callable) -> None:
    assert processes(2, on_rank_sum_sparse_ones) == [200.0] * 2


def on_rank_join_over_losses() -> tuple[float, int]:
    lossy = network(0.3)
    ltp.init_process_group(lossy, reliable_gather=False)
    return join_uneven_inputs()[0], lossy.summary("training")["lost"]


def test_uneven_inputs_end_over_losses_too(processes: Callable) -> None:
    """DDP keeps only the C++ half of the handles of joined ranks."""
    for gradients, lost in processes(2, on_rank_join_over_losses):
        assert math.isfinite(gradients)
        assert lost > 0
