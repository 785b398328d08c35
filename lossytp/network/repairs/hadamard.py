"""Spread each loss over a block of elements."""

from dataclasses import dataclass

from lossytp.network.checks import check_at_least, check_at_most
from lossytp.network.repairs.repair import Zero

MOST_BLOCK = 4096  # a product with a matrix of block x block


@dataclass(frozen=True)
class Hadamard(Zero):
    """Send the randomised Hadamard coefficients of each block, spread so that a packet carries at most one of a block.

    A lost packet then takes a little from every element of a block, instead of everything from some elements. The
    expected squared error equals that of `zero`: a hop projects a block by P, with E[P] = q and E[PP] = E[P]. The error
    of the worst element is smaller (Suresh et al., "Distributed mean estimation with limited communication", ICML 2017,
    section 3; OptiReduce, NSDI 2025).

    Args:
        block: a power of two. A message with fewer packets gets smaller blocks, one with a single packet none.

    The padding is less than a block. Coefficient i of block j is number i * (number of blocks) + j on the wire.
    Element e of a hop has sign e.
    """

    name = "hadamard"

    block: int = 64

    def __post_init__(self) -> None:
        check_at_least("block", self.block, 2)
        check_at_most("block", self.block, MOST_BLOCK, "a smaller power of two")
        if self.block & (self.block - 1):
            raise ValueError(f"block = {self.block} is not a power of two: give one, such as 64")

    def block_for(self, num_elements: int, elements_per_packet: int) -> int:
        """Return the largest block up to `block` whose coefficients fit into packets of their own."""
        block = self.block
        while block > 1 and -(-num_elements // block) < elements_per_packet:
            block //= 2
        return block

    def elements_on_wire(self, num_elements: int, elements_per_packet: int) -> int:
        block = self.block_for(num_elements, elements_per_packet)
        return -(-num_elements // block) * block
