"""Turn a tensor-parallel model back into the dense one that it was made of."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2PreTrainedModel, PreTrainedModel
from transformers.activations import ACT2FN

from lossytp.parallel.blocks import SHARDED, SummedGradients, TensorParallelBlock
from lossytp.parallel.dense_places import places
from lossytp.parallel.layers import Projection, RowParallelLinear
from lossytp.parallel.layout import Layout
from lossytp.parallel.own_streams import OwnStreams, shared_again, take_first_ranks_
from lossytp.parallel.plans import blocks_of
from lossytp.parallel.vocabulary import dense_vocabulary


class SavesDense:
    """The methods that `parallelize` adds to a model's class. The class keeps its name, by which libraries find it."""

    def save_pretrained(
        self, save_directory: Any, is_main_process: bool = True, state_dict: dict | None = None, **how: Any
    ) -> None:
        """Save the dense model, as `gather` returns it, for `from_pretrained` to read.

        If the ranks are spread over processes, every process must call this. Rank 0 of all processes writes, and the
        folder is complete once the call returns there. The other arguments are those of transformers.

        Raises:
            ValueError: for a `state_dict`, which would hold shards.
        """
        if state_dict is not None:
            raise ValueError(
                f"state_dict has {len(state_dict)} tensors, but a tensor-parallel model gathers its own: leave it out"
            )
        model: Any = self
        dense = gather(model)
        if is_main_process and not (dist.is_available() and dist.is_initialized() and dist.get_rank() > 0):
            dense.save_pretrained(save_directory, **how)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the state of this model, or that of the dense one, as transformers' Trainer does to resume.

        The network's links go on where they are; `network.load_state_dict` moves them. If the ranks are spread over
        processes, every process must call this.
        """
        model: Any = self
        split = [name for name, layer in model.named_modules() if isinstance(layer, RowParallelLinear | Projection)]
        given = {f"{name}.weight" for name in split}.intersection(state_dict)
        if not any(state_dict[name].ndim == 2 for name in given):  # shards have an axis of ranks, or another name
            return super().load_state_dict(state_dict, strict, assign)  # type: ignore[misc]
        dense = gather(model)
        keys = dense.load_state_dict(state_dict, strict)
        values = dict(dense.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for box in (box for place in places(model, Layout()) for box in place.boxes(place.parameter)):
                box.view.copy_(values[box.name][box.slices])
        return keys

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Take off the hooks that transformers adds to return hidden states: it adds them again when it needs them."""
        model: Any = self
        for module in model.modules():
            module.__dict__.pop("_output_capturing_hooks_installed", None)
            for number, hook in list(module._forward_hooks.items()):
                if getattr(hook, "__module__", "") == "transformers.utils.output_capturing":
                    del module._forward_hooks[number]
        return super().__reduce_ex__(protocol)


def gather(model: PreTrainedModel) -> PreTrainedModel:
    """Return a dense copy of a parallelized model, as transformers knows it: `gather(parallelize(m))` is bitwise m.

    If the ranks are spread over processes, every process must call this, and each gets the whole model. If the ranks'
    copies have drifted apart, the result has the first rank's parameters.

    Raises:
        TypeError: for a model that `parallelize` did not make.
    """
    blocks = blocks_of(model) if isinstance(model, SavesDense) else [model]
    if not all(isinstance(block, TensorParallelBlock) for block in blocks):
        raise TypeError(f"this {type(model).__name__} is not tensor-parallel: give what parallelize() returned")
    dense_layers = {id(layer): _dense_layers(layer) for layer in model.modules() if isinstance(layer, SHARDED)}
    replacements: dict[int, Any] = {layer: dense[0] for layer, dense in dense_layers.items()}
    for module in model.modules():
        if isinstance(module, Projection):
            replacements[id(module)] = dense_layers[id(module.layer)][module.index]
        elif isinstance(module, SummedGradients):
            replacements[id(module)] = copy.deepcopy(module.module)
    replacements |= shared_again(model) | dense_vocabulary(model)
    dense: Any = copy.deepcopy(model, replacements)
    own_streams = isinstance(dense, OwnStreams)
    dense.__class__ = dense.base_class
    if own_streams:
        group: Any = dense.rank_group
        take_first_ranks_(dense.parameters(), group)
        del dense.rank_group
        dense.tie_weights()
    for block in blocks_of(dense):
        block.__class__ = block.base_class
    if isinstance(dense, GPT2PreTrainedModel):
        for block in blocks_of(dense):
            block.attn.split_size = model.config.hidden_size
            block.mlp.act = ACT2FN[model.config.activation_function].train(block.mlp.training)
    return dense


def _dense_layers(layer: Any) -> list[nn.Module]:
    """Return the dense layers that a tensor-parallel one was made of. Every process of the group must call this."""
    weight, bias = layer.dense()
    kinds, outputs = zip(*layer.made_of, strict=True)
    biases = [None] * len(kinds) if bias is None else bias.split(outputs)
    pieces = zip(kinds, weight.split(outputs, 1), biases, strict=True)
    return [_dense_layer(layer, *piece) for piece in pieces]


def _dense_layer(layer: Any, kind: Any, weight: Tensor, bias: Tensor | None) -> nn.Module:
    with torch.device("meta"):  # on "meta" the constructor draws no weights, so torch's generator does not advance
        if kind is nn.Linear:
            dense, weight = nn.Linear(weight.shape[0], weight.shape[1], bias=bias is not None), weight.t()
        else:
            dense = kind(weight.shape[1], weight.shape[0])
    dense.weight = nn.Parameter(weight.clone(memory_format=torch.contiguous_format), layer.weight.requires_grad)
    if bias is not None:
        dense.bias = nn.Parameter(bias.clone(), layer.bias.requires_grad)
    return dense.train(layer.training)
