"""Read running text for language modelling, cut it into blocks of tokens, and hold some of it out."""

import codecs
import csv
import hashlib
import json
import math
import multiprocessing
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow.parquet
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lossytp.network.bounded_files import check_file, content_of, unpacked
from lossytp.network.checks import check_known, printable, shown
from lossytp.network.losses import Stream
from lossytp.training.config import PretrainConfig
from lossytp.training.files import first_line, matching
from lossytp.training.models import (
    check_tokenizer,
    encode_whole_texts_,
    first_tokens,
    load_tokenizer,
    take_tokenizer,
    token_ids,
)
from lossytp.training.progress import waiting
from lossytp.training.rows import DATA_VARIABLE, EXPORT, Source, cached, code_digest, hub_or_its_cache
from lossytp.training.shapes import LLAMAS, PRESETS, reason

STDLIB = "stdlib"
PARQUET, SEPARATORS = ".parquet", {".csv": ",", ".tsv": "\t"}
TABLES = (PARQUET, *SEPARATORS, ".json", ".jsonl", ".ndjson")
MOST_BYTES = 2**31  # of a text, or of a list in JSON, once they are unpacked
LONGEST_LINE = 2**26
CHECKED_BYTES = 2**20  # of a text file, before any is needed
HELD_OUT_PERCENT = 2  # of stdlib's files, or of other files' documents if these are split
HELD_OUT_END = 0.1  # of a single file that is one document
DOCUMENTS_AT_ONCE = 64


class Position(NamedTuple):
    """A document's place: row `row` of file `shard`, in pass `epoch` over all files, all counted from 0."""

    epoch: int
    shard: int
    row: int


BEGINNING = Position(0, 0, 0)


@dataclass(frozen=True)
class Corpus:
    """Text files. A table (`TABLES`) has a column `text` with one document a row; any other file is one document.

    Any of them may be compressed (.gz).
    """

    files: tuple[str, ...]
    split: str | None = None
    """Which documents to read: "validation" for a few, chosen by a hash of their text, "train" for the others, None
    for all. Of a single file that is one document, "validation" is the end."""

    def documents(self, start: Position = BEGINNING) -> Iterator[tuple[Position, list[str]]]:
        """Yield lists of documents from `start` on, endlessly, each with the position after it.

        Raises:
            ValueError: if there are no documents.
        """
        epoch, first_shard, first_row = start
        while True:
            found = start != BEGINNING
            for shard in range(first_shard, len(self.files)):
                row = 0
                for texts in self._texts(shard):
                    wanted = texts[max(0, first_row - row) :]
                    row += len(texts)
                    if wanted:
                        found = True
                        yield Position(epoch, shard, row), wanted
                first_row = 0
            if not found:
                raise self.lacks("no text")
            epoch, first_shard = epoch + 1, 0

    def sha256(self) -> str:
        """Return the hash of the files' contents, in order. It is kept until a file changes.

        Raises:
            ValueError: if a file cannot be read.
        """

        def keep(folder: Path) -> None:
            digest = hashlib.sha256()
            for name in self.files:
                with open(name, "rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            (folder / "sha256").write_text(digest.hexdigest())

        states = [(os.path.abspath(name), check_file(Path(name), sys.maxsize)) for name in self.files]
        key = repr([(name, state.st_size, state.st_mtime_ns, state.st_ctime_ns) for name, state in states])
        return (cached("sha256", key, keep) / "sha256").read_text()

    def check(self) -> None:
        """Check every file before any is needed: the beginning of a text, the columns of a table.

        Raises:
            ValueError: if a file cannot be read, or holds no text.
        """
        for file in self.files:
            next(_texts(file), None)

    def texts(self) -> Iterator[str]:
        """Yield all documents once."""
        for position, texts in self.documents():
            if position.epoch:
                return
            yield from texts

    def _texts(self, shard: int) -> Iterator[list[str]]:
        for texts in _texts(self.files[shard]):
            if texts and self.split is not None and len(self.files) == 1 and _kind(self.files[0]) not in TABLES:
                (text,) = texts
                end = round(len(text) * (1 - HELD_OUT_END))
                yield [part for part in (text[end:] if self.split == "validation" else text[:end],) if part]
                return
            yield [
                text for text in texts if text and self.split in (None, "validation" if _held_out(text) else "train")
            ]

    def lacks(self, what: str) -> ValueError:
        """Return the error that the files hold only `what`, with the fix."""
        others = len(self.files) - 1
        fix = ": give more text"
        if self.split is not None:
            fix = f", for {self.split}{fix}, or name separate files with validation_glob"
        return ValueError(f"{self.files[0]}{f' and {others} more hold' if others else ' holds'} {what}{fix}")


def corpus(data_glob: str, *, split: str, splits_files: bool = False) -> Corpus:
    """Return the files that a pattern names, sorted; for "stdlib", the sources of Python's standard library.

    Args:
        data_glob: the pattern, or "stdlib".
        split: "train" or "validation", a part of the sources of the standard library.
        splits_files: whether `split` also selects among the documents of other files. If not, all are taken.

    Raises:
        ValueError: if no file matches.
    """
    if data_glob == STDLIB:
        root, wanted = Path(sysconfig.get_paths()["stdlib"]), split == "validation"
        found = sorted(file for file in _python_files(root) if _held_out(str(file.relative_to(root))) == wanted)
        return Corpus(tuple(map(str, found)))
    files = matching(data_glob)
    if not files and os.path.isdir(os.path.expanduser(data_glob)):
        raise ValueError(
            f"{data_glob!r} is a folder: give a pattern of files, such as {data_glob.rstrip('/')}/*.parquet"
        )
    if not files:
        raise ValueError(f"no file matches {data_glob!r}: give another pattern, or 'stdlib'")
    return Corpus(tuple(files), split if splits_files else None)


def _python_files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in ("site-packages", "test")]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _held_out(text: str) -> bool:
    return int(hashlib.blake2b(text.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT


def _kind(file: str) -> str:
    return Path(file.lower().removesuffix(".gz")).suffix


def _texts(file: str) -> Iterator[list[str]]:
    """Yield the documents of a file. The first list is empty, once the file has begun as it should."""
    if _kind(file) not in TABLES:
        with unpacked(Path(file), MOST_BYTES) as stream:
            _decoded(file, stream.read(CHECKED_BYTES), final=False)
        yield []
        yield [_decoded(file, content_of(Path(file), MOST_BYTES), final=True)]
        return
    rows = _rows(file)
    names = next(rows)
    if "text" not in names:
        others = printable(", ".join(names)) or "none"
        raise ValueError(f"{file} has no column 'text', but {others}: give a file with one")
    yield []
    while some := list(islice(rows, DOCUMENTS_AT_ONCE)):
        for row in some:
            if not isinstance(row, dict) or not isinstance(row.get("text"), str | None):
                raise ValueError(f"{file} has a row whose 'text' is no text, {shown(row)}: give text")
        yield [(row.get("text") or "").encode(errors="replace").decode() for row in some]  # JSON has half characters


def _rows(file: str) -> Iterator[Any]:
    """Yield the names of a table's columns, then its rows, as objects; of Parquet only their texts."""
    with unpacked(Path(file)) as stream:
        try:
            if _kind(file) == PARQUET:
                shard = pyarrow.parquet.ParquetFile(stream)
                yield shard.schema_arrow.names
                for batch in shard.iter_batches(DOCUMENTS_AT_ONCE, columns=["text"]):
                    yield from batch.to_pylist()
                return
            content = TextIOWrapper(stream, encoding="utf-8-sig", newline="")
            lines = iter(lambda: content.readline(LONGEST_LINE), "")
            if separator := SEPARATORS.get(_kind(file)):
                csv.field_size_limit(LONGEST_LINE - 1)  # what fills a line may go on in the next
                table = csv.reader(lines, delimiter=separator, strict=True)
                names = next(table, [])
                yield names
                for cells in filter(None, table):
                    row = dict(zip(names, cells, strict=False))
                    if not len(row) == len(names) == len(cells):
                        raise ValueError(f"line {table.line_num} has not one cell for each name of a column")
                    yield row
                return
            first = next(lines, "")
            rows = map(json.loads, filter(str.strip, chain([first], lines)))
            if first.startswith("["):  # a list, not an object a line
                rows = iter(json.loads(content_of(Path(file), MOST_BYTES)))
            some = list(islice(rows, DOCUMENTS_AT_ONCE))
            yield dict.fromkeys(name for row in some if isinstance(row, dict) for name in row)
            yield from chain(some, rows)
        except (pyarrow.ArrowException, csv.Error, ValueError, RecursionError) as error:
            why = " ".join(str(error).split())[:200]
            raise ValueError(f"{file} cannot be read ({why}): give a whole {_kind(file)[1:]} file of texts") from error


def _decoded(file: str, content: bytes, *, final: bool) -> str:
    """Return the text of a file, or of its beginning if not `final`.

    Raises:
        ValueError: if it is not text. Binary data would give many meaningless tokens.
    """
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(content, final)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 text (byte {error.object[error.start]:#04x} at {error.start}): save it as UTF-8, or "
            "narrow the pattern"
        ) from error
    if "\0" in text:
        raise ValueError(f"{file} is not text (NUL at character {text.index(chr(0))}): narrow the pattern")
    return text.replace("\r\n", "\n").replace("\r", "\n")


# Pack text into blocks of tokens.
#
# A block begins with the tokens that the tokenizer puts before every text, if any; running text fills the rest.
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
        parts: list[np.ndarray] = []
        missing = size
        while missing:
            if self._taken == len(self._blocks):
                self._fill()
            parts.append(self._blocks[self._taken : self._taken + missing])
            self._taken += len(parts[-1])
            missing -= len(parts[-1])
        return _with_first(self._first, np.concatenate(parts))

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
        self._portion_blocks = state.get("portion_blocks", SHUFFLED_BLOCKS)  # of older checkpoints, of any block size
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
        """Read portion `number`.

        Args:
            number: counted from 0.
            start: where the portion begins in the text.
            rest: tokens before it that filled no block (N,).

        Raises:
            RuntimeError: if the program ends before the reading does.
            ValueError: if the text cannot be read, or is shorter than a block.
        """
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
    """Return the text's whole blocks, in order (B, T): all, or the first `at_most`.

    Raises:
        ValueError: if the text is shorter than one block.
    """
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
        raise ValueError(f"block_size = {block_size} leaves no room behind {len(first)} first tokens: give more")
    return first, block_size - len(first)


def _with_first(first: np.ndarray, blocks: np.ndarray) -> Tensor:
    return torch.from_numpy(np.hstack([np.tile(first, (len(blocks), 1)), blocks]))


# Find text of the hub: files in its copy under `LOSSYTP_DATA`, or downloaded ones.


TEXTS = {"shakespeare": "karpathy/tiny_shakespeare", "openwebtext": "Skylion007/openwebtext"}


def hub_text(name: str) -> str:
    """Return the pattern of the files that hold a text's training split.

    Args:
        name: one of `TEXTS`, or `owner/name` on the hub.

    Raises:
        ValueError: if the name is unknown, or there are no such files here and the hub gives none.
    """
    path = TEXTS.get(name, name)
    if path.count("/") != 1:
        check_known("dataset", name, (*TEXTS, "owner/name on the hub"))
    copy = Source(path=path).folder
    if copy is not None and copy.is_dir():
        return _pattern_in(copy, name)
    from huggingface_hub import snapshot_download

    with hub_or_its_cache():
        try:
            folder = snapshot_download(path, repo_type="dataset", revision=EXPORT, allow_patterns="*/train/*.parquet")
        except Exception as error:  # the hub's client raises many kinds
            where = f"in {DATA_VARIABLE}, at {copy}," if copy else f"in {DATA_VARIABLE}, which is not set,"
            raise ValueError(
                f"dataset = {name!r} is neither {where} nor available from the hub ({first_line(error)}): go online "
                f"once, or put its files there"
            ) from error
    return str(Path(folder) / "**" / "train" / "*.parquet")


def _pattern_in(folder: Path, name: str) -> str:
    """Return the pattern of a folder's training files, or of its only text file."""
    for pattern in ("**/train*.parquet", "**/train*.txt", "*.txt"):
        if any(folder.glob(pattern)):
            return str(folder / pattern)
    raise ValueError(f"dataset = {name!r}: {folder} holds no .parquet or .txt file: put one there")


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
    """Return the text to validate on.

    Raises:
        ValueError: if the training text has a file of it too.
    """
    if config.data.validation_glob is None:
        return corpus(text_pattern(config), split="validation", splits_files=True)
    found = corpus(config.data.validation_glob, split="validation")
    both = set(map(os.path.realpath, found.files)).intersection(map(os.path.realpath, training_text(config).files))
    if both:
        raise ValueError(
            f"validation_glob = {config.data.validation_glob!r} names {min(both)}, which is training text too: name "
            "other files, or leave it out to hold some of the text out"
        )
    return found


def text_pattern(config: PretrainConfig) -> str:
    """Return the pattern of the text's files, or "stdlib"."""
    return config.data.data_glob if config.data.dataset is None else hub_text(config.data.dataset)


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


# Compute a baseline that a language model must beat: a trigram model with interpolated Kneser-Ney smoothing.
#
# P(w | u v) = max(c(uvw) - D, 0) / c(uv) + D N(uv.) / c(uv) P(w | v), and so on down to the uniform distribution. Lower
# orders count in how many contexts a word occurs, not how often (Chen and Goodman, "An empirical study of smoothing
# techniques for language modeling", Computer Speech & Language 13, 1999, section 2.7). Each order has one discount,
# D = n1 / (n1 + 2 n2) (Ney, Essen and Kneser, 1994).
#
# Shapes: N tokens of running text.


@dataclass(frozen=True)
class _Order:
    """The n-grams of one order: their sorted codes and counts, and for each context the words that follow it."""

    codes: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray  # sum of the counts after each context
    distinct: np.ndarray  # number of distinct words after each context
    discount: float

    @classmethod
    def of(cls, codes: np.ndarray, counts: np.ndarray, vocabulary: int) -> "_Order":
        contexts, where, distinct = np.unique(codes // vocabulary, return_inverse=True, return_counts=True)
        once, twice = (int((counts == times).sum()) for times in (1, 2))
        discount = once / (once + 2 * twice) if once else 0.5  # positive, so that no word gets probability 0
        return cls(codes, counts, contexts, np.bincount(where, weights=counts), distinct, discount)

    def interpolate(self, codes: np.ndarray, lower: np.ndarray, vocabulary: int) -> np.ndarray:
        """Return the n-grams' probabilities from those of the lower order, which stand if a context is unknown."""
        counts = _look_up(self.codes, self.counts, codes)
        totals = _look_up(self.contexts, self.totals, codes // vocabulary)
        distinct = _look_up(self.contexts, self.distinct, codes // vocabulary)
        known = np.maximum(totals, 1)
        higher = (np.maximum(counts - self.discount, 0) + self.discount * distinct * lower) / known
        return np.where(totals > 0, higher, lower)


def trigram_perplexity(train: np.ndarray, held_out: np.ndarray, vocabulary: int) -> float:
    """Return the perplexity of held-out text, from its third token on, under a trigram model of the training text.

    Args:
        train: token ids (N,) of the training text, below `vocabulary`.
        held_out: token ids (N,) of the held-out text, below `vocabulary`.
        vocabulary: number of tokens in the vocabulary.

    Raises:
        ValueError: if either text has fewer than three tokens.
    """
    for name, tokens in {"train": train, "held_out": held_out}.items():
        if len(tokens) < 3:
            raise ValueError(f"{name} has {len(tokens)} tokens: give three or more")
    codes, counts = np.unique(_codes(train, 3, vocabulary), return_counts=True)
    orders = [_Order.of(codes, counts, vocabulary)]
    for size in (2, 1):  # continuation counts: the distinct words before an n-gram
        codes, counts = np.unique(orders[-1].codes % vocabulary**size, return_counts=True)
        orders.append(_Order.of(codes, counts, vocabulary))
    probabilities = np.full(len(held_out) - 2, 1 / vocabulary)
    wanted = _codes(held_out, 3, vocabulary)
    for size, order in zip((1, 2, 3), reversed(orders), strict=True):
        probabilities = order.interpolate(wanted % vocabulary**size, probabilities, vocabulary)
    return math.exp(-np.log(probabilities).mean())


def _codes(tokens: np.ndarray, size: int, vocabulary: int) -> np.ndarray:
    """Return each n-gram of running text as a number (N - size + 1,); its first word is the most significant digit."""
    tokens = tokens.astype(np.int64)
    count = len(tokens) - size + 1
    return sum(tokens[i : i + count] * vocabulary ** (size - 1 - i) for i in range(size))


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the value of each wanted key; 0 for keys that are not among the sorted `keys`."""
    where = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[where] == wanted, values[where], 0)


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


def losses_by_block(model: Any, blocks_NT: Tensor) -> np.ndarray:
    """Return the cross-entropy of every token but the first of each block: (N, T - 1), fp64.

    Blocks pass the model one by one, so that each is a message of its own.
    """
    losses = [token_losses(model, ids_1T).cpu().numpy() for ids_1T in blocks_NT.split(1)]
    return np.concatenate(losses).astype(np.float64)
