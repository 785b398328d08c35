"""Examples as token ids, and batches of them.

Shapes: B examples, T tokens of the longest of them.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from lossytp.network.streams import Stream
from lossytp.training.cache import cached
from lossytp.training.tasks import TASKS, Example

PAD, END = "<|pad|>", "<|endoftext|>"
PAD_ID = 0
VOCABULARY = 4096
BUCKET_BATCHES = 50  # batches whose examples are sorted by length together


@dataclass(frozen=True)
class Split:
    """Token ids of many examples, one after another; example i is `tokens[offsets[i]:offsets[i + 1]]`."""

    tokens: np.ndarray
    offsets: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def lengths(self, max_length: int) -> np.ndarray:
        """Tokens of each example once cut to `max_length`, int64 (examples,)."""
        return np.minimum(np.diff(self.offsets), max_length)

    def head(self, examples: int | None) -> "Split":
        """A fixed pseudo-random sample of so many examples; all when `examples` is None."""
        if examples is None or examples >= len(self):
            return self
        chosen = sample_indices(len(self), examples)
        parts = [self.tokens[self.offsets[i] : self.offsets[i + 1]] for i in chosen]
        offsets = np.concatenate(([0], np.cumsum([len(part) for part in parts])))
        return Split(np.concatenate(parts), offsets, self.labels[chosen])

    def batch(self, indices: np.ndarray, max_length: int) -> dict[str, Tensor]:
        """The examples padded on the right: input_ids and attention_mask (B, T), labels (B,)."""
        lengths = self.lengths(max_length)[indices]
        input_ids = np.full((len(indices), lengths.max()), PAD_ID, dtype=np.int64)
        for row, (index, length) in enumerate(zip(indices, lengths, strict=True)):
            start = self.offsets[index]
            input_ids[row, :length] = self.tokens[start : start + length]
        mask = np.arange(input_ids.shape[1]) < lengths[:, None]
        return {
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": torch.from_numpy(mask.astype(np.int64)),
            "labels": torch.from_numpy(self.labels[indices].astype(np.int64)),
        }


@dataclass(frozen=True)
class Dataset:
    """A task's splits as token ids, its label names, and the hash of all of it."""

    train: Split
    test: Split
    labels: tuple[str, ...]
    sha256: str


def sample_indices(available: int, examples: int | None) -> np.ndarray:
    """Sorted indices of a fixed pseudo-random sample of `examples` out of `available`; of all when None."""
    order = np.argsort(Stream(("sample",)).uniforms(available), kind="stable")
    return np.sort(order[:examples])


def training_batches(
    split: Split, *, batch_size: int, max_length: int, seed: int, skip: int = 0
) -> Iterator[dict[str, Tensor]]:
    """Batches without end, in an order that `seed` names: shuffled, examples of like length together.

    The first `skip` of them are left out, without being made.

    Padding would hide losses, a lost packet of padding being harmless, so little of it is made.
    """
    lengths = split.lengths(max_length)
    epoch = 0
    while True:
        draws = Stream((seed, "order", epoch))
        order = np.argsort(draws.uniforms(len(split)), kind="stable")
        batches = []
        for start in range(0, len(order), batch_size * BUCKET_BATCHES):
            bucket = order[start : start + batch_size * BUCKET_BATCHES]
            bucket = bucket[np.argsort(lengths[bucket], kind="stable")]
            batches += [bucket[i : i + batch_size] for i in range(0, len(bucket), batch_size)]
        for number in np.argsort(draws.uniforms(len(batches)), kind="stable"):
            if skip:
                skip -= 1
            else:
                yield split.batch(batches[number], max_length)
        epoch += 1


def evaluation_batches(split: Split, *, batch_size: int, max_length: int) -> Iterator[dict[str, Tensor]]:
    """Every example once, sorted by length."""
    order = np.argsort(split.lengths(max_length), kind="stable")
    for start in range(0, len(order), batch_size):
        yield split.batch(order[start : start + batch_size], max_length)


def load_dataset(name: str, *, train_samples: int | None, test_samples: int | None) -> Dataset:
    """The task's data, prepared once and cached: text, a byte-level BPE vocabulary of its training split, token ids."""
    folder = _prepared(name)
    splits = {}
    digest = hashlib.sha256()
    for split in ("train", "test"):
        with np.load(folder / f"{split}.npz") as arrays:
            splits[split] = Split(**arrays)
        for array in (splits[split].tokens, splits[split].offsets, splits[split].labels):
            digest.update(array.tobytes())
    train, test = splits["train"].head(train_samples), splits["test"].head(test_samples)
    return Dataset(train, test, TASKS[name].labels, digest.hexdigest())


def load_texts(name: str) -> dict[str, list[Example]]:
    """The task's text before it became token ids: {"train": [(text, label), ...], "test": [...]}."""
    content = json.loads((_prepared(name) / "texts.json").read_text(encoding="utf-8"))
    return {split: [(text, label) for text, label in examples] for split, examples in content.items()}


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The task's tokenizer, as transformers knows it."""
    return PreTrainedTokenizerFast(tokenizer_file=str(_prepared(name) / "tokenizer.json"), pad_token=PAD, eos_token=END)


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE of 4,096 tokens (Sennrich et al., ACL 2016; bytes as in GPT-2, Radford et al., 2019)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _prepared(name: str) -> Path:
    task = TASKS[name]
    code = hashlib.blake2b(Path(__file__).read_bytes(), digest_size=8).hexdigest()
    return cached(name, f"{task.version()} {code}", lambda part: _prepare(task.load(), part))


def _prepare(splits: dict[str, list[Example]], folder: Path) -> None:
    (folder / "texts.json").write_text(json.dumps(splits), encoding="utf-8")
    tokenizer = train_tokenizer([text for text, _ in splits["train"]])
    tokenizer.save(str(folder / "tokenizer.json"))
    for split, examples in splits.items():
        rows = [encoding.ids for encoding in tokenizer.encode_batch([text for text, _ in examples])]
        np.savez(
            folder / f"{split}.npz",
            tokens=np.concatenate(rows).astype(np.int16),
            offsets=np.cumsum([0, *map(len, rows)]),
            labels=np.array([label for _, label in examples], dtype=np.int16),
        )
