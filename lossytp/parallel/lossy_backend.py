"""The c10d backend `lossy`: any PyTorch parallelism over a network that loses packets.

A `LossyProcessGroup` passes every operation on to the group that it wraps (gloo or NCCL), and removes from the messages
what the network loses. All-gathers, all-to-alls, sends, and the sums and averages of all-reduces and reduce-scatters
lose packets if their message is dense, floating-point and longer than one packet. Everything else is reliable: MAX,
MIN, integers, complex numbers, sparse tensors, objects, broadcasts, barriers, smaller messages, and everything within
`LossyNetwork.reliable()`.

The wrapped group is a plain `ProcessGroup`, so each method has the same name and arguments on both sides.

Links are named by global ranks. Every rank of a group knows the routes of a collective, and advances the same links.
Only the sender knows the routes of a send or an all-to-all, so these have their own streams, which only the sender
advances.

Activation checkpointing repeats collectives. Each repetition draws new losses, like any new message. This project's own
layers replay their losses instead (`lossytp.parallel.blocks`).
"""

import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup, ReduceOp, Work

from lossytp.network.counters import Site
from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.repairs import ZERO
from lossytp.network.repairs.chain import stage_of
from lossytp.network.routes import Hop, Hops, Missing
from lossytp.network.wiring import Wiring
from lossytp.parallel.missing import Message, settle_
from lossytp.parallel.work import Then

LOSSY_REDUCTIONS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM)


class LossyProcessGroup(ProcessGroup):
    """Carry the messages of `wrapped` over `network`.

    `init_process_group` makes one, and PyTorch makes others for sub-groups and meshes.

    Args:
        wrapped: the group that carries the messages.
        name: PyTorch's name of the group. The name and the first rank select the group's streams.
        ranks: global ranks, by position in the group.
        network: the network, with the same seed and loss processes on every rank.
        wiring: algorithm, repair and reliable_gather of every operation. A repair that remembers is refused at the
            first lossy message, because this group does not know which message follows which. "local" leaves zero in an
            all-gather, where no rank has its own part.
    """

    def __init__(
        self,
        wrapped: ProcessGroup,
        *,
        name: str,
        ranks: Sequence[int],
        network: LossyNetwork,
        wiring: Wiring,
    ) -> None:
        super().__init__(wrapped.rank(), wrapped.size())  # type: ignore[call-arg]
        self.wrapped = wrapped
        self._under_way: set[Work] = set()
        self.network = network
        self.ranks = tuple(ranks)
        self._c10d_name = name
        self._routes, self._repair = wiring.algorithm, wiring.repair
        self._reliable_gather = wiring.reliable_gather

    def getBackendName(self) -> str:
        return "lossy"

    @property
    def pg_name(self) -> str:
        return self._c10d_name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._c10d_name

    @property
    def _device_types(self) -> list[torch.device]:
        """Return the devices of the wrapped backends, which PyTorch's state dicts and object collectives ask for."""
        return self.wrapped._device_types

    def get_group_store(self) -> Any:
        return self.wrapped.get_group_store()

    # sums: lost packets are taken out of a rank's own part before it is sent

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:  # type: ignore[override]
        return self._all_reduce(tensors, opts or dist.AllreduceOptions(), self.wrapped.allreduce)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        return self._all_reduce(tensors, opts or dist.AllreduceCoalescedOptions(), self.wrapped.allreduce_coalesced)

    def _all_reduce(self, tensors: list[Tensor], options: Any, carry: Callable[[list[Tensor], Any], Work]) -> Work:
        lossy = [t for t in tensors if self._is_lossy(t)] if options.reduceOp.op in LOSSY_REDUCTIONS else []
        keeps = self._repair.uses_own_part and not self._reliable_gather
        own = [tensor.clone() if keeps else None for tensor in lossy]
        for tensor in lossy:
            self._lose_(tensor, self._routes.reduce(tensor.numel(), self.ranks, 1), "all_reduce")
        arrivals: list[Callable[[], None]] = []
        for tensor, part in zip(lossy, own, strict=True):
            hops = () if self._reliable_gather else self._routes.gather(tensor.numel(), self.ranks, 1)
            if hops:
                missing = self._draw(hops, tensor, "all_reduce", "gather")
                arrivals.append(partial(self._settle_, tensor, hops, missing, part, in_gather=True))
        return self._then([carry(tensors, options)], arrivals)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:  # type: ignore[override]
        options = opts or dist.ReduceScatterOptions()
        if options.reduceOp.op in LOSSY_REDUCTIONS:  # type: ignore[union-attr]
            inputs = [self._lose_from_pieces(pieces) for pieces in inputs]
        return self.wrapped.reduce_scatter(outputs, inputs, options)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        options = opts or dist.ReduceScatterOptions()
        if options.reduceOp.op in LOSSY_REDUCTIONS:  # type: ignore[union-attr]
            input = self._lose_from_copy(input)
        return self.wrapped.reduce_scatter_single(output, input, options)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        pairs = zip(outputs, inputs, strict=True)  # gloo has no coalesced form
        return self._then([self.reduce_scatter_single(output, input, opts) for output, input in pairs])

    # gathers: lost packets are taken out of what arrives, different ones on every rank

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:  # type: ignore[override]
        arrivals = self._lost_on_arrival(outputs)
        return self._then([self.wrapped.allgather(outputs, inputs, opts or AllgatherOptions())], arrivals)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        """Gather several inputs at once: rank r's i-th input goes to `outputs[r][i]`."""
        each = [list(pieces) for pieces in zip(*outputs, strict=True)]
        return self._then([self.allgather([pieces], [input]) for pieces, input in zip(each, inputs, strict=True)])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        arrivals = self._lost_on_arrival([[output]])
        return self._then([self.wrapped.all_gather_single(output, input, opts or AllgatherOptions())], arrivals)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._then([self.all_gather_single(output, input, opts) for output, input in pairs])

    # from one rank to another: lost packets are taken out of a copy, since autograd may need the original

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        bounds = _bounds(piece.numel() for piece in inputs)
        message = self._lose_sent(torch.cat([piece.reshape(-1) for piece in inputs]), bounds, "all_to_all")
        pieces = zip(inputs, bounds, strict=True)
        lost = [message[start:stop].view(piece.shape) for piece, (start, stop) in pieces]
        return self.wrapped.alltoall(outputs, lost, opts or dist.AllToAllOptions())

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Work:
        row = input[0].numel() if len(input) else 0
        rows = input_splits or [len(input) // self.size()] * self.size()
        lost = self._lose_sent(input, _bounds(count * row for count in rows), "all_to_all")
        return self.wrapped.all_to_all_single(output, lost, output_splits, input_splits, opts or dist.AllToAllOptions())

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Work:
        """Send to the rank at position `dst` in the group."""
        lost = []
        for tensor in tensors:
            bounds = [(0, tensor.numel() if position == dst else 0) for position in range(self.size())]
            lost.append(self._lose_sent(tensor, bounds, "send"))
        return self.wrapped.send(lost, dst, tag)

    def _lose_from_copy(self, part: Tensor) -> Tensor:
        if not self._is_lossy(part):
            return part
        copy = part.clone(memory_format=torch.contiguous_format)
        self._lose_(copy, self._routes.reduce_scatter(part.numel(), self.ranks, 1), "reduce_scatter")
        return copy

    def _lose_from_pieces(self, pieces: list[Tensor]) -> list[Tensor]:
        if not self._is_lossy(pieces[0], sum(piece.numel() for piece in pieces)):
            return pieces
        _check_equal("reduce_scatter", pieces)
        return list(self._lose_from_copy(torch.stack(pieces)).unbind())

    def _lost_on_arrival(self, messages: list[list[Tensor]]) -> list[Callable[[], None]]:
        """Draw the losses of gathered messages, each in pieces; return functions that apply them on arrival."""
        arrivals: list[Callable[[], None]] = []
        for pieces in messages:
            elements = sum(piece.numel() for piece in pieces)
            if self._is_lossy(pieces[0], elements):
                _check_equal("all_gather", pieces)
                hops = self._routes.all_gather(elements, self.ranks, 1)
                missing = self._draw(hops, pieces[0], "all_gather", "gather")
                arrivals.append(partial(self._settle_pieces_, pieces, hops, missing))
        return arrivals

    def _settle_pieces_(self, pieces: list[Tensor], hops: Hops, missing: Missing) -> None:
        message = pieces[0] if len(pieces) == 1 else torch.cat([piece.reshape(-1) for piece in pieces])
        self._settle_(message, hops, missing, None, in_gather=True)
        if len(pieces) > 1:
            for piece, part in zip(pieces, message.chunk(len(pieces)), strict=True):
                piece.copy_(part.view_as(piece))

    def _then(self, works: list[Work], arrivals: Sequence[Callable[[], None]] = ()) -> Work:
        """Return a handle for running operations. `arrivals` run once all of them are complete.

        A single operation without arrivals keeps its own handle, for which PyTorch's C++ code can wait.
        """
        return Then(works, arrivals, self._under_way) if arrivals or len(works) > 1 else works[0]

    def _lose_sent(self, message: Tensor, bounds: list[tuple[int, int]], operation: str) -> Tensor:
        """Return a copy of `message` that lacks the packets which the network loses.

        `bounds` are the elements [start, stop) for each position.
        """
        if not self._is_lossy(message):
            return message
        me = self.rank()
        hops = tuple(
            Hop(self.ranks[me], self.ranks[position], start, stop, (me,))
            for position, (start, stop) in enumerate(bounds)
            if position != me and stop > start
        )
        copy = message.clone(memory_format=torch.contiguous_format)
        missing = self._draw(hops, copy, operation, "gather", one_sided=True)
        self._settle_(copy, hops, missing, None, in_gather=True)
        return copy

    def _lose_(self, message: Tensor, hops: Hops, operation: str) -> None:
        """Remove the lost packets from this rank's contribution to a sum."""
        if stage_of(self._repair, "select") != ZERO and any(len(hop.positions) > 1 for hop in hops):
            raise ValueError(
                f"repair = '{self._repair}' does not work over the backend with algorithm = {self._routes.name!r}, "
                "whose packets carry sums that no single process knows: choose direct or sender, or another repair"
            )
        own = message.clone() if self._repair.uses_own_part else None
        self._settle_(message, hops, self._draw(hops, message, operation, "reduce"), own)

    def _settle_(
        self, message: Tensor, hops: Hops, missing: Missing, own: Tensor | None, *, in_gather: bool = False
    ) -> None:
        flat = message.detach().reshape(1, -1)  # a copy where the message does not lie in order
        capacity = self.network.wire.elements_per_packet(message.element_size())
        own_1N = None if own is None else own.detach().reshape(1, -1)
        sent = Message(flat, (self.rank(),), self.ranks, hops, missing, self.network, capacity, in_gather, own_1N)
        settle_(sent, self._repair)
        if not message.is_contiguous():
            message.detach().copy_(flat.view(message.shape))  # which autograd must not record

    def _draw(self, hops: Hops, message: Tensor, operation: str, phase: str, *, one_sided: bool = False) -> Missing:
        if self._repair.remembers:
            raise ValueError(
                f"repair = '{self._repair}' does not work over the backend, which does not know which message follows "
                "which: choose another"
            )
        name = f"{self._c10d_name}@{self.ranks[0]}"
        if one_sided:
            name += f" from {self.ranks[self.rank()]}"
        in_backward = torch._C._current_graph_task_id() != -1  # of autograd
        down = operation == "send" and any(hop.dst < hop.src for hop in hops)  # a pipeline's gradients
        direction = "backward" if in_backward or down else "forward"
        site = Site(None, None, direction, operation, phase)
        return self.network.send(hops, message.element_size(), repair=self._repair, group=name, site=site)

    def _is_lossy(self, message: Tensor, elements: int | None = None) -> bool:
        """Return whether `message` may lose packets; `elements` are those of all its pieces together."""
        if not message.is_floating_point() or message.layout != torch.strided:
            return False
        if self.size() == 1 or self.network.suspended:
            return False
        elements = message.numel() if elements is None else elements
        return self.network.wire.num_packets(elements, message.element_size()) > 1


def _forward(name: str) -> Callable:
    def method(self: LossyProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.wrapped, name)(*args, **kwargs)

    return method


FORWARDED = ("barrier", "broadcast", "gather", "monitored_barrier", "recv", "recv_anysource", "reduce", "scatter")
OF_THE_BACKENDS = ("_get_backend", "_get_sequence_number_for_group", "_set_sequence_number_for_group")
for _name in (*FORWARDED, *OF_THE_BACKENDS, "abort", "shutdown"):
    setattr(LossyProcessGroup, _name, _forward(_name))

# PyTorch's C++ code calls these methods, also in compiled programs. The compiler must not trace them as user code.
for _name, _method in list(vars(LossyProcessGroup).items()):
    if inspect.isfunction(_method) and _name != "__init__":
        setattr(LossyProcessGroup, _name, _disable_dynamo(_method))

# older names of the same operations
LossyProcessGroup._allgather_base = LossyProcessGroup.all_gather_single  # type: ignore[assignment]
LossyProcessGroup._reduce_scatter_base = LossyProcessGroup.reduce_scatter_single  # type: ignore[assignment]
LossyProcessGroup.allgather_into_tensor_coalesced = LossyProcessGroup.all_gather_single_coalesced  # type: ignore[assignment]
LossyProcessGroup.reduce_scatter_tensor_coalesced = LossyProcessGroup.reduce_scatter_single_coalesced  # type: ignore[assignment]
LossyProcessGroup.alltoall_base = LossyProcessGroup.all_to_all_single  # type: ignore[assignment]


def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """Do what PyTorch's function of this name does. That one refuses every backend but "gloo", by its name."""
    lossy: Any = dist.group.WORLD if group is None else group
    if isinstance(lossy, LossyProcessGroup):
        timeout = timeout or lossy._get_backend(torch.device("cpu")).options._timeout
        lossy.wrapped.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)  # type: ignore[attr-defined]
    else:
        _monitored_barrier(group, timeout, wait_all_ranks)


_monitored_barrier = dist.monitored_barrier
dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = monitored_barrier


def _check_equal(operation: str, pieces: list[Tensor]) -> None:
    sizes = {piece.numel() for piece in pieces}
    if len(sizes) > 1:
        raise ValueError(f"{operation} of pieces of {sorted(sizes)} elements: give pieces of one size")


def _bounds(counts: Iterable[int]) -> list[tuple[int, int]]:
    """Return [start, stop) of consecutive pieces with these numbers of elements."""
    stops = list(itertools.accumulate(counts))
    return list(zip([0, *stops], stops, strict=False))
