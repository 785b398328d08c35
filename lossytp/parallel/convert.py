"""Convert a dense GPT-2 of transformers to a tensor-parallel one, and back.

GPT-2 stays Hugging Face's. In every block, column-parallel layers replace q/k/v and the MLP's first linear layer, and
row-parallel layers replace the two output projections. A column-parallel layer's outputs are in the dense order. Heads
therefore fall to ranks as attention expects them, and its code runs unchanged, with its cache and masks.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2ForSequenceClassification, GPT2LMHeadModel, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.pytorch_utils import Conv1D

from lossytp.network.checks import check_bool, check_is
from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.tape import LossTape
from lossytp.network.wiring import Wiring
from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.group import RankGroup, check_divides
from lossytp.parallel.layers import ColumnParallelLinear, RowParallelLinear
from lossytp.parallel.own_streams import OWN_STREAMS, give_own_streams_, shared_again, take_first_ranks_
from lossytp.parallel.reach import check_layers, check_reaches

SUPPORTED = (GPT2LMHeadModel, GPT2ForSequenceClassification)


class TensorParallelBlock(GPT2Block):
    """A block that gradient checkpointing recomputes with the losses of its first pass.

    When checkpointing is enabled, transformers sets `_gradient_checkpointing_func` on every block, and then calls it in
    place of the block's forward.
    """

    @property
    def _gradient_checkpointing_func(self) -> Callable:
        if "_gradient_checkpointing_func" not in self.__dict__:
            raise AttributeError("gradient checkpointing was never enabled")
        checkpoint: Callable = self.__dict__["_gradient_checkpointing_func"]
        collective: LossyCollective = self.attn.c_attn.collective  # type: ignore[assignment]

        def checkpoint_with_tape(function: Callable, *args: Any, **kwargs: Any) -> Any:
            network, tape = collective.network, LossTape()

            def run(*inputs: Any, **named: Any) -> Any:
                with network.recording(tape):
                    return function(*inputs, **named)

            return checkpoint(run, *args, **kwargs)

        return checkpoint_with_tape

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, checkpoint: Callable) -> None:
        self.__dict__["_gradient_checkpointing_func"] = checkpoint


class SavesDense:
    """The method that `parallelize` adds to a model's class, which keeps its name: libraries find models by it."""

    base_class: type[PreTrainedModel]

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
                f"state_dict of {len(state_dict)} tensors for a tensor-parallel model, which gathers its own: leave it "
                "out"
            )
        model: Any = self
        dense = gather(model)
        if is_main_process and not (dist.is_available() and dist.is_initialized() and dist.get_rank() > 0):
            dense.save_pretrained(save_directory, **how)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Let copies and pickles find the class, which is in no module."""
        return _blank, (self.base_class,), self.__dict__


_SAVING: dict[type[PreTrainedModel], type[PreTrainedModel]] = {}  # by the class that a model had


def _saves_dense(base_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    if base_class not in _SAVING:
        contents = {"base_class": base_class, "__module__": base_class.__module__, "__doc__": base_class.__doc__}
        _SAVING[base_class] = type(base_class.__name__, (SavesDense, base_class), contents)
    return _SAVING[base_class]


def _blank(base_class: type[PreTrainedModel]) -> PreTrainedModel:
    kind = _saves_dense(base_class)
    return kind.__new__(kind)


def parallelize(
    model: PreTrainedModel,
    network: LossyNetwork,
    *,
    tensor_parallel_size: int,
    group: RankGroup | None = None,
    own_copies: bool = False,
    wiring: Wiring | None = None,
    **settings: Any,
) -> PreTrainedModel:
    """Return a tensor-parallel copy of `model`, whose all-reduces lose what `network` loses.

    `copy.deepcopy` of the result also copies the network. The copy loses its own packets, and its own network reports
    them. `save_pretrained` of the result saves the dense model; if the ranks are spread over processes, each must call
    it.

    Args:
        model: GPT2LMHeadModel or GPT2ForSequenceClassification; not changed. The same on every process.
        network: shared by all layers; `network.report()` shows what each of them sent and lost.
        tensor_parallel_size: number of ranks; must divide the heads and the MLP's width.
        group: where the ranks live. If left out, they are spread over all processes of torch.distributed, and this copy
            holds this process's shards; without torch.distributed they are virtual ranks of this process.
        own_copies: whether each rank has its own copies of replicated parameters, which may drift apart; needs
            `reliable_gather=False`. If not, the ranks of a process share them.
        wiring: how the ranks exchange messages. If left out, `settings` make it.
        settings: as in `Wiring.named`: algorithm, repair, reliable_gather and others.

    Raises:
        TypeError: if the model or an argument is of another type.
        ValueError: if a size does not divide, a name is unknown, or the network names layers, links or a phase that the
            model does not use.
    """
    check_convertible(model, tensor_parallel_size)
    if group is None:
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        group = RankGroup(tensor_parallel_size, process_group=world)
    check_is("group", group, RankGroup, "one, such as RankGroup(4)")
    if group.size != tensor_parallel_size:
        raise ValueError(f"tensor_parallel_size = {tensor_parallel_size}, but the group is of {group.size}: give one")
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
            "own_copies = True where all ranks share a stream: give reliable_gather = False, or leave it out"
        )

    def column(conv: Conv1D, num_projections: int, layer: int, module: str) -> nn.Module:
        return ColumnParallelLinear(
            conv.weight, conv.bias, num_projections=num_projections, collective=collective, layer=layer, module=module
        )

    def row(conv: Conv1D, layer: int, module: str) -> nn.Module:
        return RowParallelLinear(
            conv.weight, conv.bias, own_bias=own_copies, collective=collective, layer=layer, module=module
        )

    ranks_here = len(group.local) if own_streams else 1  # attention sees them one after the other
    parallel = with_layers(model, column, row, width_here=model.config.hidden_size // (group.processes * ranks_here))
    for block in blocks_of(parallel):
        block.__class__ = TensorParallelBlock
    assert_converted(parallel)
    if own_streams:
        give_own_streams_(parallel, group, own_copies=own_copies)
    parallel.__class__ = _saves_dense(type(parallel))
    return parallel


def with_layers(
    model: PreTrainedModel,
    column: Callable[[Conv1D, int, int, str], nn.Module],
    row: Callable[[Conv1D, int, str], nn.Module],
    *,
    width_here: int,
) -> PreTrainedModel:
    """Return a copy of `model` with the four linear layers of every block replaced.

    Args:
        model: a dense GPT-2; not changed.
        column: makes a layer of a dense layer, its number of projections, the block's number, and "attention" or "mlp".
            Its outputs are those of this process's heads or units, projections side by side.
        row: makes a layer of a dense layer, the block's number, and the module. It takes this process's heads or units.
        width_here: outputs of one of q, k, v in this process.
    """
    replacements: dict[int, Any] = {}  # deepcopy's memo: it takes these in place of copies
    for number, block in enumerate(blocks_of(model)):
        attention, mlp = block.attn, block.mlp
        replacements |= {
            id(attention.c_attn): column(attention.c_attn, 3, number, "attention").train(attention.training),
            id(attention.c_proj): row(attention.c_proj, number, "attention").train(attention.training),
            id(mlp.c_fc): column(mlp.c_fc, 1, number, "mlp").train(mlp.training),
            id(mlp.c_proj): row(mlp.c_proj, number, "mlp").train(mlp.training),
        }
    changed = copy.deepcopy(model, replacements)
    for block in blocks_of(changed):
        block.attn.split_size = width_here  # attention splits q, k and v here; it infers the number of heads
    return fuse_gelu_(changed)


def fuse_gelu_(model: PreTrainedModel) -> PreTrainedModel:
    """Compute GPT-2's activation in one kernel, by the same formula; transformers uses several."""
    if model.config.activation_function == "gelu_new":
        for block in blocks_of(model):
            block.mlp.act = nn.GELU(approximate="tanh").train(block.mlp.training)
    return model


def gather(model: PreTrainedModel) -> PreTrainedModel:
    """Return the dense copy of a parallelized model, as transformers knows it; `gather(parallelize(m))` is bitwise m.

    If the ranks are spread over processes, every process must call this, and each gets the whole model. If ranks have
    drifted apart, the result has the first rank's parameters.

    Raises:
        TypeError: for a model that `parallelize` did not make.
    """
    blocks = blocks_of(model) if isinstance(model, SUPPORTED) else [model]
    if not all(isinstance(block, TensorParallelBlock) for block in blocks):
        raise TypeError(f"this {type(model).__name__} is not tensor-parallel: give what parallelize() returned")
    replacements: dict[int, Any] = {
        id(layer): _conv1d(layer)
        for layer in model.modules()
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear)
    }
    replacements |= shared_again(model)
    dense: Any = copy.deepcopy(model, replacements)
    dense.__class__ = getattr(dense, "base_class", type(dense))
    for plain, own in OWN_STREAMS.items():
        if type(dense) is own:
            dense.__class__ = plain
            group: Any = dense.rank_group
            take_first_ranks_(dense.parameters(), group)
            del dense.rank_group
            dense.tie_weights()
    for block in blocks_of(dense):
        block.__class__ = GPT2Block
        block.attn.split_size = model.config.hidden_size
        block.mlp.act = ACT2FN[model.config.activation_function].train(block.mlp.training)
    return dense


def assert_converted(model: PreTrainedModel) -> None:
    """Raise AssertionError unless every linear layer of every block is sharded.

    An earlier study replaced `nn.Linear` alone, which GPT-2's blocks do not have, and so sharded nothing.
    """
    for number, block in enumerate(blocks_of(model)):
        kinds = [type(layer) for layer in block.modules() if isinstance(layer, Conv1D | nn.Linear)]
        expected: dict[str, type[nn.Module]] = {
            "attn.c_attn": ColumnParallelLinear,
            "attn.c_proj": RowParallelLinear,
            "mlp.c_fc": ColumnParallelLinear,
            "mlp.c_proj": RowParallelLinear,
        }
        unsharded = [name for name, kind in expected.items() if type(block.get_submodule(name)) is not kind]
        if kinds or unsharded:
            raise AssertionError(f"block {number} was not converted: {kinds or unsharded} left as they were")


def check_convertible(model: PreTrainedModel, tensor_parallel_size: int) -> None:
    """Raise TypeError or ValueError, naming the fix, if `parallelize` cannot convert the model."""
    if not isinstance(model, SUPPORTED):
        names = " or ".join(supported.__name__ for supported in SUPPORTED)
        raise TypeError(f"{type(model).__name__} cannot be parallelized: give a {names}")
    if not all(isinstance(block, GPT2Block) and isinstance(block.attn.c_attn, Conv1D) for block in blocks_of(model)):
        raise TypeError("the model's blocks are not those of a dense GPT-2: give the dense model, or gather() it first")
    if model.config.add_cross_attention:
        raise ValueError("add_cross_attention = True is not supported: give a decoder without cross-attention")
    inner = model.config.n_inner or 4 * model.config.hidden_size
    check_divides(tensor_parallel_size, heads=model.config.num_attention_heads, inner=inner)


def blocks_of(model: Any) -> list[Any]:
    """Return the transformer blocks of a GPT-2."""
    return list(model.transformer.h)


def _conv1d(layer: ColumnParallelLinear | RowParallelLinear) -> Conv1D:
    weight, bias = layer.dense()
    with torch.device("meta"):  # on "meta" the constructor draws no weights, so torch's generator does not advance
        conv = Conv1D(weight.shape[1], weight.shape[0])
    conv.weight = nn.Parameter(weight.clone(), layer.weight.requires_grad)
    conv.bias = nn.Parameter(bias.clone(), layer.bias.requires_grad)
    return conv.train(layer.training)
