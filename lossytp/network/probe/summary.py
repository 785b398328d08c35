"""Summarise a trace: the loss rate with its interval, burst lengths, delays."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from scipy import stats

from lossytp.network.checks import printable
from lossytp.network.probe.trace_file import FlowTrace, ProbeTrace
from lossytp.network.trace import DOUBT, burst_lengths

CONFIDENCE = 0.95
BLOCKS = 100
SHARES = (0.5, 0.9, 0.99, 0.999)
BURSTS_SHOWN = 8


class LossRate(NamedTuple):
    """The share of lost packets, and its confidence interval."""

    value: float
    low: float
    high: float


def loss_rate(lost: np.ndarray, confidence: float = CONFIDENCE) -> LossRate:
    """Return the loss rate, with an interval that allows for bursts.

    Bursts reduce the number of independent packets. The factor is the variance of the losses over `BLOCKS` consecutive
    blocks, relative to the variance of independent losses (batch means; Law, "Simulation Modeling and Analysis", 5th
    ed., 9.5.3). The interval is Wilson's (1927) for the reduced number, with Student's quantile. It is too narrow if
    bursts are as long as a block.

    Args:
        lost: bool, (packets,): whether each packet was lost.
        confidence: probability that the interval holds the true rate.

    Raises:
        ValueError: if there are no packets.
    """
    packets = len(lost)
    if not packets:
        raise ValueError("a flow of 0 packets has no loss rate: send at least one")
    rate = float(np.mean(lost))
    blocks = min(BLOCKS, packets)
    length = packets // blocks
    independent = float(packets)
    if blocks > 1 and 0 < rate < 1:
        sums = np.asarray(lost)[: blocks * length].reshape(blocks, length).sum(1)
        independent = packets / max(1.0, float(sums.var(ddof=1)) / (length * rate * (1 - rate)))
    quantile = float(stats.t.ppf((1 + confidence) / 2, max(1, blocks - 1)))
    weight = quantile**2 / independent
    middle = (rate + weight / 2) / (1 + weight)
    half = quantile / (1 + weight) * math.sqrt(rate * (1 - rate) / independent + weight / (4 * independent))
    return LossRate(rate, max(0.0, middle - half), min(1.0, middle + half))


def summary_lines(trace: ProbeTrace) -> Iterator[str]:
    """Yield the lines of a summary."""
    for number, flow in sorted(trace.flows.items()):
        seconds, asked, speed = float(flow.sent_s[-1] - flow.sent_s[0]), flow.rate_packets_per_s, ""
        if seconds > 0:  # not of unknown times
            speed = f" at {(flow.num_packets - 1) / seconds:.0f}/s" + ("" if asked is None else f" of {asked:g}/s")
        yield f"flow {number}, {printable(flow.src)} to {printable(flow.dst)}: {flow.num_packets} packets{speed}"
        yield from (f"  {line}" for line in _flow_lines(flow))
    yield from caveats(trace)


def caveats(trace: ProbeTrace) -> Iterator[str]:
    """Yield what a reader of the trace's numbers should know about the measurement."""
    lost = trace.all_lost()
    if trace.clocks == "none" and 2 * lost.sum() > len(lost):  # not measured by this program
        yield DOUBT.format(lost.mean())
    if not trace.complete:
        yield "the measurement ended early: this trace lacks the packets after that"
    if trace.clocks == "different":
        yield "delays count from each flow's fastest packet, because the two machines' clocks differ"
    if trace.own_losses:
        yield (
            f"{trace.own_losses} of the lost packets reached a machine that was too slow to take them. The network did "
            "not lose these: send slower, or raise net.core.rmem_max there"
        )


def _flow_lines(flow: FlowTrace) -> Iterator[str]:
    rate, bursts = loss_rate(flow.lost), burst_lengths(np.flatnonzero(flow.lost))
    yield (
        f"lost {int(flow.lost.sum())}: {rate.value:.3%} ({CONFIDENCE:.0%} interval {rate.low:.3%} to {rate.high:.3%}); "
        f"reordered {int(flow.reordered.sum())}, duplicates {int(flow.duplicates.sum())}"
    )
    if len(bursts):
        lengths, counts = np.unique(bursts, return_counts=True)
        shown = [f"{length}: {count}" for length, count in zip(lengths, counts, strict=True)]
        more = f", ... up to {lengths[-1]}" if len(shown) > BURSTS_SHOWN else ""
        yield f"bursts by length: {', '.join(shown[:BURSTS_SHOWN])}{more}; mean {bursts.mean():.2f} packets"
    delays_ms = flow.delay_s[~np.isnan(flow.delay_s)] * 1e3
    if len(delays_ms):
        parts = [
            f"{share:.1%}".replace(".0%", "%") + f" within {np.quantile(delays_ms, share):.3f}" for share in SHARES
        ]
        yield f"delay in ms: {', '.join(parts)}, longest {delays_ms.max():.3f}"
