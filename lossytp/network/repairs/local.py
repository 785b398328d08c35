"""Fill in the receiver's own part."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lossytp.network.repairs.repair import Moments, Repair


@dataclass(frozen=True)
class Local(Repair):
    """The receiver fills in its own contribution.

    In a reduce phase it does so once for everything that a hop did not deliver, in addition to adding its own part as
    usual. In a gather phase each rank replaces the result that it lacks with its own contribution, as layers without
    synchronisation do (Lamprecht et al., "CAAT-Net", NeurIPS 2025). A switch has no part of its own and leaves zero.
    """

    name = "local"
    uses_own_part: ClassVar[bool] = True

    def sum_moments(self, crosses_HR: np.ndarray, receivers: tuple[int, ...], rate: float) -> Moments:
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

    def result_moments(self, total: Moments, receiver: int, arrives: float) -> Moments:
        mean_R, second_RR = total
        instead_R = np.eye(len(mean_R))[receiver]
        lost = 1 - arrives
        return arrives * mean_R + lost * instead_R, arrives * second_RR + lost * np.outer(instead_R, instead_R)
