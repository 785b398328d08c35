"""Convert a dense decoder of transformers to a tensor-parallel one.

The model's code stays Hugging Face's. The model's plan says which linear layers to replace: column-parallel layers
replace those that begin attention and the MLP of every block, and row-parallel layers replace those that end them. The
outputs of a column-parallel layer are in the dense order. So each rank gets whole heads, and attention's own code runs
unchanged, with its cache and masks.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2PreTrainedModel, PreTrainedModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.pytorch_utils import Conv1D

from lossytp.network.checks import check_bool, check_is
from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.wiring import Wiring
from lossytp.parallel.blocks import SHARDED, SummedGradients, TensorParallelBlock
from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.deferred import values_of
from lossytp.parallel.dense import SavesDense
from lossytp.parallel.group import RankGroup
from lossytp.parallel.layers import ColumnParallelLinear, Projection, RowParallelLinear
from lossytp.parallel.mixed_classes import mixed
from lossytp.parallel.own_streams import OwnStreams, give_own_streams_
from lossytp.parallel.plans import (
    GPT2_PLAN,
    SUMMED,
    LayerSplit,
    Plan,
    blocks_of,
    check_size,
    named_by,
    plan_of,
    splits_of,
    weight_and_bias,
)
from lossytp.parallel.reach import check_layers, check_reaches

GPT2_HEADS = ("GPT2LMHeadModel", "GPT2ForSequenceClassification")
OTHER_HEADS = ("ForCausalLM", "ForSequenceClassification")  # how the names of other families' classes end
FUNCTIONAL_DROPOUTS = ("residual_dropout", "embedding_dropout")  # of families that have no nn.Dropout to replace
EXAMPLES = ("GPT2LMHeadModel", "LlamaForCausalLM", "another decoder of transformers with a head")


def parallelize(
    model: PreTrainedModel,
    network: LossyNetwork,
    *,
    tensor_parallel_size: int,
    group: RankGroup | None = None,
    own_copies: bool = False,
    wiring: Wiring | None = None,
    plan: Plan | None = None,
    **settings: Any,
) -> PreTrainedModel:
    """Return a tensor-parallel copy of `model`, whose all-reduces lose what `network` loses.

    `copy.deepcopy` of the result also copies the network. The copy loses its own packets, and its own network reports
    them. `save_pretrained` of the result saves the dense model; if the ranks are spread over processes, each must call
    it.

    Args:
        model: a decoder of transformers with a head for language modelling or classification: GPT-2, or one whose
            configuration carries a tensor-parallel plan, such as a Llama, Mistral, Qwen or Gemma. It is not changed. It
            must be the same on every process.
        network: the network that all layers share. `network.report()` shows what each layer sent and lost.
        tensor_parallel_size: number of ranks. It must divide the heads, the key-value heads and the MLP's width.
        group: the ranks and their processes. If left out, the ranks are spread over all processes of torch.distributed,
            and this copy holds the shards of this process. Without torch.distributed they are virtual ranks of this
            process.
        own_copies: whether each rank has its own copies of replicated parameters, which may drift apart. This needs
            `reliable_gather=False`. Otherwise the ranks of a process share them.
        wiring: how the ranks exchange messages. If left out, `settings` make it.
        plan: which layers to shard, and how, as in `lossytp.parallel.plans`. If left out, the model's own plan.
        settings: settings of `Wiring.named`: algorithm, repair, reliable_gather and others.

    Raises:
        TypeError: if the model or an argument is of another type.
        ValueError: if a size does not divide, a name is unknown, or the network names layers, links or a phase that the
            model does not use.
    """
    splits = dense_splits(model, tensor_parallel_size, plan)
    if group is None:
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        group = RankGroup(tensor_parallel_size, process_group=world)
    check_is("group", group, RankGroup, "one, such as RankGroup(4)")
    if group.size != tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size = {tensor_parallel_size}, but the group has {group.size} ranks: leave one out"
        )
    check_bool("own_copies", own_copies)
    if wiring is None:
        wiring = Wiring.named(**settings)
    elif settings:
        raise ValueError(f"wiring and {', '.join(settings)} were both given: give one of the two")
    collective = LossyCollective(network, group, wiring)
    check_reaches(network, group, collective.wiring)
    check_layers(network, len(blocks_of(model)))
    own_streams = collective.wiring.own_streams
    if own_copies and not own_streams:
        raise ValueError(
            "own_copies = True, but all ranks share a stream: give reliable_gather = False, or leave it out"
        )
    functional = [name for name in FUNCTIONAL_DROPOUTS if getattr(model.config, name, 0)]
    if own_streams and functional:
        raise ValueError(
            f"{functional[0]} = {getattr(model.config, functional[0]):g} does not work with reliable_gather = False, "
            f"because {type(model).__name__} would drop other elements on each rank: load the model with "
            f"{functional[0]} = 0"
        )
    summed = [module for _, _, style, module in named_by(plan_of(model, plan), model) if style == SUMMED]
    if summed and own_copies:
        raise ValueError(
            f"own_copies = True for {type(model).__name__}, whose ranks sum the gradients of replicated norms: leave "
            "it out"
        )

    def place(split: LayerSplit) -> dict[str, Any]:
        return {"collective": collective, "layer": split.layer, "module": split.module}

    def column(split: LayerSplit, weight: Tensor, bias: Tensor | None) -> nn.Module:
        return ColumnParallelLinear(weight, bias, widths=split.widths, gather_output=split.whole, **place(split))

    def row(split: LayerSplit, weight: Tensor, bias: Tensor | None) -> nn.Module:
        return RowParallelLinear(weight, bias, own_bias=own_copies, split_input=split.whole, **place(split))

    ranks_here = len(group.local) if own_streams else 1  # attention sees them one after the other
    kept = {id(module): SummedGradients(module, group) for module in summed} if group.processes > 1 else {}
    parallel: Any = with_layers(model, splits, column, row, shards=group.processes * ranks_here, replacements=kept)
    for block in blocks_of(parallel):
        block.__class__ = mixed(type(block), TensorParallelBlock)
    assert_converted(parallel, plan)
    if own_streams:
        give_own_streams_(parallel, group, own_copies=own_copies)
    parallel.__class__ = mixed(type(parallel), SavesDense, *([OwnStreams] if own_streams else []))
    return parallel


def with_layers(
    model: PreTrainedModel,
    splits: list[LayerSplit],
    column: Callable[[LayerSplit, Tensor, Tensor | None], nn.Module],
    row: Callable[[LayerSplit, Tensor, Tensor | None], nn.Module],
    *,
    shards: int,
    replacements: dict[int, Any] | None = None,
) -> PreTrainedModel:
    """Return a copy of `model` with the layers of `splits` replaced.

    Args:
        model: a dense decoder; not changed.
        splits: the layers, as `dense_splits` returns them.
        column: makes a column-parallel layer from a split, and the weight (inputs, outputs) and bias of all its linear
            layers side by side. The layer returns the outputs of this process, projections side by side.
        row: makes a row-parallel layer, which takes this process's inputs.
        shards: number of parts into which the heads are split. Attention sees one part.
        replacements: further modules to replace, by the id of the module.
    """
    memo: dict[int, Any] = dict(replacements or {})  # deepcopy takes these in place of copies
    for split in splits:
        layer: Any = (row if split.row else column)(split, *split.drawn_weight_and_bias()).train(
            split.linears[0].training
        )
        layer.row, layer.projections = split.row, split.projections
        layer.made_of = [(type(linear), weight_and_bias(linear)[0].shape[1]) for linear in split.linears]
        if len(split.linears) == 1:
            memo[id(split.linears[0])] = layer
            continue
        for index, linear in enumerate(split.linears):
            memo[id(linear)] = Projection(layer, index).train(linear.training)
    sharded = {id(parameter) for split in splits for linear in split.linears for parameter in linear.parameters()}
    for parameter in model.parameters():
        if parameter.is_meta and id(parameter) not in sharded:
            memo[id(parameter)] = nn.Parameter(values_of(parameter), parameter.requires_grad)
    changed = copy.deepcopy(model, memo)
    for module in changed.modules():
        if isinstance(module, GPT2Attention) and not isinstance(module.c_attn, Conv1D):
            module.split_size //= shards  # attention splits q, k and v here; it infers the number of heads
    return fuse_gelu_(changed)


def fuse_gelu_(model: PreTrainedModel) -> PreTrainedModel:
    """Compute GPT-2's activation in one kernel, by the same formula; transformers uses several."""
    if isinstance(model, GPT2PreTrainedModel) and model.config.activation_function == "gelu_new":
        for block in blocks_of(model):
            block.mlp.act = nn.GELU(approximate="tanh").train(block.mlp.training)
    return model


def assert_converted(model: PreTrainedModel, plan: Plan | None = None) -> None:
    """Raise AssertionError unless every layer that the plan names is sharded as it says.

    An earlier study replaced only `nn.Linear`, which GPT-2's blocks do not have, and so sharded nothing.
    """
    unsharded: dict[int, list[str]] = {}
    for name, layer, style, module in named_by(plan_of(model, plan), model):
        kind: Any = RowParallelLinear if style.startswith("rowwise") else (ColumnParallelLinear, Projection)
        if style.startswith(("rowwise", "colwise")) and not isinstance(module, kind):
            unsharded.setdefault(layer, []).append(name.split(f".{layer}.", 1)[1])
    for layer, names in unsharded.items():
        raise AssertionError(f"block {layer} was not converted: {names} left as they were; correct the plan's patterns")


def dense_splits(model: PreTrainedModel, tensor_parallel_size: int, plan: Plan | None = None) -> list[LayerSplit]:
    """Return the layers to shard of a dense model, by `plan` or its own plan.

    Raises:
        TypeError: if `parallelize` cannot convert a model of this type, or the model has no plan.
        ValueError: if the plan does not fit the model, or a size does not divide.
    """
    if hasattr(model, "merge_and_unload") or any(hasattr(module, "lora_A") for module in model.modules()):
        raise TypeError(f"{type(model).__name__} has adapters, which are not sharded: give its merge_and_unload()")
    heads = GPT2_HEADS if isinstance(model, GPT2PreTrainedModel) else OTHER_HEADS
    names = [kind.__name__ for kind in type(model).__mro__]
    if not isinstance(model, PreTrainedModel) or not any(name.endswith(heads) for name in names):
        examples = " or ".join(GPT2_HEADS if heads is GPT2_HEADS else EXAMPLES)
        raise TypeError(f"{type(model).__name__} cannot be parallelized: give a {examples}")
    if any(isinstance(module, (*SHARDED, TensorParallelBlock)) for module in model.modules()):
        raise TypeError("the model is tensor-parallel already: give the dense model, or gather() it first")
    if getattr(model.config, "add_cross_attention", False):
        raise ValueError("add_cross_attention = True is not supported: give a decoder without cross-attention")
    splits = splits_of(model, plan_of(model, plan))
    check_size(model, splits, tensor_parallel_size)
    return splits


def gpt2_splits(model: PreTrainedModel, tensor_parallel_size: int, implementation: str) -> list[LayerSplit]:
    """Return the layers to shard of a GPT-2, as `dense_splits`, for layers that this project did not write.

    Raises:
        TypeError: for another family.
    """
    if isinstance(model, PreTrainedModel) and not isinstance(model, GPT2PreTrainedModel):
        raise TypeError(
            f"implementation = {implementation!r} supports GPT-2, not a {type(model).__name__}: give 'lossytp'"
        )
    return dense_splits(model, tensor_parallel_size, GPT2_PLAN)
