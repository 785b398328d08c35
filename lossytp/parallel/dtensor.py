"""GPT-2 with PyTorch's own tensor parallelism, for comparison: `parallelize_module` over the backend `lossy`.

PyTorch's column-wise and row-wise styles support only `nn.Linear`. So GPT-2's Conv1D layers become linear layers. Their
q, k and v are ordered by rank, so that a rank's contiguous share holds the q, k and v of its heads.

PyTorch adds a row-parallel layer's bias before the sum, an equal share of it to each rank's part. So a packet that is
lost on the way to the sum takes a share of the bias with it, and one that is lost on the way back takes all of it. This
project's layers and Megatron's add the bias after the sum, where it cannot be lost. Everything else that crosses the
network is the same.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from lossytp.parallel.convert import gpt2_splits, with_layers
from lossytp.parallel.plans import LayerSplit, blocks_of

PLAN: dict[str, type[ColwiseParallel | RowwiseParallel]] = {
    "attn.c_attn": ColwiseParallel,
    "attn.c_proj": RowwiseParallel,
    "mlp.c_fc": ColwiseParallel,
    "mlp.c_proj": RowwiseParallel,
}


def parallelize_dtensor(model: PreTrainedModel, mesh: DeviceMesh) -> PreTrainedModel:
    """Return a tensor-parallel copy of `model` over the processes of a 1-D mesh, one rank each.

    The errors are those of `lossytp.parallelize`.
    """
    ranks = mesh.size()

    def column(split: LayerSplit, weight: Tensor, bias: Tensor | None) -> nn.Linear:
        assert bias is not None
        weight_DPRF = weight.detach().view(len(weight), split.projections, ranks, -1)
        bias_PRF = bias.detach().view(split.projections, ranks, -1)
        return _linear(weight_DPRF.permute(2, 1, 3, 0).flatten(0, 2), bias_PRF.transpose(0, 1).flatten())

    def row(split: LayerSplit, weight: Tensor, bias: Tensor | None) -> nn.Linear:
        assert bias is not None
        return _linear(weight.detach().t(), bias.detach())

    parallel = with_layers(model, gpt2_splits(model, ranks, "dtensor"), column, row, shards=ranks)
    for block in blocks_of(parallel):
        parallelize_module(block, mesh, {name: style() for name, style in PLAN.items()})
    return parallel


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    with torch.device("meta"):  # on "meta" the constructor draws no weights, so torch's generator does not advance
        linear = nn.Linear(weight.shape[1], weight.shape[0])
    linear.weight = nn.Parameter(weight.clone(memory_format=torch.contiguous_format))
    linear.bias = nn.Parameter(bias.clone())
    return linear
