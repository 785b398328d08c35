"""Save the trained model as a folder that transformers reads."""

import json
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lossytp.parallel.bucketed_ddp import BucketedDDP
from lossytp.parallel.dense import gather
from lossytp.parallel.dense_boxes import dense_weights
from lossytp.parallel.dense_places import places
from lossytp.parallel.flat_fsdp import FlatFSDP
from lossytp.parallel.replicas import on_rank_zero
from lossytp.parallel.stages import Stage
from lossytp.training.engine import Engine
from lossytp.training.files import saving, sync
from lossytp.training.own_files import MARK, claim, is_marked, mark, others, refuse, remove

BEST, LAST = "best", "last"
MODEL_FILES = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json")
TOKENIZER_FILES = ("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt")


def save_model(engine: Engine, folder: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Save the dense model in `folder`, and replace an earlier one. All processes must call this; the first writes.

    If ranks have drifted apart, the first rank's parameters are saved. If the run is killed meanwhile, it saves the
    model again once resumed.

    Raises:
        ValueError: if the folder holds the user's files, or cannot be written.
    """
    dense = _dense_model(engine)

    def write() -> None:
        _check_folder(folder)
        part = _part(folder)
        remove(part)
        claim(part, ["*"])
        with saving(folder):
            try:
                dense.save_pretrained(part)
                if tokenizer is not None:
                    tokenizer.save_pretrained(part)
                mark(part, [path.name for path in part.iterdir() if path.name != MARK])
                sync(part)
            except Exception:
                remove(part)
                raise
            remove(folder)
            part.rename(folder)

    on_rank_zero(write, engine.network)


def save_in_bfloat16(
    engine: Engine, build: Callable[[], PreTrainedModel], folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Save the trained weights, rounded to bfloat16, and the tokenizer among other files of `folder`.

    All processes must call this; the first writes.

    Args:
        engine: the trained model.
        build: makes a dense model of the same shape. Only the first process calls it.
        folder: where to write.
        tokenizer: the model's tokenizer.

    Raises:
        ValueError: if the folder cannot be written.
    """
    trained = _dense_model(engine)

    def write() -> None:
        dense = build()
        dense.load_state_dict(trained.state_dict())
        with saving(folder):
            dense.to(torch.bfloat16).save_pretrained(folder)  # type: ignore[arg-type]
            tokenizer.save_pretrained(folder)

    on_rank_zero(write, engine.network)


def _dense_model(engine: Engine) -> Any:
    """Return the trained model, as transformers knows it, on the first process. All processes must call this."""
    module: Any = engine.module
    if isinstance(module, DistributedDataParallel | BucketedDDP):
        module = module.module
    if isinstance(module, FlatFSDP | FSDPModule | Stage) or engine.implementation in ("dtensor", "megatron"):
        weights = dense_weights(places(engine.module, engine.layout), engine.network)
        return engine.dense_model(weights) if engine.layout.rank == 0 else None
    with engine.network.reliable(), torch.no_grad():
        return gather(module) if engine.implementation == "lossytp" else module


def check_folders(output_dir: Path) -> None:
    """Raise ValueError if the folders of a run's models hold the user's files."""
    for name in (BEST, LAST):
        _check_folder(output_dir / name)


def _check_folder(folder: Path) -> None:
    for each in (folder, _part(folder)):
        _mark_old(each)
        refuse(others(each))


def remove_models(output_dir: Path) -> None:
    """Delete the models that a run saved, but no file that this program did not write."""
    for name in (BEST, LAST):
        _mark_old(output_dir / name)
        remove(output_dir / name)


def _part(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.part")


def _mark_old(folder: Path) -> None:
    """Mark a model's folder from an older version, which marked none; the task's name in its config identifies it."""
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
