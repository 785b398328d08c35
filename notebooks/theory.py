"""Compute the expected squared error of a lossy all-reduce in closed form.

R ranks contribute parts x_r with E[x_r^2] = 1 and E[x_r x_s] = rho, their coherence. Every link loses packets
independently of the others, at the same stationary rate p = 1 - q. A rank's result is sum_r a_r x_r, so its error is

    E[(sum_r (a_r - 1) x_r)^2] = sum_rs E[x_r x_s] (E[a_r a_s] - E[a_r] - E[a_s] + 1).

The moments of the weights a_r follow from the algorithm's routes. They depend on n(r), the number of hops of the reduce
phase that carry r's part of an element, and on the number of hops that bring the sum to a rank in a lossy gather. Each
repair states the moments of its weights (`Repair.sum_moments`).

An element crosses each hop once. So Gilbert-Elliott and Bernoulli links of equal rate have equal expectations, as long
as bursts are shorter than a chunk. `fec` and `retransmit` are exceptions: their remaining loss rate is that of
Bernoulli links, for `fec` in whole blocks (for "xor", blocks where n - k divides k).
`tests/parallel/test_theory_against_simulation.py` compares the formulas with simulated losses.

Suffixes: R ranks, H hops that carry an element.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from numbers import Real

import numpy as np

from lossytp.network.checks import check_at_least, check_probability
from lossytp.network.lossy_network import CommConfig
from lossytp.network.repairs import ZERO, Chain, Moments, Protect, Repair
from lossytp.network.routes import Hop


def expected_squared_error(
    comm: CommConfig, ranks: int, loss_rate: float, coherence: float = 0.0, energy_at_risk: float | None = None
) -> float:
    """Return E[(a rank's result - sum)^2] / E[sum^2] of an all-reduce, averaged over elements and ranks.

    With `sequence_parallel`, it is that of a reduce-scatter, and of an all-gather if gathers lose packets.

    With algorithm "direct" and a reliable gather, the numerator is

        zero, hadamard   (R - 1) p + rho (R - 1) (R - 2) p^2
        fec, retransmit  the same, with `Repair.missing_rate` in place of p
        rescale          (R - 1) p / q
        stale            2 (R - 1) p + 2 rho (R - 1) (R - 2) p^2 / (1 + p)
        local            (1 - rho) (2 (R - 1) p + (R - 1) (R - 2) p^2)

    and the denominator E[sum^2] is R + rho R (R - 1). `stale` has its worst case here: each message is independent of
    the many before it. `protect` multiplies the error by the energy at risk. This is exact if the parts are
    uncorrelated and each crosses one link.

    Args:
        comm: how the ranks exchange messages. A message has as many equal chunks as there are ranks.
        ranks: number of ranks, R.
        loss_rate: stationary loss rate of every link.
        coherence: rho, above -1 / (R - 1), where the parts sum to nothing, and at most 1, where they are equal.
        energy_at_risk: for `protect`, the share of the sum of squares that lies in unprotected packets, as
            `unprotected_energy` measures it. If left out, all packets count as equally strong.

    Raises:
        ValueError: if a value is out of range, or the repair has no closed form for these routes.
    """
    check_at_least("ranks", ranks, 1)
    lowest = -1 / (ranks - 1) if ranks > 1 else -math.inf
    if not (isinstance(coherence, Real) and lowest < coherence <= 1):
        raise ValueError(
            f"coherence = {coherence!r} is not in ({lowest:.4g}, 1]: {ranks} parts cannot be so correlated, or their "
            "sum is always 0; give one inside"
        )
    at_risk = 1.0
    if isinstance(protect := comm.repair.part("select"), Protect):
        at_risk = 1 - protect.share if energy_at_risk is None else energy_at_risk
        check_probability("energy_at_risk", at_risk)
        others = [comm.repair.part(stage) for stage in ("deliver", "fill")]
        comm = replace(comm, repair=Chain(tuple(part for part in others if part != ZERO)))
    elif energy_at_risk is not None:
        raise ValueError(
            f"energy_at_risk = {energy_at_risk} does not go with repair = '{comm.repair}': give it with protect only"
        )
    products_RR = np.full((ranks, ranks), coherence) + (1 - coherence) * np.eye(ranks)
    errors = [
        (products_RR * (second_RR - mean_R[:, None] - mean_R + 1)).sum()
        for mean_R, second_RR in _moments(comm, ranks, loss_rate)
    ]
    return float(at_risk * np.mean(errors) / products_RR.sum())


def unprotected_energy(squares: np.ndarray, protect: Protect) -> float:
    """Return the share of a hop's sum of squares, (packets,), that `protect` leaves in unprotected packets."""
    return float(1 - squares[protect.protected(squares, seed=0)].sum() / squares.sum())


def mean_weights(comm: CommConfig, ranks: int, loss_rate: float) -> np.ndarray:
    """Return E[a_r] of rank r's part in an element of chunk c, averaged over the ranks' results: (chunks c, ranks r).

    Its distance from 1 is the bias of a repair. With `rescale` it is 1. With `rescale_counted` in a direct exchange, an
    owner's own part has the weight R / (1 + number of others that arrived), on average (1 - p^R) / q (Chao and
    Strawderman, "Negative moments of positive random variables", JASA 1972). The others share the rest: each has
    (R - (1 - p^R) / q) / (R - 1). Where all parts are equally likely to arrive ("sender", "switch"), each has 1 - p^R.
    With `stale`, it is the probability that the part is current.
    """
    means = [mean_R for mean_R, _ in _moments(comm, ranks, loss_rate)]
    return np.reshape(means, (ranks, -1, ranks)).mean(1)


def missing_share(comm: CommConfig, ranks: int, loss_rate: float) -> float:
    """Return the mean share of contributions that a rank's result lacks, whether or not a repair fills the gaps.

    Restored packets are not missing. In a direct exchange with a reliable gather, the share is (R - 1) p / R.
    """
    check_probability("loss_rate", loss_rate)
    rate = comm.repair.missing_rate(loss_rate)
    return float(1 - mean_weights(replace(comm, repair=ZERO), ranks, rate).mean())


def _moments(comm: CommConfig, ranks: int, loss_rate: float) -> Iterator[Moments]:
    """Yield the moments in each rank's result for one element per chunk. If all results are equal, yield one rank's."""
    check_at_least("ranks", ranks, 1)
    check_probability("loss_rate", loss_rate)
    repair, everyone = comm.repair, tuple(range(ranks))
    rate = repair.missing_rate(loss_rate)
    reduce, gather = (routes(ranks, everyone) for routes in comm.algorithm.pair(comm.sequence_parallel))
    for chunk in range(ranks):
        total = _sum_moments(tuple(hop for hop in reduce if hop.start <= chunk < hop.stop), repair, ranks, rate)
        on_way = [hop.positions for hop in gather if hop.start <= chunk < hop.stop]
        for receiver in range(1 if comm.reliable_gather else ranks):
            hops = 0 if comm.reliable_gather else sum(receiver in positions for positions in on_way)
            yield repair.result_moments(total, receiver, float((1 - rate) ** hops))


@lru_cache(maxsize=64)
def _sum_moments(hops: tuple[Hop, ...], repair: Repair, ranks: int, rate: float) -> Moments:
    crosses_HR = np.zeros((len(hops), ranks))
    for crosses_R, hop in zip(crosses_HR, hops, strict=True):
        crosses_R[list(hop.positions)] = 1
    return repair.sum_moments(crosses_HR, tuple(hop.dst for hop in hops), rate)
