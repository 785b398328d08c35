"""The trained model as a folder that transformers reads."""

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedTokenizerBase

from lossytp.parallel.convert import gather
from lossytp.parallel.replicas import agreed
from lossytp.training.engine import Engine
from lossytp.training.files import saving, sync
from lossytp.training.own_files import MARK, claim, is_marked, mark, others, refuse, remove

BEST, LAST = "best", "last"
MODEL_FILES = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json")
TOKENIZER_FILES = ("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt")


def save_model(engine: Engine, folder: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Save the dense model in `folder`, in place of one that is there. All processes must call it; the first writes.

    Where ranks have drifted apart it is the first rank's. A run that is killed meanwhile saves it again later.

    Raises:
        ValueError: where the folder holds others' files, or cannot be written.
    """
    module: Any = engine.module
    if isinstance(module, DistributedDataParallel):
        module = module.module
    weights = None
    with engine.network.reliable(), torch.no_grad():
        if isinstance(module, FSDPModule):
            weights = {name: _whole(tensor) for name, tensor in module.state_dict().items()}  # type: ignore[attr-defined]
        elif engine.implementation == "lossytp":
            module = gather(module)

    def write() -> None:
        _check_folder(folder)
        part = _part(folder)
        remove(part)
        claim(part, ["*"])
        with saving(folder):
            try:
                module.save_pretrained(part, state_dict=weights)
                if tokenizer is not None:
                    tokenizer.save_pretrained(part)
                mark(part, [path.name for path in part.iterdir() if path.name != MARK])
                sync(part)
            except Exception:
                remove(part)
                raise
            remove(folder)
            part.rename(folder)

    agreed(write, engine.network)


def check_folders(output_dir: Path) -> None:
    """Raise ValueError where others' files are where a run's models would go."""
    for name in (BEST, LAST):
        _check_folder(output_dir / name)


def _check_folder(folder: Path) -> None:
    for each in (folder, _part(folder)):
        _mark_old(each)
        refuse(others(each))


def remove_model(folder: Path) -> None:
    """Delete the model in `folder`, and no file that this program did not write."""
    _mark_old(folder)
    remove(folder)


def _part(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.part")


def _mark_old(folder: Path) -> None:
    """Mark a folder that a version wrote which did not mark its folders: it left the task's name in the model."""
    if is_marked(folder) or not (folder / "config.json").is_file():
        return
    try:
        ours = "finetuning_max_length" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return
    known = (*MODEL_FILES, *TOKENIZER_FILES)
    names = [path.name for path in folder.iterdir()]
    if ours and all(any(fnmatchcase(name, pattern) for pattern in known) for name in names):
        mark(folder, names)


def _whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()
