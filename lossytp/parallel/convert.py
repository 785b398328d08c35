"""Convert a dense decoder of transformers to a tensor-parallel one.

The model's code stays Hugging Face's. The model's plan says which linear layers to replace: column-parallel layers
replace those that begin attention and the MLP of every block, and row-parallel layers replace those that end them. The
outputs of a column-parallel layer are in the dense order. So each rank gets whole heads, and attention's own code runs
unchanged, with its cache and masks.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers import Cache, GPT2PreTrainedModel, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.pytorch_utils import Conv1D

from lossytp.network.checks import check_bool, check_is, refuse_if
from lossytp.network.lossy_network import CommConfig, LossyNetwork
from lossytp.network.repairs import ProtectFirst
from lossytp.parallel.collectives import LossyCollective, collective_of
from lossytp.parallel.experts import TensorParallelExperts, experts_of
from lossytp.parallel.group import Layout, RankGroup, check_layers, check_reaches
from lossytp.parallel.layers import (
    SHARDED,
    ColumnParallelLinear,
    Projection,
    RowParallelLinear,
    SummedGradients,
    TensorParallelBlock,
)
from lossytp.parallel.own_streams import OwnStreams, give_own_streams_, shared_again, take_first_ranks_
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
    values_of,
    weight_and_bias,
)
from lossytp.parallel.shards import shards
from lossytp.parallel.vocabulary import dense_vocabulary


def needs_positions(collective: LossyCollective) -> bool:
    """Return whether what a message loses depends on its tokens' positions."""
    first = collective.comm.repair.part("select")
    return collective.network.scope.positions is not None or isinstance(first, ProtectFirst)


def positions_of(model: PreTrainedModel, *inputs: Any, **named: Any) -> np.ndarray:
    """Return the position of each token within its own sequence, (B * T,), or -1 for padding.

    They follow from `position_ids`, as for packed sequences, else from the mask and the cache. The arguments are those
    of the model's call on B sequences, T tokens of each.
    """
    given = inspect.signature(model.forward).bind(*inputs, **named).arguments
    given |= given.pop("kwargs", {})
    embeddings, tokens = given.get("inputs_embeds"), given.get("input_ids")
    if tokens is None:
        if embeddings is None:  # the model names what is missing
            return np.zeros(0, np.int64)
        tokens = embeddings[..., 0]
    tokens_BT = tokens.reshape(-1, tokens.shape[-1])  # rows of options, if there are several
    cache, ids, mask = (given.get(name) for name in ("past_key_values", "position_ids", "attention_mask"))
    past, length = 0 if cache is None else int(cache.get_seq_length()), tokens_BT.shape[1]
    positions_BT = torch.arange(past, past + length, device=tokens.device).expand_as(tokens_BT)
    mask_BT = mask.reshape(-1, mask.shape[-1]) if isinstance(mask, Tensor) and mask.ndim < 4 else None
    if mask_BT is not None:
        mask_BT = mask_BT[:, : past + length].bool()  # a static cache's mask may be longer
        positions_BT = mask_BT.cumsum(1)[:, -length:] - 1
    if ids is not None:
        positions_BT = ids.expand_as(tokens_BT)
    if mask_BT is not None:
        positions_BT = positions_BT.masked_fill(~mask_BT[:, -length:], -1)
    return positions_BT.reshape(-1).cpu().numpy()


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
            raise ValueError("state_dict has no use, as a tensor-parallel model gathers its own: leave it out")
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
        axes: dict[str, int] = {}  # of the dense model; shards have an axis of ranks, or another name
        for name, module in model.named_modules():
            if isinstance(module, RowParallelLinear | Projection):
                axes[f"{name}.weight"] = 2
            elif isinstance(module, TensorParallelExperts):
                axes |= {f"{name}.{weight}": 3 for weight in module.pieces}
        if not any(state_dict[name].ndim == number for name, number in axes.items() if name in state_dict):
            return super().load_state_dict(state_dict, strict, assign)  # type: ignore[misc]
        dense = gather(model)
        keys = dense.load_state_dict(state_dict, strict)
        values = dict(dense.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for parameter, shard in shards(model, Layout()):
                shard.take_(parameter, lambda part: values[part.name])
        return keys

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        model: Any = self
        collective = collective_of(model)
        if collective is None or not needs_positions(collective):
            return super().__call__(*inputs, **named)  # type: ignore[misc]
        with collective.network.at(positions_of(model, *inputs, **named)):
            return super().__call__(*inputs, **named)  # type: ignore[misc]

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
        elif isinstance(module, TensorParallelExperts):
            replacements[id(module)] = module.dense()
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
        for attention in block.modules():
            if "dense_key_value_groups" in attention.__dict__:
                attention.num_key_value_groups = attention.__dict__.pop("dense_key_value_groups")
    if isinstance(dense, GPT2PreTrainedModel):
        for block in blocks_of(dense):
            block.attn.split_size = model.config.hidden_size
            block.mlp.act = ACT2FN[model.config.activation_function].train(block.mlp.training)
    return dense


def _dense_layers(layer: Any) -> list[nn.Module]:
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


# Decoders for multiple choice score each option separately, and answer the one with the largest score (Radford et al.,
# "Improving Language Understanding by Generative Pre-Training", 2018, figure 1). Any classifier of transformers becomes
# one. Its class bears the family's name, such as `LlamaForMultipleChoice`; copies and pickles import it from here.


CLASSIFIER, CHOICE = "ForSequenceClassification", "ForMultipleChoice"


class MultipleChoice:
    """Make a classifier with one logit choose among options, by a softmax over the options of an example.

    It takes input_ids and attention_mask (B, O, T) and labels (B,), and returns logits (B, O). An option whose mask is
    all 0 is absent, and its logit is minus infinity. Inputs of two axes, (B, T), are examples of one option each.
    """

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Any = None, **kwargs: Any
    ) -> Any:
        options = input_ids.shape[1] if input_ids.ndim == 3 else 1
        tokens = input_ids.shape[-1]
        absent = torch.zeros(len(input_ids), options, dtype=torch.bool, device=input_ids.device)
        if attention_mask is not None:
            absent = ~attention_mask.view(-1, options, tokens).bool().any(-1)
            attention_mask = attention_mask.reshape(-1, tokens).clone()
            attention_mask[absent.view(-1), 0] = 1  # softmax over nothing is NaN
        classifier: Any = super()
        output = classifier.forward(input_ids.reshape(-1, tokens), attention_mask=attention_mask, **kwargs)
        output.logits = output.logits.view(-1, options).masked_fill(absent, -torch.inf)
        if labels is not None:
            output.loss = nn.functional.cross_entropy(output.logits, labels)
        return output


@cache
def multiple_choice_of(classifier: type) -> Any:
    """Return the class for multiple choice of a family's classifier, such as `LlamaForSequenceClassification`."""
    name = classifier.__name__.removesuffix(CLASSIFIER) + CHOICE
    return type(name, (MultipleChoice, classifier), {"__module__": __name__, "__doc__": MultipleChoice.__doc__})


def __getattr__(name: str) -> Any:
    classifier = getattr(transformers, name.removesuffix(CHOICE) + CLASSIFIER, None) if name.endswith(CHOICE) else None
    if classifier is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return multiple_choice_of(classifier)


# A model's or a block's own class with methods added keeps its name, since libraries find models by it. Copies and
# pickles find it through the classes that it is made of.


_made: dict[tuple[type, ...], type] = {}


class Mixed:
    """The base of all classes of `mixed`: they know their `base_class` and can be pickled."""

    base_class: type
    mixins: tuple[type, ...]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, (self.base_class, *self.mixins), self.__dict__


def mixed(base: type, *mixins: type) -> type:
    """Return `base` with the methods of `mixins` before its own. The same classes give the same class."""
    if (base, *mixins) not in _made:
        contents = {"base_class": base, "mixins": mixins, "__module__": base.__module__, "__doc__": base.__doc__}
        _made[base, *mixins] = type(base.__name__, (*mixins, Mixed, base), contents)
    return _made[base, *mixins]


def _blank(base: type, *mixins: type) -> Any:
    kind: Any = mixed(base, *mixins)
    return kind.__new__(kind)


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
    share_memory: bool = False,
    comm: CommConfig | None = None,
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
        share_memory: whether the model and its copy share the memory of their weights, but for experts and for copies
            of key-value heads, so that both together are hardly larger than one. Neither may be trained then. This
            needs virtual ranks.
        comm: how the ranks exchange messages. If left out, `settings` make it.
        plan: which layers to shard, and how, as in `lossytp.parallel.plans`. If left out, the model's own plan.
        settings: settings of `CommConfig.named`: algorithm, repair, reliable_gather and others.

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
    fault = f"is not the group's {group.size} ranks: leave one out"
    refuse_if(group.size != tensor_parallel_size, "tensor_parallel_size", tensor_parallel_size, fault)
    check_bool("own_copies", own_copies)
    check_bool("share_memory", share_memory)
    fault = f"does not work where {group.processes} processes hold parts of the model: leave it out"
    refuse_if(share_memory and group.processes > 1, "share_memory", share_memory, fault)
    if comm is None:
        comm = CommConfig.named(**settings)
    elif settings:
        raise ValueError(f"comm and {', '.join(settings)} were both given: give one of the two")
    collective = LossyCollective(network, group, comm)
    check_reaches(network, group, collective.comm)
    check_layers(network, blocks := len(blocks_of(model)))
    collective.comm = comm.of_model(blocks)
    own_streams = collective.comm.own_streams
    fault = "does not work where all ranks share a stream: give reliable_gather = False, or leave it out"
    refuse_if(own_copies and not own_streams, "own_copies", own_copies, fault)
    kind = type(model).__name__
    fault = f"does not work with reliable_gather = False, as ranks would drop other elements: load the {kind} with 0"
    for name in FUNCTIONAL_DROPOUTS:
        refuse_if(own_streams and getattr(model.config, name, 0), name, getattr(model.config, name, 0), fault)
    summed = [module for _, _, style, module in named_by(plan_of(model, plan), model) if style == SUMMED]
    mixtures = experts_of(model, plan_of(model, plan), tensor_parallel_size)
    fault = "does not work with a mixture of experts, whose messages of a layer would share a memory: choose another"
    refuse_if(bool(mixtures) and comm.repair.remembers, "repair", str(comm.repair), fault)
    if (summed or mixtures) and own_copies:
        reason = "sum the gradients of replicated norms" if summed else "share the routers of experts"
        raise ValueError(f"own_copies = True for {kind}, whose ranks {reason}: leave it out")

    def sharded(split: LayerSplit, weight: Tensor, bias: Tensor | None) -> nn.Module:
        kind: Any = RowParallelLinear if split.row else ColumnParallelLinear
        how: dict[str, Any] = {"own_bias": own_copies, "split_input": split.whole}
        if not split.row:
            how = {"widths": split.widths, "copies": split.copies(group.size), "gather_output": split.whole}
        place = {"collective": collective, "layer": split.layer, "module": split.module}
        layer = kind(*weight.shape, dense=(weight, bias), **how, **place)
        return _in_shared_memory(layer, split) if share_memory else layer

    ranks_here = len(group.local) if own_streams else 1  # attention sees them one after the other
    split_up = summed if group.processes > 1 else []
    kept: dict[int, Any] = {id(module): SummedGradients(_drawn_copy(module), group) for module in split_up}
    kept |= {id(split.experts): TensorParallelExperts(split, collective) for split in mixtures}
    if share_memory:
        kept |= {id(parameter): parameter for parameter in model.parameters() if not parameter.is_meta}
    parallel: Any = with_layers(model, splits, sharded, shards=group.processes * ranks_here, replacements=kept)
    for block in blocks_of(parallel):
        block.__class__ = mixed(type(block), TensorParallelBlock)
        _share_key_value_heads_(block)
    assert_converted(parallel, plan)
    if own_streams:
        give_own_streams_(parallel, group, own_copies=own_copies)
    parallel.__class__ = mixed(type(parallel), SavesDense, *([OwnStreams] if own_streams else []))
    return parallel


def _in_shared_memory(layer: Any, split: LayerSplit) -> nn.Module:
    """Return a layer of virtual ranks, after its dense layers' weights became views of its own, if they can."""
    weight, _ = layer.dense()
    pieces = weight.split([weight_and_bias(linear)[0].shape[1] for linear in split.linears], 1)
    for linear, piece in zip(split.linears, pieces, strict=True):
        if not getattr(layer, "has_copies", False) and not linear.weight.is_meta:
            linear.weight.data = piece if isinstance(linear, Conv1D) else piece.t()
    return layer


def _drawn_copy(module: nn.Module) -> nn.Module:
    drawn: dict[int, Any] = {
        id(each): nn.Parameter(values_of(each).detach().clone(), each.requires_grad) for each in module.parameters()
    }
    return copy.deepcopy(module, drawn)


def _share_key_value_heads_(block: nn.Module) -> None:
    """Let fewer queries share a key-value head in attention, if ranks have copies of these heads.

    Attention may have no keys and values of its own, and use those of an earlier block.
    """
    for attention in block.modules():
        groups: Any = getattr(attention, "num_key_value_groups", 1)
        columns: list[Any] = [each for each in attention.modules() if isinstance(each, ColumnParallelLinear)]
        if groups == 1 or not columns or columns[0].whole:
            continue
        copies = max(each for layer in columns for each in layer.copies)
        if not hasattr(attention, "k_proj"):
            size, head_dim = columns[0].collective.group.size, cast(Any, attention).head_dim
            key_value_heads = columns[0].widths[0] * size // head_dim // groups
            copies = max(1, size // key_value_heads)
        if copies > 1:
            attention.dense_key_value_groups, attention.num_key_value_groups = groups, groups // copies


def with_layers(
    model: PreTrainedModel,
    splits: list[LayerSplit],
    sharded: Callable[[LayerSplit, Tensor, Tensor | None], nn.Module],
    *,
    shards: int,
    replacements: dict[int, Any] | None = None,
) -> PreTrainedModel:
    """Return a copy of `model` with the layers of `splits` replaced.

    Args:
        model: a dense decoder; not changed.
        splits: the layers, as `dense_splits` returns them.
        sharded: makes a layer from a split, and the weight (inputs, outputs) and bias of all its linear layers side by
            side. A column-parallel layer returns the outputs of this process, projections side by side; a row-parallel
            one takes this process's inputs.
        shards: number of parts into which the heads are split. Attention sees one part.
        replacements: further modules to replace, by the id of the module.
    """
    memo: dict[int, Any] = dict(replacements or {})  # deepcopy takes these in place of copies
    for split in splits:
        layer: Any = sharded(split, *split.drawn_weight_and_bias()).train(split.linears[0].training)
        layer.row, layer.projections, layer.whole = split.row, split.projections, split.whole
        layer.made_of = [(type(linear), weight_and_bias(linear)[0].shape[1]) for linear in split.linears]
        if len(split.linears) == 1:
            memo[id(split.linears[0])] = layer
            continue
        for index, linear in enumerate(split.linears):
            memo[id(linear)] = Projection(layer, index).train(linear.training)
    replaced = [linear for split in splits for linear in split.linears]
    replaced += [module for module in model.modules() if id(module) in memo]
    handled = {id(parameter) for module in replaced for parameter in module.parameters()}
    for parameter in model.parameters():
        if parameter.is_meta and id(parameter) not in handled:
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
        fault = f"supports GPT-2, not a {type(model).__name__}: give 'lossytp'"
        raise TypeError(f"implementation = {implementation!r} {fault}")
    return dense_splits(model, tensor_parallel_size, GPT2_PLAN)


def reliable_prefix(model: PreTrainedModel, input_ids: Tensor) -> Cache:
    """Return the cache of a fixed prefix, such as a system prompt, computed without losses.

    Give a copy of it to `generate` as `past_key_values`, with prompts that begin with the prefix. For several prompts,
    or beam search, call its `batch_repeat_interleave` first. No packet more is sent than without a cache.

    Args:
        model: a language model that `parallelize` returned.
        input_ids: (B, P) token ids, or (1, P) for one prompt.

    Raises:
        TypeError: if the model is not tensor-parallel, or `input_ids` is no tensor.
        ValueError: if `input_ids` has another shape.
    """
    collective = collective_of(model)
    if collective is None:
        raise TypeError(f"this {type(model).__name__} is not tensor-parallel: give what parallelize() returned")
    check_is("input_ids", input_ids, Tensor, "token ids of shape (1, tokens)")
    if input_ids.ndim != 2 or not input_ids.numel():
        raise ValueError(f"input_ids is of shape {tuple(input_ids.shape)}: give token ids of shape (1, tokens)")
    with torch.no_grad(), collective.network.reliable():
        cache: Cache = model(input_ids=input_ids, use_cache=True).past_key_values
    return cache
