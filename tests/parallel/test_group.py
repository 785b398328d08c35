"""Who the tensor-parallel ranks are, and which TP degrees a model allows."""

import copy
import dataclasses
import re
from contextlib import suppress
from typing import Any

import pytest
import torch

from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.group import RankGroup, check_divides
from tests.parallel.conftest import FakeProcessGroup, bernoulli


@pytest.mark.parametrize("size", [1, 2, 8])
def test_ranks_count_from_zero(size: int) -> None:
    assert RankGroup(size).ranks == tuple(range(size))


def test_a_group_is_a_value() -> None:
    assert RankGroup(4) == RankGroup(4, "tp") != RankGroup(4, "other")
    with pytest.raises(dataclasses.FrozenInstanceError):
        RankGroup(4).size = 8  # type: ignore[misc]


def test_a_copy_of_a_model_shares_its_process_group() -> None:
    group = RankGroup(2, process_group=FakeProcessGroup(2, 0), first_rank=0)  # type: ignore[arg-type]
    assert copy.deepcopy({"group": group})["group"] is group


@pytest.mark.parametrize("size", [0, -2])
def test_a_group_has_at_least_one_rank(size: int) -> None:
    with pytest.raises(ValueError, match=rf"^tensor_parallel_size = {size} is below 1: give the number of ranks$"):
        RankGroup(size)


def test_groups_on_the_same_links_lose_packets_of_their_own() -> None:
    def losses(name: str) -> list:
        collective = LossyCollective(bernoulli(0.3), RankGroup(2, name))
        return collective.sum_(torch.ones(2, 20_000)).tolist()

    assert losses("tp 0") == losses("tp 0")
    assert losses("tp 0") != losses("tp 1")


class SummingProcessGroup(FakeProcessGroup):
    """Sums what it is given with ten more."""

    def allreduce(self, tensors: list[torch.Tensor]) -> "SummingProcessGroup":
        self.tensors = tensors
        return self

    def wait(self) -> None:
        for tensor in self.tensors:
            tensor += 10


def group_over_processes(size: int, processes: int, rank: int, **settings: Any) -> RankGroup:
    """Numbered from 0: a group that torch.distributed does not know cannot say where it begins."""
    group = SummingProcessGroup(processes, rank)
    return RankGroup(size, process_group=group, **{"first_rank": 0, **settings})  # type: ignore[arg-type]


def test_ranks_may_begin_elsewhere() -> None:
    assert RankGroup(3, first_rank=4).ranks == (4, 5, 6)
    assert RankGroup(3, first_rank=4).local == range(3), "positions, not ranks"


@pytest.mark.parametrize("size", [1, 4])
def test_without_a_process_group_all_ranks_are_here(size: int) -> None:
    group = RankGroup(size)
    assert (group.processes, group.local) == (1, range(size))


@pytest.mark.parametrize(
    ("size", "processes", "here"),
    [
        (4, 1, [range(4)]),
        (4, 2, [range(2), range(2, 4)]),
        (4, 4, [range(1), range(1, 2), range(2, 3), range(3, 4)]),
        (6, 2, [range(3), range(3, 6)]),
    ],
)
def test_ranks_are_spread_evenly_over_the_processes_in_order(size: int, processes: int, here: list[range]) -> None:
    groups = [group_over_processes(size, processes, rank, first_rank=10) for rank in range(processes)]
    assert [group.local for group in groups] == here
    assert {group.ranks for group in groups} == {tuple(range(10, 10 + size))}, "every process knows all of them"
    assert {group.processes for group in groups} == {processes}


@pytest.mark.parametrize(("size", "processes"), [(3, 2), (2, 4), (6, 4)])
def test_ranks_that_cannot_be_spread_evenly_are_refused(size: int, processes: int) -> None:
    message = (
        f"tensor_parallel_size = {size} is not a multiple of the {processes} processes that share the ranks: give a "
        f"multiple of {processes}, or start fewer processes"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        group_over_processes(size, processes, 0)


@pytest.mark.parametrize(("processes", "first"), [([0, 1], 0), ([2, 3], 4)])
def test_the_first_rank_follows_from_the_processes(
    processes: list[int], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: processes)
    assert group_over_processes(4, 2, 0, first_rank=-1).ranks == tuple(range(first, first + 4))


def test_processes_that_are_not_neighbours_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [0, 2])
    with pytest.raises(ValueError, match=r"^process_group = processes \[0, 2\], which are not neighbours, .*: give "):
        group_over_processes(4, 2, 0, first_rank=-1)
    assert group_over_processes(4, 2, 0, first_rank=8).ranks == (8, 9, 10, 11)


def test_a_sum_is_complete_when_it_was_waited_for() -> None:
    partial = torch.ones(3)
    wait = group_over_processes(4, 2, 0).begin_sum_(partial)
    assert partial.tolist() == [1.0] * 3
    wait()
    assert partial.tolist() == [11.0] * 3


def test_a_sum_goes_over_the_group_that_a_lossy_one_wraps() -> None:
    group, partial = group_over_processes(4, 2, 0), torch.ones(3)
    group.process_group.wrapped = SummingProcessGroup(2, 0)  # type: ignore[union-attr]
    group.begin_sum_(partial)()
    assert partial.tolist() == [11.0] * 3
    assert not hasattr(group.process_group, "tensors")


@pytest.mark.parametrize("group", [RankGroup(4), group_over_processes(4, 1, 0)])
def test_one_process_alone_sends_no_sum(group: RankGroup) -> None:
    partial = torch.ones(3)
    group.begin_sum_(partial)()
    assert partial.tolist() == [1.0] * 3


def test_sizes_that_divide_heads_and_inner_are_accepted() -> None:
    accepted = []
    for size in range(1, 17):
        with suppress(ValueError):
            check_divides(size, heads=8, inner=256)
            accepted.append(size)
    assert accepted == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("size", "heads", "inner", "fits"),
    [
        (3, 8, 256, "2, 4, 8"),
        (16, 8, 256, "2, 4, 8"),
        (0, 8, 256, "2, 4, 8"),
        (-1, 8, 256, "2, 4, 8"),
        (8, 8, 100, "2, 4"),
        (2, 7, 28, "7"),
        (2, 7, 12, "1"),
    ],
)
def test_other_sizes_are_refused_with_those_that_fit(size: int, heads: int, inner: int, fits: str) -> None:
    message = f"tensor_parallel_size = {size} does not divide the model's {heads} heads and its MLP of {inner}: "
    with pytest.raises(ValueError, match=f"^{re.escape(message + 'choose one of ' + fits)}$"):
        check_divides(size, heads=heads, inner=inner)


@pytest.mark.parametrize("size", ["4", 4.0, True, None])
def test_a_size_that_is_no_whole_number_is_refused(size):
    for refuse in (RankGroup, lambda size: check_divides(size, heads=4, inner=16)):
        with pytest.raises(
            TypeError, match=rf"^tensor_parallel_size = {size!r} is not a whole number: give the number of"
        ):
            refuse(size)
