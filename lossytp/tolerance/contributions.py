"""Find a decoder's sums over tensor-parallel ranks, and what each rank contributes to them.

Shapes: T tokens; R ranks, M elements of a sum (tokens x width, row-major), K inputs of one rank, D model width.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lossytp.parallel.convert import dense_splits
from lossytp.parallel.functions import rank_by_rank
from lossytp.parallel.plans import LayerSplit, weight_and_bias
from lossytp.tolerance.damage import checked_layers


def sums_of(dense: PreTrainedModel, ranks: int, layers: Sequence[int] | None = None) -> list[LayerSplit]:
    """Return the row-parallel layers, whose products the ranks sum, in the order of their layers.

    Args:
        dense: a language model.
        ranks: R.
        layers: numbers of the layers, from 0; all if left out.

    Raises:
        ValueError: if the model does not fit the number of ranks, or has no such layer.
    """
    wanted = checked_layers(dense, layers)
    splits = [each for each in dense_splits(dense, ranks) if each.row and each.layer in wanted]
    return sorted(splits, key=lambda split: (split.layer, split.module))  # attention before mlp


def contributions(
    dense: PreTrainedModel, ids_T: Tensor, sums: Sequence[LayerSplit], ranks: int
) -> Iterator[tuple[LayerSplit, Tensor]]:
    """Yield the ranks' contributions (R, M) to each of the sums, without losses. The model may have any head."""
    inputs: dict[Any, Tensor] = {}
    handles = [
        split.linears[0].register_forward_pre_hook(lambda linear, given: inputs.update({linear: given[0]}))
        for split in sums
    ]
    try:
        forward(dense, ids_T)
    finally:
        for handle in handles:
            handle.remove()
    for split in sums:
        weight, _ = weight_and_bias(split.linears[0])
        weight_RKD = weight.detach().unflatten(0, (ranks, -1))
        x_RTK = inputs.pop(split.linears[0])[0].unflatten(-1, (ranks, -1)).transpose(0, 1)
        yield split, rank_by_rank(x_RTK, weight_RKD).flatten(1)


def forward(dense: Any, ids_T: Tensor) -> None:
    """Compute the model's answer to one text, for the hooks on its layers."""
    with torch.inference_mode():
        dense(input_ids=ids_T.unsqueeze(0), use_cache=False)
