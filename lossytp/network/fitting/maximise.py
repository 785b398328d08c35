"""Maximise the likelihood of recorded flows: EM from several starts, then a quasi-Newton method.

Baum and Welch's EM climbs from any start, but it is slow near the maximum, and its maximisation step ignores that flows
start in the stationary state. L-BFGS on the exact likelihood climbs the rest. EM's expected counts give its gradient
(Fisher's identity; Lange, "A quasi-Newton acceleration of the EM algorithm", 1995).

Shapes: P parameters, K states.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize

from lossytp.network.fitting.families import Family
from lossytp.network.fitting.forward_backward import Expected, Passes
from lossytp.network.fitting.runs import Blocks
from lossytp.network.fitting.starts import starts
from lossytp.network.trace import Trace

FIRST_STEPS, MOST_STEPS = 5, 60  # EM steps from every start, and EM steps in all
SMALL_GAIN = 0.05  # nats: EM stops at a step that gains less
FARTHEST = 30.0  # log odds of a parameter that is practically 0 or 1
PRECISION = 1e-5  # nats: L-BFGS stops at a step that gains less ...
SMALL_SLOPE = 0.01  # ... or where all slopes are smaller, in expected events
STEP = 1e-5  # of log odds, for differences


class Maximum(NamedTuple):
    """The maximum of the likelihood.

    Attributes:
        values: values of the parameters there, (P,).
        log_likelihood: log-likelihood there, in nats.
    """

    values: np.ndarray
    log_likelihood: float


class Likelihood:
    """The likelihood of flows under one family, on the scale of log odds.

    The log odds of a parameter compare its choice with the last one, which has no parameter of its own.
    """

    def __init__(self, family: Family, flows: Sequence[Trace]) -> None:
        self.family = family
        self.passes = Passes(Blocks.of(flows))

    def odds(self, values: np.ndarray) -> np.ndarray:
        """Return the log odds of the parameters, (P,)."""
        rest = 1 - self.family.same_row @ values
        with np.errstate(divide="ignore"):
            odds = np.log(values) - np.log(np.maximum(rest, 0.0))
        return np.clip(odds, -FARTHEST, FARTHEST)

    def values(self, odds: np.ndarray) -> np.ndarray:
        """Return the parameters with these log odds, (P,)."""
        weights = np.exp(odds)
        return weights / (1 + self.family.same_row @ weights)

    def at(self, odds: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the log-likelihood and its gradient with respect to the log odds, (P,)."""
        expected = self.passes.expected(self.family.chain(self.values(odds)))
        tally = self.family.tally(expected)
        gradient = tally.chosen - tally.occasions * self.values(odds) + self._start_gradient(odds, expected.starts)
        return expected.log_likelihood, gradient

    def _start_gradient(self, odds: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return the gradient of sum_k starts[k] log(stationary share of k), by central differences, (P,)."""

        def value(odds: np.ndarray) -> float:
            return float(starts @ np.log(np.maximum(self.family.chain(self.values(odds)).start, 1e-300)))

        return np.array([value(odds + step) - value(odds - step) for step in STEP * np.eye(len(odds))]) / (2 * STEP)

    def em_step(self, values: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the log-likelihood of these values, and EM's next values."""
        expected = self.passes.expected(self.family.chain(values))
        return expected.log_likelihood, self.maximisation(expected)

    def maximisation(self, expected: Expected) -> np.ndarray:
        """Return how often each parameter's choice is expected per occasion; 0.5 without occasions."""
        tally = self.family.tally(expected)
        shares = np.divide(
            tally.chosen, tally.occasions, out=np.full(len(tally.chosen), 0.5), where=tally.occasions > 0
        )
        return self.values(self.odds(shares))


def maximise(likelihood: Likelihood, flows: Sequence[Trace]) -> Maximum:
    """Maximise the likelihood of flows that have both lost and received packets."""
    best = None
    for values in starts(likelihood.family, flows):
        for _ in range(FIRST_STEPS):
            reached, values = likelihood.em_step(values)
        if best is None or reached > best[0]:
            best = reached, values
    assert best is not None
    reached, values = best
    for _ in range(MOST_STEPS - FIRST_STEPS):
        now, following = likelihood.em_step(values)
        if now - reached < SMALL_GAIN:
            break
        reached, values = now, following
    found = minimize(
        _negative,
        likelihood.odds(values),
        (likelihood,),
        jac=True,
        method="L-BFGS-B",
        bounds=[(-FARTHEST, FARTHEST)] * len(values),
        options={"ftol": PRECISION / max(abs(reached), 1.0), "gtol": SMALL_SLOPE, "maxiter": 200},
    )
    return Maximum(likelihood.values(found.x), -float(found.fun))


def _negative(odds: np.ndarray, likelihood: Likelihood) -> tuple[float, np.ndarray]:
    value, gradient = likelihood.at(odds)
    return -value, -gradient
