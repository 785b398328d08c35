"""The sums of a real model: the packets that carry them, what each costs if lost alone, and how wrong sums become."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from lossytp.network.checks import check_at_least, check_filled, check_known
from lossytp.network.scope import MODULES, Site
from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.convert import dense_splits
from lossytp.parallel.group import RankGroup
from lossytp.parallel.layers import rank_by_rank
from lossytp.parallel.plans import LayerSplit, blocks_of, weight_and_bias
from lossytp.study.style import COLUMN, marker_of, shared_legend
from lossytp.training.groups import NetworkSettings
from paper.damage import RISE, checked_layers, losses_by_block

NOTHING = 1e-3  # nats: below this, the axis of single packets is linear


# Find a decoder's sums over tensor-parallel ranks, and what each rank contributes to them.
#
# Shapes: T tokens; R ranks, M elements of a sum (tokens x width, row-major), K inputs of one rank, D model width.


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


# Find the packets whose loss damages a language model most: those with the largest norm.
#
# A few activations of a pretrained model are thousands of times larger than the others, mostly at the first token (Sun
# et al., "Massive activations in large language models", COLM 2024, arXiv:2402.17762). So the packets that carry them
# are much stronger than the others. They are so few that it is mostly chance whether one of them is lost.
#
# The collective's routes say which contributions a packet carries. A lost packet is modelled by subtracting them from
# the dense model's sum. This takes one run per packet, and no repair acts.
#
# Shapes: N blocks, T tokens per block; R ranks, M elements of a sum (tokens x width, row-major), K inputs of one rank,
# D model width.


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
    comm = settings.comm()
    reduce, _ = comm.algorithm.pair(comm.sequence_parallel)
    capacity = settings.build().wire.elements_per_packet(*comm.block(parts_RM.element_size()))
    unit = width if comm.sequence_parallel else 1
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


# Measure the squared error of a language model's sums over lossy networks, in two units.
#
# Relative to the sum, it is the error that `paper.theory` expects (of the reduce-scatter alone
# with `sequence_parallel`). Relative to the residual stream, it is the
# error after normalisation: the next layer divides each token by the norm of its stream (RMSNorm; LayerNorm also
# subtracts the mean). Each sum is measured alone, on the ranks' lossless contributions.
#
# Shapes: N blocks, T tokens per block; R ranks, M elements of a sum (tokens x width, row-major), D model width.


def sum_errors(
    dense: PreTrainedModel, blocks_NT: Tensor, networks: Sequence[NetworkSettings], *, draws: int = 2
) -> pd.DataFrame:
    """Measure the errors of all of a model's sums.

    The model must add each sum unchanged to its residual stream, as GPT-2 and Llama do.

    Args:
        dense: a language model in evaluation mode.
        blocks_NT: token ids, on the model's device. Each block is a separate message.
        networks: the networks, which share one tensor-parallel size.
        draws: number of draws of losses for each sum and block.

    Returns:
        A row for each network, with means over draws, sums and blocks: `squared_error`, relative to the squared sum,
        and `stream_error`, relative to the squared stream, token by token.

    Raises:
        ValueError: if there is no network, or they have several tensor-parallel sizes, or the model does not fit
            theirs; if the model does not add its sums to the stream as they are; if a repair needs earlier messages, as
            "stale" does; or if only backward loses packets.
    """
    check_filled("networks", networks)
    check_at_least("draws", draws, 1)
    sizes = sorted({each.tensor_parallel_size for each in networks})
    if len(sizes) > 1:
        raise ValueError(f"networks have tensor_parallel_size {' and '.join(map(str, sizes))}: give one size")
    (ranks,) = sizes
    for each in networks:
        each.check_forward()
    sums = sums_of(dense, ranks)
    collectives = [LossyCollective(each.build(), RankGroup(ranks), each.comm()) for each in networks]
    for collective in collectives:
        if collective.comm.repair.remembers:
            raise ValueError(
                f"repair = '{collective.comm.repair}' does not work for single sums, before which nothing arrived: "
                "choose another"
            )
    rows = []
    with torch.inference_mode():
        for ids_T in blocks_NT:
            streams = _squared_streams(dense, ids_T, sums)
            for (split, parts_RM), stream_T in zip(contributions(dense, ids_T, sums, ranks), streams, strict=True):
                site = Site(split.layer, split.module, "forward")
                width = parts_RM.shape[1] // len(ids_T)
                for number, collective in enumerate(collectives):
                    unit = width if collective.comm.sequence_parallel else 1
                    results = [
                        collective.sum_(parts_RM.clone(), site, unit).view(-1, parts_RM.shape[1]) for _ in range(draws)
                    ]
                    rows += [{"network": number, **_errors(each, parts_RM, stream_T)} for each in results]
    return pd.DataFrame(rows).groupby("network").mean()


def _errors(results_RM: Tensor, parts_RM: Tensor, stream_T: Tensor) -> dict[str, float]:
    total_M = parts_RM.sum(0)
    error_T = (results_RM - total_M).unflatten(1, (len(stream_T), -1)).square().sum(2).mean(0)
    return {
        "squared_error": float(error_T.sum() / total_M.square().sum()),
        "stream_error": float((error_T / stream_T).mean()),
    }


def _hidden(output: Any) -> Tensor:
    """Return the hidden states of a block's output, which may be a tuple."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def _squared_streams(dense: PreTrainedModel, ids_T: Tensor, sums: Sequence[LayerSplit]) -> list[Tensor]:
    """Return each token's squared norm of the residual stream after each of the sums, (T,) each."""
    streams: list[Tensor] = []
    first = blocks_of(dense)[0].register_forward_pre_hook(lambda block, given: streams.append(given[0][0]))
    handles = [
        split.linears[0].register_forward_hook(lambda linear, given, sum_1TD: streams.append(streams[-1] + sum_1TD[0]))
        for split in sums
    ]
    last = blocks_of(dense)[-1].register_forward_hook(lambda block, given, output: streams.append(_hidden(output)[0]))
    try:
        forward(dense, ids_T)
    finally:
        for handle in (first, *handles, last):
            handle.remove()
    *added, hidden_TD = streams
    if not torch.allclose(added[-1], hidden_TD, rtol=1e-3, atol=1e-3 * float(hidden_TD.abs().max())):
        raise ValueError(
            f"{type(dense).__name__} does not add each sum to its residual stream as it is, so the stream's error is "
            "unknown: choose a model such as GPT-2 or Llama"
        )
    return [stream_TD.square().sum(1) for stream_TD in added[1:]]


# Draw them.


def single_packets(table: pd.DataFrame) -> Figure:
    """Draw the rise if exactly one packet is lost, against the packet's norm: one mark per packet.

    Args:
        table: table from `strong_packets.by_norm`.
    """
    figure, ax = _panel()
    for number, name in enumerate(BINS):
        rows = table[table["bin"].isin([name])]
        if len(rows):
            ax.plot(rows["norm"], rows["rise"], marker_of(number), color=f"C{number}", label=name, ms=3.5, alpha=0.7)
    ax.axhline(0, color="grey", lw=0.6, ls=":")
    ax.set_yscale("symlog", linthresh=NOTHING)
    ax.margins(y=0.08)
    place = " and ".join(f"layer {layer}, {module}" for layer, module in _places(table))
    ax.set(xscale="log", xlabel="L2 norm of the lost packet", ylabel=RISE, title=f"one packet lost in {place}")
    shared_legend(figure, ax)
    return figure


def strongest(norms: pd.DataFrame) -> Figure:
    """Draw the norm of each sum's strongest packet, relative to the median packet's.

    Args:
        norms: table from `strong_packets.packet_norms`.
    """
    figure, ax = _panel()
    for number, (module, rows) in enumerate(summary(norms).groupby("module")):
        ax.plot(rows["layer"], rows["ratio"], f"{marker_of(number)}-", color=f"C{number}", label=module, ms=3)
    ax.set(yscale="log", xlabel="layer", ylabel="strongest packet's norm / median")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.legend()
    return figure


def _panel() -> tuple[Figure, Axes]:
    return plt.subplots(figsize=(COLUMN, 0.7 * COLUMN), layout="constrained")


def _places(table: pd.DataFrame) -> list[tuple[int, str]]:
    return list(table[["layer", "module"]].drop_duplicates().itertuples(index=False, name=None))
