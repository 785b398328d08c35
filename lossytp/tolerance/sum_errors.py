"""Measure the squared error of a language model's sums over lossy networks, in two units.

Relative to the sum, it is the error that `lossytp.network.theory` expects (of the reduce-scatter alone
with `sequence_parallel`). Relative to the residual stream, it is the
error after normalisation: the next layer divides each token by the norm of its stream (RMSNorm; LayerNorm also
subtracts the mean). Each sum is measured alone, on the ranks' lossless contributions.

Shapes: N blocks, T tokens per block; R ranks, M elements of a sum (tokens x width, row-major), D model width.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lossytp.network.checks import check_at_least, check_filled
from lossytp.network.counters import Site
from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.group import RankGroup
from lossytp.parallel.plans import LayerSplit, blocks_of
from lossytp.tolerance.contributions import contributions, forward, sums_of
from lossytp.training.config.network import NetworkSettings


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
    collectives = [LossyCollective(each.network(), RankGroup(ranks), each.wiring()) for each in networks]
    for collective in collectives:
        if collective.wiring.repair.remembers:
            raise ValueError(
                f"repair = '{collective.wiring.repair}' does not work for single sums, before which nothing arrived: "
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
                    unit = width if collective.wiring.sequence_parallel else 1
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
