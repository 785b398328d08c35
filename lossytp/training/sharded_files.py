"""Write tensors that processes hold in pieces to a folder, and read them in others: `torch.distributed.checkpoint`.

Each process writes the pieces that it holds to a file of its own. An index, `.metadata`, says where each piece of each
tensor is. A process that holds other pieces reads the parts that it needs.

The index is a pickle, which could run code. It is read with PyTorch's own classes alone.
"""

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as index_classes
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lossytp.network.lossy_network import LossyNetwork
from lossytp.parallel.replicas import gathered

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
