"""The text and the tokenizer that a pretraining run names."""

import hashlib
import os
from itertools import islice
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lossytp.training.config import PretrainConfig
from lossytp.training.model_files import reason
from lossytp.training.models import load_tokenizer
from lossytp.training.pretraining.corpus import Corpus, corpus
from lossytp.training.pretraining.hub_text import hub_text
from lossytp.training.pretraining.vocabulary import train_tokenizer
from lossytp.training.shapes import LLAMAS, PRESETS
from lossytp.training.tasks.cache import cached, code_digest
from lossytp.training.tokenizer import check_tokenizer, encode_whole_texts_

VOCABULARY_DOCUMENTS = 4000


def training_text(config: PretrainConfig) -> Corpus:
    """Return the text to train on: all of it, less what is held out if there is no `validation_glob`."""
    return corpus(text_pattern(config), split="train", splits_files=config.validation_glob is None)


def validation_text(config: PretrainConfig) -> Corpus:
    """Return the text to validate on.

    Raises:
        ValueError: if the training text has a file of it too.
    """
    if config.validation_glob is None:
        return corpus(text_pattern(config), split="validation", splits_files=True)
    found = corpus(config.validation_glob, split="validation")
    both = set(map(os.path.realpath, found.files)).intersection(map(os.path.realpath, training_text(config).files))
    if both:
        raise ValueError(
            f"validation_glob = {config.validation_glob!r} names {min(both)}, which is training text too: name other "
            "files, or leave it out to hold some of the text out"
        )
    return found


def text_pattern(config: PretrainConfig) -> str:
    """Return the pattern of the text's files, or "stdlib"."""
    return config.data_glob if config.dataset is None else hub_text(config.dataset)


def text_sha256(config: PretrainConfig) -> str:
    """Return the hash of the text that the run trains and validates on.

    Raises:
        ValueError: if there are no files, or one cannot be read.
    """
    hashes = training_text(config).sha256(), validation_text(config).sha256()
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def tokenizer_for(config: PretrainConfig) -> PreTrainedTokenizerFast:
    """Return the tokenizer of `tokenizer_path`, else of a model on the hub or in a folder, else a trained one.

    Training reads the first `VOCABULARY_DOCUMENTS` documents. What is trained on them is cached.

    Raises:
        ValueError: if the named folder holds no usable tokenizer.
    """
    if config.tokenizer_path is not None:
        return _loaded(os.path.expanduser(config.tokenizer_path), config)
    shape = PRESETS.get(config.model_name) or LLAMAS.get(config.model_name)
    if shape is None:
        return load_tokenizer(config.model_name, trust_remote_code=config.trust_remote_code)
    size = shape["vocab_size"]
    documents = list(islice(training_text(config).texts(), VOCABULARY_DOCUMENTS))

    def train(part: Any) -> None:
        train_tokenizer(documents, size=size).save_pretrained(part)

    read = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    return _loaded(str(cached("vocabulary", f"{read} {size} {code_digest(train_tokenizer.__module__)}", train)), config)


def _loaded(folder: str, config: PretrainConfig) -> PreTrainedTokenizerFast:
    whose = f"tokenizer_path = {folder!r}"
    try:
        loaded: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(f"{whose} holds no tokenizer ({reason(error, folder)}): give a folder with one") from error
    check_tokenizer(whose, loaded)
    encode_whole_texts_(loaded)
    return loaded
