"""What a pretraining run finds in its folder: a finished model, a checkpoint to go on from, a vocabulary."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lossytp.training.models import PRESETS
from lossytp.training.pretraining.config import PretrainConfig
from lossytp.training.pretraining.corpus import corpus
from lossytp.training.pretraining.vocabulary import train_tokenizer

VOCABULARY_DOCUMENTS = 4000
CHECKPOINT = "checkpoint.pt"
STATISTICS = "pretrain.json"
MOVES_NO_NUMBER = ("checkpoint_path", "output_dir", "num_proc", "eval_steps")


def finished(config: PretrainConfig, folder: Path) -> dict[str, Any] | None:
    """What pretrain.json holds, if it is of this configuration; None where there is none of it."""
    try:
        statistics: dict[str, Any] = json.loads((folder / STATISTICS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{folder / STATISTICS} is not JSON ({error}): delete it, and it is made again") from error
    wanted = described(config)
    if statistics["config"] != wanted:
        changed = ", ".join(name for name, value in wanted.items() if statistics["config"].get(name) != value)
        raise ValueError(f"output_dir = {str(folder)!r} holds a model with another {changed}: name another folder")
    return statistics


def described(config: PretrainConfig) -> dict[str, Any]:
    """The configuration, less what changes no number."""
    described = {name: value for name, value in config.as_dict().items() if name not in MOVES_NO_NUMBER}
    return described | {name: portable(described[name]) for name in ("data_glob", "validation_glob", "tokenizer_path")}


def portable(pattern: str | None) -> str | None:
    """The last parts of a path: its folder differs from machine to machine."""
    return pattern and "/".join(Path(pattern).parts[-4:])


def tokenizer_for(config: PretrainConfig, folder: Path) -> PreTrainedTokenizerFast:
    source = config.tokenizer_path or (str(folder) if (folder / "tokenizer.json").exists() else None)
    if source is not None:
        loaded: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=config.trust_remote_code)
        return loaded
    texts = islice(corpus(config.data_glob, split="train").texts(), VOCABULARY_DOCUMENTS)
    tokenizer = train_tokenizer(texts, size=PRESETS[config.model_name]["vocab_size"])
    tokenizer.save_pretrained(folder)
    return tokenizer


def checkpoint_of(config: PretrainConfig) -> dict | None:
    """What to go on from, None to begin; ValueError where it is of another configuration."""
    path = Path(config.checkpoint_path or Path(config.output_dir) / CHECKPOINT)
    if path.is_dir():
        found = sorted(path.rglob("*.pt"), key=lambda file: file.stat().st_mtime)
        if not found:
            raise ValueError(f"checkpoint_path = {config.checkpoint_path!r} holds no *.pt: leave it out to begin anew")
        path = found[-1]
    if not path.exists():
        if config.checkpoint_path is not None:
            raise ValueError(f"checkpoint_path = {config.checkpoint_path!r} is not there: leave it out to begin anew")
        return None
    state: dict = torch.load(path, map_location="cpu", weights_only=True)
    same = {name: state["config"].get(name) for name in MOVES_NO_NUMBER}
    if replace(config, **same).as_dict() != state["config"]:
        changed = [n for n, v in config.as_dict().items() if n not in MOVES_NO_NUMBER and state["config"].get(n) != v]
        raise ValueError(f"{path} is of a run with another {', '.join(changed)}: name another folder")
    return state
