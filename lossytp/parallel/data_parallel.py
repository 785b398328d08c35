"""Data parallelism by DDP and FSDP, PyTorch's or this project's: replicas see different examples and average gradients.

Li et al., "PyTorch Distributed", VLDB 2020; Zhao et al., "PyTorch FSDP", VLDB 2023. Over the backend `lossy`, DDP loses
packets in its all-reduce of gradients, and FSDP in its all-gather of parameters and reduce-scatter of gradients.
"""

from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from lossytp.parallel.bucketed_ddp import BucketedDDP
from lossytp.parallel.deferred import draw_
from lossytp.parallel.flat_fsdp import FlatFSDP
from lossytp.parallel.plans import blocks_of

DataParallelType = Literal["ddp", "fsdp"]


def data_parallel(
    model: PreTrainedModel, mesh: DeviceMesh, kind: DataParallelType, *, custom: bool = False
) -> nn.Module:
    """Return `model` as one of the replicas along the 1-D `mesh`. Call the result instead of `model`.

    Args:
        model: the model, on its device, or deferred. FSDP moves it there from the CPU, block by block.
        mesh: the replicas.
        kind: "ddp" replicates the parameters, "fsdp" shards them, block by block.
        custom: whether to use this project's code in place of PyTorch's. PyTorch's FSDP2 changes `model` itself, the
            others wrap it.
    """
    if custom and kind == "fsdp":
        return FlatFSDP(model, mesh.get_group(), blocks=blocks_of(model))
    if custom:
        return BucketedDDP(model, mesh.get_group())
    if kind == "ddp":
        return DistributedDataParallel(model, process_group=mesh.get_group(), gradient_as_bucket_view=True)
    sharded: Any = fully_shard
    for part in (*blocks_of(model), model):
        draw_(part)
        sharded(part, mesh=mesh)
    return model
