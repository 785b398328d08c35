"""More test examples than the official split has: whole training sentences, whose phrases leave training with them."""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lossytp.network.streams import Stream
from lossytp.training.tasks.kinds import PART
from lossytp.training.tasks.sources import RowSource, Split

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A source, of whose training sentences some are tested on instead, together with the official test rows.

    SST-2 trains on sentences and on phrases of them. Held out are whole sentences, those that are part of no other row,
    and with them goes every phrase that one of them holds. Test rows have a column `part`: "official" or "held_out".
    Equal is what is equal word for word: a phrase that differs by a comma stays. Of SST-2's 67,349 training rows 17,579
    are left when 5,000 of its 6,885 sentences are held out.
    """

    source: RowSource
    column: str
    """The column with the sentence or phrase."""
    sentences: int
    """How many to hold out."""

    def __str__(self) -> str:
        return f"{self.source} with {self.sentences} sentences held out"

    def rows(self, split: Split) -> "Dataset":
        """The rows that are left for training, or the official test rows and behind them those held out.

        ValueError where there are not so many sentences.
        """
        import datasets

        train = self.source.rows("train")
        holders = _holders(train[self.column])
        whole = np.array([row for row, held_in in enumerate(holders) if held_in == [row]])
        if len(whole) <= self.sentences:
            raise ValueError(f"{self.source} has {len(whole)} whole sentences: hold out fewer than {self.sentences}")
        draw = np.argsort(Stream(("held out",)).uniforms(len(whole)), kind="stable")[: self.sentences]
        chosen = np.sort(whole[draw])
        if split == "train":
            gone = set(chosen.tolist())
            return train.select([row for row, held_in in enumerate(holders) if gone.isdisjoint(held_in)])
        official = self.source.rows("test")
        parts = [
            rows.add_column(PART, [name] * len(rows)).select_columns([*official.column_names, PART])
            for name, rows in (("official", official), ("held_out", train.select(chosen)))
        ]
        return datasets.concatenate_datasets([rows.cast(parts[0].features) for rows in parts])

    def subset(self, split: Split) -> bool | None:
        """Whether rows of the official split were missing before."""
        return self.source.subset(split)

    def fingerprint(self, split: Split) -> str:
        """Of both splits and this file, since either decides what is in the other."""
        told = [self.source.fingerprint("train"), self.source.fingerprint("test"), self.column, str(self.sentences)]
        return hashlib.blake2b("\n".join([*told, Path(__file__).read_text()]).encode(), digest_size=8).hexdigest()


def _holders(texts: Sequence[str]) -> list[list[int]]:
    """For each text the whole ones that hold it, word for word, itself alone where it is one; of equals the first."""
    padded = [f" {' '.join(text.split())} " for text in texts]
    whole_by_word: dict[str, list[int]] = defaultdict(list)
    holders: list[list[int]] = [[] for _ in texts]
    for row in sorted(range(len(padded)), key=lambda row: -len(padded[row])):  # stable: a text after what can hold it
        words = set(padded[row].split())
        rarest = min((whole_by_word[word] for word in words), key=len, default=[])
        holders[row] = [other for other in rarest if padded[row] in padded[other]] or [row]
        if holders[row] == [row]:
            for word in words:
                whole_by_word[word].append(row)
    return holders
