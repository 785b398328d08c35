"""Data parallelism by PyTorch's DDP and FSDP2: replicas see different examples and average their gradients.

Li et al., "PyTorch Distributed", VLDB 2020; Zhao et al., "PyTorch FSDP", VLDB 2023. Over the backend `lossy` DDP's
all-reduce of gradients loses packets, and FSDP's all-gather of parameters and reduce-scatter of gradients do.
"""

from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from lossytp.parallel.plans import blocks_of

DataParallelType = Literal["ddp", "fsdp"]


def data_parallel(model: PreTrainedModel, mesh: DeviceMesh, kind: DataParallelType) -> nn.Module:
    """Return `model` as one of the replicas along the 1-D `mesh`. Call the result instead of `model`.

    "ddp" wraps it. "fsdp" shards its parameters in place, block by block.
    """
    if kind == "ddp":
        return DistributedDataParallel(model, process_group=mesh.get_group(), gradient_as_bucket_view=True)
    sharded: Any = fully_shard
    for block in blocks_of(model):
        sharded(block, mesh=mesh)
    sharded(model, mesh=mesh)
    return model
