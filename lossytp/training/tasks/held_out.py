"""Move whole sentences from a training split to the test split, and remove their phrases from training."""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from lossytp.network.streams import Stream
from lossytp.training.tasks.kinds import PART
from lossytp.training.tasks.sources import RowSource, Split

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A source that adds some of its training sentences to the official test rows.

    SST-2's training rows are sentences and their phrases. A sentence is whole if no other row contains it. Whole
    sentences are held out, and training loses every phrase that they contain. Texts are compared word for word: a
    phrase that differs by a comma stays. Test rows have a column `part`: "official" or "held_out".

    SST-2 keeps 17,579 of its 67,349 training rows if 5,000 of its 6,885 whole sentences are held out.
    """

    has_parts: ClassVar[bool] = True
    source: RowSource
    column: str
    """Column of the sentences and phrases."""
    sentences: int
    """Number of sentences to hold out."""

    def __str__(self) -> str:
        return f"{self.source} with {self.sentences} sentences held out"

    def rows(self, split: Split) -> "Dataset":
        """Return the remaining training rows, or the official test rows followed by those held out.

        Raises:
            ValueError: if there are too few whole sentences.
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
        """Return whether the source lacks rows of the official split; None if there is no official number."""
        return self.source.subset(split)

    def fingerprint(self, split: Split) -> str:
        """Return a hash of both splits and this file: each split's rows depend on the other's."""
        parts = [self.source.fingerprint("train"), self.source.fingerprint("test"), self.column, str(self.sentences)]
        return hashlib.blake2b("\n".join([*parts, Path(__file__).read_text()]).encode(), digest_size=8).hexdigest()


def _holders(texts: Sequence[str]) -> list[list[int]]:
    """Return, for each text, the rows of the whole texts that contain it word for word.

    A whole text has only its own row. Of equal texts, the first counts as whole.
    """
    padded = [f" {' '.join(text.split())} " for text in texts]
    whole_by_word: dict[str, list[int]] = defaultdict(list)
    holders: list[list[int]] = [[] for _ in texts]
    for row in sorted(range(len(padded)), key=lambda row: -len(padded[row])):  # longest first; equal texts in order
        words = set(padded[row].split())
        rarest = min((whole_by_word[word] for word in words), key=len, default=[])
        holders[row] = [other for other in rarest if padded[row] in padded[other]] or [row]
        if holders[row] == [row]:
            for word in words:
                whole_by_word[word].append(row)
    return holders
