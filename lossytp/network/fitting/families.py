"""Define the families of loss processes that can be fitted, as chains with free parameters.

A parameter is the probability of one choice: to step to another state, or to lose a packet. A `Tally` counts how often
the choice is expected, and on how many occasions. Baum and Welch's maximisation step divides one by the other, and the
likelihood's gradient follows from both.

Shapes: P parameters, K states.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lossytp.network.bernoulli import Bernoulli
from lossytp.network.fitting.chain import Chain
from lossytp.network.fitting.forward_backward import Expected
from lossytp.network.four_state import IS_LOST, FourState
from lossytp.network.gilbert_elliott import GilbertElliott
from lossytp.network.loss_process import LossProcess


class Tally(NamedTuple):
    """Expected counts of each parameter's choice, and of the occasions to choose, (P,) each."""

    chosen: np.ndarray
    occasions: np.ndarray


@dataclass(frozen=True)
class Family:
    """A family of loss processes.

    Attributes:
        name: name in messages and tables.
        parameters: names of the parameters, (P,).
        rows: a number per parameter, (P,). Parameters with the same number belong to one choice, and add up to 1 or
            less.
        build: returns the process with given values of the parameters.
        chain: returns the chain with given values of the parameters.
        tally: returns the parameters' tally.
    """

    name: str
    parameters: tuple[str, ...]
    rows: tuple[int, ...]
    build: Callable[..., LossProcess]
    chain: Callable[[np.ndarray], Chain]
    tally: Callable[[Expected], Tally]

    @property
    def same_row(self) -> np.ndarray:
        """Return 1.0 where two parameters belong to the same choice, (P, P)."""
        rows = np.array(self.rows)
        return (rows[:, None] == rows).astype(float)

    def process(self, values: np.ndarray) -> LossProcess:
        """Return the process with these values of the parameters, (P,)."""
        return self.build(*(float(value) for value in values))


def _bernoulli_chain(values: np.ndarray) -> Chain:
    return Chain(np.ones((1, 1)), values, np.ones(1))


def _bernoulli_tally(expected: Expected) -> Tally:
    return Tally(expected.lost[0], expected.transitions[0])


def _two_states(leave: float, back: float, loss: np.ndarray) -> Chain:
    share_bad = leave / (leave + back)
    return Chain(np.array([[1 - leave, leave], [back, 1 - back]]), loss, np.array([1 - share_bad, share_bad]))


def _gilbert_chain(values: np.ndarray) -> Chain:
    return _two_states(values[0], values[1], np.array([0.0, 1.0]))


def _gilbert_tally(expected: Expected) -> Tally:
    steps = expected.transitions
    return Tally(np.array([steps[0, 1], steps[1, 0]]), steps.sum(axis=1))


def _gilbert_elliott_chain(values: np.ndarray) -> Chain:
    return _two_states(values[0], values[1], np.array([values[3], values[2]]))


def _gilbert_elliott_tally(expected: Expected) -> Tally:
    steps, visits, lost = _gilbert_tally(expected), expected.transitions.sum(axis=1), expected.lost.sum(axis=1)
    return Tally(np.concatenate([steps.chosen, lost[::-1]]), np.concatenate([steps.occasions, visits[::-1]]))


def _four_state_chain(values: np.ndarray) -> Chain:
    process = FourState(*values)
    return Chain(process.transition, IS_LOST, process.shares)


_FROM, _TO = np.array([0, 2, 2, 1, 0]), np.array([2, 0, 1, 2, 3])  # p13, p31, p32, p23, p14


def _four_state_tally(expected: Expected) -> Tally:
    steps = expected.transitions
    return Tally(steps[_FROM, _TO], steps.sum(axis=1)[_FROM])


BERNOULLI = Family(
    "Bernoulli", ("loss_rate",), (0,), lambda rate: Bernoulli(loss_rate=rate), _bernoulli_chain, _bernoulli_tally
)
GILBERT = Family(
    "simple Gilbert",
    ("p_good_to_bad", "p_bad_to_good"),
    (0, 1),
    lambda leave, back: GilbertElliott(p_good_to_bad=leave, p_bad_to_good=back),
    _gilbert_chain,
    _gilbert_tally,
)
GILBERT_ELLIOTT = Family(
    "Gilbert-Elliott",
    ("p_good_to_bad", "p_bad_to_good", "loss_bad", "loss_good"),
    (0, 1, 2, 3),
    lambda leave, back, bad, good: GilbertElliott(
        p_good_to_bad=leave, p_bad_to_good=back, loss_bad=bad, loss_good=good
    ),
    _gilbert_elliott_chain,
    _gilbert_elliott_tally,
)
FOUR_STATE = Family(
    "four-state Markov", ("p13", "p31", "p32", "p23", "p14"), (0, 2, 2, 1, 0), FourState, _four_state_chain,
    _four_state_tally,
)  # fmt: skip
FAMILIES = {family.name: family for family in (BERNOULLI, GILBERT, GILBERT_ELLIOTT, FOUR_STATE)}
