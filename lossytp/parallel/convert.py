"""From a dense GPT-2 of transformers to a tensor-parallel one, and back.

GPT-2 stays Hugging Face's: in every block the four linear layers are replaced, q/k/v and the MLP's first by
column-parallel ones, the two output projections by row-parallel ones. A column-parallel layer's outputs are in the
dense order, so heads fall to ranks as attention expects them and its code runs unchanged, cache and masks included.
"""

import copy
from types import MethodType
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2ForSequenceClassification, GPT2LMHeadModel, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.pytorch_utils import Conv1D

from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.tape import LossTape
from lossytp.parallel.collectives import LossyAllReduce
from lossytp.parallel.group import VirtualRanks, check_divides
from lossytp.parallel.layers import ColumnParallelLinear, RowParallelLinear

SUPPORTED = (GPT2LMHeadModel, GPT2ForSequenceClassification)


def parallelize(
    model: PreTrainedModel,
    network: LossyNetwork,
    *,
    tensor_parallel_size: int,
    algorithm: str = "direct",
    repair: str = "zero",
    reliable_gather: bool = True,
) -> PreTrainedModel:
    """A tensor-parallel copy of `model`, whose all-reduces lose what `network` loses.

    Args:
        model: GPT2LMHeadModel or GPT2ForSequenceClassification; not changed.
        network: shared by all layers; `network.report()` tells what each of them sent and lost.
        tensor_parallel_size: virtual ranks; must divide the heads and the MLP's width.
        algorithm: "sender" or "direct".
        repair: "zero" or "rescale".
        reliable_gather: must be True.

    Raises:
        TypeError: for another model. ValueError: for a size that does not divide, or an unknown name.
    """
    check_convertible(model, tensor_parallel_size)
    group = VirtualRanks(tensor_parallel_size)
    collective = LossyAllReduce(network, group, algorithm, repair, reliable_gather)
    replacements: dict[int, Any] = {}  # deepcopy's memo: what stands here is taken in place of a copy
    for number, block in enumerate(_blocks(model)):
        attention, mlp = block.attn, block.mlp
        replacements |= {
            id(attention.c_attn): _column(attention.c_attn, 3, collective, number, "attention"),
            id(attention.c_proj): _row(attention.c_proj, collective, number, "attention"),
            id(mlp.c_fc): _column(mlp.c_fc, 1, collective, number, "mlp"),
            id(mlp.c_proj): _row(mlp.c_proj, collective, number, "mlp"),
        }
    parallel = copy.deepcopy(model, replacements)
    if model.config.activation_function == "gelu_new":
        for block in _blocks(parallel):
            block.mlp.act = nn.GELU(approximate="tanh")  # the same formula, in one kernel
    _replay_losses_in_checkpointing(parallel, network)
    assert_converted(parallel)
    return parallel


def gather(model: PreTrainedModel) -> PreTrainedModel:
    """The dense copy of a parallelized model, as transformers knows it; `gather(parallelize(m))` is bitwise m."""
    replacements: dict[int, Any] = {
        id(layer): _conv1d(*layer.dense())
        for layer in model.modules()
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear)
    }
    method = model.__dict__.pop("_set_gradient_checkpointing")
    try:
        dense = copy.deepcopy(model, replacements)
    finally:
        model.__dict__["_set_gradient_checkpointing"] = method
    for block in _blocks(dense):
        block.mlp.act = ACT2FN[model.config.activation_function]
    if dense.is_activation_checkpointing:
        dense.activation_checkpointing_enable()
    return dense


def assert_converted(model: PreTrainedModel) -> None:
    """Raise AssertionError unless every linear layer of every block is sharded.

    An earlier study replaced `nn.Linear` alone, which GPT-2's blocks do not have, and so sharded nothing.
    """
    for number, block in enumerate(_blocks(model)):
        kinds = [type(layer) for layer in block.modules() if isinstance(layer, Conv1D | nn.Linear)]
        expected = {
            "attn.c_attn": ColumnParallelLinear,
            "attn.c_proj": RowParallelLinear,
            "mlp.c_fc": ColumnParallelLinear,
            "mlp.c_proj": RowParallelLinear,
        }
        unsharded = [name for name, kind in expected.items() if type(block.get_submodule(name)) is not kind]
        if kinds or unsharded:
            raise AssertionError(f"block {number} was not converted: {kinds or unsharded} left as they were")


def check_convertible(model: PreTrainedModel, tensor_parallel_size: int) -> None:
    """Raise TypeError or ValueError, naming the fix, where `parallelize` cannot work."""
    if not isinstance(model, SUPPORTED):
        names = " or ".join(supported.__name__ for supported in SUPPORTED)
        raise TypeError(f"{type(model).__name__} cannot be parallelized: give a {names}")
    if not all(isinstance(block, GPT2Block) and isinstance(block.attn.c_attn, Conv1D) for block in _blocks(model)):
        raise TypeError("the model's blocks are not those of a dense GPT-2: give the dense model, or gather() it first")
    if model.config.add_cross_attention:
        raise ValueError("add_cross_attention = True is not supported: give a decoder without cross-attention")
    inner = model.config.n_inner or 4 * model.config.hidden_size
    check_divides(tensor_parallel_size, heads=model.config.num_attention_heads, inner=inner)


def _blocks(model: Any) -> list[Any]:
    return list(model.transformer.h)


def _column(conv: Conv1D, num_projections: int, collective: LossyAllReduce, layer: int, module: str) -> nn.Module:
    return ColumnParallelLinear(
        conv.weight, conv.bias, num_projections=num_projections, collective=collective, layer=layer, module=module
    )


def _row(conv: Conv1D, collective: LossyAllReduce, layer: int, module: str) -> nn.Module:
    return RowParallelLinear(conv.weight, conv.bias, collective=collective, layer=layer, module=module)


def _conv1d(weight: Any, bias: Any) -> Conv1D:
    conv = Conv1D(weight.shape[1], weight.shape[0])
    conv.weight = nn.Parameter(weight.clone())
    conv.bias = nn.Parameter(bias.clone())
    return conv


def _replay_losses_in_checkpointing(model: Any, network: LossyNetwork) -> None:
    """Make gradient checkpointing, whenever it is enabled, recompute each block with the losses of its first pass."""

    def set_gradient_checkpointing(
        self: PreTrainedModel, enable: bool = True, gradient_checkpointing_func: Any = checkpoint, **kwargs: Any
    ) -> None:
        def checkpoint_with_tape(block: Any, *args: Any, **checkpoint_kwargs: Any) -> Any:
            tape = LossTape()

            def run(*inputs: Any, **named: Any) -> Any:
                with network.recording(tape):
                    return block(*inputs, **named)

            return gradient_checkpointing_func(run, *args, **checkpoint_kwargs)

        type(self)._set_gradient_checkpointing(self, enable, checkpoint_with_tape, **kwargs)

    model.__dict__["_set_gradient_checkpointing"] = MethodType(set_gradient_checkpointing, model)
    if model.is_activation_checkpointing:
        model._set_gradient_checkpointing(True, model.transformer._gradient_checkpointing_func)
