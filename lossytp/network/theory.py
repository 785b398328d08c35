"""Expected squared error of a lossy all-reduce, in closed form, by algorithm, repair, ranks and coherence of the parts.

R ranks' parts x_r have E[x_r^2] = 1 and E[x_r x_s] = rho, their coherence; every link loses packets at the same
stationary rate p = 1 - q, and independently of the others. A rank's result is sum_r a_r x_r, so that its error is

    E[(sum_r (a_r - 1) x_r)^2] = sum_rs E[x_r x_s] (E[a_r a_s] - E[a_r] - E[a_s] + 1).

The moments of the weights a_r follow from the algorithm's routes alone: from h(r), the hops of the reduce phase that
carry r's part of an element, and from the number of hops of a lossy gather that bring the sum to a rank. One element
meets each hop once, so Gilbert-Elliott and Bernoulli links of equal rate have equal expectations, as long as bursts are
shorter than a chunk. Only for `fec` and `retransmit` the rate that remains is that of Bernoulli links, and for `fec`
that of whole blocks (of "xor", where n - k divides k). `tests/parallel/test_theory_against_simulation.py` compares.

Suffixes: R ranks, H hops that carry an element, O outcomes (each hop delivers, or not).
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from numbers import Real

import numpy as np
from scipy.special import hyp2f1

from lossytp.network.algorithms import algorithm_named
from lossytp.network.checks import check_at_least, check_probability
from lossytp.network.fec import Fec
from lossytp.network.repair import ZERO, Hadamard, Local, Repair, Rescale, RescaleCounted, Retransmit, Stale, Zero
from lossytp.network.repairs import repair_named
from lossytp.network.routes import Hop

Moments = tuple[np.ndarray, np.ndarray]  # E[a_r], (R,), and E[a_r a_s], (R, R)
MOST_RANKS_COUNTED = 16


def expected_squared_error(
    algorithm: str, repair: str, ranks: int, loss_rate: float, coherence: float = 0.0, reliable_gather: bool = True
) -> float:
    """E[(a rank's result - sum)^2] / E[sum^2], mean over elements, which fill equal chunks, and over ranks.

    Args:
        algorithm, repair: as `all_reduce` takes them.
        loss_rate: stationary, of every link.
        coherence: rho, above -1 / (R - 1), where the parts sum to nothing, and at most 1, where they are equal.
        reliable_gather: False loses packets of the results too.

    E[sum^2] is R + rho R (R - 1). With algorithm "direct" and a reliable gather, the error is this, divided by that:

        zero, hadamard   (R - 1) p + rho (R - 1) (R - 2) p^2
        fec, retransmit  the same, p being what remains: `Repair.missing_rate`
        rescale          (R - 1) p / q
        stale            2 (R - 1) p + 2 rho (R - 1) (R - 2) p^2 / (1 + p)
        local            (1 - rho) (2 (R - 1) p + (R - 1) (R - 2) p^2)

    `stale` is at its worst: each message independent of those before it, of which many have been.
    """
    check_at_least("ranks", ranks, 1)
    lowest = -1 / (ranks - 1) if ranks > 1 else -math.inf
    if not (isinstance(coherence, Real) and lowest < coherence <= 1):
        raise ValueError(
            f"coherence = {coherence!r} is not in ({lowest:.4g}, 1]: {ranks} parts below would have a negative "
            "variance, and at the lower end sum to nothing; give one inside"
        )
    products_RR = np.full((ranks, ranks), coherence) + (1 - coherence) * np.eye(ranks)
    errors = [
        (products_RR * (second_RR - mean_R[:, None] - mean_R + 1)).sum()
        for mean_R, second_RR in _moments(algorithm, repair, ranks, loss_rate, reliable_gather)
    ]
    return float(np.mean(errors) / products_RR.sum())


def mean_weights(algorithm: str, repair: str, ranks: int, loss_rate: float, reliable_gather: bool = True) -> np.ndarray:
    """E[a_r] of rank r's part in an element of chunk c, (chunks c, ranks r), mean over the ranks that hold the result.

    Less 1, it is a repair's bias; all 1 with `rescale`. With `rescale_counted` in a direct exchange, an owner's own
    part weighs (1 - p^R) / q on average, R / (1 + how many of the others arrived) (Chao and Strawderman, "Negative
    moments of positive random variables", JASA 1972), and each other the rest, (R - (1 - p^R) / q) / (R - 1); where
    owners have no part that is surer to arrive ("sender", "switch") each weighs 1 - p^R. With `stale`, it is the
    weight of the part's present value: the probability that this is not an old one.
    """
    means = [mean_R for mean_R, _ in _moments(algorithm, repair, ranks, loss_rate, reliable_gather)]
    return np.reshape(means, (ranks, -1, ranks)).mean(1)


def missing_share(algorithm: str, repair: str, ranks: int, loss_rate: float, reliable_gather: bool = True) -> float:
    """Share of the contributions that a rank's result lacks on average, or has in the receiver's substitute alone.

    What `fec` and `retransmit` restore is not missing. In a direct exchange whose gather is reliable (R - 1) p / R.
    """
    rate = _checked(algorithm, repair, ranks, loss_rate, reliable_gather).missing_rate(loss_rate)
    return float(1 - mean_weights(algorithm, "zero", ranks, rate, reliable_gather).mean())


def _checked(algorithm: str, repair: str, ranks: int, loss_rate: float, reliable_gather: bool) -> Repair:
    """The repair that is named; ValueError where there is none, or one of the other values cannot be."""
    check_at_least("ranks", ranks, 1)
    check_probability("loss_rate", loss_rate)
    known = repair_named(repair)
    if not isinstance(known, Zero | Rescale | RescaleCounted | Stale | Local | Fec | Retransmit | Hadamard):
        raise ValueError(f"repair = {repair!r} has no expected squared error here: add the moments of its weights")
    routes = algorithm_named(algorithm)
    if isinstance(known, Local) and not routes.has_receiving_ranks:
        raise ValueError(
            f"repair = 'local' with algorithm = {algorithm!r}: a loss there is everyone's; choose another algorithm"
        )
    if routes.sum_reaches_all and not reliable_gather:
        raise ValueError(
            f"reliable_gather = False with algorithm = {algorithm!r}, whose sum reaches every rank: choose another "
            "algorithm"
        )
    return known


def _moments(algorithm: str, repair: str, ranks: int, loss_rate: float, reliable_gather: bool) -> Iterator[Moments]:
    """Of one element of each chunk, and there of each rank's result; of one rank's where all hold the same."""
    known = _checked(algorithm, repair, ranks, loss_rate, reliable_gather)
    if loss_rate == 1 and isinstance(known, Rescale | Stale):
        known = ZERO  # nothing ever arrives that could be scaled, or grow old
    rate = known.missing_rate(loss_rate)
    routes, everyone = algorithm_named(algorithm), tuple(range(ranks))
    reduce, gather = routes.reduce(ranks, everyone), routes.gather(ranks, everyone)
    for chunk in range(ranks):
        reduced = _reduced(tuple(hop for hop in reduce if hop.start <= chunk < hop.stop), known, ranks, rate)
        on_way = [hop.positions for hop in gather if hop.start <= chunk < hop.stop]
        for receiver in range(1 if reliable_gather else ranks):
            hops = 0 if reliable_gather else sum(receiver in positions for positions in on_way)
            yield _gathered(reduced, known, receiver, float((1 - rate) ** hops))


@lru_cache(maxsize=64)
def _reduced(hops: tuple[Hop, ...], repair: Repair, ranks: int, rate: float) -> Moments:
    """The weights of the parts in the sum.

    With n(r) hops of r's own, c(r, s) in common with s, and d_h = 1 where hop h delivers, else 0: a_r = prod d_h, so
    E[a_r] = q^n(r) and E[a_r a_s] = q^(n(r) + n(s) - c(r, s)); with `Rescale` a_r = prod d_h / q, so that E[a_r] = 1
    and E[a_r a_s] = q^-c(r, s) (Horvitz and Thompson, "A generalization of sampling without replacement", JASA 1952).
    `Hadamard` is as zero: what a hop does to a block is a projection P, with E[P] = q and E[PP] = E[P].
    """
    crosses_HR = np.zeros((len(hops), ranks))
    for crosses_R, hop in zip(crosses_HR, hops, strict=True):
        crosses_R[list(hop.positions)] = 1
    delivered = 1.0 - rate
    if isinstance(repair, RescaleCounted):
        return _counted(crosses_HR, rate)
    if isinstance(repair, Local):
        return _local(crosses_HR, tuple(hop.dst for hop in hops), rate)
    crossed_R, common_RR = crosses_HR.sum(0), crosses_HR.T @ crosses_HR
    if isinstance(repair, Rescale):
        return np.ones(ranks), delivered**-common_RR
    mean_R = delivered**crossed_R
    if isinstance(repair, Stale):
        _check_meet_and_stay_together(crosses_HR)
        return mean_R, _same_age(crossed_R[:, None] - common_RR, crossed_R - common_RR, rate)
    return mean_R, delivered ** (crossed_R[:, None] + crossed_R - common_RR)


def _gathered(reduced: Moments, repair: Repair, receiver: int, arrives: float) -> Moments:
    """The weights in what a receiver holds, which all hops of its gather deliver with probability `arrives`."""
    mean_R, second_RR = reduced
    if isinstance(repair, Rescale):
        return mean_R, second_RR / arrives
    if isinstance(repair, Stale):
        return arrives * mean_R, second_RR  # all parts are equally old, or none
    instead_R = np.eye(len(mean_R))[receiver] * isinstance(repair, Local)
    lost = 1 - arrives
    return arrives * mean_R + lost * instead_R, arrives * second_RR + lost * np.outer(instead_R, instead_R)


def _counted(crosses_HR: np.ndarray, rate: float) -> Moments:
    """R / n of each of the n parts that arrived, over all outcomes: a ratio estimator (Cochran, 1977, section 6)."""
    hops, ranks = crosses_HR.shape
    if max(hops, ranks) > MOST_RANKS_COUNTED:
        raise ValueError(
            f"ranks = {ranks} with repair = 'rescale_counted', worked out from all 2^{hops} outcomes of its hops: give "
            f"at most {MOST_RANKS_COUNTED}"
        )
    lost_OH = (np.arange(2**hops)[:, None] >> np.arange(hops) & 1).astype(float)
    lost_O = lost_OH.sum(1)
    chance_O = rate**lost_O * (1 - rate) ** (hops - lost_O)
    arrived_OR = lost_OH @ crosses_HR == 0
    weight_OR = arrived_OR * ranks / np.maximum(arrived_OR.sum(1, keepdims=True), 1)
    return chance_O @ weight_OR, (chance_O[:, None] * weight_OR).T @ weight_OR


def _local(crosses_HR: np.ndarray, receivers: tuple[int, ...], rate: float) -> Moments:
    """Hop after hop: what is lost takes its parts' weights, and adds 1 to the receiver's, unless that is a switch."""
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


def _same_age(hops_RR: np.ndarray, others_RR: np.ndarray, rate: float) -> np.ndarray:
    """P(two parts are of the same message), which have crossed m hops and n others before all that they share.

    A hop's output is k messages older than its input with probability q p^k. Two sums of such ages are equal with
    probability q^(m + n) sum_k binom(m + k - 1, k) binom(n + k - 1, k) p^2k = q^(m + n) F(m, n; 1; p^2) (DLMF 15.2.1),
    and F(m, n; 1; z) = (1 - z)^(1 - m - n) F(1 - m, 1 - n; 1; z) (DLMF 15.8.1), which has finitely many terms. Its
    moments enter an error as a weight's do, x_r of another message being uncorrelated: E[a_r a_s] is this, and
    E[a_r] the probability of age 0.
    """
    finite_RR = hyp2f1(1 - hops_RR, 1 - others_RR, 1, rate**2)
    return (1 - rate) * (1 + rate) ** (1 - hops_RR - others_RR) * finite_RR


def _check_meet_and_stay_together(crosses_HR: np.ndarray) -> None:
    """Raise ValueError unless any two parts share all hops after the first that they share."""
    for one_H in crosses_HR.T:
        for other_H in crosses_HR.T:
            met_H = np.cumsum(one_H * other_H) > 0
            if (one_H != other_H)[met_H].any():
                raise ValueError(
                    "repair = 'stale' where parts that shared a hop go on over separate ones: their ages have no "
                    "closed form here; choose another repair, or an algorithm whose parts stay together"
                )
