"""The tasks of `lossytp.harness`: YAML files of lm-evaluation-harness, and the functions that these name."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lossytp.network.checks import check_known
from lossytp.tolerance.config import WIKITEXT, wikitext
from lossytp.training.docstrings import Docstrings
from lossytp.training.rows import sample_indices

if TYPE_CHECKING:
    from datasets import Dataset

LONGEST_PASSAGE, SHORTEST_PASSAGE, SHORTEST_WORD = 64, 16, 4  # words, words, letters: LAMBADA's have 75 words
WIKITEXT_FILES = ("valid.txt", "test.txt")
UNTOKENISED = {r" @(.)@ ": r"\1", r" (?=[.,;:!?)%]|'\w)": "", r"(?<=[($]) ": ""}  # WikiText spaces punctuation
FEWSHOT_ROWS = 1000


def rows_of(dataset: str, **_: Any) -> "dict[str, Dataset]":
    """Return the rows of a task of `lossytp.train`: "test", and a sample of "train" for few-shot examples."""
    from lossytp.training.tasks import task_named

    source = task_named(dataset).source
    train = source.rows("train")
    return {"train": train.select(sample_indices(len(train), FEWSHOT_ROWS)), "test": source.rows("test")}


def completed(row: dict[str, Any], results: list[tuple[float, bool]]) -> dict[str, float]:
    """Return whether the model completes a passage, and the cross-entropy of its last word in nats."""
    ((log_likelihood, greedy),) = results
    return {"acc": float(greedy), "nats": -log_likelihood}


def last_words(text: str, **_: Any) -> "dict[str, Dataset]":
    """Return passages without their last word, and this word, in columns `passage` and `word`.

    Args:
        text: docstrings or wikitext-2.

    Raises:
        ValueError: if the text is neither, or is not under LOSSYTP_DATA.
    """
    import datasets

    check_known("text", text, ("docstrings", WIKITEXT))
    if text != WIKITEXT:
        texts = Docstrings().rows("test")["text"]
    elif (file := wikitext()) is None:
        raise ValueError(f"{WIKITEXT} is missing: put Salesforce/wikitext under LOSSYTP_DATA")
    else:
        texts = [line for name in WIKITEXT_FILES for line in file.with_name(name).read_text("utf-8").split("\n")]
        for pattern, instead in UNTOKENISED.items():
            texts = [re.sub(pattern, instead, line) for line in texts]
    found = dict.fromkeys(passage for each in texts for passage in passages(each.strip()))
    rows = [dict(zip(("passage", "word"), passage.rsplit(" ", 1), strict=True)) for passage in found]
    return {"test": datasets.Dataset.from_list(rows)}


def passages(text: str) -> Iterator[str]:
    """Yield runs of whole sentences whose last word also stands earlier in them, without the full stop."""
    run: list[str] = []
    for sentence in re.split(r"(?<=[a-z]\.) (?=[A-Z])", text):
        run = [] if "<unk>" in sentence else [*run, sentence]
        while len(run) > 1 and len(" ".join(run).split()) > LONGEST_PASSAGE:
            run.pop(0)
        *words, last = " ".join(run).split() or [""]
        word, before = last[:-1], {each.strip("\"'`(),.;:") for each in words}
        fits = SHORTEST_PASSAGE <= len(words) < LONGEST_PASSAGE and len(word) >= SHORTEST_WORD
        if fits and last.endswith(".") and word.isalpha() and word in before:
            yield " ".join([*words, word])
            run = []
