"""The second-order prediction of what losses cost, from passes without losses.

Each packet k at risk carries a part x_k of a sum, and losing it adds -x_k. With g and H the gradient and the Hessian of
the cross-entropy with respect to the sums, to second order and for small loss rates p, where no two losses meet,

    rise = p * sum_k (-g.x_k + x_k.H.x_k / 2).

The second term is half the trace of H times the covariance of the error, which is p * sum_k x_k x_k^T: the linearity
theorem of quantisation (Malinovskii et al., "HIGGS", NAACL 2025, arXiv:2411.17525) for another noise. Zeros also have
a mean, -p x_k, and so the first term, which quantisation lacks. H is taken as the Gauss-Newton matrix: x.H.x is the
mean over tokens of the variance, under the model's own prediction of a token, of the logits' directional derivative.
Random signs s_k replace the sum over packets by one direction (Hutchinson 1989): E[d.H.d] for d = sum_k s_k x_k. Both
derivatives are central differences: a pass in which each packet is multiplied by 1 + eps s_k, and one by 1 - eps s_k.

Shapes: B sequences of one message, T tokens of each, V words, P packets of a hop, M elements of a message.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lossytp.network.scope import Site
from lossytp.parallel.collectives import Message
from lossytp.tolerance.config import NO_REPAIR, Setup, ToleranceConfig
from lossytp.tolerance.measure import Measurement
from lossytp.tolerance.packets import Watch

EPSILON = 0.01  # relative step of the central differences


class SecondOrder:
    """The two terms of the predicted slope on the B sequences of one message, without its chosen packets."""

    def __init__(
        self, measurement: Measurement, config: ToleranceConfig, ids_BT: Tensor, chosen: Any, probes: int
    ) -> None:
        settings = config.network(Setup(config.algorithms, "reduce", NO_REPAIR, config.rates()[0]))
        self.model, self.network = measurement.over(settings, repair=Watch())
        self.network.alone, self.network.see = True, self._scale_
        self.measurement, self.ids_BT, self.chosen, self.probes = measurement, ids_BT, chosen, probes
        self.step, self.signs, self.generator = 0.0, False, torch.Generator()
        self.correlation = 0.0  # of the losses of two consecutive packets

    def _scale_(self, message: Message, site: Site) -> None:
        """Multiply each packet at risk by 1 + step, or by 1 + step * s_k with random signs."""
        for number, hop in enumerate(message.hops):
            packets = hop.num_packets(message.capacity)
            step_P = torch.full((packets,), self.step)
            if self.signs:
                signs_P = 2 * torch.randint(0, 2, (packets,), generator=self.generator) - 1
                if self.correlation:  # a packet keeps the sign of the one before it with this probability
                    kept_P = torch.rand(packets, generator=self.generator) < self.correlation
                    signs_P = signs_P[torch.arange(packets).masked_fill(kept_P, 0).cummax(0).values]
                step_P *= signs_P
            step_P[self.chosen.get((site.layer, site.module), {}).get(number, [])] = 0
            step_M = step_P.repeat_interleave(message.capacity)[: hop.stop - hop.start].to(message.rows_LN)
            message.rows_LN[message.rows_of(hop.positions), hop.start : hop.stop] *= 1 + step_M

    def scaled_B(self, step: float) -> np.ndarray:
        """Return the cross-entropy of each sequence if each packet is multiplied by 1 + step."""
        self.signs, self.step = False, step
        return self.measurement.score(self.model, self.ids_BT)

    def first_B(self) -> np.ndarray:
        """Return the rise of each sequence per unit of loss rate by the error's mean, -sum_k g.x_k."""
        return (self.scaled_B(-EPSILON) - self.scaled_B(EPSILON)) / (2 * EPSILON)

    def mean_second_B(self) -> np.ndarray:
        """Return the mean of `second_B` over as many directions as the settings say."""
        return np.mean([self.second_B(seed) for seed in range(self.probes)], axis=0)

    def second_B(self, seed: int) -> np.ndarray:
        """Return an estimate of sum_k x_k.H.x_k / 2 of each sequence, from one direction."""
        self.signs, logits = True, []
        with torch.inference_mode():
            for self.step in (EPSILON, -EPSILON, 0.0):
                self.generator.manual_seed(seed)
                logits.append(self.model(input_ids=self.ids_BT, use_cache=False).logits)
            found = []
            for up_TV, down_TV, here_TV in zip(*logits, strict=True):
                slope_TV, chance_TV = (up_TV - down_TV)[:-1].float() / (2 * EPSILON), here_TV[:-1].float().softmax(-1)
                mean_T1 = (chance_TV * slope_TV).sum(-1, keepdim=True)
                found.append(float((chance_TV * (slope_TV - mean_T1).square()).sum(-1).mean()) / 2)
        return np.array(found)
