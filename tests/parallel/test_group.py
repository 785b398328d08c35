"""Who the tensor-parallel ranks are, and which TP degrees a model allows."""

import dataclasses
import re

import pytest
import torch

from lossytp.parallel.collectives import LossyAllReduce
from lossytp.parallel.group import RankGroup, check_divides
from tests.parallel.conftest import bernoulli


@pytest.mark.parametrize("size", [1, 2, 8])
def test_ranks_count_from_zero(size: int) -> None:
    assert RankGroup(size).ranks == tuple(range(size))


def test_a_group_is_a_value() -> None:
    assert RankGroup(4) == RankGroup(4, "tp") != RankGroup(4, "other")
    with pytest.raises(dataclasses.FrozenInstanceError):
        RankGroup(4).size = 8  # type: ignore[misc]


@pytest.mark.parametrize("size", [0, -2])
def test_a_group_has_at_least_one_rank(size: int) -> None:
    with pytest.raises(ValueError, match=rf"^tensor_parallel_size = {size} is below 1: give the number of ranks$"):
        RankGroup(size)


def test_groups_on_the_same_links_lose_packets_of_their_own() -> None:
    def losses(name: str) -> list:
        collective = LossyAllReduce(bernoulli(0.3), RankGroup(2, name))
        return collective.sum_(torch.ones(2, 20_000)).tolist()

    assert losses("tp 0") == losses("tp 0")
    assert losses("tp 0") != losses("tp 1")


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_sizes_that_divide_heads_and_inner_are_accepted(size: int) -> None:
    check_divides(size, heads=8, inner=256)


@pytest.mark.parametrize(
    ("size", "heads", "inner", "fits"),
    [
        (3, 8, 256, "1, 2, 4, 8"),
        (16, 8, 256, "1, 2, 4, 8"),
        (0, 8, 256, "1, 2, 4, 8"),
        (-1, 8, 256, "1, 2, 4, 8"),
        (8, 8, 100, "1, 2, 4"),
        (2, 7, 28, "1, 7"),
    ],
)
def test_other_sizes_are_refused_with_those_that_fit(size: int, heads: int, inner: int, fits: str) -> None:
    message = f"tensor_parallel_size = {size} does not divide the model's {heads} heads and its MLP of {inner}: "
    with pytest.raises(ValueError, match=f"^{re.escape(message + 'choose one of ' + fits)}$"):
        check_divides(size, heads=heads, inner=inner)
