"""Turn examples into token ids and batches.

Shapes: B examples, O largest number of options, T tokens of the longest sequence.
"""

import hashlib
import json
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from lossytp.network.losses import Stream
from lossytp.parallel.group import rank_and_world_size
from lossytp.parallel.vocabulary import IGNORED
from lossytp.training.models import first_tokens
from lossytp.training.progress import waiting
from lossytp.training.rows import Split, cached, code_digest
from lossytp.training.task_kinds import Examples, Task
from lossytp.training.tasks import task_named

BUCKET_BATCHES = 50  # examples of this many batches are sorted by length together
ANSWER_TOKENS = 32  # largest number of tokens of a generated answer


@dataclass(frozen=True)
class TokenizedSplit:
    """Token ids of many examples of one kind of task.

    Sequence s is `tokens[offsets[s]:offsets[s + 1]]`. Example i has the sequences `first[i]` to `first[i + 1] - 1`: one
    for each option of a multiple choice, otherwise a single one. Its label is `labels[i]`. `parts[i]` names its part of
    the split, "" if the split has none. `cut[i]` is true if its text was cut. `incomplete` counts the rows without a
    label, which were left out, and those without a text.

    In a generation task a sequence is a prompt followed by an answer of `answer_lengths[s]` tokens, and `answers[i]`
    holds the accepted answers.
    """

    kind: str
    tokens: np.ndarray
    offsets: np.ndarray
    first: np.ndarray
    labels: np.ndarray
    answer_lengths: np.ndarray
    parts: np.ndarray
    cut: np.ndarray
    answers: tuple[tuple[str, ...], ...]
    pad_id: int
    incomplete: dict[str, int]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def references(self) -> np.ndarray | tuple[tuple[str, ...], ...]:
        """Return the labels (examples,) or accepted answers that a metric compares predictions with."""
        if self.kind == "generation":
            return self.answers
        return self.labels if self.kind == "regression" else self.labels.astype(np.int64)

    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each example's longest sequence, int64 (examples,)."""
        return np.maximum.reduceat(np.diff(self.offsets), self.first[:-1])

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return a batch of examples, padded on the right.

        Returns:
            `input_ids` and `attention_mask` (B, T), or (B, O, T) for multiple choice, where a missing option's mask is
            0. `labels` (B,), or (B, T) for generation, where all but the answer is `IGNORED`.
        """
        counts = np.diff(self.first)[indices]
        sequences = [range(self.first[i], self.first[i + 1]) for i in indices]
        rows = [s for example in sequences for s in (*example, *[example[0]] * (counts.max() - len(example)))]
        input_ids, mask = self._padded([self._tokens(s) for s in rows])
        batch = {"input_ids": input_ids, "attention_mask": mask}
        if self.kind == "multiple choice":
            batch = {name: tensor.view(len(indices), counts.max(), -1) for name, tensor in batch.items()}
            absent = np.arange(counts.max()) >= counts[:, None]
            batch["attention_mask"][torch.from_numpy(absent)] = 0
        if self.kind == "generation":
            labels = input_ids.masked_fill(mask == 0, IGNORED)
            for row, s in enumerate(rows):
                labels[row, : len(self._tokens(s)) - self.answer_lengths[s]] = IGNORED
            return {**batch, "labels": labels}
        kind = np.float32 if self.kind == "regression" else np.int64
        return {**batch, "labels": torch.from_numpy(self.labels[indices].astype(kind))}

    def prompts(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return a generation task's prompts, padded on the left so that generation continues them.

        Returns:
            `input_ids` and `attention_mask` (B, T).
        """
        input_ids, mask = self._padded([self._tokens(i)[: -self.answer_lengths[i]] for i in indices], "left")
        return {"input_ids": input_ids, "attention_mask": mask}

    def _tokens(self, sequence: int) -> Tensor:
        return torch.from_numpy(self.tokens[self.offsets[sequence] : self.offsets[sequence + 1]].astype(np.int64))

    def _padded(self, rows: list[Tensor], side: str = "right") -> tuple[Tensor, Tensor]:
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)
        return pad_sequence(rows, True, self.pad_id, side), mask


@dataclass(frozen=True)
class Dataset:
    """A task's splits as token ids, the tokenizer that made them, and a hash of tokens, labels and accepted answers."""

    task: Task
    train: TokenizedSplit
    test: TokenizedSplit
    tokenizer: PreTrainedTokenizerFast
    sha256: str


def training_batches(
    split: TokenizedSplit, *, batch_size: int, seed: int, skip: int = 0
) -> Iterator[dict[str, Tensor]]:
    """Yield training batches endlessly but for the first `skip`, in an order that the seed determines.

    Examples of similar length share a batch, which leaves little padding. Padding would hide losses, since a lost
    packet of padding is harmless. The last batches of an epoch may be smaller.
    """
    lengths = split.lengths()
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
                yield split.batch(batches[number])
        epoch += 1


def evaluation_batches(split: TokenizedSplit, *, batch_size: int) -> Iterator[np.ndarray]:
    """Yield the indices of all examples once, sorted by length. Examples of equal length are shuffled.

    Files often list a class's examples one after another. Unshuffled, a batch and the next would share a class, and the
    `stale` repair, which fills in values of the previous batch, would reveal it.
    """
    shuffled = np.argsort(Stream(("evaluation",)).uniforms(len(split)), kind="stable")
    order = shuffled[np.argsort(split.lengths()[shuffled], kind="stable")]
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def load_dataset(
    name: str,
    tokenizer: PreTrainedTokenizerFast,
    *,
    max_length: int,
    train_samples: int | None,
    test_samples: int | None,
    task: Task | None = None,
) -> Dataset:
    """Return the data of `task`, or of the task of this name, as token ids. They are prepared once, then cached.

    Args:
        name: the task's name.
        tokenizer: makes the token ids.
        max_length: the number of tokens to cut an example to.
        train_samples: number of training examples to sample; None for all.
        test_samples: number of test examples to sample; None for all.
        task: the task, if it is not in TASKS.
    """
    task = task or task_named(name)
    digest = hashlib.sha256()
    splits = {}
    wanted: dict[Split, int | None] = {"train": train_samples, "test": test_samples}
    for split, samples in wanted.items():
        with waiting(f"{name}: reading and tokenising {split}"):
            splits[split] = _load_split(name, task, split, tokenizer, max_length, samples)
        for what, number in splits[split].incomplete.items():
            if number and rank_and_world_size()[0] == 0:
                print(f"{number} {split} rows of {name} are {what.replace('_', ' a ')}", file=sys.stderr)
        for array in (splits[split].tokens, splits[split].offsets, splits[split].first, splits[split].labels):
            digest.update(array.tobytes())
        if task.kind == "generation":
            digest.update(json.dumps(splits[split].answers).encode())
    return Dataset(task, splits["train"], splits["test"], tokenizer, digest.hexdigest())


def _load_split(
    name: str, task: Task, split: Split, tokenizer: PreTrainedTokenizerFast, max_length: int, samples: int | None
) -> TokenizedSplit:
    vocabulary = hashlib.blake2b(tokenizer.backend_tokenizer.to_str().encode(), digest_size=8).hexdigest()
    ids = [tokenizer.pad_token_id, tokenizer.eos_token_id]
    key = json.dumps([split, samples, max_length, task.fingerprint(), vocabulary, ids, code_digest(__name__)])

    def tokenize(folder: Path) -> None:
        content = _tokenized(task, task.examples(split, samples), tokenizer, max_length)
        (folder / "split.pickle").write_bytes(pickle.dumps(content))

    found: TokenizedSplit = pickle.loads((cached(f"{name}-{split}", key, tokenize) / "split.pickle").read_bytes())
    return found


def _tokenized(task: Task, examples: Examples, tokenizer: PreTrainedTokenizerFast, max_length: int) -> TokenizedSplit:
    """Return a split with a sequence for every ending, and the body cut to fit into `max_length`.

    Each begins with the tokens that the tokenizer puts before every text, if any.
    """
    generates, first = task.kind == "generation", first_tokens(tokenizer)
    taken = len(first) + (ANSWER_TOKENS if generates else 0)
    if max_length <= taken:
        what = f"{len(first)} first tokens" + (f" and an answer of {ANSWER_TOKENS}" if generates else "")
        raise ValueError(f"max_length = {max_length} leaves no room for a text after {what}: give {taken + 1} or more")

    def encoded(texts: list[str]) -> list[list[int]]:  # in parallel, by the tokenizer's own threads
        return [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)]

    bodies = encoded([example.body for example in examples])
    endings = iter(encoded([ending for example in examples for ending in example.endings]))
    answers = [example.label for example in examples if isinstance(example.label, tuple)]
    targets = encoded([f" {accepted[0]}" for accepted in answers])
    longest = max_length - taken
    sequences: list[list[int]] = []
    answer_lengths: list[int] = []
    cut = np.zeros(len(examples), dtype=bool)
    for number, example in enumerate(examples):
        for _ in example.endings:
            whole_ending, body = next(endings), bodies[number]
            ending = whole_ending[:longest]
            room = longest - len(ending)
            cut[number] |= len(body) + len(whole_ending) > longest
            body = body[:room] if task.cut == "right" else body[max(0, len(body) - room) :]
            answer = [*targets[number][: ANSWER_TOKENS - 1], tokenizer.eos_token_id] if generates else []
            # an empty text would have no last token to classify at
            sequences.append([*first, *(body + ending or [tokenizer.eos_token_id]), *answer])
            answer_lengths.append(len(answer))
    return TokenizedSplit(
        kind=task.kind,
        tokens=np.concatenate(sequences).astype(np.int32),
        offsets=np.cumsum([0, *map(len, sequences)]),
        first=np.cumsum([0, *(len(example.endings) for example in examples)]),
        labels=np.array([0.0 if generates else example.label for example in examples], dtype=np.float64),
        answer_lengths=np.array(answer_lengths),
        parts=np.array([example.part for example in examples]),
        cut=cut,
        answers=tuple(answers),
        pad_id=int(tokenizer.pad_token_id),
        incomplete=examples.incomplete,
    )
