"""Scale up what arrives, so that a sum keeps its size on average."""

from dataclasses import dataclass

import numpy as np

from lossytp.network.repairs.repair import ZERO, Moments, Repair

MOST_RANKS_COUNTED = 16


@dataclass(frozen=True)
class Rescale(Repair):
    """Divide what crossed a link by its delivery probability, so that the sum is unbiased.

    Horvitz and Thompson, "A generalization of sampling without replacement", JASA 1952, eq. 6. A path of several hops
    is divided once for each. An owner's own part crosses no link.
    """

    name = "rescale"

    def weight(self, loss_rate: float) -> float:
        return 1.0 if loss_rate == 1 else 1 / (1 - loss_rate)  # a link that delivers nothing has nothing to scale

    def sum_moments(self, crosses_HR: np.ndarray, receivers: tuple[int, ...], rate: float) -> Moments:
        """Return E[a_r] = 1 and E[a_r a_s] = q^-c(r, s), with c(r, s) hops in common (Horvitz and Thompson)."""
        if rate == 1:  # nothing arrives that could be scaled
            return ZERO.sum_moments(crosses_HR, receivers, rate)
        return np.ones(crosses_HR.shape[1]), (1.0 - rate) ** -(crosses_HR.T @ crosses_HR)

    def result_moments(self, total: Moments, receiver: int, arrives: float) -> Moments:
        return (total[0], total[1] / arrives) if arrives else ZERO.result_moments(total, receiver, arrives)


@dataclass(frozen=True)
class RescaleCounted(Repair):
    """Multiply each element of a sum by R / (contributions that arrived), which the receiver counts.

    This is a ratio estimator (Cochran, "Sampling Techniques", 1977, section 6). It is biased if some contributions are
    more likely to arrive than others, as an owner's own is. An element is zero if no contribution arrived. In a gather
    phase there is nothing to count, and missing elements are zero.
    """

    name = "rescale_counted"

    def sum_moments(self, crosses_HR: np.ndarray, receivers: tuple[int, ...], rate: float) -> Moments:
        """Return the moments over all outcomes O of the hops: each of the n parts that arrived has weight R / n."""
        hops, ranks = crosses_HR.shape
        if max(hops, ranks) > MOST_RANKS_COUNTED:
            raise ValueError(
                f"ranks = {ranks} with repair = 'rescale_counted', worked out from all 2^{hops} outcomes of its hops: "
                f"give fewer ranks"
            )
        lost_OH = (np.arange(2**hops)[:, None] >> np.arange(hops) & 1).astype(float)
        lost_O = lost_OH.sum(1)
        chance_O = rate**lost_O * (1 - rate) ** (hops - lost_O)
        arrived_OR = lost_OH @ crosses_HR == 0
        weight_OR = arrived_OR * ranks / np.maximum(arrived_OR.sum(1, keepdims=True), 1)
        return chance_O @ weight_OR, (chance_O[:, None] * weight_OR).T @ weight_OR
