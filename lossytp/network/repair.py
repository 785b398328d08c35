"""What is done about packets that do not arrive: send more of them, or make do with what there is.

A repair has two sides. Its transport says how many packets a message takes and which of them are missing in the end;
that is here. What stands where something is missing is a matter of tensors (`lossytp.parallel.missing`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lossytp.network.checks import check_at_least, check_at_most

MOST_BUDGET = 100
MOST_BLOCK = 4096  # a product with a matrix of block x block

Send = Callable[..., np.ndarray]
"""`send(count, extra=0)` sends `count` packets, `extra` of them by reason of a repair; sorted indices of the lost."""


@dataclass(frozen=True)
class Repair:
    """No transport of its own: what is lost is missing. No extra bytes, no extra time."""

    def elements_on_wire(self, num_elements: int, elements_per_packet: int) -> int:
        """Elements that are sent for so many of a message."""
        return num_elements

    def deliver(self, num_packets: int, send: Send) -> np.ndarray:
        """Send a message of `num_packets` over one link; sorted indices of its packets that are missing in the end."""
        return send(num_packets)

    def weight(self, loss_rate: float) -> float:
        """Factor for what has crossed a link of this stationary loss rate."""
        return 1.0

    def missing_rate(self, loss_rate: float) -> float:
        """Share of a message's packets that are missing in the end, over a Bernoulli link of this loss rate."""
        return loss_rate


@dataclass(frozen=True)
class Zero(Repair):
    """Leave missing elements at zero: the sum shrinks towards zero by the loss rate, on average."""


@dataclass(frozen=True)
class Rescale(Repair):
    """Divide what crossed a link by its delivery probability, so that the sum is unbiased.

    Horvitz and Thompson, "A generalization of sampling without replacement", JASA 1952, eq. 6. On a path of several
    hops, once for each; an owner's own part crosses no link.
    """

    def weight(self, loss_rate: float) -> float:
        return 1.0 if loss_rate == 1 else 1 / (1 - loss_rate)  # a link that delivers nothing has nothing to scale


@dataclass(frozen=True)
class RescaleCounted(Repair):
    """Multiply each element of a sum by R / (contributions that arrived), which the receiver counts.

    A ratio estimator (Cochran, "Sampling Techniques", 1977, section 6): biased where some contributions are surer to
    arrive than others, as an owner's own is; `lossytp.network.theory` has the bias. Zero where nothing arrived, and in
    a gather phase, where there is nothing to count.
    """


@dataclass(frozen=True)
class Stale(Repair):
    """The receiver puts in what last arrived at this place: same layer, direction, hop and position in the message.
    So it also passes on.

    Zero at first, and after a change of the message's size. As the stale parameters of "Distributed training under
    packet loss" (arXiv 2507.07114), for activations. Costs memory: a copy of all that crosses a hop, which
    training's checkpoints hold and `LossyNetwork.state_dict` does not.
    """


@dataclass(frozen=True)
class Local(Repair):
    """The receiver puts in its own contribution: in a reduce phase once for all that is missing of a hop, also where it
    adds its own part besides; in a gather phase in place of the result, each rank that lacks it its own, as layers
    whose synchronisation is left out do (Lamprecht et al., "CAAT-Net", NeurIPS 2025). A switch has no part of its own,
    and leaves zero.
    """


@dataclass(frozen=True)
class Retransmit(Repair):
    """What is lost is sent again, at most `budget` times; what is lost then is missing.

    Selective repeat, cut short (Kurose and Ross, "Computer Networking", section 3.4). Over a Bernoulli link p^(b + 1)
    is missing and p + ... + p^b sent beyond the message. They follow at
    once on the link, so a burst may take them too. Costs a round trip each time.
    """

    budget: int

    def __post_init__(self) -> None:
        check_at_least("budget", self.budget, 1)
        check_at_most("budget", self.budget, MOST_BUDGET)

    def deliver(self, num_packets: int, send: Send) -> np.ndarray:
        missing = send(num_packets)
        for _ in range(self.budget):
            if not len(missing):
                break
            missing = missing[send(len(missing), extra=len(missing))]
        return missing

    def missing_rate(self, loss_rate: float) -> float:
        return float(loss_rate ** (self.budget + 1))


@dataclass(frozen=True)
class Hadamard(Repair):
    """Send the randomised Hadamard coefficients of each block, spread so that a packet carries at most one of a block.

    A lost packet then costs every element of a block a little, instead of some elements everything: the expected
    squared error is zero-fill's, the worst element's is smaller (Suresh et al., "Distributed mean estimation with
    limited communication", ICML 2017, section 3; OptiReduce, NSDI 2025). `block` is a power of two; a message of fewer
    packets takes smaller blocks, one of a single packet none. Costs no packets but for less than a block of padding.
    Coefficient i of block j is number i * (number of blocks) + j on the wire; element e of a hop has sign e.
    """

    block: int = 64

    def __post_init__(self) -> None:
        check_at_least("block", self.block, 2)
        check_at_most("block", self.block, MOST_BLOCK, "a smaller power of two")
        if self.block & (self.block - 1):
            raise ValueError(f"block = {self.block} is not a power of two: give one, such as 64")

    def block_for(self, num_elements: int, elements_per_packet: int) -> int:
        """The largest block up to `block` whose coefficients can lie in packets of their own."""
        block = self.block
        while block > 1 and -(-num_elements // block) < elements_per_packet:
            block //= 2
        return block

    def elements_on_wire(self, num_elements: int, elements_per_packet: int) -> int:
        block = self.block_for(num_elements, elements_per_packet)
        return -(-num_elements // block) * block


ZERO = Zero()
