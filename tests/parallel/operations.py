"""Operations of torch.distributed that the backend `lossy` carries: how to run them, and what must come out.

Each takes this rank's message x and a group, and returns what the rank then holds. R ranks, N elements of x. What must
come out is worked out in plain Python, over a network that loses the same packets.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

import lossytp as ltp
from lossytp.parallel import backend as initialize
from tests.parallel.reference import Message, reference
from tests.parallel.reference import Reference as Links

WIRE = ltp.Wire(mtu_bytes=76)  # 32 bytes of payload: 8 elements of fp32, 4 of float64, 16 of bfloat16
LOSS_RATE = 0.2


def network(loss_rate: float = LOSS_RATE, seed: int = 3) -> ltp.LossyNetwork:
    return ltp.LossyNetwork(ltp.Bernoulli(loss_rate=loss_rate), seed=seed, wire=WIRE)


def uneven(num_ranks: int, each: int) -> list[list[int]]:
    """[i][j]: how much of R * each goes from position i to position j; most to the next one."""
    most = num_ranks * each - (num_ranks - 1)
    return [[most if j == (i + 1) % num_ranks else 1 for j in range(num_ranks)] for i in range(num_ranks)]


class Reference:
    """What this rank ends up with, packet by packet, over a network of its own of the same seed.

    Messages are lists of numbers, by position in the group.
    """

    def __init__(
        self, seed: int, group: ProcessGroup, algorithm: str, repair: str, reliable_gather: bool = True
    ) -> None:
        self.network, self.room = network(seed=seed), 32 // torch.float32.itemsize
        self.ranks, self.rank = dist.get_process_group_ranks(group), dist.get_rank()
        self.me, self.size = self.ranks.index(self.rank), len(self.ranks)
        self.name = f"{group.group_name}@{self.ranks[0]}"
        self.how, self.lossy_gather = (algorithm, repair), not reliable_gather and algorithm != "sender"

    def links(self, suffix: str = "") -> Links:
        return reference(self.network, self.ranks, *self.how, self.room, self.name + suffix)

    def sums(self, several: list[list[list]], divisor: int = 1) -> list[list]:
        links = self.links()
        totals = [[value / divisor for value in links.reduced(messages)] for messages in several]
        if not self.lossy_gather:
            return totals
        return [links.gathered(total, parts)[self.me] for total, parts in zip(totals, several, strict=True)]

    def sum(self, messages: list[list]) -> list:
        return self.sums([messages])[0]

    def mean(self, messages: list[list]) -> list:
        return self.sums([messages], self.size)[0]

    def scatter(self, messages: list[list]) -> list:
        each = len(messages[0]) // self.size
        return self.links().reduce_scatter(messages, unit=1)[self.me * each :][:each]

    def gather(self, messages: list[list]) -> list:
        return self.links().all_gather([value for shard in messages for value in shard], unit=1)[self.me]

    def cross(self, src: int, values: list) -> list:
        return self.links(f" from {src}")._hop(src, self.rank, Message(values), "").values if values else []

    def even(self, messages: list[list]) -> list:
        return self._exchange(messages, [[len(messages[0]) // self.size] * self.size] * self.size)

    def uneven_pairs(self, messages: list[list]) -> list:
        counts = uneven(self.size, len(messages[0]) // self.size)
        pairs = [[value for value in values for _ in range(2)] for values in messages]
        return self._exchange(pairs, [[2 * count for count in row] for row in counts])

    def _exchange(self, messages: list[list], counts: list[list[int]]) -> list:
        result: list = []
        for src, values, sent in zip(self.ranks, messages, counts, strict=True):
            part = values[sum(sent[: self.me]) : sum(sent[: self.me + 1])]
            result += part if src == self.rank else self.cross(src, part)
        return result

    def ring(self, messages: list[list]) -> list:
        return self.cross(self.ranks[self.me - 1], messages[self.me - 1])


def new_group(lossy: ltp.LossyNetwork, **settings: Any) -> ProcessGroup:
    assert initialize._settings is not None
    comm = initialize.backend_comm(**settings)
    with patch.object(initialize, "_settings", replace(initialize._settings, network=lossy, comm=comm)):
        group = dist.new_group()
    assert isinstance(group, ProcessGroup)
    return group


def whole_numbers(rank: int, num_elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Never zero; their sums are exact in any dtype, even scaled by 1.25."""
    generator = torch.Generator().manual_seed(100 * num_elements + rank)
    return torch.randint(1, 5, (num_elements,), generator=generator).to(dtype)


REPAIRS = ("zero", "rescale", "rescale_counted", "local", "fec(3, 2)", "retransmit(1)", "hadamard(4)")


def all_reduce(x: Tensor, group: ProcessGroup, op: Any = ReduceOp.SUM, *, async_op: bool = False) -> list[Tensor]:
    total = x[:-1].clone()  # no multiple of the chunks
    work = dist.all_reduce(total, op, group, async_op=async_op)
    if async_op:
        work.wait()
    return [total]


def all_reduce_coalesced(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    totals = [x.clone(), x[1:].clone()]
    with dist._coalescing_manager(group):
        for total in totals:
            dist.all_reduce(total, group=group)
    return totals


def reduce_scatter(x: Tensor, group: ProcessGroup, op: Any = ReduceOp.SUM, *, listed: bool = False) -> list[Tensor]:
    total = x.new_empty(len(x) // group.size())
    if listed:
        dist.reduce_scatter(total, list(x.chunk(group.size())), op, group)
    else:
        dist.reduce_scatter_tensor(total, x, op, group)
    return [total]


def reduce_scatter_coalesced(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    totals = functional.reduce_scatter_tensor_coalesced([x, x + 1], "sum", [0, 0], group)
    return [functional.wait_tensor(total) for total in totals]


def all_gather(x: Tensor, group: ProcessGroup, *, async_op: bool = False) -> list[Tensor]:
    gathered = x.new_empty(len(x) * group.size())
    work = dist.all_gather_into_tensor(gathered, x, group, async_op=async_op)
    if async_op:
        work.wait()
    return [gathered]


def all_gather_list(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    gathered = [x.new_empty(len(x) // 3, 3) for _ in range(group.size())]
    dist.all_gather(gathered, x[: len(x) // 3 * 3].view(-1, 3), group)
    return [torch.cat(gathered)]


def all_gather_coalesced(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    gathered = functional.all_gather_into_tensor_coalesced([x, x + 1], group)
    return [functional.wait_tensor(message) for message in gathered]


def all_gather_coalesced_lists(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    gathered = [[torch.empty_like(x), torch.empty_like(x)] for _ in range(group.size())]
    dist.all_gather_coalesced(gathered, [x, x + 1], group, async_op=True).wait()
    return [torch.cat(pieces) for pieces in zip(*gathered, strict=True)]


def all_gather_functional_out(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    """Run the variant with a given output, which compiled programs call."""
    gathered = x.new_empty(len(x) * group.size())
    torch.ops._c10d_functional.all_gather_into_tensor_out(x, group.size(), group.group_name, out=gathered)
    return [functional.wait_tensor(gathered)]


def all_to_all_single(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return [received]


def all_to_all_pairs(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    """Uneven splits, of rows of two elements."""
    counts = uneven(group.size(), len(x) // group.size())
    sent, came = counts[group.rank()], [row[group.rank()] for row in counts]
    received = x.new_empty(sum(came), 2)
    dist.all_to_all_single(received, torch.stack([x, x], 1), came, sent, group)
    return [received]


def all_to_all_list(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    received = list(torch.empty_like(x).chunk(group.size()))
    dist.all_to_all(received, list(x.chunk(group.size())), group)
    return [torch.cat(received)]


def send(x: Tensor, group: ProcessGroup, *, batched: bool = False) -> list[Tensor]:
    ranks, received = dist.get_process_group_ranks(group), torch.empty_like(x)
    after, before = ranks[(group.rank() + 1) % len(ranks)], ranks[group.rank() - 1]
    if batched:
        pair = [dist.P2POp(dist.isend, x, after, group), dist.P2POp(dist.irecv, received, before, group)]
        works = dist.batch_isend_irecv(pair)
    else:
        works = [dist.isend(x, after, group), dist.irecv(received, before, group)]
    for work in works:
        work.wait()
    return [received]


def _both(messages: list[list]) -> list[list[list]]:
    """The messages of two coalesced operations, the second of which are larger by one."""
    return [messages, [[value + 1 for value in values] for values in messages]]


# name: how to run it, what must come out of all ranks' messages
LOSSY: dict[str, tuple[Callable[..., list[Tensor]], Callable[[Reference, list[list]], list[list]]]] = {
    "all_reduce": (all_reduce, lambda ref, xs: [ref.sum([x[:-1] for x in xs])]),
    "all_reduce, async": (
        lambda x, group: all_reduce(x, group, async_op=True),
        lambda ref, xs: [ref.sum([x[:-1] for x in xs])],
    ),
    "all_reduce, mean": (
        lambda x, group: all_reduce(x, group, ReduceOp.AVG),
        lambda ref, xs: [ref.mean([x[:-1] for x in xs])],
    ),
    "all_reduce, functional": (
        lambda x, group: [functional.wait_tensor(functional.all_reduce(x, "sum", group))],
        lambda ref, xs: [ref.sum(xs)],
    ),
    "all_reduce, coalesced": (all_reduce_coalesced, lambda ref, xs: ref.sums([xs, [x[1:] for x in xs]])),
    "reduce_scatter": (reduce_scatter, lambda ref, xs: [ref.scatter(xs)]),
    "reduce_scatter, list": (lambda x, group: reduce_scatter(x, group, listed=True), lambda ref, xs: [ref.scatter(xs)]),
    "reduce_scatter, coalesced": (
        reduce_scatter_coalesced,
        lambda ref, xs: [ref.scatter(messages) for messages in _both(xs)],
    ),
    "all_gather": (all_gather, lambda ref, xs: [ref.gather(xs)]),
    "all_gather, async": (lambda x, group: all_gather(x, group, async_op=True), lambda ref, xs: [ref.gather(xs)]),
    "all_gather, list": (all_gather_list, lambda ref, xs: [ref.gather([x[: len(x) // 3 * 3] for x in xs])]),
    "all_gather, functional": (
        lambda x, group: [functional.wait_tensor(functional.all_gather_tensor(x, 0, group))],
        lambda ref, xs: [ref.gather(xs)],
    ),
    "all_gather, coalesced": (all_gather_coalesced, lambda ref, xs: [ref.gather(messages) for messages in _both(xs)]),
    "all_gather, lists coalesced": (
        all_gather_coalesced_lists,
        lambda ref, xs: [ref.gather(messages) for messages in _both(xs)],
    ),
    "all_gather, functional into a tensor": (all_gather_functional_out, lambda ref, xs: [ref.gather(xs)]),
    "all_to_all": (all_to_all_single, lambda ref, xs: [ref.even(xs)]),
    "all_to_all, pairs": (all_to_all_pairs, lambda ref, xs: [ref.uneven_pairs(xs)]),
    "all_to_all, list": (all_to_all_list, lambda ref, xs: [ref.even(xs)]),
    "send": (send, lambda ref, xs: [ref.ring(xs)]),
    "send, batched": (lambda x, group: send(x, group, batched=True), lambda ref, xs: [ref.ring(xs)]),
}


def _broadcast(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    x = x.clone()
    dist.broadcast(x, dist.get_process_group_ranks(group)[0], group)
    return [x]


def _gather_and_scatter(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    first, received = dist.get_process_group_ranks(group)[0], torch.empty_like(x)
    gathered = [torch.empty_like(x) for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather(x, gathered, first, group)
    dist.scatter(received, gathered and gathered[::-1], first, group)
    return [received]


def _reduce(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    total = x.clone()
    dist.reduce(total, dist.get_process_group_ranks(group)[0], group=group)
    return [total] if group.rank() == 0 else []


def _objects(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    gathered: list = [None] * group.size()
    dist.all_gather_object(gathered, x.tolist(), group)
    chosen = [gathered[-1] if group.rank() == 0 else None]
    dist.broadcast_object_list(chosen, dist.get_process_group_ranks(group)[0], group)
    dist.barrier(group)
    return [torch.tensor(values, dtype=x.dtype) for values in [*gathered, *chosen]]


RELIABLE: dict[str, Callable[[Tensor, ProcessGroup], list[Tensor]]] = {
    "all_reduce, max": lambda x, group: all_reduce(x, group, ReduceOp.MAX),
    "all_reduce, min": lambda x, group: all_reduce(x, group, ReduceOp.MIN),
    "all_reduce, product": lambda x, group: all_reduce(x, group, ReduceOp.PRODUCT),
    "reduce_scatter, max": lambda x, group: reduce_scatter(x, group, ReduceOp.MAX),
    "reduce_scatter, list of max": lambda x, group: reduce_scatter(x, group, ReduceOp.MAX, listed=True),
    "broadcast": _broadcast,
    "gather and scatter": _gather_and_scatter,
    "reduce": _reduce,
    "objects": _objects,
}
