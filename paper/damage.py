"""Find where losses damage a language model: by layer, and by token."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor
from transformers import PreTrainedModel

from lossytp.network.checks import check_at_least, check_filled
from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.scope import MODULES
from lossytp.parallel.convert import parallelize
from lossytp.parallel.plans import blocks_of
from lossytp.study.statistics import t_interval
from lossytp.study.style import COLUMN, estimates
from lossytp.training.groups import NetworkSettings
from lossytp.training.text import token_losses

DRAWS = 3


def losses_by_block(model: Any, blocks_NT: Tensor) -> np.ndarray:
    """Return the cross-entropy of every token but the first of each block: (N, T - 1), fp64.

    Blocks pass the model one by one, so that each is a message of its own.
    """
    losses = [token_losses(model, ids_1T).cpu().numpy() for ids_1T in blocks_NT.split(1)]
    return np.concatenate(losses).astype(np.float64)


def by_site(
    dense: PreTrainedModel,
    blocks_NT: Tensor,
    settings: NetworkSettings,
    *,
    layers: Sequence[int] | None = None,
    draws: int = DRAWS,
) -> pd.DataFrame:
    """Measure the rise of cross-entropy if only one layer's attention or MLP loses packets.

    Every row has its own draws, so rows are independent.

    Args:
        dense: a language model in evaluation mode.
        blocks_NT: token ids, on the model's device.
        settings: the network and the tensor-parallel size. Layers and module of its scope are replaced.
        layers: numbers of the layers to try, from 0; all if left out.
        draws: number of draws of losses for each row.

    Returns:
        A row for each layer and module: layer, module, rise, low, high. The rise is in nats per token, with its 95 %
        interval.

    Raises:
        ValueError: if the model does not fit the tensor-parallel size, or has no such layer; or if only backward
            loses packets.
    """
    check_at_least("draws", draws, 1)
    numbers = checked_layers(dense, layers)
    network, lossy = _lossy(dense, settings)
    lossless, scope = losses_by_block(dense, blocks_NT), network.scope
    rows = []
    for number, (layer, module) in enumerate(product(numbers, MODULES)):
        network.scope = replace(scope, layers=(layer, layer + 1), module=module)
        rises = [(_drawn(lossy, network, blocks_NT, number * draws + draw) - lossless).mean() for draw in range(draws)]
        rows.append({"layer": layer, "module": module, **_rise(rises)})
    return pd.DataFrame(rows)


def by_position(
    dense: PreTrainedModel, blocks_NT: Tensor, settings: NetworkSettings, *, draws: int = DRAWS
) -> pd.DataFrame:
    """Measure the rise of cross-entropy by a token's position in its block, in bins of powers of two.

    The token at position p is predicted from the p tokens before it.

    Args:
        dense: a language model in evaluation mode.
        blocks_NT: token ids, on the model's device.
        settings: the network and the tensor-parallel size.
        draws: number of draws of losses.

    Returns:
        A row for each bin: first, last (its positions, both included), rise, low, high. The rise is the mean over the
        bin's tokens, in nats, with its 95 % interval.

    Raises:
        ValueError: if the model does not fit the tensor-parallel size, or only backward loses packets.
    """
    check_at_least("draws", draws, 1)
    network, lossy = _lossy(dense, settings)
    lossless = losses_by_block(dense, blocks_NT)
    rises_ST = np.array([(_drawn(lossy, network, blocks_NT, draw) - lossless).mean(0) for draw in range(draws)])
    rows, first, tokens = [], 1, blocks_NT.shape[1]
    while first < tokens:
        last = min(2 * first, tokens) - 1
        rows.append({"first": first, "last": last, **_rise(rises_ST[:, first - 1 : last].mean(1))})
        first *= 2
    return pd.DataFrame(rows)


def checked_layers(model: PreTrainedModel, layers: Sequence[int] | None) -> list[int]:
    """Return the numbers of the layers, or all of the model's.

    Raises:
        ValueError: if the model has no layer of a number, or there are no numbers.
    """
    count = len(blocks_of(model))
    if layers is None:
        return list(range(count))
    check_filled("layers", layers)
    for layer in layers:
        check_at_least("layers", layer, 0)
        if layer >= count:
            raise ValueError(f"layers = {layer} is above the model's last, {count - 1}: give fewer")
    return sorted(set(layers))


def _lossy(dense: PreTrainedModel, settings: NetworkSettings) -> tuple[LossyNetwork, PreTrainedModel]:
    settings.check_forward()
    network = settings.build()
    size = settings.tensor_parallel_size
    return network, parallelize(dense, network, tensor_parallel_size=size, comm=settings.comm())


def _drawn(lossy: PreTrainedModel, network: LossyNetwork, blocks_NT: Tensor, draw: int) -> np.ndarray:
    with network.evaluation(draw):
        return losses_by_block(lossy, blocks_NT)


def _rise(rises: Any) -> dict[str, float]:
    rise = t_interval(rises)
    return {"rise": rise.value, "low": rise.low, "high": rise.high}


# Draw where losses damage a model, each figure from a table of `damage` or `strong_packets`.


RISE = "rise of cross-entropy (nats)"
ESTIMATE = ["rise", "low", "high"]
APART = 0.12  # of a layer, between the marks of its modules


def sites(table: pd.DataFrame) -> Figure:
    """Draw the rise if only one layer's attention or MLP loses packets, with intervals.

    Args:
        table: table from `damage.by_site`.
    """
    figure, ax = _panel()
    for number, (module, rows) in enumerate(table.groupby("module")):
        where = rows["layer"] + (2 * number - 1) * APART
        estimates(ax, where, rows[ESTIMATE], number, label=str(module))
    ax.axhline(0, color="grey", lw=0.6, ls=":")
    ax.set(xlabel="layer that loses packets", ylabel=RISE)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend()
    return figure


def positions(table: pd.DataFrame) -> Figure:
    """Draw the rise against a token's position in its block, with intervals.

    Args:
        table: table from `damage.by_position`.
    """
    figure, ax = _panel()
    estimates(ax, range(len(table)), table[ESTIMATE], 0, linestyle="-")
    bins = table[["first", "last"]].to_numpy().tolist()
    names = [str(first) if first == last else f"{first}-{last}" for first, last in bins]
    ax.set_xticks(range(len(table)), names, rotation=45, ha="right")
    ax.axhline(0, color="grey", lw=0.6, ls=":")
    ax.set(xlabel="position of the token in its block", ylabel=RISE)
    return figure


def _panel() -> tuple[Figure, Axes]:
    return plt.subplots(figsize=(COLUMN, 0.7 * COLUMN), layout="constrained")
