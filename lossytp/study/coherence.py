"""How alike the contributions are that tensor-parallel ranks send, which decides what a lost one costs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def coherence(model: nn.Module, batches: Sequence[dict[str, Tensor]], ranks: int) -> float:
    """E[x_r x_s] / E[x_r^2] of two ranks' contributions x to the same sum, forward, as `lossytp.network.theory` has it.

    Mean over the sums after every layer's attention and MLP, of the dense GPT-2 `model` sharded over `ranks` ranks.

    Args:
        batches: keywords of the model's `transformer`; tokens that `attention_mask` leaves out do not count.
    """
    if ranks < 2:
        raise ValueError(f"ranks = {ranks} share no sum: give 2 or more")
    transformer: Any = model.get_submodule("transformer")
    layers = [layer for block in transformer.h for layer in (block.attn.c_proj, block.mlp.c_proj)]
    squares = torch.zeros(len(layers), 2, dtype=torch.float64)  # of the sums, and of the contributions
    real = torch.zeros(0, dtype=torch.bool)

    def measure(number: int, weight: Tensor, hidden: Tensor) -> None:
        hidden_NRH = hidden[real].unflatten(-1, (ranks, -1))
        parts_NRD = torch.einsum("nrh,rhd->nrd", hidden_NRH, weight.unflatten(0, (ranks, -1)))
        squares[number] += torch.stack([parts_NRD.sum(1).square().sum(), parts_NRD.square().sum()]).double()

    handles = [
        layer.register_forward_pre_hook(lambda module, args, number=number: measure(number, module.weight, args[0]))
        for number, layer in enumerate(layers)
    ]
    try:
        with torch.no_grad():
            for batch in batches:
                real = batch["attention_mask"].bool()
                transformer(**batch)
    finally:
        for handle in handles:
            handle.remove()
    of_sums, of_parts = squares.T
    return float(((of_sums - of_parts) / (ranks - 1) / of_parts).mean())
