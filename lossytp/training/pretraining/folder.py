"""Find and save what a pretraining run keeps in its folder: a finished model, a checkpoint, a vocabulary."""

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
from lossytp.training.record import result_settings
from lossytp.training.saved_models import MODEL_FILES, TOKENIZER_FILES
from lossytp.training.tokenizer import check_tokenizer

VOCABULARY_DOCUMENTS = 4000
CHECKPOINT = "checkpoint.pt"
STATISTICS = "pretrain.json"
FILES = (CHECKPOINT, f".{CHECKPOINT}.part", STATISTICS, "README.md", *MODEL_FILES, *TOKENIZER_FILES)
TOLD = ("validation_loss", "perplexity", "tokens")  # keys of pretrain.json that the command prints
STATE = ("model", "optimizer", "blocks", "losses", "evaluations", "seconds")  # keys of a checkpoint beside "config"


def finished(config: PretrainConfig, folder: Path) -> dict[str, Any] | None:
    """Return the content of the folder's pretrain.json, or None if there is no such file.

    Parameters that an older file lacks get their defaults.

    Raises:
        ValueError: if the file is damaged, or of another configuration.
    """
    file = folder / STATISTICS
    try:
        statistics: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        written = described(PretrainConfig.from_dict(statistics["config"]))
        lacking = [name for name in TOLD if not isinstance(statistics[name], int | float)]
        if lacking:
            raise ValueError(f"it lacks numbers: {', '.join(lacking)}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} was not written by this command ({error!r}): delete it to run again") from error
    changed = [name for name, value in described(config).items() if written[name] != value]
    if changed:
        changes = ", ".join(changed)
        raise ValueError(f"output_dir = {str(folder)!r} holds a model with different {changes}: give another folder")
    try:
        now = data_sha256(config)
    except ValueError:  # a committed model is read on machines without its data
        return statistics
    _check_same_data(file, statistics.get("data_sha256", now), now)
    return statistics


def data_sha256(config: PretrainConfig) -> str:
    """Return the hash of the text that the run trains and validates on.

    Raises:
        ValueError: if there are no files, or one cannot be read.
    """
    hashes = training_text(config).sha256(), validation_text(config).sha256()
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def _check_same_data(file: Path, then: str, now: str) -> None:
    """Raise ValueError if the text's hash `now` differs from `then`, its value when `file` was written."""
    if now != then:
        raise ValueError(
            f"the text files have changed since {file} was written: put the old files back, or give another output_dir"
        )


def described(config: PretrainConfig) -> dict[str, Any]:
    """Return the settings that the result depends on, paths shortened to their last parts."""
    described = result_settings(config)
    del described["eval_steps"]  # when pretraining validates changes nothing else
    return described | {name: path_end(described[name]) for name in ("data_glob", "validation_glob", "tokenizer_path")}


def path_end(pattern: str | None) -> str | None:
    """Return the last four parts of a path. The earlier parts differ from machine to machine."""
    return pattern and "/".join(Path(pattern).parts[-4:])


def training_text(config: PretrainConfig) -> Corpus:
    """Return the text to train on: that of `data_glob`, less held-out documents if there is no `validation_glob`."""
    return corpus(config.data_glob, split="train", splits_files=config.validation_glob is None)


def validation_text(config: PretrainConfig) -> Corpus:
    """Return the text to validate on."""
    pattern = config.validation_glob or config.data_glob
    return corpus(pattern, split="validation", splits_files=config.validation_glob is None)


def tokenizer_for(config: PretrainConfig, folder: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer of `tokenizer_path`, else of the checkpoint's folder, else one trained on the text.

    Training reads the first `VOCABULARY_DOCUMENTS` documents, and saves the tokenizer in `folder`.

    Raises:
        ValueError: if the named or the checkpoint's folder holds no usable tokenizer.
    """
    source, checkpoint = config.tokenizer_path, _checkpoint(config)
    if source is None and checkpoint is not None and (checkpoint.parent / "tokenizer.json").exists():
        source = str(checkpoint.parent)
    if source is not None:
        whose = f"tokenizer_path = {source!r}" if config.tokenizer_path else f"{source}, the checkpoint's folder,"
        try:
            loaded: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=config.trust_remote_code)
        except Exception as error:  # a damaged file can raise anything
            raise ValueError(f"{whose} holds no tokenizer ({first_line(error)}): give a folder with one") from error
        check_tokenizer(whose, loaded)
        return loaded
    texts = islice(training_text(config).texts(), VOCABULARY_DOCUMENTS)
    tokenizer = train_tokenizer(texts, size=PRESETS[config.model_name]["vocab_size"])
    with saving(folder):
        tokenizer.save_pretrained(folder)
    return tokenizer


def checkpoint_of(config: PretrainConfig) -> dict | None:
    """Return the state to resume from, or None to start over.

    Raises:
        ValueError: if the checkpoint is damaged, or of another configuration.
    """
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
        raise ValueError(f"{path} is not a checkpoint of this command ({why}): delete it to start over") from error
    changed = [name for name, value in described(config).items() if written[name] != value]
    if changed:
        raise ValueError(f"{path} belongs to a run with different {', '.join(changed)}: give another folder")
    now = data_sha256(config)
    _check_same_data(path, state.get("data_sha256", now), now)
    return state


def claim_files_of(config: PretrainConfig, folder: Path) -> None:
    """Declare that this run's files in its folder are this program's.

    Raises:
        ValueError: if the folder already holds the user's files of these names.
    """
    if _checkpoint(config) == folder / CHECKPOINT and not is_marked(folder):
        mark(folder, FILES)  # an older version wrote them, which did not mark its folders
    claim_files(folder, FILES)


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Replace the folder's checkpoint.

    Raises:
        ValueError: if it cannot be written; the previous checkpoint stays.
    """
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
    """Return the file to resume from, or None if there is none."""
    path = Path(config.checkpoint_path or Path(config.output_dir) / CHECKPOINT)
    if path.is_dir():
        found = sorted(path.rglob("*.pt"), key=lambda file: file.stat().st_mtime)
        if not found:
            raise ValueError(
                f"checkpoint_path = {config.checkpoint_path!r} has no *.pt file: leave it out to start over"
            )
        path = found[-1]
    if path.exists():
        return path
    if config.checkpoint_path is not None:
        raise ValueError(f"checkpoint_path = {config.checkpoint_path!r} does not exist: leave it out to start over")
    return None
