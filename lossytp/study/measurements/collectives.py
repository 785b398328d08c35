"""Measure what losses do to collectives, beside the theory: what is missing, how wrong sums are, how long they take.

Shapes: R ranks, N elements of one message, H a shard's inputs, D outputs.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from tqdm import tqdm

from lossytp.network import LossProcess, LossyNetwork
from lossytp.network.algorithms import algorithm_named
from lossytp.network.checks import check_at_least, check_probability
from lossytp.network.routes import Hops, Missing
from lossytp.network.theory import expected_squared_error
from lossytp.network.timing import AllReduce, Channel, collective_times, tail
from lossytp.network.transport import Path, Transport
from lossytp.network.wiring import Wiring
from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.group import RankGroup

SETTLING_MESSAGES = 20  # until "stale" has earlier values for nearly all positions


def who_lacks_what(
    algorithm: str, process: LossProcess, *, ranks: int, num_elements: int, seed: int
) -> dict[str, np.ndarray]:
    """Find which elements the ranks lack in one float32 all-reduce.

    Returns:
        For "reduce", the contributions that the sum lacks; for "gather", the results that a rank lacks. Each is bool
        (R, N), True where something is missing.

    Raises:
        ValueError: if `ranks` or `num_elements` is below 1, or `seed` below 0.
    """
    check_at_least("ranks", ranks, 1)
    check_at_least("num_elements", num_elements, 1)
    check_at_least("seed", seed, 0)
    network = LossyNetwork(process, seed=seed)
    routes = algorithm_named(algorithm)
    group = RankGroup(ranks).ranks
    lacks = {}
    for phase, way in (("reduce", routes.reduce), ("gather", routes.gather)):
        hops = way(num_elements, group)
        missing = network.send(hops, 4)
        lacks[phase] = _lacking(hops, missing, network.wire.elements_per_packet(4), ranks, num_elements)
    return lacks


def _lacking(hops: Hops, missing: Missing, capacity: int, ranks: int, num_elements: int) -> np.ndarray:
    """Return bool (R, N), True for each rank's elements that a lost packet of some hop carried."""
    lacks_RN = np.zeros((ranks, num_elements), dtype=bool)
    for hop, packets in zip(hops, missing.packets, strict=True):
        for start in hop.start + packets * capacity:
            lacks_RN[list(hop.positions), start : min(start + capacity, hop.stop)] = True
    return lacks_RN


def errors_by_rank(
    process: LossProcess, way: dict, *, ranks: int, coherence: float, num_packets: int, seed: int
) -> np.ndarray:
    """Measure the root mean square error of each packet's elements on each rank, in the last of many messages.

    Args:
        process: the loss process of each link.
        way: settings of `Wiring`, such as algorithm, repair and reliable_gather.
        ranks: number of ranks in the group.
        coherence: correlation of the ranks' parts.
        num_packets: packets of a message.
        seed: seed of the losses and the parts.

    Returns:
        (R, num_packets), in units of the root mean square of a rank's part. Rows are equal if all ranks share a result.
    """
    network = LossyNetwork(process, seed=seed)
    capacity = network.wire.elements_per_packet(4)
    *_, error = _errors(network, way, ranks, coherence, num_packets * capacity, SETTLING_MESSAGES + 1, seed)
    by_packet = error.view(-1, num_packets, capacity).square().mean(2).sqrt()
    return np.asarray(by_packet.expand(ranks, num_packets))


def _errors(
    network: LossyNetwork, way: dict, ranks: int, coherence: float, num_elements: int, num_messages: int, seed: int
) -> Iterator[Tensor]:
    """Yield each message's lossy sum minus its exact sum of Gaussian parts: (N,), or (R, N) without a shared result."""
    check_probability("coherence", coherence)
    collective = LossyCollective(network, RankGroup(ranks), Wiring.named(**way))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_messages):
        common_N = torch.randn(num_elements, generator=generator)
        own_RN = torch.randn(ranks, num_elements, generator=generator)
        parts_RN = coherence**0.5 * common_N + (1 - coherence) ** 0.5 * own_RN
        exact_N = parts_RN.sum(0)
        yield collective.sum_(parts_RN) - exact_N


def squared_errors(
    process: LossProcess,
    ways: list[dict],
    *,
    ranks: int,
    coherence: float,
    num_elements: int,
    num_messages: int,
    seed: int,
) -> pd.DataFrame:
    """Measure the relative squared error of lossy all-reduces, beside what the theory expects.

    Args:
        process: the loss process of each link.
        ways: settings of `Wiring`: algorithm, repair, reliable_gather.
        ranks: number of ranks in the group.
        coherence: correlation of the ranks' parts, which are Gaussian and new in each message.
        num_elements: elements of a message.
        num_messages: messages to average over.
        seed: seed of the losses and the parts.

    Returns:
        One row for each way: its settings, coherence, measured, standard_error (over messages) and expected.

    Raises:
        ValueError: if `num_messages` is below 2, because one message has no standard error.
    """
    check_at_least("num_messages", num_messages, 2)
    rows = []
    for way in tqdm(ways, desc="errors of sums", mininterval=5):
        network = LossyNetwork(process, seed=seed)
        each = _errors(network, way, ranks, coherence, num_elements, SETTLING_MESSAGES + num_messages, seed)
        errors = [error.square().mean().item() for error in each]
        expected_square = ranks + coherence * ranks * (ranks - 1)
        measured = np.array(errors[SETTLING_MESSAGES:]) / expected_square
        settings: dict[str, Any] = {"algorithm": "direct", "repair": "zero", "reliable_gather": True} | way
        rows.append(
            settings
            | {
                "coherence": coherence,
                "measured": measured.mean(),
                "standard_error": measured.std(ddof=1) / num_messages**0.5,
                "expected": expected_squared_error(Wiring.named(**way), ranks, process.loss_rate, coherence),
            }
        )
    return pd.DataFrame(rows)


def completion_times(
    all_reduces: list[AllReduce],
    transports: dict[str, Transport],
    processes: dict[str, LossProcess],
    *,
    path: Path,
    samples: int,
    seed: int,
) -> pd.DataFrame:
    """Measure the time until an all-reduce is complete on all ranks.

    Returns:
        One row for each all-reduce, transport and process, with the columns algorithm, transport, process, mean_s,
        p50_s, p99_s, p999_s and missing_share.
    """
    rows = []
    arms = list(product(all_reduces, transports, processes))
    for all_reduce, transport, process in tqdm(arms, desc="completion times", mininterval=5):
        channel = Channel(path=path, transport=transports[transport], process=processes[process])
        times = collective_times(all_reduce, channel, samples=samples, seed=seed)
        rows.append(
            {
                "algorithm": all_reduce.algorithm,
                "transport": transport,
                "process": process,
                **tail(times.seconds)._asdict(),
                "missing_share": times.missing_share.mean(),
            }
        )
    return pd.DataFrame(rows)


def coherence(model: nn.Module, batches: Sequence[dict[str, Tensor]], ranks: int) -> float:
    """Measure the coherence E[x_r x_s] / E[x_r^2] of two ranks' contributions x to a sum in the forward pass.

    It decides what a lost contribution costs (`lossytp.network.theory`).

    Args:
        model: a dense GPT-2, whose layers are sharded over `ranks` tensor-parallel ranks.
        batches: keywords of the model's `transformer`. Tokens outside `attention_mask` do not count.
        ranks: at least 2.

    Returns:
        The mean over the sums after every layer's attention and MLP.
    """
    check_at_least("ranks", ranks, 2)
    transformer: Any = model.get_submodule("transformer")
    layers = [layer for block in transformer.h for layer in (block.attn.c_proj, block.mlp.c_proj)]
    squares = torch.zeros(len(layers), 2, dtype=torch.float64)  # of the sums and of the contributions
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
