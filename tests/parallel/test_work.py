"""Handles of lossy operations under way: they lose once, whoever waits, and live as long as somebody may wait.

Functions named `on_rank_...` run in every process.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_work
from torch.distributed._functional_collectives import wait_tensor

import lossytp as ltp
from tests.parallel.backend_reference import Reference, network
from tests.parallel.operations import whole_numbers


def on_rank_begin(gathers: bool) -> list[bool]:
    """The results lose packets once each, and the links are drawn in the order of the calls."""
    lossy, repair = network(), "rescale" if gathers else "zero"
    ltp.init_process_group(lossy, algorithm="ring", repair=repair, reliable_gather=False)
    reference = Reference(3, dist.group.WORLD, "ring", repair, False)
    messages = [[whole_numbers(rank, size).tolist() for rank in range(2)] for size in (800, 900, 1000)]
    mine = [torch.tensor(parts[dist.get_rank()]) for parts in messages]
    results = [torch.empty(2 * len(x)) for x in mine] if gathers else mine
    works = [
        dist.all_gather_into_tensor(result, x, async_op=True) if gathers else dist.all_reduce(x, async_op=True)
        for result, x in zip(results, mine, strict=True)
    ]
    drawn = lossy.state_dict()
    works[2].wait()  # in another order than begun
    works[0].get_future().wait()
    while not works[1].is_completed():
        pass
    once = [result.tolist() for result in results]
    for work in works:
        work.wait()
        work.get_future().wait()
    return [
        once == [(reference.gather if gathers else reference.sum)(parts) for parts in messages],
        once == [result.tolist() for result in results],
        lossy.state_dict() == drawn,
        all(work.is_completed() for work in works),
    ]


@pytest.mark.parametrize("gathers", [False, True], ids=["sums", "gathers"])
def test_an_asynchronous_operation_loses_once_and_in_the_order_of_the_calls(processes: Callable, gathers: bool) -> None:
    """Whether it was waited for, its future was, or it was asked until it had ended."""
    assert processes(2, on_rank_begin, gathers) == [[True] * 4] * 2


def on_rank_leave_the_waiting_to_torch() -> list[bool]:
    """Hand each handle to C++ and forget it, as DDP's join does."""
    ltp.init_process_group(network(1.0), reliable_gather=False)
    group: Any = dist.group.WORLD
    x_N, gathered_N, pieces = torch.ones(100), torch.ones(200), [torch.ones(100), torch.ones(100)]
    lists = [[torch.ones(100), torch.ones(50)] for _ in range(2)]
    operations: list[tuple[torch.Tensor, Callable[[], Any]]] = [
        (x_N, lambda: dist.all_reduce(x_N, async_op=True)),
        (gathered_N, lambda: dist.all_gather_into_tensor(gathered_N, torch.ones(100), async_op=True)),
        (pieces[1 - dist.get_rank()], lambda: dist.all_gather(pieces, torch.ones(100), async_op=True)),
        (lists[1 - dist.get_rank()][1], lambda: group.allgather_coalesced(lists, [torch.ones(100), torch.ones(50)])),
    ]
    answers = []
    for tensor, begin in operations:
        _register_work(tensor, begin())
        answers.append(wait_tensor(tensor).eq(0).any().item())
    return [*answers, not group._under_way]


def test_cplusplus_can_wait_for_a_handle_that_python_has_forgotten(processes: Callable) -> None:
    """A handle whose Python half is gone would wait for ever."""
    assert processes(2, on_rank_leave_the_waiting_to_torch) == [[True] * 5] * 2


def on_rank_ask_for_results() -> list:
    """Values of the future and of `result()`, of several operations as one."""
    ltp.init_process_group(network(0.0))
    group: Any = dist.group.WORLD
    answers = []
    for _ in range(2):
        outputs = [[torch.zeros(30), torch.zeros(20)] for _ in range(2)]
        inputs = [torch.full((30,), 1.0 + dist.get_rank()), torch.full((20,), 3.0 + dist.get_rank())]
        work = group.allgather_coalesced(outputs, inputs)
        values = work.get_future().wait() if not answers else work.result()
        answers.append([value.mean().item() for value in values])
        answers.append([work.is_completed(), work.is_success(), work.exception()])
    return answers


def test_a_handle_of_several_has_their_results(processes: Callable) -> None:
    each = [[1.0, 2.0, 3.0, 4.0], [True, True, None]] * 2
    assert processes(2, on_rank_ask_for_results) == [each] * 2
