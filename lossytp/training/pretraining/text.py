"""The text and the tokenizer that a pretraining run names."""

import hashlib
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
    """Return the text to validate on."""
    pattern = config.validation_glob or text_pattern(config)
    return corpus(pattern, split="validation", splits_files=config.validation_glob is None)


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


def tokenizer_for(config: PretrainConfig, sha256: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of `tokenizer_path`, else of a model on the hub or in a folder, else a trained one.

    Training reads the first `VOCABULARY_DOCUMENTS` documents.

    Args:
        config: the run's configuration.
        sha256: the hash of the text, by which a trained tokenizer is cached.

    Raises:
        ValueError: if the named folder holds no usable tokenizer.
    """
    if config.tokenizer_path is not None:
        return _loaded(config.tokenizer_path, config)
    shape = PRESETS.get(config.model_name) or LLAMAS.get(config.model_name)
    if shape is None:
        return load_tokenizer(config.model_name, trust_remote_code=config.trust_remote_code)
    size = shape["vocab_size"]
    text = training_text(config)

    def train(part: Any) -> None:
        train_tokenizer(islice(text.texts(), VOCABULARY_DOCUMENTS), size=size).save_pretrained(part)

    key = f"{sha256} {text.split} {size} {VOCABULARY_DOCUMENTS} {code_digest(train_tokenizer.__module__)}"
    return _loaded(str(cached("vocabulary", key, train)), config)


def _loaded(folder: str, config: PretrainConfig) -> PreTrainedTokenizerFast:
    whose = f"tokenizer_path = {folder!r}"
    try:
        loaded: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(f"{whose} holds no tokenizer ({reason(error, folder)}): give a folder with one") from error
    check_tokenizer(whose, loaded)
    encode_whole_texts_(loaded)
    return loaded
