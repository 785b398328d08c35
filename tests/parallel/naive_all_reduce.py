"""An all-reduce of stacked messages, element by element in Python's floats."""

import torch
from torch import Tensor

import lossytp as ltp
from tests.parallel.conftest import delivered, pieces_sent

ALGORITHMS, REPAIRS = ["sender", "direct"], ["zero", "rescale"]  # of the naive all-reduce here


def whole_numbers(num_ranks: int, num_elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Messages whose sums are exact in any dtype, even scaled by 1.25, so that results can be compared bitwise."""
    generator = torch.Generator().manual_seed(num_ranks + num_elements)
    return torch.randint(-3, 4, (num_ranks, num_elements), generator=generator).to(dtype)


def naive_all_reduce(x_RN: Tensor, network: ltp.LossyNetwork, algorithm: str, repair: str) -> list[float]:
    """The result that each rank holds, summed element by element in Python's floats."""
    num_ranks, num_elements = x_RN.shape
    arrives_RN = delivered(network, algorithm, num_ranks, num_elements, x_RN.element_size()).tolist()
    weights = [[1.0] * num_elements for _ in range(num_ranks)]
    if repair == "rescale":
        for rank in range(num_ranks):
            for dst, start, stop in pieces_sent(algorithm, rank, num_ranks, num_elements):
                loss_rate = network.process(rank, dst).loss_rate
                for element in range(start, stop):
                    weights[rank][element] = 1 / (1 - loss_rate) if loss_rate < 1 else 1.0
    sums = [0.0] * num_elements
    for rank, values in enumerate(x_RN.tolist()):
        for element, value in enumerate(values):
            if arrives_RN[rank][element]:
                sums[element] += weights[rank][element] * value
    return sums
