"""Measure the losses on a link, beside the closed forms of its loss process."""

import numpy as np
import pandas as pd

from lossytp.network import LossyNetwork
from lossytp.network.checks import check_at_least
from lossytp.network.loss_process import LossProcess
from lossytp.network.trace import burst_lengths

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
