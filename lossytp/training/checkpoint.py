"""Save an unfinished run's state, so that the same command resumes it as if it had never been stopped: `resume`.

A checkpoint is a folder `step-N`: a file of each process, and `checkpoint.json`. It is written under another name, and
renamed once it is whole and on the disk. So a run that is killed at any moment harms no earlier checkpoint.

A process's file holds its shards, with their places in the dense model (`lossytp.parallel.shards`), and what it has
alone: its random generator, its links, and what repairs remember. At the layout that wrote a checkpoint, each process
reads its own file, and the run goes on to the last digit. Processes of another layout read all files.
"""

import json
import math
import os
import re
import sys
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.scope import Counters
from lossytp.parallel.collectives import collective_of
from lossytp.parallel.group import Layout
from lossytp.parallel.replicas import gathered, local, on_rank_zero
from lossytp.parallel.shards import FIRST, Part, Shard, assembled, shards
from lossytp.training.config import RunSettings
from lossytp.training.files import first_line, refuse, saving, sync, write_atomically
from lossytp.training.progress import waiting
from lossytp.training.record import check_inputs, sha256_of

if TYPE_CHECKING:
    from lossytp.training.loop import Run

FOLDER, MARKER, VERSION = "checkpoint", "checkpoint.json", 3
STEP = re.compile(r"step-(\d+)")
SIZES = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size")
LAYOUT = (*SIZES, "data_parallel_type", "implementation", "enable_loss_parallelism", "deferred_init")
"""Settings that say how a run is spread over processes. They may change when it is resumed."""
SUFFIXES = (".pth", ".pt")  # of other programs' weights
ENTRIES = ("model", "model_state_dict", "state_dict", "module")  # under which they may lie
WRAPPERS = r"(module\.|_orig_mod\.)+"  # of wrapped and of compiled models


@dataclass
class History:
    """What a run has counted so far, apart from packets at its present layout."""

    losses: list[float] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    real_tokens: int = 0
    best: float = -math.inf
    saved_best: float = -math.inf  # of this output folder; `best` may be of the run that this one goes on from
    since_best: int = 0
    drift: float = 0.0  # replica drift after the last step before an evaluation
    resumed: list[int] = field(default_factory=list)  # steps after which the run was resumed
    earlier_seconds: float = 0.0  # total time of processes that were stopped
    first_weights: dict[str, str] | None = None  # the file of another program's weights that the run began from
    layouts: list[dict[str, Any]] = field(default_factory=list)  # earlier ones, with the steps after which they ended
    earlier_packets: dict[str, list] = field(default_factory=lambda: Counters().state_dict())  # at these layouts


def save(run: "Run", step: int) -> None:
    """Save the state after a step. All processes must call this. If it fails, the previous checkpoint stays."""
    collective, tensors = collective_of(run.engine.module), []
    for parameter, shard in shards(run.engine.module, run.layout):
        values = {"parameter": parameter, **run.optimizer.state.get(parameter, {})}
        tensors.append((shard, {kind: local(each).detach().cpu() for kind, each in values.items()}))
    state = {
        "shards": tensors,
        "scaler": run.scaler.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state(run.device) if run.device.type == "cuda" else None,
        "network": json.dumps(run.network.state_dict()),
        "memories": collective.memories_state() if collective is not None else [],
        "position": run.objective.state_dict(),
        "history": json.dumps({**asdict(run.history), "earlier_seconds": run.total_seconds()}),
        "inputs": {"data": run.objective.sha256, "trace": run.trace_sha256},
    }
    with waiting(f"saving the state after step {step}"):
        run.checkpoints.save(step, state)


def resume(run: "Run") -> None:
    """Go on from the newest checkpoint, at this layout or another; else begin from the weights of `checkpoint_path`.

    The learning rate and the order of the data depend only on the step.

    Raises:
        ValueError: if the checkpoint is of another configuration or of other files, or damaged without an older one.
    """
    checkpoints = run.checkpoints
    found = checkpoints.find()
    if found is None:
        _begin_from_weights(run)
        return
    same = found.layout == checkpoints.layout
    states = [found.state(rank) for rank in ((run.layout.rank,) if same else range(found.layout["processes"]))]
    state, history = states[0], History(**json.loads(states[0]["history"]))
    then = {**state["inputs"], "first_weights": history.first_weights}
    fix = f"put the old file back, or {checkpoints.to_start_over(found.folder)}"
    check_inputs(run.config, then, run.objective.sha256, checkpoints.sources.weights, found.folder, fix)
    run.engine.warm_up(run.objective.batch, run.scaler)
    run.objective.load_state_dict(state["position"], len(history.losses))
    if not same:
        state = _of_another_layout(run, found, states, history)
    _restore_tensors_(run, states, copies=all(found.layout[name] == checkpoints.layout[name] for name in SIZES[:2]))
    run.scaler.load_state_dict(state["scaler"])
    if state["random"] is not None:
        torch.set_rng_state(state["random"])
    if run.device.type == "cuda" and state["random_cuda"] is not None:
        torch.cuda.set_rng_state(state["random_cuda"], run.device)
    run.network.load_state_dict(json.loads(state["network"]))
    collective = collective_of(run.engine.module)
    if collective is not None:
        collective.load_memories_state(state["memories"], run.device)
    if not checkpoints.owns(found.folder):
        history.saved_best = -math.inf
    history.resumed.append(len(history.losses))
    run.history = history


def _restore_tensors_(run: "Run", states: list[dict[str, Any]], *, copies: bool) -> None:
    """Take parameters and AdamW's state from the shards in `states`.

    With `copies`, each copy of a parameter takes its own, if it is there; else all take the first one.
    """
    saved: list[tuple[Shard, dict[str, Tensor]]] = [pair for state in states for pair in state["shards"]]
    for parameter, shard in shards(run.engine.module, run.layout):

        def dense(part: Part, kind: str, replica: int = shard.replica) -> Tensor:
            own = (replica, part.rank)
            copy = own if copies and any(each.has(part.name, own) for each, _ in saved) else FIRST
            held = [(each, tensors[kind]) for each, tensors in saved if each.has(part.name, copy)]
            return assembled(held, part.name, copy)

        shard.take_(local(parameter).detach(), partial(dense, kind="parameter"))
        like = next(tensors for each, tensors in saved if shard.parts[0].name in (part.name for part in each.parts))
        for kind, value in like.items():
            if kind == "step":
                run.optimizer.state[parameter][kind] = value.clone()
            elif kind != "parameter":
                moment = run.optimizer.state[parameter][kind] = torch.zeros_like(parameter)
                shard.take_(local(moment).detach(), partial(dense, kind=kind))


def _of_another_layout(run: "Run", found: "Found", states: list[dict[str, Any]], history: History) -> dict[str, Any]:
    """Return what this process has alone, from the states of all processes of another layout.

    Links that are in both layouts go on. What the earlier layout counted goes to the history.
    """
    networks, packets = [json.loads(state["network"]) for state in states], Counters()
    for network in networks:
        packets.merge(counters_of(network["counters"]))
    packets.add_all(counters_of(history.earlier_packets))
    history.earlier_packets = packets.state_dict()
    history.layouts.append({"steps": len(history.losses), **found.layout})
    if run.layout.rank == 0:
        print(
            f"{found.folder} is of another layout ({run.checkpoints.changes(found)}). Links that are in both keep "
            "their states, and others start afresh. Replicas start from the first one's weights.",
            file=sys.stderr,
        )
    merged = {**networks[0], "counters": Counters().state_dict()}
    for kind in ("links", "normals"):
        merged[kind] = list({json.dumps(link): [link, kept] for each in networks for link, kept in each[kind]}.values())
    sizes, number = {name: found.layout[name] for name in SIZES}, len(states)
    ranks = [Layout(**sizes, rank=rank, world_size=number) for rank in range(number)]
    here = run.layout.data_index, run.layout.pipeline_index
    like = [state for state, each in zip(states, ranks, strict=True) if (each.data_index, each.pipeline_index) == here]
    memories: dict[Any, list] = {}
    for state in states if sizes["tensor_parallel_size"] == run.layout.tensor_parallel_size else ():
        for site, memory in state["memories"]:
            memories.setdefault(site and tuple(site), []).extend(memory)
    return {
        "scaler": states[0]["scaler"],
        "random": like[0]["random"] if like else None,  # a new replica goes on with its own
        "random_cuda": like[0]["random_cuda"] if like else None,
        "network": json.dumps(merged),
        "memories": [[site, memory] for site, memory in memories.items()],
    }


def counters_of(state: dict[str, list]) -> Counters:
    """Return the counters with this `state_dict()`."""
    counters = Counters()
    counters.load_state_dict(state)
    return counters


def _begin_from_weights(run: "Run") -> None:
    """Fill the parameters with the weights that another program saved, if `checkpoint_path` names a file of them.

    The optimizer, the data and the learning rate begin anew, because their layout differs from program to program.
    """
    file = run.checkpoints.sources.weights
    if file is None:
        return
    try:
        content: Any = torch.load(file, map_location="cpu", weights_only=True)
        found = next(each for each in (content, *(content.get(name) for name in ENTRIES)) if _is_state_dict(each))
    except Exception as error:
        fix = f"give a state_dict that torch.save wrote, alone or under one of {', '.join(ENTRIES)}"
        raise ValueError(f"{file} cannot be read as weights: {fix}") from error
    weights = {re.sub("^" + WRAPPERS, "", name): tensor for name, tensor in found.items()}

    def dense(part: Part) -> Tensor:
        tensor = weights.get(part.name)
        if tensor is None or tuple(tensor.shape) != part.shape or not tensor.isfinite().all():
            what = f"{part.name} of shape {part.shape} and finite values"
            raise ValueError(f"{file} lacks {what}: give the weights of the same model")
        return tensor

    for parameter, shard in shards(run.engine.module, run.layout):
        shard.take_(local(parameter).detach(), dense)
    run.history.first_weights = {"file": file.name, "sha256": sha256_of(file)}
    if run.layout.rank == 0:
        print(f"{file} gives the weights; the optimizer, the data and the steps begin anew", file=sys.stderr)


def _is_state_dict(content: Any) -> bool:
    return isinstance(content, Mapping) and bool(content) and all(isinstance(each, Tensor) for each in content.values())


# Find checkpoints on the disk, write them and delete them.


class Found(NamedTuple):
    """A whole checkpoint: its folder, the run that wrote it, that run's layout, by name, and its settings."""

    folder: Path
    run: str
    layout: dict[str, Any]
    config: dict[str, Any]

    def state(self, rank: int) -> dict[str, Any]:
        """Return the state of a process that wrote it."""
        with torch.serialization.safe_globals([Shard, Part]):
            return torch.load(self.folder / f"process-{rank}.pt", map_location="cpu", mmap=True, weights_only=True)


class Sources(NamedTuple):
    """Where a run writes its checkpoints, those to go on from, newest first, and another program's file of weights."""

    home: Path
    checkpoints: list[Path]
    weights: Path | None = None


def sources(config: RunSettings) -> Sources:
    """Find a run's checkpoints, as its `checkpoint_path` and `output_dir` say."""
    own = Path(config.output.output_dir) / FOLDER
    mine = steps_in(own)
    if config.output.checkpoint_path is None:
        return Sources(own, mine)
    given = Path(config.output.checkpoint_path)
    if given.name == MARKER:
        given = given.parent
    if _is_home(given, config):
        return Sources(given, steps_in(given))
    theirs = [given] if (given / MARKER).is_file() else steps_in(given) or steps_in(given / FOLDER)
    files = [file for file in (given, *given.glob("*")) if file.suffix in SUFFIXES and file.is_file()]
    weights = None if theirs else max(files, key=lambda file: file.stat().st_mtime, default=None)
    gone_on = mine and own.resolve() not in given.resolve().parents  # since it resumed from `checkpoint_path`
    return Sources(own, mine if gone_on else theirs, weights)


def _is_home(given: Path, config: RunSettings) -> bool:
    """Return whether a run writes its checkpoints to `checkpoint_path`: it is new or empty, or the run's own."""
    if not given.is_dir():  # a file of weights, and a mistyped checkpoint, are no new folder
        return not (given.exists() or given.suffix in SUFFIXES or STEP.fullmatch(given.name))
    if steps := steps_in(given):
        with suppress(ValueError, AttributeError):  # of a damaged marker, which `_find` refuses
            return bool(_marker(steps[0]).get("run") == os.path.abspath(config.output.output_dir))
        return False
    return all(path.name.startswith(".") for path in given.iterdir())


def steps_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, newest first."""
    steps = {file.parent: STEP.fullmatch(file.parent.name) for file in folder.glob(f"step-*/{MARKER}")}
    return sorted((step for step, named in steps.items() if named), key=number_of, reverse=True)


def number_of(folder: Path) -> int:
    """Return the step of a checkpoint."""
    return int(folder.name.removeprefix("step-"))


def _marker(folder: Path) -> dict[str, Any]:
    return json.loads((folder / MARKER).read_text(encoding="utf-8"))


class Checkpoints:
    """Write a run's checkpoints, find them, and keep the last ones. All processes must call `save` and `find`."""

    def __init__(self, config: RunSettings, layout: Layout, network: LossyNetwork) -> None:
        self.config, self.network, self.rank = config, network, layout.rank
        settings = config.result_settings()
        self.layout = {"processes": layout.world_size, **{name: settings[name] for name in LAYOUT if name in settings}}
        self.sources = on_rank_zero(lambda: sources(config), network)
        self.folder = self.sources.home

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint with this process's state, and delete older ones."""
        part, finished = self.folder / f".step-{step}.part", self.folder / f"step-{step}"
        mine = part / f"process-{self.rank}.pt"
        with saving(finished):
            on_rank_zero(lambda: self._begin(part), self.network)
            try:
                torch.save(state, mine)
                sync(mine)
                gathered(None, self.network)  # all have written
                on_rank_zero(lambda: self._end(part, finished), self.network)
            finally:
                delete(part)  # if it could not be finished

    def find(self) -> Found | None:
        """Return the newest checkpoint to resume from, or None; raise ValueError if the run cannot go on from it."""
        return on_rank_zero(self._find, self.network)

    def remove(self) -> None:
        """Delete the checkpoints of a finished run, which needs none."""
        if self.rank == 0:
            for folder in (*steps_in(self.folder), *self.folder.glob(".step-*.part")):
                delete(folder)
            with suppress(OSError):  # the user's files are in it, or there is none
                self.folder.rmdir()

    def owns(self, folder: Path) -> bool:
        """Return whether a checkpoint lies in this run's folder."""
        return folder.parent.resolve() == self.folder.resolve()

    def changes(self, found: Found) -> str:
        """Return how this run's layout differs from that of a checkpoint."""
        pairs = ((name, then, self.layout[name]) for name, then in found.layout.items())
        return ", ".join(f"{name} {then} -> {now}" for name, then, now in pairs if then != now)

    def to_start_over(self, folder: Path) -> str:
        """Return how to start without a checkpoint: delete it only if it is this run's."""
        return f"{f'delete {folder}' if self.owns(folder) else 'leave checkpoint_path out'} to start over"

    def _begin(self, part: Path) -> None:
        for each in self.folder.glob(".step-*.part"):  # of a killed run
            delete(each)
        part.mkdir(parents=True, exist_ok=True)

    def _end(self, part: Path, finished: Path) -> None:
        unseen = [rank for rank in range(self.layout["processes"]) if not (part / f"process-{rank}.pt").is_file()]
        if unseen:
            raise ValueError(f"{part} lacks the file of process {unseen[0]}: give a folder that all machines share")
        run = os.path.abspath(self.config.output.output_dir)
        marker = {"run": run, "layout": self.layout, "config": self.config.result_settings(), "version": VERSION}
        write_atomically(part / MARKER, json.dumps(marker))
        sync(part)
        delete(finished)  # of a run that went on from an earlier step
        part.rename(finished)
        sync(self.folder)
        steps = steps_in(self.folder)
        kept = [each for each in steps if number_of(each) <= number_of(finished)][: self.config.output.keep_checkpoints]
        for each in steps:
            if each not in kept:
                delete(each)

    def _find(self) -> Found | None:
        refuse([path for path in self.folder.glob("step-*") if not (path / MARKER).is_file()])
        given = self.config.output.checkpoint_path
        if self.sources.checkpoints:
            folder = self.sources.checkpoints[0]
            try:
                found = _read(folder)
            except Exception as error:  # a damaged file can raise anything
                reason = first_line(error)
                raise ValueError(f"{folder} cannot be read ({reason}): {self.to_start_over(folder)}") from error
            self._check(found)
            return found
        if given is not None and self.sources.weights is None and Path(given) != self.folder:
            what = "is no checkpoint, no folder of some, and no .pth file"
            raise ValueError(f"checkpoint_path = {given!r} {what}: give one, or leave it out to start over")
        return None

    def _check(self, found: Found) -> None:
        """Raise ValueError if the run cannot go on from a checkpoint."""
        written = {**self.config.result_of(self.config.defaults()), **found.config}
        changed = [name for name in self.config.differences(written) if name not in LAYOUT]
        if changed:
            run = f"an unfinished run with {self.config.compared(changed, written)}"
            fix = f"give another output_dir, or {self.to_start_over(found.folder)}"
            raise ValueError(f"{found.folder} belongs to {run}: {fix}")
        resized = any(found.layout[name] != self.layout[name] for name in SIZES[:2])
        if resized and written["replicated_gradients"] != "reliable":
            what = f"is of another layout ({self.changes(found)}), and copies have drifted apart (replicated_gradients)"
            raise ValueError(f"{found.folder} {what}: start the run as it was, or give another output_dir")


def _read(folder: Path) -> Found:
    """Return the checkpoint in a folder. Anything may be raised if it is damaged, or of another version."""
    marker = _marker(folder)
    if marker.pop("version", None) != VERSION:
        raise ValueError("another version of lossytp wrote it")
    found = Found(**{**marker, "folder": folder})
    for rank in range(found.layout["processes"]):
        with zipfile.ZipFile(folder / f"process-{rank}.pt") as file:
            if (damaged := file.testzip()) is not None:  # which torch.load would not notice
                raise ValueError(f"the checksum of {damaged} does not match")
    return found


def delete(folder: Path) -> None:
    """Delete a checkpoint, but no file of the user's in it."""
    for file in (*folder.glob("process-*.pt"), *folder.glob(f".{MARKER}.part"), folder / MARKER):
        file.unlink(missing_ok=True)
    with suppress(OSError):  # the user's files are in it, or there is none
        folder.rmdir()
