"""Test that a run of elements of a tensor falls into few boxes."""

import math
from collections.abc import Iterator

import pytest
import torch

from lossytp.parallel.places import boxes_of


def runs(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    size = math.prod(shape)
    return ((first, stop) for first in range(size + 1) for stop in range(first, size + 1))


@pytest.mark.parametrize("shape", [(7,), (3, 4), (1, 5), (4, 1), (2, 3, 4), (2, 2, 1, 3)])
def test_a_run_of_elements_falls_into_few_boxes_that_are_exactly_it(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(math.prod(shape)).view(shape)
    for first, stop in runs(shape):
        found = boxes_of(shape, first, stop)
        assert len(found) <= 2 * len(shape) - 1
        inside = [
            numbers[tuple(slice(begin, begin + size) for begin, size in zip(start, sizes, strict=True))].flatten()
            for start, sizes in found
        ]
        assert sorted(torch.cat(inside).tolist() if inside else []) == list(range(first, stop))
