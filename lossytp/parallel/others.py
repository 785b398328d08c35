"""GPT-2 with the tensor-parallel layers of others, for comparison: PyTorch's DTensor and Megatron-core."""

import importlib.util
import os
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
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
    """Return a tensor-parallel copy of `model` over the processes of a 1-D mesh, one rank each."""
    ranks = mesh.size()

    def sharded(split: LayerSplit, weight: Tensor, bias: Tensor | None) -> nn.Linear:
        whole = weight.detach().t(), bias
        weight, bias = whole if split.row else _by_rank(split, weight, bias, ranks)
        assert bias is not None
        with torch.device("meta"):  # on "meta" the constructor draws no weights, so torch's generator does not advance
            linear = nn.Linear(weight.shape[-1], bias.numel())
        linear.weight = nn.Parameter(weight.flatten(0, -2).clone(memory_format=torch.contiguous_format))
        linear.bias = nn.Parameter(bias.detach().flatten().clone())
        return linear

    parallel = with_layers(model, gpt2_splits(model, ranks, "dtensor"), sharded, shards=ranks)
    for block in blocks_of(parallel):
        parallelize_module(block, mesh, {name: style() for name, style in PLAN.items()})
    return parallel


def _by_rank(split: LayerSplit, weight: Tensor, bias: Tensor | None, ranks: int) -> tuple[Tensor, Tensor]:
    """Return each rank's columns, (R, P, F, D), and their bias, (R, P, F)."""
    assert bias is not None
    weight_DPRF = weight.detach().view(len(weight), split.projections, ranks, -1)
    return weight_DPRF.permute(2, 1, 3, 0), bias.detach().view(split.projections, ranks, -1).transpose(0, 1)


def megatron_is_installed() -> bool:
    """Return whether `parallelize_megatron` finds Megatron-core, an optional extra: `pip install megatron-core`."""
    return importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None


def parallelize_megatron(model: PreTrainedModel, process_group: ProcessGroup) -> PreTrainedModel:
    """Return a tensor-parallel copy of `model` over the processes of a group, one rank each, in Megatron's layers.

    Raises:
        ModuleNotFoundError: without Megatron-core. Other errors are those of `lossytp.parallelize`.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # each of its layers warns without it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Transformer Engine and Apex are missing, but not needed
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    ranks, rank = process_group.size(), process_group.rank()
    splits = gpt2_splits(model, ranks, "megatron")
    # on the CPU, with copied weights instead of drawn ones
    settings = ModelParallelConfig(
        tensor_model_parallel_size=ranks,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=model.dtype,
    )
    common = {"config": settings, "init_method": None, "bias": True, "skip_bias_add": False, "tp_group": process_group}

    class Autocast:
        """Compute under autocast as PyTorch's layers do: on the CPU, Megatron's own functions would mix dtypes."""

        def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **how: Any) -> Any:
            device = input.device.type
            if torch.is_autocast_enabled(device):
                dtype = torch.get_autocast_dtype(device)
                input, weight, bias = input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
            with torch.autocast(device, enabled=False):
                return super()._forward_impl(input=input, weight=weight, bias=bias, **how)  # type: ignore[misc]

    class Column(Autocast, ColumnParallelLinear):
        sharded_over_ranks = ("weight", "bias")

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[0]

    class Row(Autocast, RowParallelLinear):
        sharded_over_ranks = ("weight",)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[0]

    def sharded(split: LayerSplit, weight: Tensor, bias: Tensor | None) -> nn.Module:
        linear: Any
        if split.row:
            linear = Row(*weight.shape, input_is_parallel=True, **common)
            weight = weight.detach().chunk(ranks)[rank].t()
        else:
            linear = Column(*weight.shape, gather_output=False, **common)
            weight, bias = (each[rank] for each in _by_rank(split, weight, bias, ranks))
        assert bias is not None
        with torch.no_grad():
            linear.weight.copy_(weight.flatten(0, -2))
            linear.bias.copy_(bias.flatten())
        return linear

    return with_layers(model, splits, sharded, shards=ranks)
