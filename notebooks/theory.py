"""Compute the expected squared error of a lossy all-reduce in closed form.

R ranks contribute parts x_r with E[x_r^2] = 1 and E[x_r x_s] = rho, their coherence. Every link loses packets
independently of the others, at the same stationary rate p = 1 - q. A rank's result is sum_r a_r x_r, so its error is

    E[(sum_r (a_r - 1) x_r)^2] = sum_rs E[x_r x_s] (E[a_r a_s] - E[a_r] - E[a_s] + 1).

The moments of the weights a_r follow from the algorithm's routes. They depend on n(r), the number of hops of the reduce
phase that carry r's part of an element, on the number of hops that bring the sum to a rank in a lossy gather, and on
the repair (`sum_moments`, `result_moments`).

An element crosses each hop once. So Gilbert-Elliott and Bernoulli links of equal rate have equal expectations, as long
as bursts are shorter than a chunk. `fec` and `retransmit` are exceptions: their remaining loss rate is that of
Bernoulli links, for `fec` in whole blocks (for "xor", blocks where n - k divides k).
`tests/parallel/test_theory_against_simulation.py` compares the formulas with simulated losses.

Suffixes: R ranks, H hops that carry an element.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, singledispatch
from numbers import Real

import numpy as np
from scipy.special import hyp2f1

from lossytp.network.checks import check_at_least, check_at_most, check_probability
from lossytp.network.lossy_network import CommConfig
from lossytp.network.repairs import ZERO, Chain, Local, Protect, Repair, Rescale, RescaleCounted, Stale, Zero
from lossytp.network.routes import Hop

MOST_RANKS_COUNTED = 16
Moments = tuple[np.ndarray, np.ndarray]
"""E[a_r], (R,), and E[a_r a_s], (R, R). A result is sum_r a_r x_r: a_r is the weight of rank r's contribution x_r."""


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
            yield result_moments(repair, total, receiver, float((1 - rate) ** hops))


@lru_cache(maxsize=64)
def _sum_moments(hops: tuple[Hop, ...], repair: Repair, ranks: int, rate: float) -> Moments:
    crosses_HR = np.zeros((len(hops), ranks))
    for crosses_R, hop in zip(crosses_HR, hops, strict=True):
        crosses_R[list(hop.positions)] = 1
    return sum_moments(repair, crosses_HR, tuple(hop.dst for hop in hops), rate)


# The moments of the weights, by repair. Others have those of their nearest base class here.


@singledispatch
def sum_moments(repair: Repair, crosses_HR: np.ndarray, receivers: tuple[int, ...], rate: float) -> Moments:
    """Return the moments of the contributions' weights in one element of the sum.

    Args:
        repair: the repair; each kind registers its own moments.
        crosses_HR: 1 where hop h of the reduce phase carries rank r's contribution, else 0.
        receivers: for each hop, the rank at its end, or `SWITCH`.
        rate: share of packets that stay missing, from `missing_rate`.

    Raises:
        ValueError: if the repair has no closed form.
    """
    fault = f"has no expected squared error: register sum_moments of {type(repair).__name__}"
    raise ValueError(f"repair = '{repair}' {fault}")


@sum_moments.register
def _(repair: Zero, crosses_HR: np.ndarray, receivers: tuple[int, ...], rate: float) -> Moments:
    """Return E[a_r] = q^n(r) and E[a_r a_s] = q^(n(r) + n(s) - c(r, s)).

    Hop h delivers a packet (d_h = 1) with probability q = 1 - p. The weight a_r is the product of d_h over the n(r)
    hops that carry rank r's contribution. Of these hops, c(r, s) also carry rank s's.
    """
    delivered, crossed_R, common_RR = 1.0 - rate, crosses_HR.sum(0), crosses_HR.T @ crosses_HR
    return delivered**crossed_R, delivered ** (crossed_R[:, None] + crossed_R - common_RR)


@sum_moments.register
def _(repair: Rescale, crosses_HR: np.ndarray, receivers: tuple[int, ...], rate: float) -> Moments:
    """Return E[a_r] = 1 and E[a_r a_s] = q^-c(r, s), with c(r, s) hops in common (Horvitz and Thompson)."""
    if rate == 1:  # nothing arrives that could be scaled
        return sum_moments(ZERO, crosses_HR, receivers, rate)
    return np.ones(crosses_HR.shape[1]), (1.0 - rate) ** -(crosses_HR.T @ crosses_HR)


@sum_moments.register
def _(repair: RescaleCounted, crosses_HR: np.ndarray, receivers: tuple[int, ...], rate: float) -> Moments:
    """Return the moments over all outcomes O of the hops: each of the n parts that arrived has weight R / n."""
    hops, ranks = crosses_HR.shape
    check_at_most("ranks", max(hops, ranks), MOST_RANKS_COUNTED, f"fewer: it takes all 2^{hops} outcomes of hops")
    lost_OH = (np.arange(2**hops)[:, None] >> np.arange(hops) & 1).astype(float)
    lost_O = lost_OH.sum(1)
    chance_O = rate**lost_O * (1 - rate) ** (hops - lost_O)
    arrived_OR = lost_OH @ crosses_HR == 0
    weight_OR = arrived_OR * ranks / np.maximum(arrived_OR.sum(1, keepdims=True), 1)
    return chance_O @ weight_OR, (chance_O[:, None] * weight_OR).T @ weight_OR


@sum_moments.register
def _(repair: Stale, crosses_HR: np.ndarray, receivers: tuple[int, ...], rate: float) -> Moments:
    """Return the probability that a part is current, for E[a_r], and that two have the same age, for E[a_r a_s].

    Parts of different messages are uncorrelated, so these probabilities take the moments' place in the error.
    """
    if rate == 1:  # nothing ever arrives, so every gap stays zero
        return sum_moments(ZERO, crosses_HR, receivers, rate)
    met_HRR = np.cumsum(crosses_HR[:, :, None] * crosses_HR[:, None, :], axis=0) > 0
    if (met_HRR & (crosses_HR[:, :, None] != crosses_HR[:, None, :])).any():
        what = "repair = 'stale' has no closed form where parts share a hop and then part again"
        raise ValueError(f"{what}: choose another repair, or an algorithm whose parts stay together")
    crossed_R, common_RR = crosses_HR.sum(0), crosses_HR.T @ crosses_HR
    return (1.0 - rate) ** crossed_R, same_age(crossed_R[:, None] - common_RR, crossed_R - common_RR, rate)


@sum_moments.register
def _(repair: Local, crosses_HR: np.ndarray, receivers: tuple[int, ...], rate: float) -> Moments:
    """Go hop by hop: a loss sets its parts' weights to 0 and adds 1 to the receiver's, unless that is a switch."""
    mean_R, second_RR = np.ones(crosses_HR.shape[1]), np.ones((crosses_HR.shape[1],) * 2)
    for crosses_R, receiver in zip(crosses_HR, receivers, strict=True):
        kept_R = 1 - crosses_R
        instead_R = (np.arange(len(kept_R)) == receiver).astype(float)
        lost_R = kept_R * mean_R
        cross_RR = np.outer(instead_R, lost_R)
        lost_RR = np.outer(kept_R, kept_R) * second_RR + cross_RR + cross_RR.T + np.outer(instead_R, instead_R)
        mean_R = (1 - rate) * mean_R + rate * (lost_R + instead_R)
        second_RR = (1 - rate) * second_RR + rate * lost_RR
    return mean_R, second_RR


@sum_moments.register
def _(repair: Chain, crosses_HR: np.ndarray, receivers: tuple[int, ...], rate: float) -> Moments:
    return sum_moments(repair.part("fill"), crosses_HR, receivers, rate)


def same_age(hops_RR: np.ndarray, others_RR: np.ndarray, rate: float) -> np.ndarray:
    """Return the probability that two parts belong to the same message.

    The parts cross m and n hops before the first hop that they share. A hop's output is k messages older than its input
    with probability q p^k. Two sums of such ages are equal with probability

        q^(m + n) sum_k binom(m + k - 1, k) binom(n + k - 1, k) p^2k = q^(m + n) F(m, n; 1; p^2)  (DLMF 15.2.1).

    F(m, n; 1; z) = (1 - z)^(1 - m - n) F(1 - m, 1 - n; 1; z) (DLMF 15.8.1), which has finitely many terms.
    """
    finite_RR = hyp2f1(1 - hops_RR, 1 - others_RR, 1, rate**2)
    return (1 - rate) * (1 + rate) ** (1 - hops_RR - others_RR) * finite_RR


@singledispatch
def result_moments(repair: Repair, total: Moments, receiver: int, arrives: float) -> Moments:
    """Return the moments in the result of rank `receiver`, which the sum reaches with probability `arrives`."""
    mean_R, second_RR = total
    return arrives * mean_R, arrives * second_RR


@result_moments.register
def _(repair: Rescale, total: Moments, receiver: int, arrives: float) -> Moments:
    return (total[0], total[1] / arrives) if arrives else result_moments(ZERO, total, receiver, arrives)


@result_moments.register
def _(repair: Stale, total: Moments, receiver: int, arrives: float) -> Moments:
    if arrives == 0:
        return result_moments(ZERO, total, receiver, arrives)
    return arrives * total[0], total[1]  # the sum ages as a whole, so its parts' ages stay equal or different


@result_moments.register
def _(repair: Local, total: Moments, receiver: int, arrives: float) -> Moments:
    mean_R, second_RR = total
    instead_R, lost = np.eye(len(mean_R))[receiver], 1 - arrives
    return arrives * mean_R + lost * instead_R, arrives * second_RR + lost * np.outer(instead_R, instead_R)


@result_moments.register
def _(repair: Chain, total: Moments, receiver: int, arrives: float) -> Moments:
    return result_moments(repair.part("fill"), total, receiver, arrives)
