"""Test that whole sentences move to the test split, and no phrase of them stays in training."""

import os

import datasets
import pytest

from lossytp.training.rows import HeldOut
from lossytp.training.tasks import TASKS, Table

pytestmark = pytest.mark.slow

SENTENCES = [f"story {i} is a {'dull' if i % 2 else 'fine'} one ." for i in range(20)]
PHRASES = [f"story {i}" for i in range(20)] + ["one .", "a fine one", "fin"]
TRAIN = [{"text": text, "label": 0} for text in [*PHRASES, *SENTENCES, SENTENCES[0]]]
OFFICIAL = [{"text": "officially poor", "label": 1}]


def held_out(sentences: int, train=TRAIN) -> HeldOut:
    return HeldOut(source=Table(train=train, test=OFFICIAL), column="text", sentences=sentences)


def test_whole_sentences_follow_the_official_test_rows():
    rows = held_out(7).rows("test").to_list()
    assert rows[0] == {"text": "officially poor", "label": 1, "part": "official"}
    assert [row["part"] for row in rows[1:]] == ["held_out"] * 7
    tested = [row["text"] for row in rows[1:]]
    assert len(set(tested)) == 7
    assert set(tested) <= set(SENTENCES) | {"fin"}  # part of a word of other rows, but never a whole word


def test_training_keeps_rows_that_no_tested_sentence_contains():
    held = held_out(7)
    tested = [row["text"] for row in held.rows("test").to_list()[1:]]
    left = [row["text"] for row in held.rows("train").to_list()]
    apart = [row["text"] for row in TRAIN if not any(f" {row['text']} " in f" {sentence} " for sentence in tested)]
    assert left == apart
    assert 0 < len(left) < len(TRAIN)
    assert "one ." not in left  # every sentence ends with it


def test_the_choice_is_fixed_and_another_one_has_another_fingerprint():
    assert held_out(7).rows("test").to_list() == held_out(7).rows("test").to_list()
    fingerprints = {
        held_out(7).fingerprint("test"),
        held_out(8).fingerprint("test"),
        held_out(7, TRAIN[:-2]).fingerprint("test"),
    }
    assert len(fingerprints) == 3
    assert held_out(7).fingerprint("test") == held_out(7).fingerprint("test")


def test_holding_out_too_many_sentences_is_refused():
    with pytest.raises(ValueError, match="has 21 whole sentences: hold out fewer than 21"):
        held_out(21).rows("train")


def test_the_numbers_of_sst2(tmp_path, monkeypatch, capfd):
    source = TASKS["sst2_held_out"].source
    if not os.environ.get("LOSSYTP_DATA") or not source.source.folder.is_dir():
        pytest.skip("needs LOSSYTP_DATA, a folder laid out like the hub, with nyu-mll/glue/sst2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    datasets.enable_progress_bars()
    train, test = source.rows("train"), source.rows("test")
    assert capfd.readouterr().err == "", "no progress bars into a log"
    assert (len(train), len(test)) == (17579, 5872)
    assert test["part"][:872] == ["official"] * 872
    tested = " | ".join(f" {' '.join(text.split())} " for text in test["sentence"][872:])
    assert not [text for text in train["sentence"][::5] if f" {' '.join(text.split())} " in tested]
