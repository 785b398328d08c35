"""The process group of the backend `lossy`: any PyTorch parallelism over a network that loses packets.

A `LossyProcessGroup` passes every operation on to the group that it wraps (gloo or NCCL), and removes from the messages
what the network loses. All-gathers, all-to-alls, sends, and the sums and averages of all-reduces and reduce-scatters
lose packets if their message is dense, floating-point and longer than one packet. Everything else is reliable: MAX,
MIN, integers, complex numbers, sparse tensors, objects, broadcasts, barriers, smaller messages, and everything within
`LossyNetwork.reliable()`. `OPERATIONS` lists what carries each operation.

Every rank of a group knows the routes of a collective, and advances the same links. Only the sender knows the routes of
a send or an all-to-all, so these have their own streams, which only the sender advances. Collectives that activation
checkpointing repeats draw new losses. This project's own layers replay theirs (`lossytp.parallel.layers`).
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # defines the operations
import torch.distributed.nn  # whose signatures would keep the group that exists when they are first read
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, _register_work, _resolve_process_group
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup, ReduceOp, Work

from lossytp.network.lossy_network import CommConfig, LossyNetwork
from lossytp.network.repairs import ZERO
from lossytp.network.routes import Hop, Hops, Routes
from lossytp.network.scope import Site
from lossytp.parallel.collectives import Message, apply_losses_

Action = Callable[[], None]


class Then(Work):
    """Wait for several operations, then act once, before any caller learns that they are complete.

    PyTorch's C++ code may keep only the C++ half of this object, which cannot wait without the Python half. So `alive`
    holds the handle until a caller has waited for it.
    """

    def __init__(self, works: Sequence[Work], actions: Sequence[Action], alive: set[Work]) -> None:
        super().__init__()
        self._works, self._actions, self._alive = works, actions, alive
        self._lock = threading.Lock()  # a future may complete on a thread of the backend's
        self._complete = False
        alive.add(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        waited = [work.wait(timeout) for work in self._works]  # wait for each, even if one is not complete
        return self._act() if all(waited) else False

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        def act(future: Any) -> list[Tensor]:
            results = [part.value() for part in future.value()]
            self._act()  # the operations may report a little later that they are complete
            return [tensor for tensors in results for tensor in tensors]

        return torch.futures.collect_all([work.get_future() for work in self._works]).then(act)

    def is_completed(self) -> bool:
        return self._complete or (all(work.is_completed() for work in self._works) and self._act())

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[Tensor]:
        self.wait()
        return [tensor for work in self._works for tensor in work.result()]

    def _act(self) -> bool:
        with self._lock:
            actions, self._actions = self._actions, ()
            for action in actions:
                action()
        self._alive.discard(self)
        self._complete = True
        return True


class LossyProcessGroup(ProcessGroup):
    """Carry the messages of `wrapped` over `network`.

    `init_process_group` makes one, and PyTorch makes others for sub-groups and meshes.

    Args:
        wrapped: the plain `ProcessGroup` that carries the messages.
        name: PyTorch's name of the group. The name and the first rank select the group's streams.
        ranks: global ranks, by position in the group.
        network: the network, with the same seed and loss processes on every rank.
        comm: algorithm, repair and reliable_gather of every operation. "local" leaves zero in an all-gather, where no
            rank has its own part.
    """

    def __init__(
        self, wrapped: ProcessGroup, *, name: str, ranks: Sequence[int], network: LossyNetwork, comm: CommConfig
    ) -> None:
        super().__init__(wrapped.rank(), wrapped.size())  # type: ignore[call-arg]
        self.wrapped, self.network, self.ranks = wrapped, network, tuple(ranks)
        self._c10d_name = name
        self._routes, self._repair = comm.algorithm, comm.repair
        self._reliable_gather = comm.reliable_gather
        self._under_way: set[Work] = set()

    def getBackendName(self) -> str:
        return "lossy"

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._c10d_name

    pg_name = group_name

    @property
    def _device_types(self) -> list[torch.device]:
        """Return the devices of the wrapped backends, which PyTorch's state dicts and object collectives ask for."""
        return self.wrapped._device_types

    # How each kind of operation loses packets. `carry` is the wrapped group's method of the same name and arguments.

    def _all_reduce(self, carry: Callable, tensors: list[Tensor], *options: Any) -> Work:
        """Take lost packets out of a rank's own part before it is sent and, in a lossy gather, out of the result."""
        lossy = [[tensor] for tensor in tensors if self._is_lossy([tensor])] if _adds(options) else []
        keeps = self._repair.uses_own_part and not self._reliable_gather
        own = [message[0].clone() if keeps else None for message in lossy]
        for message in lossy:
            self._drawn(message, self._routes.reduce, "all_reduce", "reduce")()
        arrivals = [
            self._drawn(message, self._routes.gather, "all_reduce", "gather", part)
            for message, part in zip(lossy, own, strict=True)
            if not self._reliable_gather
        ]
        return self._then([carry(tensors, *options)], arrivals)

    def _reduce_scatter(self, carry: Callable, output: Any, input: Any, *options: Any) -> Work:
        if _adds(options):
            copy = partial(self._copied, routes=self._routes.reduce_scatter, operation="reduce_scatter", phase="reduce")
            input = copy([input])[0] if isinstance(input, Tensor) else [copy(pieces) for pieces in input]
        return carry(output, input, *options)

    def _all_gather(self, carry: Callable, output: Any, input: Any, *options: Any) -> Work:
        """Take lost packets out of what arrives, different ones on every rank."""
        arrivals = [
            self._drawn(message, self._routes.all_gather, "all_gather", "gather")
            for message in ([[output]] if isinstance(output, Tensor) else output)
            if self._is_lossy(message)
        ]
        return self._then([carry(output, input, *options)], arrivals)

    def _all_to_all(self, carry: Callable, outputs: list[Tensor], inputs: list[Tensor], *options: Any) -> Work:
        return carry(outputs, self._lack(inputs, "all_to_all", [piece.numel() for piece in inputs]), *options)

    def _all_to_all_single(
        self, carry: Callable, output: Tensor, input: Tensor, to: list[int], of: list[int], *options: Any
    ) -> Work:
        row = input[0].numel() if len(input) else 0
        counts = [rows * row for rows in of or [len(input) // self.size()] * self.size()]
        return carry(output, *self._lack([input], "all_to_all", counts), to, of, *options)

    def _send(self, carry: Callable, tensors: list[Tensor], dst: int, tag: int = 0) -> Work:
        counts = [[tensor.numel() * (position == dst) for position in range(self.size())] for tensor in tensors]
        lost = [self._lack([tensor], "send", each)[0] for tensor, each in zip(tensors, counts, strict=True)]
        return carry(lost, dst, tag)

    def _forward(self, carry: Callable, *args: Any, **named: Any) -> Any:
        return carry(*args, **named)

    def _one_by_one(self, name: str, outputs: Iterable, inputs: Iterable, *options: Any) -> Work:
        """Carry a coalesced operation, which gloo does not have, as several."""
        single = getattr(self, name)
        return self._then([single(*pair, *options) for pair in zip(outputs, inputs, strict=True)])

    def _lists_one_by_one(self, _: Callable, outputs: list, inputs: list[Tensor], *options: Any) -> Work:
        """Gather several inputs at once: rank r's i-th input goes to `outputs[r][i]`."""
        each = [[list(pieces)] for pieces in zip(*outputs, strict=True)]
        return self._one_by_one("allgather", each, [[input] for input in inputs], *options)

    def _lack(self, pieces: list[Tensor], operation: str, counts: Sequence[int]) -> list[Tensor]:
        """Return copies that lack what is lost on the way to each position, of which `counts` elements go there."""
        me, stops = self.rank(), list(itertools.accumulate(counts))
        hops = tuple(
            Hop(self.ranks[me], rank, stop - count, stop, (me,))
            for position, (rank, count, stop) in enumerate(zip(self.ranks, counts, stops, strict=True))
            if position != me and count
        )
        return self._copied(pieces, lambda *_: hops, operation, "gather")

    def _copied(self, pieces: list[Tensor], routes: Callable, operation: str, phase: str) -> list[Tensor]:
        """Return copies of a message's pieces that lack what the network loses. Autograd may need the originals."""
        if not self._is_lossy(pieces):
            return pieces
        copies = [piece.detach().clone(memory_format=torch.contiguous_format) for piece in pieces]
        self._drawn(copies, routes, operation, phase)()
        return copies

    def _drawn(
        self, pieces: list[Tensor], routes: Routes, operation: str, phase: str, own: Tensor | None = None
    ) -> Action:
        """Draw now what a message loses; return the function that takes it out of the message's pieces.

        Raises:
            ValueError: if the repair does not work here, or the pieces of a collective are of several sizes.
        """
        sizes, itemsize, me = [piece.numel() for piece in pieces], pieces[0].element_size(), self.rank()
        hops, one_sided = routes(sum(sizes), self.ranks, 1), operation in ("all_to_all", "send")
        if len(set(sizes)) > 1 and not one_sided:
            raise ValueError(f"{operation} of pieces of {sorted(set(sizes))} elements: give pieces of one size")
        self._check_repair(hops, phase)
        in_backward = torch._C._current_graph_task_id() != -1  # of autograd
        down = operation == "send" and any(hop.dst < hop.src for hop in hops)  # a pipeline's gradients
        site = Site(None, None, "backward" if in_backward or down else "forward", operation, phase)
        name = f"{self._c10d_name}@{self.ranks[0]}" + (f" from {self.ranks[me]}" if one_sided else "")
        missing = self.network.send(hops, itemsize, repair=self._repair, group=name, site=site)
        capacity = self.network.wire.elements_per_packet(itemsize)

        def lose() -> None:
            parts = [piece.detach().reshape(-1) for piece in pieces]  # copies where pieces do not lie in order
            flat_1N = (torch.cat(parts) if len(parts) > 1 else parts[0])[None]
            own_1N = None if own is None else own.detach().reshape(1, -1)
            if phase == "reduce" and self._repair.uses_own_part:
                own_1N = flat_1N.clone()
            sent = (flat_1N, (me,), self.ranks, hops, missing, self.network, capacity, self._repair)
            apply_losses_(Message(*sent, in_gather=phase == "gather", own_LN=own_1N))
            if len(pieces) > 1 or not pieces[0].is_contiguous():
                for piece, part in zip(pieces, flat_1N[0].split(sizes), strict=True):
                    piece.detach().copy_(part.view(piece.shape))  # which autograd must not record

        return lose

    def _check_repair(self, hops: Hops, phase: str) -> None:
        select, reason, fix = self._repair.part("select"), "", "choose another"
        if self._repair.remembers:
            reason = ", which does not know which message follows which"
        elif self._repair.knows_model:
            reason = ", which does not know a message's tokens and layer"
        elif select != ZERO and phase == "reduce" and any(len(hop.positions) > 1 for hop in hops):
            reason = f" with algorithm = {self._routes.name!r}, whose packets carry sums that no single process knows"
            fix = "choose direct or sender, or another repair"
        if reason:
            raise ValueError(f"repair = '{self._repair}' does not work over the backend{reason}: {fix}")

    def _is_lossy(self, pieces: list[Tensor]) -> bool:
        """Return whether a message, in pieces, may lose packets."""
        if not pieces[0].is_floating_point() or pieces[0].layout != torch.strided:
            return False
        if self.size() == 1 or self.network.suspended:
            return False
        return self.network.wire.num_packets(sum(piece.numel() for piece in pieces), pieces[0].element_size()) > 1

    def _then(self, works: list[Work], arrivals: Sequence[Action] = ()) -> Work:
        # a single operation without arrivals keeps its own handle, for which PyTorch's C++ code can wait
        return Then(works, arrivals, self._under_way) if arrivals or len(works) > 1 else works[0]


def _adds(options: Sequence[Any]) -> bool:
    return not options or options[0].reduceOp.op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM)


def _each(name: str) -> Callable:
    return lambda group, _, outputs, inputs, *options: group._one_by_one(name, outputs, inputs, *options)


RELIABLE = ("barrier", "broadcast", "gather", "monitored_barrier", "recv", "recv_anysource", "reduce", "scatter")
OF_THE_BACKENDS = ("_get_backend", "_get_sequence_number_for_group", "_set_sequence_number_for_group")
OF_THE_GROUP = ("abort", "get_group_store", "shutdown")
OPERATIONS: dict[str, Callable] = {
    "allreduce": LossyProcessGroup._all_reduce,
    "allreduce_coalesced": LossyProcessGroup._all_reduce,
    "reduce_scatter": LossyProcessGroup._reduce_scatter,
    "reduce_scatter_single": LossyProcessGroup._reduce_scatter,
    "reduce_scatter_single_coalesced": _each("reduce_scatter_single"),
    "allgather": LossyProcessGroup._all_gather,
    "allgather_coalesced": LossyProcessGroup._lists_one_by_one,
    "all_gather_single": LossyProcessGroup._all_gather,
    "all_gather_single_coalesced": _each("all_gather_single"),
    "alltoall": LossyProcessGroup._all_to_all,
    "all_to_all_single": LossyProcessGroup._all_to_all_single,
    "send": LossyProcessGroup._send,
    **dict.fromkeys((*RELIABLE, *OF_THE_BACKENDS, *OF_THE_GROUP), LossyProcessGroup._forward),
}
OLDER_NAMES = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}


def _method(name: str) -> Callable:
    """Return the method of this name, which compiled programs must not trace: PyTorch's C++ code calls it."""

    def method(self: LossyProcessGroup, *args: Any, **named: Any) -> Any:
        return OPERATIONS[name](self, getattr(self.wrapped, name), *args, **named)

    return _disable_dynamo(method)


for _name in OPERATIONS:
    setattr(LossyProcessGroup, _name, _method(_name))
for _older, _name in OLDER_NAMES.items():
    setattr(LossyProcessGroup, _older, getattr(LossyProcessGroup, _name))


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


def all_gather_into_tensor_out(
    input: Tensor, group_size: int, group_name: str | ProcessGroup, *, out: Tensor
) -> Tensor:
    """Gather the ranks' `input` into `out`; return `out`, which `wait_tensor` completes.

    PyTorch's own kernel calls a C++ method that Python cannot override, so over the backend `lossy` its message would
    lose nothing. This kernel calls the method of the group, whatever the group is.
    """
    group = group_name if isinstance(group_name, ProcessGroup) else _resolve_process_group(group_name)  # type: ignore[arg-type]
    options = AllgatherOptions()
    options.asyncOp = True
    _register_work(out, group.all_gather_single(out, input, options))
    return out


_library = torch.library.Library("_c10d_functional", "IMPL")  # the kernels exist as long as this object
for _device in ("CPU", "CUDA"):
    _library.impl("all_gather_into_tensor_out", all_gather_into_tensor_out, _device)
