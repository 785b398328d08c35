"""What a pretraining run finds in its folder: a finished model, a checkpoint to go on from, a vocabulary."""

import hashlib
import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lossytp.training.config import PretrainConfig
from lossytp.training.files import check_whole, saving
from lossytp.training.models import PRESETS, first_line
from lossytp.training.own_files import claim_files, is_marked, mark
from lossytp.training.pretraining.corpus import Corpus, corpus
from lossytp.training.pretraining.vocabulary import train_tokenizer
from lossytp.training.saved_models import MODEL_FILES, TOKENIZER_FILES
from lossytp.training.tokenizer import check_tokenizer

VOCABULARY_DOCUMENTS = 4000
CHECKPOINT = "checkpoint.pt"
STATISTICS = "pretrain.json"
FILES = (CHECKPOINT, f".{CHECKPOINT}.part", STATISTICS, "README.md", *MODEL_FILES, *TOKENIZER_FILES)
TOLD = ("validation_loss", "perplexity", "tokens")  # of pretrain.json by the command
STATE = ("model", "optimizer", "blocks", "losses", "evaluations", "seconds")  # of a checkpoint, beside "config"
MOVES_NO_NUMBER = ("checkpoint_path", "output_dir", "num_proc", "eval_steps")


def finished(config: PretrainConfig, folder: Path) -> dict[str, Any] | None:
    """What pretrain.json holds, if it is of this configuration; None where there is none of it.

    Parameters that did not exist when it was written have their defaults.
    """
    file = folder / STATISTICS
    try:
        statistics: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        written = described(PretrainConfig.from_dict(statistics["config"]))
        lacking = [name for name in TOLD if not isinstance(statistics[name], int | float)]
        if lacking:
            raise ValueError(f"no number: {', '.join(lacking)}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not of this command ({error!r}): delete it, and it is made again") from error
    changed = [name for name, value in described(config).items() if written[name] != value]
    if changed:
        changes = ", ".join(changed)
        raise ValueError(f"output_dir = {str(folder)!r} holds a model with another {changes}: name another folder")
    try:
        now = data_sha256(config)
    except ValueError:  # a committed model is read on machines without its data
        return statistics
    _check_same_data(file, statistics.get("data_sha256", now), now)
    return statistics


def data_sha256(config: PretrainConfig) -> str:
    """Return the hash of the text that the run trains and validates on.

    Raises:
        ValueError: if there is none, or a file cannot be read.
    """
    hashes = training_text(config).sha256(), validation_text(config).sha256()
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def _check_same_data(file: Path, then: str, now: str) -> None:
    """Raise ValueError unless the hash of the text is `now` what it was `then`, when `file` was written."""
    if now != then:
        raise ValueError(
            f"{file} is of a run on other text, which has changed since: put the old files back, or name another "
            "output_dir"
        )


def described(config: PretrainConfig) -> dict[str, Any]:
    """The configuration, less what changes no number."""
    described = {name: value for name, value in config.as_dict().items() if name not in MOVES_NO_NUMBER}
    return described | {name: portable(described[name]) for name in ("data_glob", "validation_glob", "tokenizer_path")}


def portable(pattern: str | None) -> str | None:
    """The last parts of a path: its folder differs from machine to machine."""
    return pattern and "/".join(Path(pattern).parts[-4:])


def training_text(config: PretrainConfig) -> Corpus:
    """What it is trained on: all that `data_glob` names where there are other files to validate on."""
    return corpus(config.data_glob, split="train", splits_files=config.validation_glob is None)


def validation_text(config: PretrainConfig) -> Corpus:
    """What it is validated on."""
    pattern = config.validation_glob or config.data_glob
    return corpus(pattern, split="validation", splits_files=config.validation_glob is None)


def tokenizer_for(config: PretrainConfig, folder: Path) -> PreTrainedTokenizerFast:
    """The one that is named, else that of the checkpoint to go on from, else one made of the text's beginning."""
    source, checkpoint = config.tokenizer_path, _checkpoint(config)
    if source is None and checkpoint is not None and (checkpoint.parent / "tokenizer.json").exists():
        source = str(checkpoint.parent)
    if source is not None:
        whose = f"tokenizer_path = {source!r}" if config.tokenizer_path else f"{source}, the checkpoint's folder,"
        try:
            loaded: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=config.trust_remote_code)
        except Exception as error:  # on a damaged file a library raises whatever it comes upon first
            raise ValueError(f"{whose} holds no tokenizer ({first_line(error)}): give a folder that does") from error
        check_tokenizer(whose, loaded)
        return loaded
    texts = islice(training_text(config).texts(), VOCABULARY_DOCUMENTS)
    tokenizer = train_tokenizer(texts, size=PRESETS[config.model_name]["vocab_size"])
    with saving(folder):
        tokenizer.save_pretrained(folder)
    return tokenizer


def checkpoint_of(config: PretrainConfig) -> dict | None:
    """What to go on from, None to begin; ValueError where it is of another configuration."""
    path = _checkpoint(config)
    if path is None:
        return None
    try:
        check_whole(path)
        state: dict = torch.load(path, map_location="cpu", weights_only=True)
        written = described(PretrainConfig.from_dict(state["config"]))
        lacking = [name for name in STATE if name not in state]
        if lacking:
            raise ValueError(f"it lacks {', '.join(lacking)}")
    except Exception as error:
        why = " ".join(str(error).split())[:100]
        raise ValueError(f"{path} is no checkpoint of this command ({why}): delete it to begin anew") from error
    changed = [name for name, value in described(config).items() if written[name] != value]
    if changed:
        raise ValueError(f"{path} is of a run with another {', '.join(changed)}: name another folder")
    now = data_sha256(config)
    _check_same_data(path, state.get("data_sha256", now), now)
    return state


def claim_files_of(config: PretrainConfig, folder: Path) -> None:
    """Declare the files of this run in its folder to be this program's.

    Raises:
        ValueError: where others' files of these names are there.
    """
    if _checkpoint(config) == folder / CHECKPOINT and not is_marked(folder):
        mark(folder, FILES)  # a version wrote them that did not mark its folders
    claim_files(folder, FILES)


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Replace the folder's checkpoint; ValueError, and the one before it stays, where it cannot be written."""
    part = folder / f".{CHECKPOINT}.part"
    with saving(folder / CHECKPOINT):
        try:
            with part.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(folder / CHECKPOINT)
        except Exception:
            part.unlink(missing_ok=True)
            raise


def _checkpoint(config: PretrainConfig) -> Path | None:
    """The file to go on from, if there is one."""
    path = Path(config.checkpoint_path or Path(config.output_dir) / CHECKPOINT)
    if path.is_dir():
        found = sorted(path.rglob("*.pt"), key=lambda file: file.stat().st_mtime)
        if not found:
            raise ValueError(f"checkpoint_path = {config.checkpoint_path!r} holds no *.pt: leave it out to begin anew")
        path = found[-1]
    if path.exists():
        return path
    if config.checkpoint_path is not None:
        raise ValueError(f"checkpoint_path = {config.checkpoint_path!r} is not there: leave it out to begin anew")
    return None
