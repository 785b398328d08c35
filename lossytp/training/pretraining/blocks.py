"""Pack text into blocks of tokens.

Shapes: B blocks, T tokens a block, N tokens.
"""

import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from lossytp.network.streams import Stream
from lossytp.training.pretraining.corpus import BEGINNING, Corpus, Position
from lossytp.training.tokenizer import take_tokenizer, token_ids

SHUFFLED_BLOCKS = 8192  # blocks that are shuffled together
Result = TypeVar("Result")


class Portion(NamedTuple):
    """Blocks that are shuffled together (B, T), the text's position after them, and the tokens left over (N,)."""

    blocks: np.ndarray
    position: Position
    rest: np.ndarray


class PackedBlocks:
    """Blocks of `block_size` tokens without padding: documents one after another, each followed by the end token.

    Blocks are shuffled in portions: of a few thousand blocks if `streaming`, else of a whole pass over the text. `seed`
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
        self.text, self.tokenizer, self.block_size, self.seed = text, tokenizer, block_size, seed
        self._encode: Callable[[list[str]], list[np.ndarray]] = partial(encode, tokenizer)
        if num_proc is not None and num_proc > 1:
            pool = multiprocessing.get_context("spawn").Pool(num_proc, take_tokenizer, (tokenizer.backend_tokenizer,))
            self._encode = lambda texts: [_ended(tokenizer, ids) for ids in pool.map(token_ids, texts)]
        self.streaming = streaming
        self._start = self._position = BEGINNING
        self._rest = self._rest_at_start = np.zeros(0, dtype=np.int64)
        self._portion = -1  # index of the current portion
        self._blocks = np.zeros((0, block_size), dtype=np.int64)
        self._taken = 0  # blocks of this portion returned so far
        self._next: Future[Portion] | None = None
        self._unwanted = threading.Event()  # set once nobody needs the next portion

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
        self._unwanted.set()
        self._unwanted = threading.Event()
        self._position, self._rest = Position(*state["start"]), state["rest"].numpy()
        self._portion = max(-1, state["portion"] - 1)
        self._blocks, self._next = self._blocks[:0], None
        if state["portion"] >= 0:
            self._fill()
        self._taken = state["taken"]

    def _fill(self) -> None:
        self._start, self._rest_at_start = self._position, self._rest
        self._portion += 1
        here = (self._portion, self._position, self._rest, self._unwanted)
        self._blocks, self._position, self._rest = self._read(*here) if self._next is None else self._next.result()
        self._taken = 0
        if self.streaming:
            self._next = _in_background(self._read, self._portion + 1, self._position, self._rest, self._unwanted)

    def _read(self, number: int, start: Position, rest: np.ndarray, unwanted: threading.Event) -> Portion:
        """Read portion `number`.

        Args:
            number: counted from 0.
            start: where the portion begins in the text.
            rest: tokens before it that filled no block (N,).
            unwanted: ends the reading early, as the end of the program does.

        Raises:
            RuntimeError: if the reading ends early.
            ValueError: if the text cannot be read, or is shorter than a block.
        """
        position, enough, pieces, length = start, SHUFFLED_BLOCKS * self.block_size, [rest], len(rest)
        epoch = None  # of the first document
        for after, texts in self.text.documents(start):
            if after.epoch > 0 and start == BEGINNING and length < self.block_size:
                raise _too_short(self.text, length, self.block_size)
            epoch = after.epoch if epoch is None else epoch
            if length >= enough if self.streaming else after.epoch > epoch and length >= self.block_size:
                break
            if unwanted.is_set() or not threading.main_thread().is_alive():  # a program that ends waits for this thread
                raise RuntimeError("nobody needs this portion any more")
            position = after
            pieces += self._encode(texts)
            length += sum(map(len, pieces[-len(texts) :]))
        tokens = np.concatenate(pieces)
        wanted = enough if self.streaming else length // self.block_size * self.block_size
        blocks = tokens[:wanted].reshape(-1, self.block_size)
        draws = Stream((self.seed, "blocks", number)).uniforms(len(blocks))
        return Portion(blocks[np.argsort(draws, kind="stable")], position, tokens[wanted:])


def _in_background(function: Callable[..., Result], *arguments: Any) -> "Future[Result]":
    """Call a function in another thread."""
    future: Future[Result] = Future()

    def call() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # whoever asks for the result gets it
            future.set_exception(error)

    threading.Thread(target=call).start()
    return future


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[np.ndarray]:
    """Return the token ids of each text, int64, followed by the end token."""
    encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    return [_ended(tokenizer, encoding.ids) for encoding in encodings]


def _ended(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> np.ndarray:
    return np.array([*ids, tokenizer.eos_token_id], dtype=np.int64)


def all_blocks(text: Corpus, tokenizer: PreTrainedTokenizerFast, *, block_size: int) -> Tensor:
    """Return all whole blocks of the text, in order (B, T).

    Raises:
        ValueError: if the text is shorter than one block.
    """
    tokens = np.concatenate([ids for document in text.texts() for ids in encode(tokenizer, [document])])
    whole = len(tokens) // block_size
    if not whole:
        raise _too_short(text, len(tokens), block_size)
    return torch.from_numpy(tokens[: whole * block_size].reshape(whole, block_size))


def _too_short(text: Corpus, tokens: int, block_size: int) -> ValueError:
    return ValueError(f"{text.who_hold} {tokens} tokens, fewer than a block of {block_size}{text.remedy}")
