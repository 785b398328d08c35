"""Which tensor-parallel ranks there are, and which of them live in this process."""

from dataclasses import dataclass


@dataclass(frozen=True)
class VirtualRanks:
    """All `size` tensor-parallel ranks in one process, as a leading axis of its tensors.

    `ranks` are the group's global ranks, which name the links; `name` tells groups on the same link apart.
    """

    size: int
    name: str = "tp"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"tensor_parallel_size = {self.size} is below 1: give the number of ranks")

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.size))


def check_divides(tensor_parallel_size: int, *, heads: int, inner: int) -> None:
    """Raise ValueError unless every rank gets as many of the heads, and of the MLP's `inner` units, as any other."""
    if tensor_parallel_size < 1 or heads % tensor_parallel_size or inner % tensor_parallel_size:
        fits = [size for size in range(1, heads + 1) if heads % size == 0 and inner % size == 0]
        raise ValueError(
            f"tensor_parallel_size = {tensor_parallel_size} does not divide the model's {heads} heads and its MLP of "
            f"{inner}: choose one of {', '.join(map(str, fits))}"
        )
