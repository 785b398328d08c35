"""Diverging replicas: every rank computes on its own residual stream, from the embeddings to the logits.

The streams of the L ranks in this process lie along the batch, rank-major, (L * B, T, D). The inputs are repeated at
the start and the logits are split at the end, so the model's own code runs in between. The training loss is the mean
over the ranks. All ranks of a process share the replicated parameters (embeddings, norms, biases after a sum, the
head). If copies may drift, each rank has its own, stacked on a leading axis.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from lossytp.parallel.group import RankGroup
from lossytp.parallel.mappings import own_gradient
from lossytp.parallel.plans import blocks_of

BATCHED = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "labels")


def _on_own_streams(forward: Callable) -> Callable:
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def folded(self: Any, *args: Any, **kwargs: Any) -> Any:
        ranks_here = len(self.rank_group.local)
        inputs = signature.bind(self, *args, **kwargs).arguments
        inputs |= inputs.pop("kwargs", {})
        del inputs["self"]
        return_dict = inputs.pop("return_dict", None)
        ids = inputs.get("input_ids")
        tokens = inputs.get("inputs_embeds") if ids is None else ids
        if tokens is None:
            return forward(self, **inputs)  # which names what is missing
        flat = tokens if ids is None else ids.flatten(0, -2)  # rows of options, if there are several
        rows, length = flat.shape[:2]
        past, positions = inputs.get("past_key_values"), inputs.get("position_ids")
        if past is not None and past.get_seq_length() and len(past.layers[0].keys) != ranks_here * len(tokens):
            # which would reorder the rows of a cache as if they were those of one batch
            raise ValueError("beam search does not work if ranks have their own streams: sample, or search greedily")
        if positions is None and isinstance(getattr(self.base_model, "wpe", None), PerRank):
            first = past.get_seq_length() if past is not None else 0
            positions = torch.arange(first, first + length, device=tokens.device).unsqueeze(0)
        if positions is not None:
            inputs["position_ids"] = positions.expand(rows, length)
        batched = {name: inputs[name] for name in BATCHED if name in inputs}  # a mask for each kind of layer, perhaps
        inputs |= tree_map_only(Tensor, lambda each: each.repeat(ranks_here, *[1] * (each.ndim - 1)), batched)
        if inputs.get("num_items_in_batch") is not None:
            inputs["num_items_in_batch"] = inputs["num_items_in_batch"] * ranks_here
        output = forward(self, **inputs, return_dict=True)
        output.rank_logits = output.logits.view(ranks_here, len(tokens), *output.logits.shape[1:])
        output.logits = first_ranks(output.rank_logits[0], self.rank_group)
        return output if return_dict is not False else output.to_tuple()

    return folded


class OwnStreams:
    """A model whose forward returns the first rank's logits, and each local rank's as `rank_logits` (L, B, ...).

    Its hidden states, its attention weights and its cache have the rows of all local ranks, rank-major, (L * B, ...).
    If you compute a training loss yourself, average it over `rank_logits`: each rank's shard needs its rank's loss.
    """

    rank_group: RankGroup

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        model: Any = super()
        cls.forward = _on_own_streams(model.forward)  # type: ignore[attr-defined]


class SharedDropout(nn.Dropout):
    """Dropout with the same mask for all ranks of this process, as if they shared a seed."""

    def __init__(self, p: float, ranks_here: int) -> None:
        super().__init__(p)
        self.ranks_here = ranks_here

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        each = x.view(self.ranks_here, -1, *x.shape[1:])
        return (each * nn.functional.dropout(torch.ones_like(each[0]), self.p)).view(x.shape)


class PerRank(nn.Module):
    """A replicated module with parameters for each local rank, (L, ...): slice i computes piece i of the input."""

    def __init__(self, module: nn.Module, ranks_here: int) -> None:
        super().__init__()
        self.ranks_here = ranks_here
        self.template = [module]  # a list hides its parameters from this module
        self.per_rank = tuple(name for name, _ in module.named_parameters())
        for name, parameter in module.named_parameters():
            copies = parameter.detach().expand(ranks_here, *parameter.shape).clone()
            self.register_parameter(name, nn.Parameter(copies, parameter.requires_grad))

    def forward(self, x: Tensor) -> Tensor:
        parameters = {name: own_gradient(getattr(self, name), self.ranks_here) for name in self.per_rank}
        of_ranks = [{name: each[rank] for name, each in parameters.items()} for rank in range(self.ranks_here)]
        pieces = zip(of_ranks, x.chunk(self.ranks_here), strict=True)
        return torch.cat([functional_call(self.template[0], own, (piece,)) for own, piece in pieces])

    def first(self) -> nn.Module:
        """Return a module with the first rank's current parameters, their dtype and `requires_grad`."""
        module = copy.deepcopy(self.template[0])
        for name in self.per_rank:
            copies = getattr(self, name)
            setattr(module, name, nn.Parameter(copies[0].detach().clone(), copies.requires_grad))
        return module


def give_own_streams_(model: PreTrainedModel, group: RankGroup, *, own_copies: bool) -> None:
    """Prepare `model`, whose blocks are tensor-parallel, to compute on one stream per rank. Its class does not change.

    With `own_copies` each rank also gets its own copies of replicated parameters.
    """
    ranks_here = len(group.local)
    own: Any = model
    own.rank_group = group
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Dropout and name != "attn_dropout":
                setattr(module, name, SharedDropout(child.p, ranks_here).train(child.training))
            elif own_copies and not hasattr(child, "sharded_over_ranks") and list(child.parameters(recurse=False)):
                setattr(module, name, PerRank(child, ranks_here).train(child.training))
    head: Any = model.get_output_embeddings()
    if own_copies and head is not None and model.config.tie_word_embeddings:
        embeddings: Any = model.get_input_embeddings()
        head.weight = embeddings.weight


def shared_again(model: nn.Module) -> dict[int, Any]:
    """Return replacements, for `deepcopy`, of what `give_own_streams_` made: plain dropout, the first rank's copies."""
    replacements: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, SharedDropout):
            replacements[id(module)] = nn.Dropout(module.p).train(module.training)
        elif isinstance(module, PerRank):
            replacements[id(module)] = module.first().train(module.training)
    return replacements


@contextmanager
def stream_distance(model: nn.Module) -> Iterator[Callable[[], list[float]]]:
    """Measure how far apart the ranks' streams are after each transformer layer, within the block.

    Yields:
        A function to call after the block. It returns one number per layer, over all forward passes: the distance of a
        rank's stream from the mean stream, as a root mean square over ranks, divided by the mean stream's norm.

    Raises:
        ValueError: if all ranks share one stream.
    """
    own: Any = model
    if not hasattr(own, "rank_group"):
        raise ValueError("all ranks share one stream: give reliable_gather = False, or measure no stream_distance")
    group, blocks = own.rank_group, blocks_of(own)
    squares = torch.zeros(len(blocks), 2, dtype=torch.float64)  # of distances, summed over ranks; of the mean

    def measure(layer: int, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        each = hidden.detach().view(len(group.local), -1).double()
        mean = each.sum(0)
        group.begin_sum_(mean)()
        mean /= group.size
        distance = (each - mean).square().sum()
        group.begin_sum_(distance)()
        squares[layer] += torch.stack([distance, mean.square().sum()]).cpu()

    handles = [
        block.register_forward_hook(lambda _, __, output, layer=layer: measure(layer, output))
        for layer, block in enumerate(blocks)
    ]
    try:
        yield lambda: (squares[:, 0] / group.size / squares[:, 1]).sqrt().tolist()
    finally:
        for handle in handles:
            handle.remove()


def first_ranks(logits: Tensor, group: RankGroup) -> Tensor:
    """Return the logits of the group's first rank on every process, so that all make the same decision."""
    if torch.is_grad_enabled() or group.processes == 1:
        return logits
    logits = logits.contiguous().clone()
    take_first_ranks_([logits], group)
    return logits


def take_first_ranks_(tensors: Iterable[Tensor], group: RankGroup) -> None:
    """Replace the tensors by those of the process that holds the group's first rank."""
    if group.process_group is None or group.processes == 1:
        return
    for tensor in tensors:
        dist.broadcast(tensor.detach(), group_src=0, group=group.plain_group)
