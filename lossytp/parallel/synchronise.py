"""Keep the copies of replicated parameters together: embeddings, norms, biases after a sum, the head.

Tensor-parallel ranks hold copies of them. The gradients of the copies differ if the ranks' streams differ, or if each
copy is averaged with other data-parallel replicas over its own links.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lossytp.network.counters import Site
from lossytp.network.lossy_network import LossyNetwork
from lossytp.parallel.collectives import collective_of
from lossytp.parallel.layout import Layout
from lossytp.parallel.replicas import local, placed

GRADIENTS = Site(None, None, "backward")


def synchronise_gradients_(model: nn.Module, layout: Layout, network: LossyNetwork, *, lossy: bool = False) -> None:
    """Set every replicated parameter's gradient to the mean over tensor-parallel ranks.

    If `lossy`, their sum is one message over the network, and each rank may lack different packets of it.

    Raises:
        ValueError: if `lossy`, and ranks of this process share their copies.
    """
    gradients = [local(p.grad) for p, axes, _ in placed(model) if p.grad is not None and "tp" not in axes]
    copies = max((copies for p, axes, copies in placed(model) if "tp" not in axes), default=1)
    collective = collective_of(model)
    if lossy and collective is not None:
        if not collective.wiring.own_streams or copies != len(collective.group.local):
            raise ValueError("lossy = True needs ranks with copies of their own: give own_copies = True to parallelize")
        _in_one_message_(gradients, copies, lambda each: collective.sum_(each, GRADIENTS) / collective.group.size)
    elif lossy:
        _in_one_message_(gradients, copies, lambda each: _mean(each, layout))
    else:
        with network.reliable():
            _in_one_message_(gradients, copies, lambda each: _mean(each.mean(0, keepdim=True), layout).expand_as(each))


def resynchronise_(model: nn.Module, layout: Layout, network: LossyNetwork) -> None:
    """Set every copy of a replicated parameter to the mean over tensor-parallel ranks, without losses.

    Local SGD does this with whole models (Stich, "Local SGD converges fast and communicates little", ICLR 2019). The
    optimizer's moments stay each rank's own.
    """
    with network.reliable(), torch.no_grad():
        for parameter, axes, copies in placed(model):
            if "tp" not in axes:
                each = local(parameter) if copies > 1 else local(parameter).unsqueeze(0)
                each.copy_(_mean(each.mean(0, keepdim=True), layout).expand_as(each))


def _in_one_message_(tensors: list[Tensor], copies: int, mean: Callable[[Tensor], Tensor]) -> None:
    """Replace the tensors by their `mean`, sent as one message. If `copies` > 1, the first axis holds the copies."""
    if not tensors:
        return
    sizes = [tensor.numel() // copies for tensor in tensors]
    means = mean(torch.cat([tensor.reshape(copies, -1) for tensor in tensors], 1))
    for tensor, piece in zip(tensors, means.split(sizes, 1), strict=True):
        tensor.copy_(piece.reshape(tensor.shape))


def _mean(values: Tensor, layout: Layout) -> Tensor:
    group = layout.process_group("tp")
    if group is None:
        return values
    values = values.contiguous().clone()
    dist.all_reduce(values, group=group)
    return values / layout.tensor_processes
