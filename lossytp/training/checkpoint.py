"""Save an unfinished run's state, so that the same command resumes it as if it had never been stopped.

Every process writes its own file, named after the step. Once all files are there, the first process replaces a marker
that names the step. So the marker always names whole files, whenever processes are killed.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lossytp.network.lossy_network import LossyNetwork
from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.layout import Layout
from lossytp.parallel.replicas import gathered, local, on_rank_zero
from lossytp.training.config import RunSettings
from lossytp.training.files import check_whole, saving
from lossytp.training.own_files import claim, is_marked, mark, others, refuse, remove, remove_parts
from lossytp.training.record import write_atomically

FOLDER, MARKER = "checkpoint", "step.json"
FILES = (MARKER, "step-*.rank-*.pt")
ADAMW = {"step", "exp_avg", "exp_avg_sq"}  # its state for each parameter
NAME = re.compile(r"step-\d+\.rank-\d+\.pt|\.step\.json\.\d+")
STATE = (
    "parameters",
    "optimizer",
    "scaler",
    "random",
    "random_cuda",
    "network",
    "memories",
)  # keys of `training_state`


class Checkpoints:
    """Save and load a run's checkpoints, and keep the last one. All processes must call each method."""

    def __init__(self, config: RunSettings, layout: Layout, network: LossyNetwork) -> None:
        self._config, self._network = config, network
        self._rank, self._processes = layout.rank, layout.world_size
        self.folder = Path(config.output_dir) / FOLDER

    def check(self) -> None:
        """Raise ValueError if the checkpoints' folder holds the user's files."""
        on_rank_zero(self._check, self._network)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Save this process's `state` after `step`: tensors and JSON values.

        Raises:
            ValueError: if it cannot be written; the previous checkpoint stays.
        """
        claim(self.folder, FILES)
        gathered(None, self._network)  # all processes look for the user's files before any process writes its own
        path = self._path(step)
        with saving(path):
            try:
                with path.open("wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())
            except Exception:
                path.unlink(missing_ok=True)
                raise
        gathered(None, self._network)  # wait for the files of all processes
        marker = {"step": step, "processes": self._processes, "config": self._config.result_settings()}
        on_rank_zero(lambda: write_atomically(self.folder / MARKER, json.dumps(marker)), self._network)
        for older in self.folder.glob(f"step-*.rank-{self._rank}.pt"):
            if older != path:
                older.unlink()

    def load(self, plain: tuple[str, ...]) -> dict[str, Any] | None:
        """Return this process's last state, on the CPU, or None if there is none.

        Args:
            plain: names that the state's JSON entry "plain" must have.

        Raises:
            ValueError: if the state is of another configuration or number of processes, a file is damaged, or the
                state lacks a name of `STATE` or `plain`.
        """
        source = on_rank_zero(self._source, self._network)
        step = on_rank_zero(lambda: self._step(source), self._network)
        if step is None:
            return None
        path = self._path(step, source)
        try:
            check_whole(path)
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            kept = json.loads(state["plain"])
            lacking = [*(name for name in STATE if name not in state), *(name for name in plain if name not in kept)]
            if lacking:
                raise ValueError(f"it lacks {', '.join(lacking)}")
        except Exception as error:
            reason = " ".join(str(error).split())[:100]
            raise ValueError(f"{path} cannot be read ({reason}): delete {source} to start over") from error
        return state

    def remove(self) -> None:
        """Delete the checkpoints of a finished run, which needs none."""
        remove(self.folder)

    def _check(self) -> None:
        if is_marked(self.folder):
            remove_parts(self.folder, FILES)
            return
        found = others(self.folder)
        if self.folder / MARKER in found and all(_is_checkpoint(path) for path in found):
            mark(self.folder, FILES)  # an older version wrote them, which did not mark its folders
        else:
            refuse(found)

    def _source(self) -> Path:
        """Return the folder to resume from: of the newest checkpoint below `checkpoint_path`, else this run's own."""
        given = self._config.checkpoint_path
        if given is None:
            return self.folder
        if not Path(given).exists():
            raise ValueError(f"checkpoint_path = {given!r} does not exist: leave it out to start over")
        path = Path(given)
        found = [path] if path.is_file() else sorted(path.rglob(MARKER), key=lambda file: file.stat().st_mtime)
        if not found:
            raise ValueError(f"checkpoint_path = {given!r} has no {MARKER} below it: leave it out to start over")
        return found[-1].parent

    def _step(self, source: Path) -> int | None:
        path = source / MARKER
        try:
            marker = json.loads(path.read_text(encoding="utf-8"))
            step, processes = int(marker["step"]), marker["processes"]
            changed = self._config.differences({**self._config.result_defaults(), **marker["config"]})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged: delete {source} to start over") from error
        if changed:
            raise ValueError(
                f"{source} belongs to an unfinished run with different {', '.join(changed)}: give another "
                "output_dir, or delete it to start over"
            )
        if processes != self._processes:
            raise ValueError(
                f"{source} belongs to a run on {processes} processes, not {self._processes}: start {processes}, "
                "or delete it to start over"
            )
        return step

    def _path(self, step: int, folder: Path | None = None) -> Path:
        return (folder or self.folder) / f"step-{step}.rank-{self._rank}.pt"


def _is_checkpoint(path: Path) -> bool:
    """Return whether an unmarked file has a checkpoint's name, or is a marker by name and content."""
    if path.name != MARKER:
        return path.is_file() and NAME.fullmatch(path.name) is not None
    try:
        return {"step", "processes", "config"} <= json.loads(path.read_text(encoding="utf-8")).keys()
    except (OSError, ValueError, AttributeError):
        return False


def training_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, network: LossyNetwork
) -> dict[str, Any]:
    """Return all state of this process that a training step changes, with tensors on the CPU.

    The learning rate and the order of the data are not in it: they depend only on the step.
    """
    collective = _collective(module)
    return {
        "parameters": {name: _on_cpu(tensor) for name, tensor in _tensors(module).items()},
        "optimizer": [
            {name: _on_cpu(value) for name, value in optimizer.state.get(parameter, {}).items()}
            for parameter in _optimized(optimizer)
        ],
        "scaler": scaler.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "network": json.dumps(network.state_dict()),
        "memories": collective.memories_state() if collective is not None else [],
    }


def restore_(
    state: dict[str, Any],
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    network: LossyNetwork,
) -> None:
    """Restore the state that `training_state` returned.

    Raises:
        ValueError: if the state is damaged or of another model. Part of it may then be restored already.
    """
    try:
        _check_fits(state, module, optimizer)
        _restore_(state, module, optimizer, scaler, network)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a state that another program wrote can raise anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"the checkpoint does not belong to this run ({reason})") from error


def _check_fits(state: dict[str, Any], module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if the tensors' names or shapes differ from the model's."""
    kept = state["parameters"]
    expected = {name: local(tensor).shape for name, tensor in _tensors(module).items()}
    apart = sorted(expected.keys() ^ kept.keys())
    if apart:
        raise ValueError(f"{apart[0]} is {'missing' if apart[0] in expected else 'unknown'}")
    for name, shape in expected.items():
        if kept[name].shape != shape:
            raise ValueError(f"{name} has shape {tuple(kept[name].shape)}, not {tuple(shape)}")
    for number, (parameter, values) in enumerate(zip(_optimized(optimizer), state["optimizer"], strict=True)):
        if values and values.keys() != ADAMW:
            raise ValueError(f"parameter {number} has {', '.join(values)}, not {', '.join(sorted(ADAMW))}")
        for name, value in values.items():
            if isinstance(value, Tensor) and value.ndim and value.shape != local(parameter).shape:
                raise ValueError(f"{name} of parameter {number} has shape {tuple(value.shape)}")


def _restore_(
    state: dict[str, Any],
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    network: LossyNetwork,
) -> None:
    collective = _collective(module)
    with torch.no_grad():
        for name, tensor in _tensors(module).items():
            local(tensor).copy_(state["parameters"][name])
    for parameter, values in zip(_optimized(optimizer), state["optimizer"], strict=True):
        if values:
            optimizer.state[parameter] = {name: _as_for(parameter, name, value) for name, value in values.items()}
    scaler.load_state_dict(state["scaler"])
    torch.set_rng_state(state["random"])
    if torch.cuda.is_available() and state["random_cuda"] is not None:
        torch.cuda.set_rng_state(state["random_cuda"])
    network.load_state_dict(json.loads(state["network"]))
    if collective is not None:
        collective.load_memories_state(state["memories"], next(module.parameters()).device)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _optimized(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _collective(module: nn.Module) -> LossyCollective | None:
    """Return the collective that all of the project's layers share; None if the model has no such layer."""
    found = (getattr(each, "collective", None) for each in module.modules())
    return next((each for each in found if isinstance(each, LossyCollective)), None)


def _on_cpu(value: Any) -> Any:
    return local(value).detach().cpu() if isinstance(value, Tensor) else value


def _as_for(parameter: nn.Parameter, name: str, value: Any) -> Any:
    """Return an optimizer value on the parameter's device, sharded like the parameter; step counts stay on the CPU."""
    if not isinstance(value, Tensor) or name == "step":
        return value
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        here, shape, stride = value.to(parameter.device), parameter.shape, parameter.stride()
        return DTensor.from_local(here, mesh, placements, run_check=False, shape=shape, stride=stride)
    return value.to(parameter.device)
