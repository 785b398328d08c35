"""Tensor-parallel mixtures of experts: each rank holds a slice of every expert, as in a dense MLP.

The router is replicated, so all ranks send a token to the same experts, and the block's output is one sum over the
ranks. transformers packs the experts' weights: `gate_up_proj` (E, 2F, D) and `down_proj` (E, D, F).

Shapes: E experts, F units of an expert, D model width, K experts per token, T tokens, R ranks, L of them here.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from lossytp.network.checks import refuse_if
from lossytp.network.scope import Site
from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.layers import outside_graphs
from lossytp.parallel.mappings import f_of_layers, g_of_layers
from lossytp.parallel.plans import EXPERTS, Plan, named_by, style_of, values_of

STYLES = {"colwise": (1, 1), "packed_colwise": (1, 2), "rowwise": (2, 1)}
"""The axis of a packed weight that the ranks split, and the number of projections side by side on it."""
GROUPED_MM_BYTES = 16  # to a multiple of which torch's grouped matrix product aligns rows


@dataclass(frozen=True)
class ExpertsSplit:
    """The experts of block `layer`, and how the ranks split each of their weights, by name, as in `STYLES`."""

    experts: nn.Module
    pieces: Mapping[str, tuple[int, int]]
    layer: int


def experts_of(model: PreTrainedModel, plan: Plan, size: int) -> list[ExpertsSplit]:
    """Return the mixtures of experts of a dense model that `plan` shards over `size` ranks.

    Raises:
        ValueError: if a weight has no style, or a style that is not supported, `size` does not divide a weight, or
            PyTorch's grouped matrix product cannot compute the slices.
    """
    splits = []
    for name, layer, style, experts in named_by(plan, model):
        if style != EXPERTS:
            continue
        pieces = {}
        for weight, values in experts.named_parameters():
            given = style_of(plan, f"{name}.{weight}") or "none"
            fault = f"of {name}.{weight} is not supported: give a plan of experts' weights in {', '.join(STYLES)}"
            refuse_if(given not in STYLES, "style", given, fault)
            axis, number = pieces[weight] = STYLES[given]
            fault = f"does not divide the {values.shape[axis] // number} units of {name}: choose a divisor"
            refuse_if(values.shape[axis] % (number * size), "tensor_parallel_size", size, fault)
            width, least = values.shape[axis] // (number * size), GROUPED_MM_BYTES // values.element_size()
            grouped = getattr(model.config, "_experts_implementation", None) == "grouped_mm"
            fault = f"gives slices of {width} units of {name}, but grouped_mm needs a multiple of {least}: "
            fault += "choose another size, or load the model with experts_implementation='eager'"
            refuse_if(grouped and width % least > 0, "tensor_parallel_size", size, fault)
        units = {each: values.shape[pieces[each][0]] // pieces[each][1] for each, values in experts.named_parameters()}
        fault = f"are slices of different units of {name}: give packed_colwise for two projections side by side"
        refuse_if(len(set(units.values())) > 1, "plan's slices", units, fault)
        splits.append(ExpertsSplit(experts, pieces, layer))
    return splits


class TensorParallelExperts(nn.Module):
    """Compute this process's slices of all experts, and sum over the ranks: (..., D) to (..., D).

    Forward: one lossy all-reduce. Backward: two, of the gradients of the input and of the router's weights. The dense
    module's own code computes each rank's part, on that rank's slices. Weights are (L, E, ...).

    Args:
        split: the dense experts, which are not changed.
        collective: how the ranks all-reduce.
    """

    def __init__(self, split: ExpertsSplit, collective: LossyCollective) -> None:
        super().__init__()
        self.pieces, self.collective, self.site = split.pieces, collective, Site(split.layer, "mlp", "forward")
        self.sharded_over_ranks = tuple(split.pieces)
        local = collective.group.local
        with torch.no_grad():
            for name, dense in split.experts.named_parameters():
                slices = _by_rank(values_of(dense), *split.pieces[name], collective.group.size)
                part = slices[local.start : local.stop].clone(memory_format=torch.contiguous_format)
                self.register_parameter(name, nn.Parameter(part, dense.requires_grad))
        self._code = [_without_weights(split.experts)]  # a list hides it from this module

    @outside_graphs
    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the sum of the outputs, (..., D), of each token's experts (T, K) with these weights (T, K)."""
        collective, site = self.collective, self.site
        x_LTD, weights_LTK = (f_of_layers(each, collective, site) for each in (x, top_k_weights))
        own = collective.comm.own_streams
        index_LTK = top_k_index.reshape(len(x_LTD) if own else 1, -1, top_k_index.shape[-1]).expand(len(x_LTD), -1, -1)
        parts = []
        for rank, inputs in enumerate(zip(x_LTD, index_LTK, weights_LTK, strict=True)):
            slices = {name: getattr(self, name)[rank] for name in self.pieces}
            parts.append(functional_call(self._code[0], slices, inputs))
        return g_of_layers(torch.stack(parts), collective, site).view(x.shape)

    def dense(self) -> nn.Module:
        """Return the dense experts; every process of the group must call this."""
        dense = copy.copy(self._code[0]).train(self.training)
        dense._parameters = {}
        with self.collective.network.reliable(), torch.no_grad():
            for name, (axis, pieces) in self.pieces.items():
                mine = getattr(self, name)
                slices = self.collective.group.all_rows(mine).unflatten(1 + axis, (pieces, -1))
                whole = slices.movedim(0, 1 + axis).flatten(axis, axis + 2)
                dense.register_parameter(name, nn.Parameter(whole.contiguous(), mine.requires_grad))
        return dense


def _by_rank(dense: Tensor, axis: int, pieces: int, ranks: int) -> Tensor:
    return dense.unflatten(axis, (pieces, ranks, -1)).movedim(axis + 1, 0).flatten(axis + 1, axis + 2)


def _without_weights(experts: nn.Module) -> nn.Module:
    code = copy.copy(experts)
    code._parameters = {name: nn.Parameter(each.detach().to("meta")) for name, each in experts.named_parameters()}
    return code
