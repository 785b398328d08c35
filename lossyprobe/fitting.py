"""Fit loss processes to recorded losses: maximum likelihood, choice by BIC, intervals, goodness of fit.

`fit` returns one `Fit` per family, the best first. `intervals` and `goodness` tell how far to trust it.
Schwarz, "Estimating the dimension of a model", 1978.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import stats
from scipy.special import expit, logit

from lossyprobe.likelihood import (
    BERNOULLI,
    FAMILIES,
    FARTHEST,
    GILBERT_ELLIOTT,
    Family,
    Likelihood,
    burst_lengths,
    check_flows,
    gap_lengths,
    gradient,
    num_lost,
    num_packets,
)
from lossytp.network.losses import Bernoulli, LossProcess
from lossytp.network.traces import Trace

FEWEST_PACKETS = 10  # lost ones, and received ones, that it takes to tell families apart


@dataclass(frozen=True)
class Fit:
    """The member of a family that makes the recorded flows most likely.

    Attributes:
        family: the family.
        values: values of the family's parameters, in order.
        log_likelihood: log-likelihood of all flows, in nats.
        num_packets: number of packets in all flows.
    """

    family: Family
    values: tuple[float, ...]
    log_likelihood: float
    num_packets: int

    @property
    def process(self) -> LossProcess:
        """Return the fitted loss process."""
        return self.family.process(np.array(self.values))

    @property
    def bic(self) -> float:
        """Return the Bayesian information criterion, with packets as observations; smaller is better."""
        return len(self.values) * math.log(self.num_packets) - 2 * self.log_likelihood

    @property
    def netem(self) -> str:
        """Return the process in the notation of Linux ``tc netem``."""
        return self.process.to_netem()  # type: ignore[attr-defined]  # every family of `FAMILIES` has it

    @property
    def loss_type(self) -> str:
        """Return the process in the notation of `--loss_type`."""
        return f"netem('{self.netem}')"


def applicable(flows: Sequence[Trace]) -> list[Family]:
    """Return the families that the flows can tell apart: only Bernoulli if few packets are lost, or few received.

    Raises:
        ValueError: if there are no flows.
    """
    check_flows(flows)
    lost = num_lost(flows)
    enough = min(lost, num_packets(flows) - lost) >= FEWEST_PACKETS
    return list(FAMILIES.values()) if enough else [BERNOULLI]


def fit_family(family: Family, flows: Sequence[Trace]) -> Fit:
    """Fit one family by maximum likelihood, taking the flows for independent and stationary from the start.

    Args:
        family: an `applicable` family.
        flows: the recorded flows.

    Raises:
        ValueError: if the flows lost none of their packets, or all, and the family is not Bernoulli.
    """
    packets, lost = num_packets(flows), num_lost(flows)
    if family is BERNOULLI:
        rate = lost / packets
        log_likelihood = sum(part * math.log(part / packets) for part in (lost, packets - lost) if part)
        return Fit(family, (rate,), log_likelihood, packets)
    if lost in (0, packets):
        raise ValueError(
            f"{lost} of {packets} packets are lost, which shows no {family.name} process: give flows with lost and "
            "received packets, or fit Bernoulli"
        )
    likelihood = Likelihood(family, flows)
    found = likelihood.maximise(flows)
    if family is GILBERT_ELLIOTT and found[3] > found[2]:  # the bad state is the one that loses more
        found = found[[1, 0, 3, 2]]
    return Fit(family, tuple(found.tolist()), likelihood.at(found), packets)


def fit(flows: Sequence[Trace], families: Iterable[Family] | None = None) -> list[Fit]:
    """Fit several families.

    Args:
        flows: the recorded flows.
        families: families to fit; all `applicable` ones if None.

    Returns:
        The fits, the one with the smallest BIC first.

    Raises:
        ValueError: if there are no flows.
    """
    tried = applicable(flows) if families is None else families
    return sorted((fit_family(family, flows) for family in tried), key=lambda each: each.bic)


# Compute confidence intervals of a fit's parameters, loss rate and mean burst from the observed information.
#
# The information is the negative second derivative of the log-likelihood on the scale of log odds. Intervals are
# symmetric on that scale (the mean burst's on a log scale), by the delta method. There are two exceptions:
#
# - Bernoulli's interval is exact (Clopper and Pearson 1934).
# - A parameter that is fitted as 0 or 1 has no curvature there. Its interval ends where the log-likelihood, with the
#   other parameters held fixed, is `DROP` nats lower. The intervals of loss rate and mean burst include their values at
#   that end.
#
# All intervals assume that the family is the true one and that flows are independent. Shapes: P parameters.


CONFIDENCE = 0.95
QUANTILE = float(stats.norm.ppf((1 + CONFIDENCE) / 2))
DROP = float(stats.chi2.ppf(CONFIDENCE, 1)) / 2
FEWEST = 0.5  # nats: a parameter counts as 0 or 1 if the end costs less, and a direction as flat if it curves less
NEGLIGIBLE = 0.01  # smallest change of a parameter's log odds that counts, in a flat direction


class Interval(NamedTuple):
    """A 95 % confidence interval."""

    low: float
    high: float


def intervals(fit: Fit, flows: Sequence[Trace]) -> dict[str, Interval]:
    """Return the intervals of the parameters by name, of `loss_rate` and of `mean_burst_packets`.

    What the flows do not determine has the interval of all its values: (0, 1), and (1, inf) for a mean burst.

    Args:
        fit: a fit of the flows.
        flows: the recorded flows.
    """
    if fit.family is BERNOULLI:
        return _exact(num_lost(flows), fit.num_packets)
    likelihood = Likelihood(fit.family, flows)
    values = np.array(fit.values)
    odds = likelihood.odds(values)
    covariance, flat = _covariance(likelihood, odds)
    at_edge = _at_edge(likelihood, values)
    found, moved = {}, [values]
    for number, name in enumerate(fit.family.parameters):

        def log_odds(odds: np.ndarray, number: int = number) -> float:
            return float(logit(likelihood.values(odds)[number]))

        slope = gradient(log_odds, odds)
        if at_edge[number]:
            found[name] = _by_likelihood(likelihood, values, number)
            far = found[name].high if values[number] < 0.5 else found[name].low
            moved.append(_moved(values, number, far))
        elif np.abs(slope @ flat).max(initial=0) > NEGLIGIBLE:
            found[name] = Interval(0.0, 1.0)
        else:
            found[name] = _between(expit, log_odds(odds), math.sqrt(slope @ covariance @ slope))
    for name, scale, back in (("loss_rate", logit, expit), ("mean_burst_packets", np.log, np.exp)):

        def measure(odds: np.ndarray, name: str = name, scale: Callable = scale) -> float:
            return float(scale(getattr(fit.family.process(likelihood.values(odds)), name)))

        slope = gradient(measure, odds)
        unknown = np.abs(slope @ flat).max(initial=0) > NEGLIGIBLE
        error = math.inf if unknown else math.sqrt(slope @ covariance @ slope)
        inner = _between(back, measure(odds), error)
        at_ends = [getattr(fit.family.process(each), name) for each in moved]
        least = 1.0 if name == "mean_burst_packets" else 0.0  # where the scale is unbounded below
        found[name] = Interval(max(least, min(inner.low, *at_ends, math.inf)), max(inner.high, *at_ends, 0.0))
    return found


def _exact(lost: int, packets: int) -> dict[str, Interval]:
    """Return Bernoulli's intervals."""
    rate = stats.binomtest(lost, packets).proportion_ci(CONFIDENCE)
    ends = float(rate.low), float(rate.high)
    bursts = [Bernoulli(loss_rate=each).mean_burst_packets for each in ends]
    return {"loss_rate": Interval(*ends), "mean_burst_packets": Interval(*bursts)}


def _between(back: Callable[[float], float], centre: float, error: float) -> Interval:
    return Interval(float(back(centre - QUANTILE * error)), float(back(centre + QUANTILE * error)))


def _covariance(likelihood: Likelihood, odds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the inverse of the observed information, (P, P), and the flat directions, (P, directions)."""
    second = gradient(likelihood.gradient, odds)
    curvature, directions = np.linalg.eigh(-(second + second.T) / 2)
    seen = curvature > FEWEST
    return directions[:, seen] / curvature[seen] @ directions[:, seen].T, directions[:, ~seen]


def _moved(values: np.ndarray, number: int, value: float) -> np.ndarray:
    return np.where(np.arange(len(values)) == number, value, values)


def _at_edge(likelihood: Likelihood, values: np.ndarray) -> np.ndarray:
    """Return which parameters the flows cannot tell from 0, or from their largest value, bool (P,)."""
    best, others = likelihood.at(values), likelihood.family.same_row @ values - values
    edges = np.where(values < 0.5, expit(-FARTHEST), np.maximum(values, (1 - others) * expit(FARTHEST)))
    return np.array([best - likelihood.at(_moved(values, *edge)) < FEWEST for edge in enumerate(edges)])


def _by_likelihood(likelihood: Likelihood, values: np.ndarray, number: int) -> Interval:
    """Return the interval of one parameter in which the log-likelihood is at most `DROP` below that of `values`."""
    best = likelihood.at(values)
    others = float(likelihood.family.same_row[number] @ values - values[number])  # parameters of the same choice
    inside, outside = float(values[number]), 1 - others if values[number] < 0.5 else 0.0
    for _ in range(40):
        tried = (inside + outside) / 2
        dropped = best - likelihood.at(_moved(values, number, tried))
        inside, outside = (inside, tried) if dropped > DROP else (tried, outside)
    return Interval(0.0, outside) if values[number] < 0.5 else Interval(outside, 1.0)


# Test how well a fit describes recorded flows, by the lengths of their bursts and gaps.
#
# The fitted process simulates recordings with flows of the same lengths. The statistic is Kolmogorov and Smirnov's: the
# largest distance between the distribution functions of the recorded lengths and of all simulated ones together. The
# p-value is the share of simulated recordings that are at least as far off. So it allows for runs that depend on each
# other, and for runs that the end of a flow cuts short. The simulated recordings are not fitted again, which makes
# p-values too large rather than too small: a small one is safe evidence against the fit.


SIMULATIONS, FEWEST_SIMULATIONS = 99, 39  # a p-value under 0.05 takes 20 at least
MOST_FLOWS = 20_000  # to simulate in all: each costs 0.05 to 0.2 ms
MEASURES = (burst_lengths, gap_lengths)


class Law(NamedTuple):
    """The distinct lengths of runs in packets, ascending, and how often each occurs: int64 (num_lengths,) each."""

    lengths: np.ndarray
    counts: np.ndarray

    def share_up_to(self, lengths: np.ndarray) -> np.ndarray:
        """Return the share of runs that are no longer than each of these lengths; 0 without runs."""
        total = np.concatenate([[0], self.counts.cumsum()])
        return total[self.lengths.searchsorted(lengths, side="right")] / max(int(total[-1]), 1)


class Comparison(NamedTuple):
    """A comparison of recorded lengths with those under the fit.

    Attributes:
        recorded: lengths in the recorded flows.
        fitted: lengths in all simulated flows together.
        statistic: largest difference between the distribution functions, in [0, 1].
        p: share of simulated recordings that are at least as far off.
    """

    recorded: Law
    fitted: Law
    statistic: float
    p: float


class Goodness(NamedTuple):
    """How well a fit describes recorded flows.

    Attributes:
        bursts: comparison of the runs of losses.
        gaps: comparison of the runs of received packets between two losses.
        simulations: number of simulated recordings, which give the p-values.
    """

    bursts: Comparison
    gaps: Comparison
    simulations: int


def goodness(fit: Fit, flows: Sequence[Trace], seed: int = 0, watch: Callable[[], object] = lambda: None) -> Goodness:
    """Return how well the fit describes the flows.

    Args:
        fit: a fit of the flows.
        flows: the recorded flows.
        seed: seed of the simulated recordings.
        watch: called after every simulated recording.
    """
    simulations = num_simulations(flows)
    process = fit.process
    laws: tuple[list[Law], list[Law]] = ([], [])
    for number in range(simulations):
        simulated = [
            Trace(
                lost=process.losses((seed, "goodness", number, place)).take(flow.num_packets),
                num_packets=flow.num_packets,
            )
            for place, flow in enumerate(flows)
        ]
        for law, measure in zip(laws, MEASURES, strict=True):
            law.append(_law(measure(simulated)))
        watch()
    bursts, gaps = (_compare(_law(measure(flows)), law) for law, measure in zip(laws, MEASURES, strict=True))
    return Goodness(bursts, gaps, simulations)


def num_simulations(flows: Sequence[Trace]) -> int:
    """Return how many recordings to simulate: the more flows, the fewer."""
    return max(FEWEST_SIMULATIONS, min(SIMULATIONS, MOST_FLOWS // len(flows)))


def _law(lengths: np.ndarray) -> Law:
    return Law(*np.unique(lengths, return_counts=True))


def _compare(recorded: Law, simulated: list[Law]) -> Comparison:
    lengths, place = np.unique(np.concatenate([law.lengths for law in simulated]), return_inverse=True)
    counts = np.bincount(place, np.concatenate([law.counts for law in simulated]), minlength=len(lengths))
    fitted = Law(lengths, counts.astype(np.int64))
    statistic = _distance(recorded, fitted)
    as_far = sum(_distance(law, fitted) >= statistic for law in simulated)
    return Comparison(recorded, fitted, statistic, (1 + as_far) / (1 + len(simulated)))


def _distance(one: Law, other: Law) -> float:
    lengths = np.union1d(one.lengths, other.lengths)
    return float(np.abs(one.share_up_to(lengths) - other.share_up_to(lengths)).max(initial=0.0))


# Measure whether flows lose packets together, as they do if they share a queue. Fits assume independent flows.


WINDOWS = 100  # per flow


def correlation_between(flows: Sequence[Trace]) -> float:
    """Return the mean correlation between the losses of two flows, over 100 windows of equal length per flow.

    Flows without losses, or with fewer than 10 packets per window, are left out. With fewer than two flows, return 0.
    """
    counts = []
    for flow in flows:
        edges = np.linspace(0, flow.num_packets, WINDOWS + 1).round()
        lost = np.histogram(flow.lost, edges)[0]
        if flow.num_packets >= WINDOWS * FEWEST_PACKETS and np.ptp(lost):
            counts.append(lost)
    if len(counts) < 2:
        return 0.0
    scores, flows_counted = stats.zscore(counts, axis=1), len(counts)  # a matrix of all pairs would fill the memory
    return float(((scores.sum(0) ** 2).mean() - flows_counted) / (flows_counted * (flows_counted - 1)))
