"""What losses do to collectives, beside the theory: who lacks what, how wrong the sums are, how long they take.

Shapes: R ranks, N elements of one message.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from lossytp.network import LossProcess, LossyNetwork
from lossytp.network.algorithms import algorithm_named
from lossytp.network.checks import check_at_least, check_probability
from lossytp.network.routes import Hops, Missing
from lossytp.network.theory import expected_squared_error
from lossytp.network.timing import collective_times, tail
from lossytp.network.transport import Path, Transport
from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.group import RankGroup
from lossytp.parallel.wiring import Wiring

SETTLING_MESSAGES = 20  # until "stale" has something to put in nearly everywhere


def who_lacks_what(
    algorithm: str, process: LossProcess, *, ranks: int, num_elements: int, seed: int
) -> dict[str, np.ndarray]:
    """One all-reduce's losses: for "reduce" the contributions the sum lacks, for "gather" the results a rank lacks.

    Each bool (R, N), True where something is missing.

    Raises:
        ValueError: where `ranks` or `num_elements` is no whole number of at least 1, or `seed` none from 0 on.
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
    lacks_RN = np.zeros((ranks, num_elements), dtype=bool)
    for hop, packets in zip(hops, missing.packets, strict=True):
        for start in hop.start + packets * capacity:
            lacks_RN[list(hop.positions), start : min(start + capacity, hop.stop)] = True
    return lacks_RN


def errors_by_rank(
    process: LossProcess, way: dict, *, ranks: int, coherence: float, num_packets: int, seed: int
) -> np.ndarray:
    """Root mean square error in each packet's elements of what each rank holds, after a message like many before it.

    Shape (ranks, num_packets), in units of the root mean square of a rank's part; where a rank's own result is that of
    all, the rows are equal.
    """
    network = LossyNetwork(process, seed=seed)
    capacity = network.wire.elements_per_packet(4)
    *_, error = _errors(network, way, ranks, coherence, num_packets * capacity, SETTLING_MESSAGES + 1, seed)
    by_packet = error.view(-1, num_packets, capacity).square().mean(2).sqrt()
    return np.asarray(by_packet.expand(ranks, num_packets))


def _errors(
    network: LossyNetwork, way: dict, ranks: int, coherence: float, num_elements: int, num_messages: int, seed: int
) -> Iterator[torch.Tensor]:
    """Message by message, lossy sum less exact sum of Gaussian parts: (N,), or (R, N) where results differ by rank."""
    check_probability("coherence", coherence)
    collective = LossyCollective(network, RankGroup(ranks), Wiring(**way))
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
    """The relative squared error of lossy all-reduces, over many messages, beside what theory expects.

    Args:
        ways: settings of `Wiring`: algorithm, repair, reliable_gather.
        coherence: correlation of the ranks' parts, which are Gaussian, and new in each message.

    Returns:
        A row for each way: its settings, measured, standard_error (over messages), expected.

    Raises:
        ValueError: where `num_messages` is below 2: one message has no standard error.
    """
    check_at_least("num_messages", num_messages, 2)
    rows = []
    for way in tqdm(ways, desc="errors of sums", mininterval=5):
        network = LossyNetwork(process, seed=seed)
        each = _errors(network, way, ranks, coherence, num_elements, SETTLING_MESSAGES + num_messages, seed)
        errors = [error.square().mean().item() for error in each]
        expected_square = ranks + coherence * ranks * (ranks - 1)
        measured = np.array(errors[SETTLING_MESSAGES:]) / expected_square
        rows.append(
            {
                "algorithm": way.get("algorithm", "direct"),
                "repair": way.get("repair", "zero"),
                "reliable_gather": way.get("reliable_gather", True),
                "coherence": coherence,
                "measured": measured.mean(),
                "standard_error": measured.std(ddof=1) / num_messages**0.5,
                "expected": expected_squared_error(
                    way.get("algorithm", "direct"),
                    way.get("repair", "zero"),
                    ranks,
                    process.loss_rate,
                    coherence,
                    way.get("reliable_gather", True),
                ),
            }
        )
    return pd.DataFrame(rows)


def completion_times(
    algorithms: list[str],
    transports: dict[str, Transport],
    processes: dict[str, LossProcess],
    *,
    path: Path,
    ranks: int,
    num_elements: int,
    samples: int,
    seed: int,
) -> pd.DataFrame:
    """Seconds until an all-reduce of float32 elements is complete on all ranks: mean and tail, a row each.

    Columns: algorithm, transport, process, mean_s, p50_s, p99_s, p999_s, missing_share.
    """
    rows = []
    arms = [(a, t, p) for a in algorithms for t in transports for p in processes]
    for algorithm, transport, process in tqdm(arms, desc="completion times", mininterval=5):
        times = collective_times(
            algorithm,
            num_elements=num_elements,
            itemsize=4,
            ranks=ranks,
            path=path,
            transport=transports[transport],
            process=processes[process],
            samples=samples,
            seed=seed,
        )
        rows.append(
            {
                "algorithm": algorithm,
                "transport": transport,
                "process": process,
                **tail(times.seconds)._asdict(),
                "missing_share": times.missing_share.mean(),
            }
        )
    return pd.DataFrame(rows)
