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
layers replay their losses instead (`lossytp.parallel.layers`).
"""

import inspect
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # defines the operations
import torch.distributed.nn  # whose signatures would keep the group that exists when they are first read
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
    _register_work,
    _resolve_process_group,
)
from torch._compile import _disable_dynamo
from torch.distributed import Backend, ProcessGroup, ReduceOp, Work

from lossytp.network.checks import check_known, check_names, shown
from lossytp.network.lossy_network import LossyNetwork, Wiring
from lossytp.network.repairs import ZERO, stage_of
from lossytp.network.routes import Hop, Hops, Missing
from lossytp.network.scope import Site
from lossytp.parallel.collectives import Message, settle_
from lossytp.parallel.group import rank_and_world_size, under_torchrun

# Define the handle of running lossy operations, in place of torch's.


class Then(Work):
    """Wait for several operations, then act once, before any caller learns that they are complete.

    PyTorch's C++ code may keep only the C++ half of this object, which cannot wait without the Python half. So `alive`
    holds the handle until a caller has waited for it.

    Args:
        works: the operations.
        actions: functions to call, in order, once all operations are complete.
        alive: the set of handles that must stay alive; this one is added.
    """

    def __init__(self, works: Sequence[Work], actions: Sequence[Callable[[], None]], alive: set[Work]) -> None:
        super().__init__()
        self._works = works
        self._actions = actions
        self._lock = threading.Lock()  # a future may complete on a thread of the backend's
        self._complete = False
        self._alive = alive
        alive.add(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        waited = [work.wait(timeout) for work in self._works]  # wait for each, even if one is not complete
        self._complete = all(waited)
        self._act()
        return self._complete

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        def act(future: Any) -> list[Tensor]:
            results = [part.value() for part in future.value()]
            self._complete = True  # the operations may report it a little later
            self._act()
            return [tensor for tensors in results for tensor in tensors]

        return torch.futures.collect_all([work.get_future() for work in self._works]).then(act)

    def is_completed(self) -> bool:
        if not self._complete and all(work.is_completed() for work in self._works):
            self._complete = True
            self._act()
        return self._complete

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[Tensor]:
        self.wait()
        return [tensor for work in self._works for tensor in work.result()]

    def _act(self) -> None:
        with self._lock:
            actions, self._actions = self._actions, ()
            for action in actions:
                action()
        self._alive.discard(self)


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


# PyTorch's functional all-gather into a given tensor, over process groups that are written in Python.
#
# PyTorch's own kernel calls a C++ method that Python cannot override, so over the backend `lossy` its message would
# lose nothing. This kernel calls the method of the group, whatever the group is.


_library = torch.library.Library("_c10d_functional", "IMPL")  # the kernels exist as long as this object


def all_gather_into_tensor_out(
    input: Tensor, group_size: int, group_name: str | ProcessGroup, *, out: Tensor
) -> Tensor:
    """Gather the ranks' `input` into `out`; return `out`, which `wait_tensor` completes."""
    group = group_name if isinstance(group_name, ProcessGroup) else _resolve_process_group(group_name)  # type: ignore[arg-type]
    options = AllgatherOptions()
    options.asyncOp = True
    _register_work(out, group.all_gather_single(out, input, options))
    return out


for _device in ("CPU", "CUDA"):
    _library.impl("all_gather_into_tensor_out", all_gather_into_tensor_out, _device)


# Start torch.distributed over a lossy network, from the variables that torchrun sets.
#
# Each error is one line that names the variable or the port, and the fix.


TIMEOUT_S = 1800.0  # PyTorch's own for gloo
SILENT_S = 5.0  # of waiting before a rank says for whom
BACKENDS = ("gloo", "nccl", "auto")


@dataclass
class _Settings:
    """The settings of the backend's groups: one instance per process, as torch.distributed has one world."""

    network: LossyNetwork
    wraps: str
    wiring: Wiring


_settings: _Settings | None = None


def init_process_group(
    network: LossyNetwork,
    *,
    wraps: str = "gloo",
    timeout_s: float = TIMEOUT_S,
    compared: Mapping[str, Any] | None = None,
    **settings: Any,
) -> None:
    """Initialise torch.distributed with the backend `lossy`, for sub-groups and meshes too.

    Args:
        network: the network, with the same seed, loss processes and wire on every rank.
        wraps: "gloo" (CPU and CUDA tensors), "nccl" (CUDA tensors, one rank per GPU; gloo carries CPU tensors), or
            "auto": NCCL if each rank has a GPU of its own, else gloo, the same on all ranks.
        timeout_s: seconds to wait for the other ranks, at the start and in each collective.
        compared: more settings that must be equal on all ranks, as JSON can hold them.
        settings: `algorithm`, `repair` and `reliable_gather` of every operation, as in `Wiring.named`. With
            `reliable_gather=False`, each rank's result of an all-reduce loses packets too. This has no effect with
            "sender", whose sum reaches all ranks.

    Raises:
        ValueError: if torchrun did not start this process, a variable is missing or wrong, the port is in use, not all
            ranks join, their settings differ, a name is unknown, or torch.distributed is already initialised.
    """
    global _settings
    check_known("wraps", wraps, BACKENDS)
    wiring = backend_wiring(**settings)
    if not under_torchrun():
        raise ValueError(
            "torch.distributed needs several processes: start with torchrun --standalone --nproc_per_node 2"
        )
    if dist.is_initialized():
        raise ValueError("torch.distributed is initialised already: call destroy_process_group() first")
    rank, world = rank_and_world_size()
    device = this_device(rank)
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" and wraps == "auto" else ""
    names = {"algorithm": wiring.algorithm.name, "repair": str(wiring.repair), "wraps": wraps, "device": device.type}
    told = {**(compared or {}), **names, "reliable_gather": wiring.reliable_gather, "timeout_s": timeout_s, "gpu": gpu}
    told |= {"seed": network.seed, **network.state_dict()["settings"], "WORLD_SIZE": world}
    _settings = _Settings(network, wraps, wiring)
    store = _join(rank, world, timeout_s)
    everyone = _told_by_all(store, rank, world, told, timeout_s)
    if wraps == "auto":
        _settings.wraps = backend_for([theirs["gpu"] for theirs in everyone])
    if wraps != "gloo" and device.type == "cuda":
        torch.cuda.set_device(device)
    Backend.register_backend("lossy", _make_group, extended_api=True, devices=["cpu", "cuda"])
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group("lossy", store=store, rank=rank, world_size=world, timeout=limit)
    dist.monitored_barrier()  # gloo fails on a rank that still connects when another one leaves


def backend_for(gpus: Sequence[str]) -> str:
    """Return "nccl" if each rank's GPU, known by its UUID, is its own, else "gloo": NCCL refuses two ranks on one."""
    return "nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "gloo"


def wrapped_backend() -> str | None:
    """Return the backend that carries this process's messages, or None if it has joined no others."""
    return _settings.wraps if _settings is not None and dist.is_initialized() else None


def this_device(rank: int) -> torch.device:
    """Return this process's GPU, shared if it sees fewer GPUs than its local rank needs, or the CPU."""
    visible = torch.cuda.device_count()
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % visible) if visible else torch.device("cpu")


def backend_wiring(*, reliable_gather: bool = True, **names: str) -> Wiring:
    """Return the wiring of every operation of the backend, given the names of its `algorithm` and `repair`.

    "sender" has no gather that could lose packets.
    """
    check_names(names, ("algorithm", "repair"))
    wiring = Wiring.named(**names)
    return replace(wiring, reliable_gather=reliable_gather or wiring.algorithm.sum_reaches_all)


def joined() -> bool:
    """Return whether this process has begun to join others over a lossy network."""
    return _settings is not None


@contextmanager
def reliable() -> Iterator[None]:
    """Lose nothing over the backend `lossy` within the block, and advance no link. Every rank must enter it.

    Raises:
        ValueError: before `init_process_group`, or after `destroy_process_group`.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    if not isinstance(world, LossyProcessGroup):
        raise ValueError("no lossy process group is running: call init_process_group first, or use network.reliable()")
    with world.network.reliable():
        yield


def _join(rank: int, world: int, timeout_s: float) -> Store:
    """Return the store through which the ranks find each other; torchrun's agent keeps one for all joins of a job."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:  # TCPStore would try for a long time, and fail with many lines
        socket.getaddrinfo(host, port)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"MASTER_ADDR = {host!r} names no machine ({error}): give the name or address of rank 0's machine"
        ) from error
    is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not is_host:
        fix = "start it, or correct MASTER_ADDR or MASTER_PORT"
        _wait_until(partial(_answers, host, port), f"rank {rank} waits for rank 0 at {host}:{port}", timeout_s, fix)
    try:
        store = TCPStore(host, port, world, is_host, timedelta(seconds=timeout_s), wait_for_workers=False)
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error) and "address already in use" not in str(error).lower():
            raise
        message = f"MASTER_PORT = {port} is in use on {host}: choose another, the same for all ranks"
        raise ValueError(message) from error
    return PrefixStore(f"lossytp/{store.add(f'joins of {rank}', 1)}", store)


def _answers(host: str, port: int) -> bool:
    """Return whether something listens there. A connection to a free port of this machine may meet itself."""
    try:
        with socket.create_connection((host, port), SILENT_S) as probe:
            return probe.getsockname() != probe.getpeername()
    except OSError:
        return False


def _told_by_all(store: Store, rank: int, world: int, mine: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    """Return what each rank tells. Raise ValueError if one does not come, or tells something else, but for its gpu."""
    store.set(f"told by {rank}", json.dumps(mine))
    everyone: list[dict[str, Any]] = []
    try:
        for other in range(world):
            key, waiting = f"told by {other}", f"rank {rank} waits for rank {other} of {world}"
            _wait_until(partial(store.check, [key]), waiting, timeout_s, "start it, or correct WORLD_SIZE")
            everyone.append(json.loads(store.get(key)))
            for name in {**everyone[0], **everyone[other]}:
                first, theirs = (everyone[number].get(name) for number in (0, other))
                if first != theirs and name != "gpu":
                    raise ValueError(
                        f"{name} = {shown(first)} on rank 0 and {shown(theirs)} on rank {other}: start all processes "
                        "of a job alike"
                    )
    except ValueError:
        store.set(f"{rank} knows", "")
        if rank == 0:  # its store must not end before the others know, too
            with suppress(ValueError):
                all_know = partial(store.check, [f"{number} knows" for number in range(world)])
                _wait_until(all_know, "", min(timeout_s, SILENT_S), "")
        raise
    return everyone


def _wait_until(ready: Callable[[], bool], waiting: str, timeout_s: float, fix: str) -> None:
    """Wait until `ready`. After some seconds, say who is `waiting` for whom; at last, raise ValueError."""
    started, told = time.monotonic(), False
    while not ready():
        waited = time.monotonic() - started
        if waited > timeout_s:
            raise ValueError(f"{waiting}, in vain for timeout_s = {timeout_s:g} seconds: {fix}")
        if waited > SILENT_S and not told:
            told = True
            print(f"{waiting}, for timeout_s = {timeout_s:g} seconds at most", file=sys.stderr, flush=True)
        time.sleep(0.02)


def _make_group(options: Any, _: Any) -> LossyProcessGroup:
    """Make a lossy group for torch.distributed, around a plain one of the same ranks."""
    assert _settings is not None
    rank, size = options.group_rank, options.group_size
    wrapped = ProcessGroup(options.store, rank, size)
    gloo: Any = ProcessGroupGloo(options.store, rank, size, options.timeout)
    backends = {"cpu": (ProcessGroup.BackendType.GLOO, gloo), "cuda": (ProcessGroup.BackendType.GLOO, gloo)}
    if _settings.wraps == "nccl":
        settings: Any = dist.ProcessGroupNCCL.Options()
        settings._timeout = options.timeout
        store = PrefixStore("nccl", options.store)  # gloo uses the store's other keys
        nccl: Any = dist.ProcessGroupNCCL(store, rank, size, settings)
        backends["cuda"] = (ProcessGroup.BackendType.NCCL, nccl)
    for device, (kind, backend) in backends.items():
        backend._set_sequence_number_for_group()
        wrapped._register_backend(torch.device(device), kind, backend)
    wrapped._set_default_backend(backends["cuda"][0])
    return LossyProcessGroup(
        wrapped,
        name=options.group_id,
        ranks=options.global_ranks_in_group or range(size),  # torch leaves it empty for the default group
        network=_settings.network,
        wiring=_settings.wiring,
    )
