"""Find the packets whose loss damages a language model most: those with the largest norm.

A few activations of a pretrained model are thousands of times larger than the others, mostly at the first token (Sun et
al., "Massive activations in large language models", COLM 2024, arXiv:2402.17762). So the packets that carry them are
much stronger than the others. They are so few that it is mostly chance whether one of them is lost.

The collective's routes say which contributions a packet carries. A lost packet is modelled by subtracting them from the
dense model's sum. This takes one run per packet, and no repair acts.

Shapes: N blocks, T tokens per block; R ranks, M elements of a sum (tokens x width, row-major), K inputs of one rank, D
model width.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from lossytp.network.checks import check_at_least, check_known
from lossytp.network.scope import MODULES
from lossytp.parallel.collectives import DTYPES
from lossytp.tolerance.contributions import contributions, sums_of
from lossytp.training.config.network import NetworkSettings
from lossytp.training.pretraining.token_losses import losses_by_block

STRONGEST = "strongest"
BINS = {STRONGEST: 0.0, "top 1 %": 0.01, "top 10 %": 0.1, "rest": 1.0}
"""The share of a message's packets, strongest first, at which each bin ends; the first bin holds one packet."""


class Packet(NamedTuple):
    """One packet of a sum: its link, the positions of the ranks whose parts it carries, its elements, its L2 norm."""

    src: int
    dst: int
    positions: tuple[int, ...]
    start: int
    stop: int
    norm: float


def packet_norms(
    dense: PreTrainedModel,
    blocks_NT: Iterable[Tensor],
    settings: NetworkSettings,
    *,
    layers: Sequence[int] | None = None,
) -> pd.DataFrame:
    """Return the norms of all packets on their way to a sum, without losses.

    Args:
        dense: a decoder in evaluation mode, with any head.
        blocks_NT: token ids, on the model's device. Each block is a separate message; lengths may differ.
        settings: the collective, the packets and the tensor-parallel size.
        layers: numbers of the layers, from 0; all if left out.

    Returns:
        A row for each packet: layer, module, block, src, dst, token (the first that it carries), norm.

    Raises:
        ValueError: if the model does not fit the tensor-parallel size, or has no such layer.
    """
    rows = []
    sums = sums_of(dense, settings.tensor_parallel_size, layers)
    for block, ids_T in enumerate(blocks_NT):
        for split, parts_RM in contributions(dense, ids_T, sums, settings.tensor_parallel_size):
            width = parts_RM.shape[1] // len(ids_T)
            for packet in _packets(parts_RM, width, settings):
                link = {"src": packet.src, "dst": packet.dst, "token": packet.start // width}
                rows.append({"layer": split.layer, "module": split.module, "block": block, **link, "norm": packet.norm})
    return pd.DataFrame(rows)


def summary(norms: pd.DataFrame) -> pd.DataFrame:
    """Return how far each sum's strongest packet stands out.

    Args:
        norms: as `packet_norms` returns them.

    Returns:
        A row for each layer and module: layer, module, median, largest (norms over all blocks), ratio (largest over
        median), token (the first that the strongest packet carries).
    """
    groups = norms.groupby(["layer", "module"])["norm"]
    table = groups.agg(median="median", largest="max")
    table["ratio"] = table["largest"] / table["median"]
    table["token"] = norms.loc[groups.idxmax(), "token"].to_numpy()
    return table.reset_index()


def by_norm(
    dense: PreTrainedModel,
    blocks_NT: Tensor,
    settings: NetworkSettings,
    *,
    layer: int,
    module: str,
    packets: int = 4,
) -> pd.DataFrame:
    """Measure the rise of cross-entropy if exactly one packet of one sum is lost, for packets of all norms.

    Args:
        dense: a language model in evaluation mode.
        blocks_NT: token ids, on the model's device.
        settings: the collective, the packets and the tensor-parallel size. The loss rate and the repair have no effect.
        layer: number of the layer, from 0.
        module: "attention" or "mlp".
        packets: number of packets to lose, one at a time, for each block and bin, spread evenly over the bin.

    Returns:
        A row for each lost packet: layer, module, block, bin (of `BINS`), src, dst, token (the first that it carries),
        norm, rise (of the block's mean cross-entropy, in nats a token).

    Raises:
        ValueError: if the model does not fit the tensor-parallel size, or has no such layer or module.
    """
    check_known("module", module, MODULES)
    check_at_least("packets", packets, 1)
    sums = [each for each in sums_of(dense, settings.tensor_parallel_size, [layer]) if each.module == module]
    rows = []
    for block, ids_T in enumerate(blocks_NT):
        ids_1T = ids_T.unsqueeze(0)
        lossless = losses_by_block(dense, ids_1T).mean()
        for split, parts_RM in contributions(dense, ids_T, sums, settings.tensor_parallel_size):
            width = parts_RM.shape[1] // len(ids_T)
            sent = sorted(_packets(parts_RM, width, settings), key=lambda packet: -packet.norm)
            for name, number in _chosen(len(sent), packets):
                packet = sent[number]
                with _without(split.linears[0], packet, parts_RM):
                    rise = losses_by_block(dense, ids_1T).mean() - lossless
                place = {"layer": layer, "module": module, "block": block, "bin": name, "src": packet.src}
                place |= {"dst": packet.dst, "token": packet.start // width}
                rows.append({**place, "norm": packet.norm, "rise": rise})
    return pd.DataFrame(rows)


def _packets(parts_RM: Tensor, width: int, settings: NetworkSettings) -> Iterator[Packet]:
    """Yield the packets of the reduce phase. A token has `width` elements."""
    wiring = settings.wiring()
    reduce, _ = wiring.algorithm.pair(wiring.sequence_parallel)
    sent_as = parts_RM.dtype if wiring.wire_dtype is None else DTYPES[wiring.wire_dtype]
    capacity = settings.network().wire.elements_per_packet(sent_as.itemsize)
    unit = width if wiring.sequence_parallel else 1
    for hop in reduce(parts_RM.shape[1], tuple(range(len(parts_RM))), unit):
        carried = parts_RM[list(hop.positions), hop.start : hop.stop].sum(0)
        norms = pad(carried, (0, -len(carried) % capacity)).view(-1, capacity).double().norm(dim=1)
        for number, norm in enumerate(norms.tolist()):
            start = hop.start + number * capacity
            yield Packet(hop.src, hop.dst, hop.positions, start, min(start + capacity, hop.stop), norm)


def _chosen(count: int, packets: int) -> Iterator[tuple[str, int]]:
    """Yield the bin and the number, from the strongest, of the packets to lose among `count`."""
    first = 0
    for name, share in BINS.items():
        stop = max(1, int(np.ceil(share * count)))
        if stop > first:
            for number in np.unique(np.linspace(first, stop - 1, packets).round().astype(int)).tolist():
                yield name, number
        first = stop


@contextmanager
def _without(linear: Any, packet: Packet, parts_RM: Tensor) -> Iterator[None]:
    """Leave the packet out of the layer's sum within the block."""
    elements = slice(packet.start, packet.stop)
    lost = parts_RM[list(packet.positions), elements].sum(0)

    def subtract(linear: Any, inputs: Any, output: Tensor) -> Tensor:
        lacking = output.clone(memory_format=torch.contiguous_format)
        lacking.view(-1)[elements] -= lost
        return lacking

    handle = linear.register_forward_hook(subtract)
    try:
        yield
    finally:
        handle.remove()
