"""Models whose weights are drawn when they are needed, a layer at a time: no process ever holds the whole model.

A deferred model has the shapes on the meta device, and a record of how each weight is drawn. `parallelize`, `FlatFSDP`
and FSDP2 draw a layer, keep this process's shard and drop the rest. So the shards are, to the last bit, parts of the
dense model of the same seed, and differ from rank to rank. Each process draws every weight that it shards.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Model = TypeVar("Model", bound=nn.Module)


class _Change(NamedTuple):
    """An operation that writes to a weight, or to a part of it."""

    operation: Any
    part: tuple[Any, ...]  # size, stride and offset of what it writes to
    random_state: Tensor | None  # of torch's generator before it; None if it draws nothing
    arguments: tuple
    named: dict[str, Any]


class _Record(TorchDispatchMode):
    """Write down what changes tensors on the meta device, and draw their random numbers as for real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: dict[int, list[_Change]] = {}  # by the address of the storage
        self._written: list[Tensor] = []  # kept, so that no other storage comes to an address in `changes`

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        named = kwargs or {}
        target = args[0] if args else None
        if not (isinstance(target, Tensor) and target.is_meta and func._schema.is_mutable):
            return func(*args, **named)
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            state = torch.get_rng_state()
            func(torch.empty(target.shape, dtype=target.dtype, device="cpu"), *args[1:], **named)
        part = (target.size(), target.stride(), target.storage_offset())
        change = _Change(func, part, state, args[1:], named)
        self._written.append(target)
        self.changes.setdefault(target.untyped_storage()._cdata, []).append(change)
        return target


def deferred(build: Callable[[], Model]) -> Model:
    """Return the model that `build` returns, with its parameters on the meta device and its buffers as they are.

    torch's generator advances as in building the model itself.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    with patch.object(nn.Module, "register_parameter", register_on_meta), _Record() as record:
        model = build()
    for parameter in model.parameters():
        parameter.changes = record.changes.get(parameter.untyped_storage()._cdata, [])  # type: ignore[attr-defined]
    return model


def draw_(module: nn.Module) -> None:
    """Draw the deferred parameters of a module, on torch's default device."""
    drawn: dict[Any, nn.Parameter] = {}
    for old in [parameter for parameter in module.parameters() if parameter.is_meta]:
        drawn[old] = nn.Parameter(values_of(old).detach().to(torch.get_default_device()), old.requires_grad)
    for owner in module.modules():  # several may share a parameter
        for name, parameter in owner._parameters.items():
            owner._parameters[name] = drawn.get(parameter, parameter)


def values_of(parameter: Tensor) -> Tensor:
    """Return the values of a parameter, drawn now if it is deferred; torch's generator does not advance.

    Raises:
        ValueError: if it is on the meta device and `deferred` did not put it there.
    """
    if not parameter.is_meta:
        return parameter
    if not hasattr(parameter, "changes"):
        raise ValueError("a parameter is on the meta device, and how to draw it is not known: build with deferred()")
    values = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")  # whose generator the record is of
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for change in parameter.changes:
            if change.random_state is not None:
                torch.set_rng_state(change.random_state)
            change.operation(values.as_strided(*change.part), *change.arguments, **change.named)
    return values.requires_grad_(parameter.requires_grad)
