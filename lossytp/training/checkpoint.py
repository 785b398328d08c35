"""Save an unfinished run's state, so that the same command resumes it as if it had never been stopped.

Each checkpoint is a folder `step-N`. It is written beside the others under another name, and renamed once it is whole
and on the disk. Its file `checkpoint.json` has the run's configuration and the checksums of all other files. So a run
that is killed at any moment harms no earlier checkpoint, and a damaged one is noticed.
"""

import io
import json
import os
import pickle
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import metadata as index_classes
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.scope import Counters
from lossytp.parallel.collectives import collective_of
from lossytp.parallel.group import Layout
from lossytp.parallel.places import Box, Place, is_first_copy
from lossytp.parallel.replicas import gathered, on_rank_zero
from lossytp.training.config import RunSettings
from lossytp.training.files import (
    claim,
    crc32_of,
    is_marked,
    others,
    refuse,
    remove,
    remove_parts,
    run_of,
    saving,
    sync_names,
    write_atomically,
)

# Write tensors that processes hold in pieces to a folder, and read them in others: `torch.distributed.checkpoint`.
#
# Each process writes the pieces that it holds to a file of its own. An index, `.metadata`, says where each piece of
# each tensor is. A process that holds other pieces reads the parts that it needs.
#
# The index is a pickle, which could run code. It is read with PyTorch's own classes alone.


INDEX = ".metadata"
OTHER_CLASSES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}


class Piece(NamedTuple):
    """A box of a tensor of size `shape` that begins at `start`, in this process's memory."""

    shape: Sequence[int]
    start: Sequence[int]
    view: Tensor


Pieces = Mapping[str, Sequence[Piece]]


def whole(tensor: Tensor) -> list[Piece]:
    """Return a tensor that no other process has a part of, as one piece."""
    return [Piece(tensor.shape, [0] * tensor.ndim, tensor)]


def write(folder: Path, pieces: Pieces, network: LossyNetwork) -> list[str]:
    """Write the pieces of all processes to a folder that all of them see, and return the names of this one's files.

    Every process must call this. The files are on the disk once it returns.
    """
    planner = _SavePlanner(pieces)
    writer = FileSystemWriter(folder)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    writer.set_up_storage_writer(rank == 0)
    plans = gathered(writer.prepare_local_plan(planner.create_local_plan()), network)
    plans, index = planner.create_global_plan(plans)  # every process makes the same one
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[rank])
    results = writer.write_data(plan, planner)
    results.wait()
    everyones = gathered(results.value(), network)
    if rank == 0:
        writer.finish(index, everyones)
    mine = {result.storage_data.relative_path for result in everyones[rank]}
    return sorted(mine | ({INDEX} if rank == 0 else set()))


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a folder, by name."""
    index: dict[str, Any] = _Reader(folder).read_metadata().state_dict_metadata
    return {name: tuple(each.size) for name, each in index.items()}


def read_(folder: Path, pieces: Pieces) -> None:
    """Fill the pieces with their values in the folder.

    Raises:
        ValueError: if a tensor has another shape, or is not there.
    """
    reader = _Reader(folder)
    index = reader.read_metadata()
    planner = _LoadPlanner(pieces, index)
    reader.set_up_storage_reader(index, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()


class _Held:
    """The pieces of this process, found by name and place."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces
        self.views = {
            (name, tuple(piece.start)): piece.view.detach() for name, each in pieces.items() for piece in each
        }

    def find(self, index: MetadataIndex) -> Tensor:
        return self.views[index.fqn, tuple(index.offset or ())]


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, pieces: Pieces) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.held = _Held(pieces)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [
                WriteItem(
                    index=MetadataIndex(name, piece.start),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=_chunk(piece),
                        properties=TensorProperties(dtype=piece.view.dtype),
                        size=torch.Size(piece.shape),
                    ),
                )
                for name, each in self.held.pieces.items()
                for piece in each
            ]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.held.find(index)


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, pieces: Pieces, index: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.held, self.index = _Held(pieces), index

    def create_local_plan(self) -> LoadPlan:
        items = []
        for name, each in self.held.pieces.items():
            kept: Any = self.index.state_dict_metadata.get(name)
            for piece in each:
                if kept is None:
                    raise ValueError(f"{name} is missing")
                if tuple(kept.size) != tuple(piece.shape):
                    raise ValueError(f"{name} has shape {tuple(kept.size)}, not {tuple(piece.shape)}")
            items += create_read_items_for_chunk_list(name, kept, [_chunk(piece) for piece in each]) if each else []
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.held.find(index)


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(piece.start), sizes=piece.view.shape)


class _Reader(FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        with (Path(self.path) / INDEX).open("rb") as file:
            index = _Unpickler(file).load()
        if not isinstance(index, Metadata):
            raise ValueError(f"{INDEX} is no index of a checkpoint")
        return index


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = getattr(index_classes, name, None) if module == index_classes.__name__ else None
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(known, type) or isinstance(dtype, torch.dtype) or (module, name) in OTHER_CLASSES:
            return super().find_class(module, name)
        raise ValueError(f"{INDEX} names {module}.{name}, which no index of a checkpoint needs")


# The state that training steps change: tensors, which any layout can read, and the state that each process has alone.
#
# Parameters and the optimizer's moments are named as in the dense model (`lossytp.parallel.places`). A process's
# own state has its random generator, its links and what repairs remember. At the layout that wrote a checkpoint, the
# run goes on as if it had never stopped, to the last digit. Another layout takes over only what both layouts have.


MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's, for each parameter, beside the number of steps
STATE = ("steps", "scaler", "random", "random_cuda", "network", "memories")  # keys of `own`


@dataclass(frozen=True)
class TrainingState:
    """The state of a model and its optimizer on this process.

    The learning rate and the order of the data are not in it: they depend only on the step.
    """

    module: nn.Module
    places: Sequence[Place]
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    network: LossyNetwork

    @property
    def _device(self) -> torch.device:
        return next(self.module.parameters()).device

    def tensors(self, known: Collection[str] | None = None) -> dict[str, list[Piece]]:
        """Return parameters and moments: this process's pieces of each, in its memory, by name.

        Args:
            known: names in a checkpoint. A copy that is not among them has the name of the first copy.
        """
        pieces: dict[str, list[Piece]] = {}
        for place in self.places:
            moments = self.optimizer.state.get(place.parameter, {})
            for kind, values in {"parameter": place.parameter, **moments}.items():
                for box in place.boxes(values) if kind != "step" else ():
                    name = _name(kind, box, known)
                    pieces.setdefault(name, []).append(Piece(box.shape, box.start, box.view))
        return pieces

    def own(self) -> dict[str, Any]:
        """Return what this process has alone: tensors on the CPU, numbers and text."""
        collective = collective_of(self.module)
        return {
            "steps": {
                name: float(self.optimizer.state[place.parameter]["step"])
                for place in self.places
                if self.optimizer.state.get(place.parameter)
                for name in place.names
            },
            "scaler": self.scaler.state_dict(),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None,
            "network": json.dumps(self.network.state_dict()),
            "memories": collective.memories_state() if collective is not None else [],
        }

    def begin_moments_(self, steps: dict[str, float]) -> None:
        """Give the optimizer zero moments for each parameter that it has updated."""
        for place in self.places:
            made = [steps[name] for name in place.names if name in steps]
            if made:
                zeros = {name: torch.zeros_like(place.parameter) for name in MOMENTS}
                self.optimizer.state[place.parameter] = {"step": torch.tensor(made[0]), **zeros}

    def restore_own_(self, state: dict[str, Any]) -> None:
        """Restore what `own` returned."""
        self.scaler.load_state_dict(state["scaler"])
        if state["random"] is not None:
            torch.set_rng_state(state["random"])
        if self._device.type == "cuda" and state["random_cuda"] is not None:
            torch.cuda.set_rng_state(state["random_cuda"], self._device)
        self.network.load_state_dict(json.loads(state["network"]))
        collective = collective_of(self.module)
        if collective is not None:
            collective.load_memories_state(state["memories"], self._device)


def of_another_layout(states: Sequence[dict[str, Any]], like: int | None, *, same_ranks: bool) -> dict[str, Any]:
    """Return a process's own state from those of all processes of another layout.

    Links that are in both layouts go on. Its counters are empty: `counted` adds them up.

    Args:
        states: by rank.
        like: the process whose random generator this one takes over, or None if the replica is new.
        same_ranks: whether there are as many tensor-parallel ranks, so that what repairs remember is of use.
    """
    networks = [json.loads(state["network"]) for state in states]
    merged = {**networks[0], "counters": Counters().state_dict()}
    for kind in ("links", "normals"):
        merged[kind] = list({json.dumps(link): [link, kept] for each in networks for link, kept in each[kind]}.values())
    memories: dict[Any, list] = {}
    for state in states if same_ranks else ():
        for site, memory in state["memories"]:
            memories.setdefault(site and tuple(site), []).extend(memory)
    return {
        "steps": {name: step for state in states for name, step in state["steps"].items()},
        "scaler": states[0]["scaler"],
        "random": None if like is None else states[like]["random"],
        "random_cuda": None if like is None else states[like]["random_cuda"],
        "network": json.dumps(merged),
        "memories": [[site, memory] for site, memory in memories.items()],
    }


def counted(states: Sequence[dict[str, Any]]) -> Counters:
    """Return what all processes counted.

    Raises:
        ValueError: if they disagree.
    """
    total = Counters()
    for state in states:
        each = Counters()
        each.load_state_dict(json.loads(state["network"])["counters"])
        total.merge(each)
    return total


def _name(kind: str, box: Box, known: Collection[str] | None) -> str:
    name = f"{kind} {box.name}{box.copy}"
    return name if known is None or name in known else f"{kind} {box.name}"


# Read the weights that another program saved with `torch.save`, such as the `.pth` files of an earlier study.
#
# They replace the model's initial weights. The optimizer, the data and the learning rate begin anew, because their
# layout differs from program to program.


SUFFIXES = (".pth", ".pt")
ENTRIES = ("model", "model_state_dict", "state_dict", "module")  # under which programs keep weights beside other things
PREFIXES = ("module.", "_orig_mod.")  # of wrapped and of compiled models


def load_weights_(places: Iterable[Place], file: Path) -> None:
    """Fill this process's parameters with those of a dense model in a file.

    Raises:
        ValueError: if the file cannot be read without running code, or lacks a parameter, or has one of another shape.
    """
    weights = _weights(file)
    with torch.no_grad():
        for place in places:
            for box in place.boxes(place.parameter):
                if box.name not in weights:
                    raise ValueError(f"{file} lacks {box.name}: give the weights of the same model")
                tensor = weights[box.name]
                if tuple(tensor.shape) != tuple(box.shape):
                    raise ValueError(
                        f"{file} has {box.name} of shape {tuple(tensor.shape)}, and the model has {tuple(box.shape)}: "
                        "give the weights of the same model, whole"
                    )
                if not tensor.isfinite().all():
                    raise ValueError(f"{file} holds NaN or infinity in {box.name}: give finite weights")
                box.view.copy_(tensor[box.slices])


def _weights(file: Path) -> dict[str, Tensor]:
    try:
        content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{file} is not a file of tensors alone: give one that torch.save wrote, or leave checkpoint_path out"
        ) from error
    found = [content, *(content[name] for name in ENTRIES if name in content)] if isinstance(content, Mapping) else []
    weights = next((each for each in found if _is_state_dict(each)), None)
    if weights is None:
        raise ValueError(
            f"{file} holds no weights, at its top level or under {', '.join(ENTRIES)}: give another checkpoint_path"
        )
    for prefix in PREFIXES:
        weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return dict(weights)


def _is_state_dict(content: Any) -> bool:
    return isinstance(content, Mapping) and bool(content) and all(isinstance(each, Tensor) for each in content.values())


# Find checkpoints on the disk: this run's own folder, the newest one, and whether it is whole.
#
# A checkpoint is a folder `step-N` whose file `checkpoint.json` has the run's configuration and the checksums of all
# other files.


FOLDER, MARKER = "checkpoint", "checkpoint.json"
STEP = re.compile(r"step-(\d+)")
LAYOUT = (
    "tensor_parallel_size",
    "data_parallel_size",
    "data_parallel_type",
    "pipeline_parallel_size",
    "implementation",
    "enable_loss_parallelism",
    "deferred_init",
)
"""Settings that say how a run is spread over processes. They may change when it is resumed."""


SIZES = tuple(name for name in LAYOUT if name.endswith("_parallel_size"))


@dataclass(frozen=True)
class Found:
    """A whole checkpoint."""

    folder: Path
    step: int
    processes: int
    config: dict[str, Any]

    @property
    def layout(self) -> dict[str, Any]:
        """Return the layout that wrote it, by name."""
        return layout_of(self.processes, self.config)

    def place(self, rank: int) -> Layout:
        """Return the place that a process had."""
        sizes = {name: self.config[name] for name in SIZES}
        return Layout(**sizes, rank=rank, world_size=self.processes)


def run_name(config: RunSettings) -> str:
    """Return what tells this run from all others on the machine: the path of its output folder."""
    return os.path.abspath(config.output.output_dir)


def home(config: RunSettings) -> Path:
    """Return the folder of this run's checkpoints: `checkpoint_path` if it is new, or this run has made it."""
    own = Path(config.output.output_dir) / FOLDER
    if config.output.checkpoint_path is None:
        return own
    given = Path(config.output.checkpoint_path)
    if not given.is_dir():
        names_a_file = given.exists() or given.suffix in SUFFIXES
        return own if names_a_file or STEP.fullmatch(given.name) else given  # a mistyped step is no new folder
    if run_of(given) not in (None, run_name(config)):
        return own
    if all(path.name.startswith(".") for path in given.iterdir()):  # what a run leaves that is killed early
        return given
    steps = steps_in(given)
    if not steps:
        return own
    try:
        run = json.loads((steps[-1] / MARKER).read_text(encoding="utf-8"))["run"]
    except (OSError, ValueError, KeyError, TypeError):
        return own
    return given if run == run_name(config) else own


def candidates(own: Path, given: str | None) -> list[Path]:
    """Return the folders of checkpoints to resume from, newest first.

    Args:
        own: the folder of the run's own checkpoints, which come first.
        given: the run's `checkpoint_path`, if any.

    Raises:
        ValueError: if `given` is not there, or holds neither a checkpoint nor weights.
    """
    mine = steps_in(own)[::-1]
    if given is None or Path(given) == own:
        return mine
    path = Path(given)
    if mine and own.resolve() not in path.resolve().parents:
        return mine  # the run has gone on since it resumed from `checkpoint_path`
    if not path.exists():
        raise ValueError(f"checkpoint_path = {given!r} does not exist: give one that does, or leave it out")
    if path.name == MARKER:
        return [path.parent]
    found = [file for file in path.rglob(MARKER) if STEP.fullmatch(file.parent.name)]
    if not found and not weights_in(path):
        raise ValueError(
            f"checkpoint_path = {given!r} has no {MARKER} below it, and is no .pth file: leave it out to start over"
        )
    if not found:
        return []
    newest = max(found, key=lambda file: file.stat().st_mtime).parent
    return [step for step in steps_in(newest.parent)[::-1] if number_of(step) <= number_of(newest)]


def read_marker(folder: Path) -> Found:
    """Return the checkpoint in a folder.

    Raises:
        ValueError: if it is damaged or cut short.
    """
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        config, sums = {**marker["config"]}, {**marker["files"]}
        found = Found(folder, int(marker["step"]), int(marker["processes"]), config)
        if found.processes < 1 or not all(found.config[size] >= 1 for size in SIZES):
            raise ValueError("it was written by no process")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{MARKER} cannot be read") from error
    for name, crc in sums.items():
        try:
            same = crc32_of(folder / name) == crc
        except OSError as error:
            raise ValueError(f"{name}: {error.strerror}") from error
        if not same:
            raise ValueError(f"the checksum of {name} does not match")
    return found


def first_weights(own: Path, given: str | None) -> Path | None:
    """Return the file of weights with which `checkpoint_path` begins a run; None if it names no such file.

    Args:
        own: the folder of the run's own checkpoints.
        given: the run's `checkpoint_path`, if any. A checkpoint there comes before a file of weights.
    """
    if given is None or Path(given) == own or Path(given).name == MARKER:
        return None
    checkpoints = (file for file in Path(given).rglob(MARKER) if STEP.fullmatch(file.parent.name))
    return None if any(True for _ in checkpoints) else weights_in(Path(given))


def weights_in(path: Path) -> Path | None:
    """Return the file of weights that this is, or the newest one in this folder."""
    files = [path] if path.is_file() else list(path.glob("*")) if path.is_dir() else []
    files = [file for file in files if file.suffix in SUFFIXES]
    return max(files, key=lambda file: file.stat().st_mtime, default=None)


def steps_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, in the order of their steps."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in paths if STEP.fullmatch(path.name) and path.is_dir()), key=number_of)


def number_of(folder: Path) -> int:
    """Return the step of a checkpoint."""
    return int(folder.name.removeprefix("step-"))


def layout_of(processes: int, config: dict[str, Any]) -> dict[str, Any]:
    """Return the number of processes, and the settings of `LAYOUT`."""
    return {"processes": processes, **{name: config[name] for name in LAYOUT if name in config}}


FILES = ("step-*", ".step-*.part")
WRITTEN = (MARKER, f"{INDEX}*", "__*.distcp")  # in a checkpoint
OLD_MARKER = "step.json"


class Checkpoints:
    """Save and load a run's checkpoints, and keep the last ones. All processes must call each method."""

    def __init__(self, config: RunSettings, layout: Layout, network: LossyNetwork) -> None:
        self._config, self._network = config, network
        self._rank, self._processes = layout.rank, layout.world_size
        self.folder = on_rank_zero(lambda: home(config), network)

    def check(self) -> None:
        """Raise ValueError if the checkpoints' folder holds the user's files."""
        on_rank_zero(self._check, self._network)

    @property
    def layout(self) -> dict[str, Any]:
        """Return the layout of this run, by name."""
        return layout_of(self._processes, self._config.result_settings())

    def changes(self, found: Found) -> str:
        """Return how this run's layout differs from that of a checkpoint."""
        mine = self.layout
        return ", ".join(f"{name} {then} -> {mine[name]}" for name, then in found.layout.items() if then != mine[name])

    def save(self, step: int, tensors: Pieces, own: dict[str, Any]) -> None:
        """Save the state after `step`: this process's pieces of tensors, and its `own` state.

        Raises:
            ValueError: if it cannot be written; the previous checkpoint stays.
        """
        self.folder = on_rank_zero(self._folder_to_write, self._network)
        part = self.folder / f".step-{step}.part"
        on_rank_zero(lambda: self._begin(part), self._network)
        with saving(self.folder / f"step-{step}"):
            try:
                names = write(part, {**tensors, _own_name(self._rank): whole(_as_bytes(own))}, self._network)
                everyones = gathered({name: crc32_of(part / name) for name in names}, self._network)
                sums = {name: crc for each in everyones for name, crc in each.items()}
                on_rank_zero(lambda: self._end(part, step, sums), self._network)
            except Exception:
                remove(part)
                raise

    def find(self) -> Found | None:
        """Return the newest whole checkpoint to resume from, or None if there is none.

        Raises:
            ValueError: if it is of another configuration, or damaged and there is no older one.
        """
        return on_rank_zero(self._find, self._network)

    def known(self, found: Found) -> set[str]:
        """Return the names of the tensors to read from a checkpoint.

        If the number of copies changed, only the first copies are read.
        """
        sizes = [
            [layout[f"{kind}_parallel_size"] for kind in ("tensor", "data")] for layout in (found.layout, self.layout)
        ]
        return {name for name in shapes(found.folder) if sizes[0] == sizes[1] or is_first_copy(name)}

    def own_states(self, found: Found, names: tuple[str, ...], plain: tuple[str, ...]) -> list[dict[str, Any]]:
        """Return this process's own state; if the layout has changed, those of all processes that wrote it.

        Args:
            found: the checkpoint.
            names: of the entries that each state must have.
            plain: names that its JSON entry "plain" must have.

        Raises:
            ValueError: if a state cannot be read, or lacks a name.
        """
        same = found.layout == self.layout
        try:
            sizes = shapes(found.folder)
            states = []
            for rank in (self._rank,) if same else range(found.processes):
                contents = torch.empty(sizes[_own_name(rank)], dtype=torch.uint8)
                read_(found.folder, {_own_name(rank): whole(contents)})
                states.append(torch.load(io.BytesIO(contents.numpy().tobytes()), weights_only=True))
                kept = json.loads(states[-1].get("plain", "{}"))
                lacking = [name for name in names if name not in states[-1]] or [x for x in plain if x not in kept]
                if lacking:
                    raise ValueError(f"it lacks {', '.join(lacking)}")
        except Exception as error:
            reason = " ".join(str(error).split())[:100]
            raise ValueError(f"{found.folder} cannot be read ({reason}): {self.to_start_over(found.folder)}") from error
        return states

    def to_start_over(self, folder: Path) -> str:
        """Return how to start without a checkpoint: delete it only if it is this run's."""
        remedy = f"delete {folder}" if self.is_own(folder) else "leave checkpoint_path out"
        return f"{remedy} to start over"

    def remove(self) -> None:
        """Delete the checkpoints of a finished run, which needs none."""
        on_rank_zero(lambda: remove(self.folder), self._network)

    def _check(self) -> None:
        if (self.folder / OLD_MARKER).exists():
            raise ValueError(
                f"{self.folder} is of an older version, which this one cannot read: delete it to start over, or finish "
                "the run with that version"
            )
        if not is_marked(self.folder):
            refuse(others(self.folder))
            return
        remove_parts(self.folder, FILES)
        for part in self.folder.glob(".step-*.part"):
            remove(part)

    def _folder_to_write(self) -> Path:
        """Return the folder, unless it was new when the run began, and another run has begun to write there since."""
        own = Path(self._config.output.output_dir) / FOLDER
        folder = own if self.folder == own else home(self._config)
        if folder != self.folder:
            print(f"{self.folder} is no longer this run's to write: checkpoints go to {folder}", file=sys.stderr)
        return folder

    def _begin(self, part: Path) -> None:
        claim(self.folder, FILES, run_name(self._config))
        remove(part)
        claim(part, WRITTEN)

    def _end(self, part: Path, step: int, sums: dict[str, int]) -> None:
        """Finish the part, rename it, and delete older checkpoints."""
        unseen = [name for name in sums if not (part / name).is_file()]
        if unseen:
            raise ValueError(
                f"{part / unseen[0]} was written on another machine, and is not here: give an output_dir that all "
                "machines see"
            )
        marker = {
            "step": step,
            "run": run_name(self._config),
            "processes": self._processes,
            "config": self._config.result_settings(),
            "files": sums,
        }
        write_atomically(part / MARKER, json.dumps(marker))
        sync_names(part)
        finished = self.folder / f"step-{step}"
        remove(finished)
        part.rename(finished)
        sync_names(self.folder)
        steps = steps_in(self.folder)
        kept = [each for each in steps if number_of(each) <= step][-self._config.output.keep_checkpoints :]
        for each in steps:
            if each not in kept:
                remove(each)

    def _find(self) -> Found | None:
        """Return the newest whole checkpoint, once it is checked."""
        damage: list[tuple[Path, str]] = []
        for folder in candidates(self.folder, self._config.output.checkpoint_path):
            try:
                found = read_marker(folder)
            except ValueError as error:
                damage.append((folder, str(error)))
                continue
            self._check_config(found)
            for damaged, reason in damage:
                print(f"{damaged} is damaged ({reason}): resuming from {folder} instead", file=sys.stderr)
            return found
        if damage:
            folder, reason = damage[0]
            raise ValueError(f"{folder} is damaged ({reason}): {self.to_start_over(folder)}")
        return None

    def weights_file(self) -> Path | None:
        """Return the file of weights with which `checkpoint_path` begins the run; None if it names no such file."""
        return on_rank_zero(lambda: first_weights(self.folder, self._config.output.checkpoint_path), self._network)

    def _check_config(self, found: Found) -> None:
        written = {**self._config.result_defaults(), **found.config}
        changed = [name for name in self._config.differences(written) if name not in LAYOUT]
        if changed:
            raise ValueError(
                f"{found.folder} belongs to an unfinished run with {self._config.compared(changed, written)}: "
                + ("give another output_dir, or " if self.is_own(found.folder) else "")
                + self.to_start_over(found.folder)
            )
        if found.layout != self.layout:
            self._check_layout(found)

    def is_own(self, folder: Path) -> bool:
        """Return whether a checkpoint lies in this run's folder."""
        return folder.parent.resolve() == self.folder.resolve()

    def _check_layout(self, found: Found) -> None:
        """Raise ValueError if the run cannot go on at this layout."""
        settings = [found.config, self._config.result_settings()]
        copies = [
            (each["tensor_parallel_size"], each["data_parallel_size"])
            for each in settings
            if each["replicated_gradients"] != "reliable"
        ]
        reasons = {
            "each rank's copies have drifted away from the others'": len(set(copies)) > 1,
            "the packets that it really sent are recorded by link": self._config.transport == "udp",
        }
        for reason, holds in reasons.items():
            if holds:
                raise ValueError(
                    f"{found.folder} is of another layout ({self.changes(found)}), and {reason}: start the run as it "
                    "was, or give another output_dir"
                )


def _own_name(rank: int) -> str:
    return f"state of process {rank}"


def _as_bytes(state: dict[str, Any]) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
