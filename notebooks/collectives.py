"""Measure what losses do to collectives and links, for the lessons 10 and 12: what is missing, how wrong, how long.

Shapes: R ranks, N elements of one message, H a shard's inputs, D outputs.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from lossytp.network import LossProcess, LossyNetwork
from lossytp.network.checks import check_at_least, check_probability
from lossytp.network.lossy_network import CommConfig
from lossytp.network.routes import Hops, Missing, algorithm_named
from lossytp.network.traces import burst_lengths
from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.group import RankGroup
from lossytp.study.style import COLUMN, estimates, marker_of, shared_legend
from notebooks.theory import expected_squared_error
from paper.timing import AllReduce, Channel, Path, Transport, collective_times, tail

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
        way: settings of `CommConfig`, such as algorithm, repair and reliable_gather.
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
    collective = LossyCollective(network, RankGroup(ranks), CommConfig.named(**way))
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
        ways: settings of `CommConfig`: algorithm, repair, reliable_gather.
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
                "expected": expected_squared_error(CommConfig.named(**way), ranks, process.loss_rate, coherence),
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


# Measure the losses on a link, beside the closed forms of its loss process.


STRETCHES = 100  # of packets, each long compared with a burst; their spread gives the standard errors


def burst_table(process: LossProcess, *, num_packets: int, seed: int, longest: int = 40) -> pd.DataFrame:
    """Measure the shares of bursts of 1 to `longest` packets on one link.

    For Bernoulli loss and the simple Gilbert channel, bursts of mean length m are geometric: (1 - 1/m)^(k - 1) / m.

    Returns:
        Columns burst_packets, measured, expected. `measured` is NaN if no packet was lost, `expected` if none can be.
    """
    lengths = burst_lengths(LossyNetwork(process, seed=seed).lost_packets(0, 1, num_packets))
    k = np.arange(1, longest + 1)
    mean = process.mean_burst_packets if process.loss_rate else np.nan
    shares = np.bincount(lengths, minlength=longest + 1)[1 : longest + 1] / (len(lengths) or np.nan)
    return pd.DataFrame({"burst_packets": k, "measured": shares, "expected": (1 - 1 / mean) ** (k - 1) / mean})


def measure(
    process: LossProcess, *, num_packets: int, seed: int, lags: tuple[int, ...] = (1, 2, 5, 10)
) -> pd.DataFrame:
    """Measure one link's loss rate, mean burst and autocorrelations over `num_packets` packets.

    The packets are split into `STRETCHES` stretches. The jackknife over stretches (Quenouille 1956) removes the bias
    and gives standard errors, which also hold for correlated losses.

    Returns:
        One row per quantity, with columns quantity, measured, expected, standard_error.

    Raises:
        ValueError: if a stretch would not be longer than the longest lag.
    """
    check_at_least("num_packets", num_packets, STRETCHES * (max(lags) + 1))
    network = LossyNetwork(process, seed=seed)
    size = num_packets // STRETCHES
    totals = np.array([_totals(network.lost_packets(0, 1, size), size, lags) for _ in range(STRETCHES)])
    whole = _quantities(totals.sum(0))
    without_one = np.array([_quantities(totals.sum(0) - stretch) for stretch in totals])
    errors = np.sqrt((STRETCHES - 1) * without_one.var(axis=0))
    names = ["loss rate", "mean burst, packets", *(f"autocorrelation, lag {lag}" for lag in lags)]
    expected = [process.loss_rate, process.mean_burst_packets, *map(process.autocorrelation, lags)]
    measured = STRETCHES * whole - (STRETCHES - 1) * without_one.mean(axis=0)
    return pd.DataFrame({"quantity": names, "measured": measured, "expected": expected, "standard_error": errors})


def _totals(lost: np.ndarray, num_packets: int, lags: tuple[int, ...]) -> list[int]:
    """Count packets, losses, adjacent pairs and bursts that begin; then for each lag its pairs, and pairs both lost."""
    indicator = np.zeros(num_packets, dtype=bool)
    indicator[lost] = True
    began = int(np.count_nonzero(indicator[1:] & ~indicator[:-1]))
    totals = [num_packets, len(lost), num_packets - 1, began]
    for lag in lags:
        totals += [num_packets - lag, int(np.count_nonzero(indicator[lag:] & indicator[:-lag]))]
    return totals


def _quantities(totals: np.ndarray) -> np.ndarray:
    """Return the loss rate, mean burst and autocorrelations of summed `_totals`."""
    packets, lost, pairs, began, *of_lags = totals.astype(float)
    rate = lost / packets
    correlations = [
        (both / count - rate**2) / (rate * (1 - rate)) for count, both in zip(of_lags[::2], of_lags[1::2], strict=True)
    ]
    return np.array([rate, rate / (began / pairs), *correlations])


# Draw what this module measures.


WIDTH = 5.5  # inches
GREYS = {"aspect": "auto", "cmap": "Greys", "vmin": 0, "interpolation": "nearest"}  # dark is more


def lost_pieces(lacks: dict[str, dict[str, np.ndarray]]) -> Figure:
    """Draw who lacks what: one row per algorithm, the reduce phase left, the gather phase right.

    Dark elements are missing: from a rank's contribution on the left, from the result on a rank on the right.

    Args:
        lacks: by algorithm, from `who_lacks_what`.
    """
    figure, axes = plt.subplots(
        len(lacks), 2, figsize=(WIDTH, 0.75 * len(lacks) + 0.6), sharex=True, sharey=True, layout="constrained"
    )
    titles = {"reduce": "contributions, as they reach the sum", "gather": "the sum, as it reaches the ranks"}
    for row, (algorithm, phases) in zip(axes, lacks.items(), strict=True):
        for ax, (phase, lacks_RN) in zip(row, phases.items(), strict=True):
            ranks, elements = lacks_RN.shape
            ax.imshow(lacks_RN, vmax=1.3, extent=(0, elements, ranks - 0.5, -0.5), **GREYS)
            for rank in range(1, ranks):
                ax.axhline(rank - 0.5, color="0.8", linewidth=0.5)
                ax.axvline(rank * elements / ranks, color="0.8", linewidth=0.5, linestyle=":")
            ax.set(yticks=range(ranks), title=titles[phase] if algorithm == next(iter(lacks)) else "")
        row[0].set_ylabel(f"{algorithm}\nrank")
    for ax in axes[-1]:
        ax.set_xlabel("element of the message (dotted: chunks)")
    return figure


def error_maps(errors: dict[tuple[str, str], np.ndarray]) -> Figure:
    """Draw where a sum is wrong, and on which rank: one column per algorithm, one row per repair.

    Args:
        errors: by (algorithm, repair), from `errors_by_rank`; without the pairs that are impossible.
    """
    algorithms, repairs = (list(dict.fromkeys(pair[place] for pair in errors)) for place in (0, 1))
    figure, axes = plt.subplots(
        len(repairs), len(algorithms), figsize=(WIDTH, 0.5 * len(repairs) + 0.6), layout="constrained", squeeze=False
    )
    worst = max(error.max() for error in errors.values())
    for row, repair in zip(axes, repairs, strict=True):
        for ax, algorithm in zip(row, algorithms, strict=True):
            ax.set(xticks=[], yticks=[])
            if (algorithm, repair) not in errors:
                ax.text(0.5, 0.5, "cannot be", ha="center", va="center", transform=ax.transAxes, color="0.5")
                continue
            image = ax.imshow(errors[algorithm, repair], vmax=worst, **GREYS)
    for ax, algorithm in zip(axes[0], algorithms, strict=True):
        ax.set_title(algorithm)
    for ax, repair in zip(axes[:, 0], repairs, strict=True):
        ax.set_ylabel(repair, rotation=0, ha="right", va="center", fontsize=7)
    figure.colorbar(image, ax=axes, label="error", shrink=0.6)
    return figure


def errors_of_sums(table: pd.DataFrame) -> Figure:
    """Draw the sums' relative squared error by repair (rows) and algorithm (markers), with the theory as bars.

    Args:
        table: from `squared_errors`; each coherence has a panel.
    """
    coherences = sorted(table["coherence"].unique())
    repairs, algorithms = list(table["repair"].unique()), list(table["algorithm"].unique())
    figure, axes = plt.subplots(
        1, len(coherences), figsize=(WIDTH, 3.2), sharey=True, sharex=True, layout="constrained", squeeze=False
    )
    for ax, coherence in zip(axes[0], coherences, strict=True):
        for number, algorithm in enumerate(algorithms):
            rows = table[(table["algorithm"] == algorithm) & (table["coherence"] == coherence)]
            y = rows["repair"].map(repairs.index) + (number - (len(algorithms) - 1) / 2) * 0.8 / len(algorithms)
            ax.plot(rows["expected"], y, "|", color="0.3", markersize=9, label="theory" if not number else None)
            values_A3 = rows[["measured"]].to_numpy() + np.outer(rows["standard_error"], (0, -2, 2))
            estimates(ax, y, values_A3, number, across=True, label=algorithm, capsize=0)  # caps would look like theory
        ax.set(xscale="log", xlabel="squared error / squared sum", title=f"coherence of the parts {coherence:g}")
        ax.set_yticks(range(len(repairs)), repairs)
    axes[0, 0].invert_yaxis()
    shared_legend(figure, axes[0, 0])
    return figure


def completion_tails(table: pd.DataFrame) -> Figure:
    """Draw completion times: a mark at the median, a line to the 99th percentile, a cross at the 99.9th.

    Args:
        table: from `completion_times`; each loss process has a panel.
    """
    processes, algorithms = list(table["process"].unique()), list(table["algorithm"].unique())
    transports = list(table["transport"].unique())
    figure, axes = plt.subplots(
        1, len(processes), figsize=(WIDTH, 2.8), sharey=True, sharex=True, layout="constrained", squeeze=False
    )
    for ax, process in zip(axes[0], processes, strict=True):
        for number, transport in enumerate(transports):
            rows = table[(table["process"] == process) & (table["transport"] == transport)]
            x = rows["algorithm"].map(algorithms.index) + (number - (len(transports) - 1) / 2) * 0.6 / len(transports)
            color, (p50, p99, p999) = f"C{number}", 1e6 * rows[["p50_s", "p99_s", "p999_s"]].to_numpy().T
            ax.vlines(x, p50, p99, color=color, linewidth=1.2)
            ax.plot(x, p50, marker_of(number), color=color, markersize=4, linestyle="", label=transport)
            ax.plot(x, p999, "x", color=color, markersize=4)
        ax.set(yscale="log", title=process)
        ax.set_xticks(range(len(algorithms)), algorithms)
    axes[0, 0].set_ylabel("completion, microseconds")
    shared_legend(figure, axes[0, 0])
    return figure


def burst_distribution(table: pd.DataFrame) -> Figure:
    """Draw the share of bursts of each length: points measured, lines the closed form.

    Args:
        table: columns process, burst_packets, measured, expected.
    """
    figure, ax = plt.subplots(figsize=(COLUMN, 1.9), layout="constrained")
    for number, (process, rows) in enumerate(table.groupby("process", sort=False)):
        color, marker = f"C{number}", marker_of(number)
        ax.plot(rows["burst_packets"], rows["expected"], color=color, linewidth=1)
        ax.plot(rows["burst_packets"], rows["measured"], marker, color=color, markersize=2.5, label=str(process))
    ax.set(yscale="log", xlabel="burst length, packets", ylabel="share of bursts")
    ax.set_ylim(1e-4, 1.5)
    figure.legend(loc="outside upper center", ncols=2)
    return figure
