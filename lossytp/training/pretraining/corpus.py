"""Read running text for language modelling: documents in a fixed order, packed into blocks of tokens.

Shapes: B blocks, T tokens a block.
"""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from lossytp.network.streams import Stream

STDLIB = "stdlib"
PARQUET = ".parquet"
HELD_OUT_PERCENT = 2  # of stdlib's files, or of other files' documents if these are split
HELD_OUT_END = 0.1  # of a single file that is one document
SHUFFLED_BLOCKS = 8192  # blocks that are shuffled together
DOCUMENTS_AT_ONCE = 64


class Position(NamedTuple):
    """A document's place: row `row` of file `shard`, in pass `epoch` over all files, all counted from 0."""

    epoch: int
    shard: int
    row: int


BEGINNING = Position(0, 0, 0)


@dataclass(frozen=True)
class Corpus:
    """Text files. A parquet file has a column `text` with one document a row; any other file is one document."""

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
                raise ValueError(f"{self.files[0]} and {len(self.files) - 1} others hold no text{self.of_split}")
            epoch, first_shard = epoch + 1, 0

    def sha256(self) -> str:
        """Return the hash of the files' contents, in order.

        Raises:
            ValueError: if a file cannot be read.
        """
        digest = hashlib.sha256()
        for name in self.files:
            try:
                with open(name, "rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            except OSError as error:
                raise ValueError(f"{name} cannot be read ({error.strerror}): give a readable file") from error
        return digest.hexdigest()

    def texts(self) -> Iterator[str]:
        """Yield all documents once."""
        for position, texts in self.documents():
            if position.epoch:
                return
            yield from texts

    def _texts(self, shard: int) -> Iterator[list[str]]:
        for texts in _texts(self.files[shard]):
            if self.split is not None and len(self.files) == 1 and not self.files[0].endswith(PARQUET):
                (text,) = texts
                end = round(len(text) * (1 - HELD_OUT_END))
                yield [part for part in (text[end:] if self.split == "validation" else text[:end],) if part]
                return
            yield [
                text for text in texts if text and self.split in (None, "validation" if _held_out(text) else "train")
            ]

    @property
    def of_split(self) -> str:
        """Return the end of an error message: which split lacks text, and the fix."""
        return "" if self.split is None else f", for {self.split}: give more, or separate files"


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
        root = Path(sysconfig.get_paths()["stdlib"])
        everything = sorted(_python_files(root))
        held_out = [_held_out(str(file.relative_to(root))) for file in everything]
        return Corpus(
            tuple(str(file) for file, held in zip(everything, held_out, strict=True) if held == (split == "validation"))
        )
    files = sorted(file for file in glob.glob(data_glob, recursive=True) if not os.path.isdir(file))
    if not files:
        raise ValueError(f"no file matches {data_glob!r}: give another pattern, or 'stdlib'")
    return Corpus(tuple(files), split if splits_files else None)


def _python_files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in ("site-packages", "test")]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _held_out(text: str) -> bool:
    return int(hashlib.blake2b(text.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT


def _texts(file: str) -> Iterator[list[str]]:
    if not file.endswith(PARQUET):
        yield [_text_in(file)]
        return
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            if "text" not in table.schema_arrow.names:
                raise ValueError(
                    f"{file} has no column 'text', but {', '.join(table.schema_arrow.names)}: give a file with one"
                )
            for batch in table.iter_batches(DOCUMENTS_AT_ONCE, columns=["text"]):
                texts = batch.column(0).to_pylist()
                if not all(isinstance(text, str | None) for text in texts):
                    raise ValueError(f"{file} has {batch.schema.types[0]} in its column 'text': give text")
                yield texts
    except (pyarrow.ArrowException, OSError) as error:
        why = " ".join(str(error).split())[:200]
        raise ValueError(f"{file} cannot be read ({why}): give a whole parquet file") from error


def _text_in(file: str) -> str:
    """Return the file's text.

    Raises:
        ValueError: if the file is unreadable or not text. Binary data would give many meaningless tokens.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror}): give a readable file") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 text (byte {error.object[error.start]:#04x} at {error.start}): save it as UTF-8, or "
            "narrow the pattern"
        ) from error
    if "\0" in text:
        raise ValueError(f"{file} is not text (NUL at character {text.index(chr(0))}): narrow the pattern")
    return text


class PackedBlocks:
    """Blocks of `block_size` tokens without padding: documents one after another, each followed by the end token.

    Blocks are shuffled in portions: of a few thousand blocks if `streaming`, else of a whole pass over the text. `seed`
    determines the order. After `load_state_dict()` an object continues as the one that `state_dict()` describes.
    """

    def __init__(
        self, text: Corpus, tokenizer: PreTrainedTokenizerFast, *, block_size: int, seed: int, streaming: bool = True
    ) -> None:
        self.text, self.tokenizer, self.block_size, self.seed = text, tokenizer, block_size, seed
        self.streaming = streaming
        self._start = self._position = BEGINNING
        self._rest = self._rest_at_start = np.zeros(0, dtype=np.int64)
        self._portion = -1  # index of the current portion
        self._blocks = np.zeros((0, block_size), dtype=np.int64)
        self._taken = 0  # blocks of this portion returned so far

    @property
    def position(self) -> Position:
        """Return the position after the last document that was read."""
        return self._position

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
        return torch.from_numpy(np.concatenate(parts))

    def in_order(self) -> Iterator[np.ndarray]:
        """Yield blocks (T,) in the order of the text, from its beginning, endlessly."""
        rest = np.zeros(0, dtype=np.int64)
        for _, texts in self.text.documents():
            tokens = np.concatenate([rest, *encode(self.tokenizer, texts)])
            whole = len(tokens) // self.block_size * self.block_size
            yield from tokens[:whole].reshape(-1, self.block_size)
            rest = tokens[whole:]

    def state_dict(self) -> dict[str, Any]:
        """Return where the current portion starts in the text, and how many of its blocks were returned."""
        return {
            "start": list(self._start),
            "rest": torch.from_numpy(self._rest_at_start),
            "portion": self._portion,
            "taken": self._taken,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position, self._rest = Position(*state["start"]), state["rest"].numpy()
        self._portion = max(-1, state["portion"] - 1)
        self._blocks = self._blocks[:0]
        if state["portion"] >= 0:
            self._fill()
        self._taken = state["taken"]

    def _fill(self) -> None:
        self._start, self._rest_at_start = self._position, self._rest
        self._portion += 1
        enough, pieces, length = SHUFFLED_BLOCKS * self.block_size, [self._rest], len(self._rest)
        for position, texts in self.text.documents(self._position):
            ends_pass = position.epoch > self._position.epoch
            if length >= enough if self.streaming else ends_pass and length >= self.block_size:
                break
            self._position = position
            pieces += encode(self.tokenizer, texts)
            length += sum(map(len, pieces[-len(texts) :]))
        tokens = np.concatenate(pieces)
        wanted = enough if self.streaming else length // self.block_size * self.block_size
        blocks, self._rest = tokens[:wanted].reshape(-1, self.block_size), tokens[wanted:]
        draws = Stream((self.seed, "blocks", self._portion)).uniforms(len(blocks))
        self._blocks = blocks[np.argsort(draws, kind="stable")]
        self._taken = 0


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[np.ndarray]:
    """Return the token ids of each text, int64, followed by the end token."""
    encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    return [np.array([*encoding.ids, tokenizer.eos_token_id], dtype=np.int64) for encoding in encodings]


def all_blocks(text: Corpus, tokenizer: PreTrainedTokenizerFast, *, block_size: int) -> Tensor:
    """Return all whole blocks of the text, in order (B, T).

    Raises:
        ValueError: if the text is shorter than one block.
    """
    tokens = np.concatenate([ids for document in text.texts() for ids in encode(tokenizer, [document])])
    whole = len(tokens) // block_size
    if not whole:
        raise ValueError(
            f"{text.files[0]} and {len(text.files) - 1} others hold {len(tokens)} tokens, fewer than a block of "
            f"{block_size}{text.of_split}"
        )
    return torch.from_numpy(tokens[: whole * block_size].reshape(whole, block_size))
