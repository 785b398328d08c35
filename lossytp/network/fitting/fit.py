"""Fit the families of loss processes to recorded flows, and choose by the Bayesian information criterion.

Schwarz, "Estimating the dimension of a model", 1978.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lossytp.network.fitting import runs
from lossytp.network.fitting.families import BERNOULLI, FAMILIES, GILBERT_ELLIOTT, Family
from lossytp.network.fitting.maximise import Likelihood, maximise
from lossytp.network.loss_process import LossProcess
from lossytp.network.trace import Trace

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
    runs.check_flows(flows)
    lost = runs.num_lost(flows)
    enough = min(lost, runs.num_packets(flows) - lost) >= FEWEST_PACKETS
    return list(FAMILIES.values()) if enough else [BERNOULLI]


def fit_family(family: Family, flows: Sequence[Trace]) -> Fit:
    """Fit one family by maximum likelihood, taking the flows for independent and stationary from the start.

    Args:
        family: an `applicable` family.
        flows: the recorded flows.

    Raises:
        ValueError: if the flows lost none of their packets, or all, and the family is not Bernoulli.
    """
    packets, lost = runs.num_packets(flows), runs.num_lost(flows)
    if family is BERNOULLI:
        rate = lost / packets
        log_likelihood = sum(part * math.log(part / packets) for part in (lost, packets - lost) if part)
        return Fit(family, (rate,), log_likelihood, packets)
    if lost in (0, packets):
        raise ValueError(
            f"{lost} of {packets} packets are lost, which shows no {family.name} process: give flows with lost and "
            "received packets, or fit Bernoulli"
        )
    found = maximise(Likelihood(family, flows), flows)
    values = tuple(found.values.tolist())
    if family is GILBERT_ELLIOTT and values[3] > values[2]:  # the bad state is the one that loses more
        values = (values[1], values[0], values[3], values[2])
    return Fit(family, values, found.log_likelihood, packets)


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
