"""Fill missing values with the last ones that arrived."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.special import hyp2f1

from lossytp.network.repairs.repair import ZERO, Moments, Repair


@dataclass(frozen=True)
class Stale(Repair):
    """The receiver fills each gap with the value that last arrived at the same place, and passes it on.

    A place is a layer, direction, hop and position in the message. Its value is zero at first, and again after the
    message has changed its size. "Distributed training under packet loss" (arXiv 2507.07114) fills parameters this way.
    The receiver keeps a copy of everything that crosses a hop. Training's checkpoints contain this copy;
    `LossyNetwork.state_dict` does not.
    """

    name = "stale"
    remembers: ClassVar[bool] = True

    def sum_moments(self, crosses_HR: np.ndarray, receivers: tuple[int, ...], rate: float) -> Moments:
        """Return the probability that a part is current, for E[a_r], and that two have the same age, for E[a_r a_s]."""
        if rate == 1:  # nothing ever arrives, so every gap stays zero
            return ZERO.sum_moments(crosses_HR, receivers, rate)
        _check_meet_and_stay_together(crosses_HR)
        crossed_R, common_RR = crosses_HR.sum(0), crosses_HR.T @ crosses_HR
        return (1.0 - rate) ** crossed_R, same_age(crossed_R[:, None] - common_RR, crossed_R - common_RR, rate)

    def result_moments(self, total: Moments, receiver: int, arrives: float) -> Moments:
        if arrives == 0:
            return ZERO.result_moments(total, receiver, arrives)
        return arrives * total[0], total[1]  # the sum ages as a whole, so its parts' ages stay equal or different


def same_age(hops_RR: np.ndarray, others_RR: np.ndarray, rate: float) -> np.ndarray:
    """Return the probability that two parts belong to the same message.

    The parts cross m and n hops before the first hop that they share. A hop's output is k messages older than its input
    with probability q p^k. Two sums of such ages are equal with probability

        q^(m + n) sum_k binom(m + k - 1, k) binom(n + k - 1, k) p^2k = q^(m + n) F(m, n; 1; p^2)  (DLMF 15.2.1).

    F(m, n; 1; z) = (1 - z)^(1 - m - n) F(1 - m, 1 - n; 1; z) (DLMF 15.8.1), which has finitely many terms.

    Parts of different messages are uncorrelated. So this probability takes the place of E[a_r a_s] in the error, and
    the probability of age 0 takes that of E[a_r].
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
                    "repair = 'stale' has no closed form where parts share a hop and then part again: choose another "
                    "repair, or an algorithm whose parts stay together"
                )
