"""Cut running text into blocks of tokens, and make the tokenizer that does so."""

import hashlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lossytp.network.checks import refuse_if
from lossytp.network.losses import Stream
from lossytp.training.config import PretrainConfig
from lossytp.training.corpus import BEGINNING, Corpus, Position, corpus, hub_text
from lossytp.training.models import (
    check_tokenizer,
    encode_whole_texts_,
    first_tokens,
    load_tokenizer,
    take_tokenizer,
    token_ids,
)
from lossytp.training.progress import waiting
from lossytp.training.rows import cached, code_digest
from lossytp.training.shapes import LLAMAS, PRESETS, reason

# Pack text into blocks of tokens. A block begins with the tokens that the tokenizer puts before every text, if any.
#
# Shapes: B blocks, T tokens a block, P tokens of them from the text, N tokens.

SHUFFLED_BLOCKS, SHUFFLED_TOKENS = 8192, 2**20  # the most that is shuffled together
Result = TypeVar("Result")


class Portion(NamedTuple):
    """Text that is shuffled together: blocks without their first tokens (B, P), and the tokens left over (N,).

    `places` are the positions where the blocks begin, or up to `DOCUMENTS_AT_ONCE` documents later (B, 3); `position`
    is that after them all.
    """

    blocks: np.ndarray
    places: np.ndarray
    position: Position
    rest: np.ndarray


class PackedBlocks:
    """Blocks of `block_size` tokens without padding: documents one after another, each followed by the end token.

    Blocks are shuffled in portions: of a million tokens if `streaming`, else of a whole pass over the text. `seed`
    determines the order. After `load_state_dict()` an object continues as the one that `state_dict()` describes.

    With `streaming`, a thread reads the next portion while this one's blocks are used. `num_proc` processes tokenise.
    """

    def __init__(
        self,
        text: Corpus,
        tokenizer: PreTrainedTokenizerFast,
        *,
        block_size: int,
        seed: int,
        streaming: bool = True,
        num_proc: int | None = None,
    ) -> None:
        self.text, self.tokenizer, self.seed, self.streaming = text, tokenizer, seed, streaming
        self._encode: Callable[[list[str]], list[np.ndarray]] = partial(encode, tokenizer)
        if num_proc is not None and num_proc > 1:
            pool = multiprocessing.get_context("spawn").Pool(num_proc, take_tokenizer, (tokenizer.backend_tokenizer,))
            self._encode = lambda texts: [_ended(tokenizer, ids) for ids in pool.map(token_ids, texts)]
        self._first, self._room = _first_and_room(tokenizer, block_size)
        self._portion_blocks = min(SHUFFLED_BLOCKS, max(1, SHUFFLED_TOKENS // block_size))
        self._start = self._position = BEGINNING
        self._rest = self._rest_at_start = np.zeros(0, dtype=np.int64)
        self._portion = -1  # index of the current portion
        self._blocks, self._places = np.zeros((0, 0), dtype=np.int64), np.zeros((0, 3), dtype=np.int64)
        self._taken = 0  # blocks of this portion returned so far
        self._next: Future[Portion] | None = None

    @property
    def position(self) -> Position:
        """Return where the last returned block begins; blocks come from all over their portion."""
        return Position(*self._places[self._taken - 1].tolist()) if self._taken else self._start

    @property
    def passes(self) -> int:
        """Return how many passes over the text the returned blocks come from."""
        return 1 + int(self._places[: self._taken, 0].max(initial=self._start.epoch))

    def batch(self, size: int) -> Tensor:
        """Return the next `size` blocks (B, T)."""
        blocks = np.zeros((0, self._room), dtype=np.int64)
        while (missing := size - len(blocks)) > 0:
            if self._taken == len(self._blocks):
                self._fill()
            taken = self._blocks[self._taken : self._taken + missing]
            self._taken += len(taken)
            blocks = np.concatenate([blocks, taken])
        return _with_first(self._first, blocks)

    def state_dict(self) -> dict[str, Any]:
        """Return where the current portion starts in the text, and how many of its blocks were returned."""
        return {
            "start": list(self._start),
            "rest": torch.from_numpy(self._rest_at_start),
            "portion": self._portion,
            "taken": self._taken,
            "portion_blocks": self._portion_blocks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position, self._rest = Position(*state["start"]), state["rest"].numpy()
        self._portion = max(-1, state["portion"] - 1)
        self._portion_blocks = state["portion_blocks"]
        self._blocks, self._next = self._blocks[:0], None
        if state["portion"] >= 0:
            self._fill()
        self._taken = state["taken"]

    def _fill(self) -> None:
        self._start, self._rest_at_start = self._position, self._rest
        self._portion += 1
        reading = self._next or in_background(self._read, self._portion, self._position, self._rest)
        with waiting("pretraining: reading the next blocks of text"):
            self._blocks, self._places, self._position, self._rest = reading.result()
        self._taken = 0
        if self.streaming:
            self._next = in_background(self._read, self._portion + 1, self._position, self._rest)

    def _read(self, number: int, start: Position, rest: np.ndarray) -> Portion:
        """Read portion `number`, which begins at `start` and with the tokens `rest` (N,) that filled no block."""
        room, enough = self._room, self._portion_blocks * self._room
        position, pieces, length = start, [rest], len(rest)
        places, ends = [start], [length]  # the tokens before each end are from no later than its place
        epoch = None  # of the first document
        for after, texts in self.text.documents(start):
            if after.epoch > 0 and start == BEGINNING and length < room:
                raise self.text.lacks(f"{length} tokens, fewer than a block of {room}")
            epoch = after.epoch if epoch is None else epoch
            if length >= enough if self.streaming else after.epoch > epoch and length >= room:
                break
            if not threading.main_thread().is_alive():  # a program that ends waits for this thread
                raise RuntimeError("nobody needs this portion any more")
            position = after
            pieces += self._encode(texts)
            length += sum(map(len, pieces[-len(texts) :]))
            places.append(position)
            ends.append(length)
        tokens = np.concatenate(pieces)
        wanted = enough if self.streaming else length // room * room
        blocks = tokens[:wanted].reshape(-1, room)
        order = np.argsort(Stream((self.seed, "blocks", number)).uniforms(len(blocks)), kind="stable")
        where = np.searchsorted(ends, order * room, side="right")
        return Portion(blocks[order], np.array(places)[where], position, tokens[wanted:])


def in_background(function: Callable[..., Result], *arguments: Any, daemon: bool = False) -> "Future[Result]":
    """Call a function in another thread; a program that ends waits for it, unless it is a daemon."""
    future: Future[Result] = Future()

    def call() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # whoever asks for the result gets it
            future.set_exception(error)

    threading.Thread(target=call, daemon=daemon).start()
    return future


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[np.ndarray]:
    """Return the token ids of each text, int64, followed by the end token."""
    encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    return [_ended(tokenizer, encoding.ids) for encoding in encodings]


def _ended(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> np.ndarray:
    return np.array([*ids, tokenizer.eos_token_id], dtype=np.int64)


def all_blocks(
    text: Corpus, tokenizer: PreTrainedTokenizerFast, *, block_size: int, at_most: int | None = None
) -> Tensor:
    """Return the text's whole blocks, in order (B, T): all, or the first `at_most`."""
    first, room = _first_and_room(tokenizer, block_size)
    pieces = list(islice(in_order(([each] for each in text.texts()), tokenizer, room), at_most))
    if not pieces:
        tokens = sum(len(encode(tokenizer, [each])[0]) for each in text.texts())
        raise text.lacks(f"{tokens} tokens, fewer than a block of {room}")
    return _with_first(first, np.stack(pieces))


def in_order(documents: Iterable[list[str]], tokenizer: PreTrainedTokenizerFast, length: int) -> Iterator[np.ndarray]:
    """Yield pieces (length,) of the text that lists of documents make."""
    rest = np.zeros(0, dtype=np.int64)
    for texts in documents:
        tokens = np.concatenate([rest, *encode(tokenizer, texts)])
        whole = len(tokens) // length * length
        yield from tokens[:whole].reshape(-1, length)
        rest = tokens[whole:]


def _first_and_room(tokenizer: PreTrainedTokenizerFast, block_size: int) -> tuple[np.ndarray, int]:
    """Return the tokens that begin every block, and P."""
    first = np.array(first_tokens(tokenizer), dtype=np.int64)
    if block_size <= len(first):
        raise ValueError(f"block_size = {block_size} leaves no room after {len(first)} first tokens: give more")
    return first, block_size - len(first)


def _with_first(first: np.ndarray, blocks: np.ndarray) -> Tensor:
    return torch.from_numpy(np.hstack([np.tile(first, (len(blocks), 1)), blocks]))


# Train the byte-level BPE vocabularies of the project's own models.


PAD, END = "<|pad|>", "<|endoftext|>"


def train_tokenizer(texts: Iterable[str], *, size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of `size` tokens (Sennrich et al., ACL 2016; bytes as in GPT-2, Radford et al., 2019).

    The first token pads, and the second ends a text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, bos_token=END)


# The text and the tokenizer that a pretraining run names.


VOCABULARY_DOCUMENTS = 4000


def training_text(config: PretrainConfig) -> Corpus:
    """Return the text to train on: all of it, less what is held out if there is no `validation_glob`."""
    return corpus(text_pattern(config), split="train", splits_files=config.data.validation_glob is None)


def validation_text(config: PretrainConfig) -> Corpus:
    """Return the text to validate on, which has no file of the training text."""
    if config.data.validation_glob is None:
        return corpus(text_pattern(config), split="validation", splits_files=True)
    found = corpus(config.data.validation_glob, split="validation")
    both = set(map(os.path.realpath, found.files)).intersection(map(os.path.realpath, training_text(config).files))
    fault = f"names {min(both, default='')}, which is training text too: name other files, or leave it out"
    refuse_if(both, "validation_glob", config.data.validation_glob, fault)
    return found


def text_pattern(config: PretrainConfig) -> str:
    """Return the pattern of the text's files, or "stdlib"."""
    return config.data.data_glob if config.data.dataset is None else hub_text(config.data.dataset)


def text_sha256(config: PretrainConfig) -> str:
    """Return the hash of the text that the run trains and validates on."""
    hashes = training_text(config).sha256(), validation_text(config).sha256()
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def tokenizer_for(config: PretrainConfig) -> PreTrainedTokenizerFast:
    """Return the tokenizer of `tokenizer_path`, else of a model on the hub or in a folder, else a trained one.

    Training reads the first `VOCABULARY_DOCUMENTS` documents. What is trained on them is cached.
    """
    if config.data.tokenizer_path is not None:
        return _loaded(os.path.expanduser(config.data.tokenizer_path), config)
    shape = PRESETS.get(config.model_name) or LLAMAS.get(config.model_name)
    if shape is None:
        return load_tokenizer(config.model_name, trust_remote_code=config.data.trust_remote_code)
    size = shape["vocab_size"]
    documents = list(islice(training_text(config).texts(), VOCABULARY_DOCUMENTS))

    def train(part: Any) -> None:
        train_tokenizer(documents, size=size).save_pretrained(part)

    read = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    return _loaded(str(cached("vocabulary", f"{read} {size} {code_digest(train_tokenizer.__module__)}", train)), config)


def _loaded(folder: str, config: PretrainConfig) -> PreTrainedTokenizerFast:
    whose = f"tokenizer_path = {folder!r}"
    try:
        loaded: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.data.trust_remote_code)
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(f"{whose} holds no tokenizer ({reason(error, folder)}): give a folder with one") from error
    check_tokenizer(whose, loaded)
    encode_whole_texts_(loaded)
    return loaded


# The cross-entropy of a language model, token by token, in nats.
#
# Shapes: N blocks of text, B blocks of one batch, T tokens each, L local ranks.


def token_losses(model: Any, ids_BT: Tensor) -> Tensor:
    """Return the cross-entropy of every token but the first, given those before it: (B, T - 1), fp32.

    If ranks have their own streams, it is the mean over local ranks.
    """
    with torch.inference_mode():
        output = model(input_ids=ids_BT, use_cache=False)
        logits_LBTV = getattr(output, "rank_logits", output.logits.unsqueeze(0))
        targets = ids_BT[:, 1:].flatten()
        losses = [cross_entropy(each[:, :-1].flatten(0, 1).float(), targets, reduction="none") for each in logits_LBTV]
        return torch.stack(losses).mean(0).view(len(ids_BT), -1)
