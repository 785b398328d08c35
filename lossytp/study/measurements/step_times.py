"""Measure how long a training step waits for its network, over best effort and over reliable transports."""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pandas as pd
from scipy import stats
from tqdm import tqdm

from lossytp.network.bernoulli import Bernoulli
from lossytp.network.checks import check_at_least, check_filled, check_not_negative, check_positive, check_probability
from lossytp.network.timing import AllReduce, Channel, step_seconds
from lossytp.network.transport import BestEffort, GoBackN, Path, SelectiveRepeat, Transport

BEST_EFFORT, GO_BACK_N = "best effort", "go-back-N"
MIN_SAMPLES, SAMPLES_TIMES_RATE = 3, 0.3  # of go-back-N: many losses make its simulation slow and its times vary less
MAX_LOSSES_A_PACKET = 20  # beyond it a simulated step takes minutes and gigabytes


def transports(num_packets: int, path: Path, timeout_round_trips: float) -> dict[str, Transport]:
    """Return the transports to compare, for messages of `num_packets` packets.

    The reliable ones have their best settings, so their times are lower bounds. Go-back-N is what RDMA over Converged
    Ethernet does (Mittal et al., "Revisiting network support for RDMA", SIGCOMM 2018).
    """
    return {
        BEST_EFFORT: BestEffort.patient(num_packets, path),
        "selective repeat": SelectiveRepeat.prompt(path, timeout_round_trips),
        GO_BACK_N: GoBackN.prompt(path, timeout_round_trips),
    }


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The links to compare: every combination of these values.

    Raises:
        ValueError: if a list is empty, or a value out of range.
    """

    bandwidths_gbits: list[float]
    round_trips_us: list[float]
    loss_rates: list[float]

    def __post_init__(self) -> None:
        for name in ("bandwidths_gbits", "round_trips_us", "loss_rates"):
            check_filled(name, getattr(self, name))
        for gbits in self.bandwidths_gbits:
            check_positive("bandwidths_gbits", gbits, "Gbit/s")
        for round_trip_us in self.round_trips_us:
            check_not_negative("round_trips_us", round_trip_us, "microseconds")
        for rate in self.loss_rates:
            check_probability("loss_rates", rate)


def step_times(
    all_reduce: AllReduce, sweep: Sweep, *, num_layers: int, timeout_round_trips: float, samples: int, seed: int
) -> pd.DataFrame:
    """Measure a tensor-parallel training step's communication time under Bernoulli loss.

    All layers are alike, so one layer's time is measured and multiplied. Times in packets depend only on the product of
    bandwidth and round trip, so each product is timed once, with `samples` samples (fewer for go-back-N).

    Returns:
        Columns transport, bandwidth_gbits, round_trip_us, loss_rate, seconds, standard_error, and message_bytes, the
        size of each all-reduced tensor. Go-back-N has no row where it would lose each packet more than
        `MAX_LOSSES_A_PACKET` times, packets sent in vain included.

    Raises:
        ValueError: if a number is out of range.
    """
    for name, count in {"num_layers": num_layers, "samples": samples}.items():
        check_at_least(name, count, 1)
    check_at_least("seed", seed, 0)
    check_not_negative("timeout_round_trips", timeout_round_trips, "round trips")
    rows = []
    timed: dict[tuple[str, float, float], np.ndarray] = {}
    settings = list(product(sweep.bandwidths_gbits, sweep.round_trips_us, sweep.loss_rates))
    for gbits, round_trip_us, rate in tqdm(settings, desc="step times", mininterval=5):
        # at 1 Gbit/s, with as many packets a round trip
        path = Path(bandwidth_bits_per_s=1e9, round_trip_s=gbits * round_trip_us * 1e-6)
        num_packets = all_reduce.num_packets(path.wire)
        for name, transport in transports(num_packets, path, timeout_round_trips).items():
            count = samples
            if isinstance(transport, GoBackN):
                sent_a_loss = min(transport.timeout_s / path.packet_s, num_packets)
                if rate**2 * sent_a_loss > MAX_LOSSES_A_PACKET * (1 - rate):
                    continue
                count = int(np.clip(SAMPLES_TIMES_RATE / max(rate, 1e-9), min(samples, MIN_SAMPLES), samples))
            key = (name, path.round_trip_s, rate)
            if key not in timed:
                channel = Channel(path=path, transport=transport, process=Bernoulli(loss_rate=rate))
                one_layer = step_seconds(all_reduce, channel, num_layers=1, compute_s=0, samples=count, seed=seed)
                timed[key] = num_layers * one_layer
            rows.append(
                {
                    "transport": name,
                    "bandwidth_gbits": gbits,
                    "round_trip_us": round_trip_us,
                    "loss_rate": rate,
                    "seconds": timed[key].mean() / gbits,
                    "standard_error": stats.sem(timed[key]) / gbits,
                    "message_bytes": all_reduce.num_elements * all_reduce.itemsize,
                }
            )
    return pd.DataFrame(rows)
