"""Test the order of documents, which text and tokenizer a run reads, and the cross-entropy of every token."""

import gzip
import json
from itertools import islice
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
import torch

from lossytp.training import corpus as corpora
from lossytp.training.config import PretrainConfig
from lossytp.training.corpus import HELD_OUT_END, STDLIB, Position, corpus
from lossytp.training.text import token_losses, training_text, validation_text
from tests.training.pretraining.documents import document, write


def taken(text, start, number):
    found = []
    for _, texts in text.documents(start):
        found += texts
        if len(found) >= number:
            return found[:number]
    raise AssertionError("documents end")


def test_documents_are_the_rows_of_all_files_in_order_and_whole_other_files(documents):
    texts = list(corpus(str(documents / "*"), split="train").texts())
    assert texts == [*(document(i) for i in range(40) if i != 30), "läst\n"]


def test_the_rest_is_the_same_from_any_position(documents):
    text = corpus(str(documents / "*"), split="train")
    passes = list(text.texts()) * 3
    before = 0
    for position, texts in islice(text.documents(), 25):  # continues into the third pass
        before += len(texts)
        assert taken(text, position, 30) == (passes * 2)[before : before + 30]
    assert position.epoch == 2
    rows = [document(i) for i in range(23)]
    for row in range(23):  # also from within a list of documents
        assert taken(text, Position(1, 0, row), 23 - row) == rows[row:]


def test_the_standard_library_is_split_by_file():
    train, validation = (corpus(STDLIB, split=split).files for split in ("train", "validation"))
    assert not {*train} & {*validation}
    assert 0.005 < len(validation) / len(train) < 0.05
    assert train == tuple(sorted(train))
    assert any(file.endswith("argparse.py") for file in train + validation)
    assert not any("site-packages" in file for file in train + validation)


def test_files_are_split_by_document_if_asked(documents, monkeypatch):
    monkeypatch.setattr(corpora, "HELD_OUT_PERCENT", 30)
    pattern = str(documents / "*.parquet")
    train, validation = (
        list(corpus(pattern, split=split, splits_files=True).texts()) for split in ("train", "validation")
    )
    assert not {*train} & {*validation}
    assert sorted(train + validation) == sorted(corpus(pattern, split="train").texts())
    assert 4 < len(validation) < 20
    text = corpus(pattern, split="train", splits_files=True)
    for position, texts in islice(text.documents(), 7):
        train = [*train[len(texts) :], *train[: len(texts)]]
        assert taken(text, position, len(train)) == train


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x89PNG\r\n\x1a\n", r"cannot be read as UTF-8 text .*0x89"),
        ("läst".encode("latin-1"), r"cannot be read as UTF-8 text .*0xe4"),
        (b"GIF\x00\x01", r"cannot be read as UTF-8 text .*NUL"),
    ],
)
def test_a_file_that_is_no_text_is_named(tmp_path, content, words):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_bytes(content)
    text = corpus(str(tmp_path / "*"), split="train")
    for read in (lambda: list(text.texts()), text.check):
        with pytest.raises(ValueError, match=rf"b\.txt {words}"):
            read()


def test_files_without_text_end_the_search_for_it(tmp_path):
    write(tmp_path / "a.parquet", [None, ""])
    (tmp_path / "b.txt").write_text("")
    with pytest.raises(ValueError, match=r"a\.parquet and 1 more hold no text: give more text"):
        next(corpus(str(tmp_path / "*"), split="train").documents())


TEXTS = ["läst, 1", "NA", 'two\n"lines"', "null", "0012"]


def written(texts):
    others = [1, "x", None, "2.5", 3]
    rows = [{"id": other, "text": text} for other, text in zip(others, texts, strict=True)]
    cells = [(str(row["id"]), '"' + row["text"].replace('"', '""') + '"') for row in rows]
    return {
        "a.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "a.json": json.dumps(rows),
        "a.csv": "\n".join(["id,text", *map(",".join, cells)]),
    }


@pytest.mark.parametrize("name", written(TEXTS))
def test_the_texts_of_every_kind_of_table_are_read_to_the_letter(tmp_path, name):
    content = written(TEXTS)[name]
    (tmp_path / name).write_text(content, encoding="utf-8")
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content.encode(), mtime=0))
    for file in (name, f"{name}.gz"):
        text = corpus(str(tmp_path / file), split="train")
        text.check()
        assert list(text.texts()) == TEXTS


def test_rows_without_text_are_no_documents_and_a_compressed_text_is_one(tmp_path):
    """More rows without the column follow one another than are read at once."""
    lines = '{"text": "a"}\n{"text": null}\n{"text": ""}\n' + '{"id": 1}\n' * 99 + '{"text": "\\ud800!"}'
    (tmp_path / "a.jsonl").write_text(f"\ufeff{lines}", encoding="utf-8")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"line\r\nline\r", mtime=0))
    assert list(corpus(str(tmp_path / "*"), split="train").texts()) == ["a", "?!", "line\nline\n"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"body": "x"}', "has no column 'text', but body"),
        ("a.csv", "id,body\n1,x", "has no column 'text', but id, body"),
        ("a.csv", "", "has no column 'text', but none"),
        ("a.parquet", {"id": [1], "body": ["x"]}, "has no column 'text', but id, body"),
        ("a.parquet", {"text": [["a"]]}, r"is no text, {'text': \['a'\]}"),
        *(("a.jsonl", '{"text": 5}', "is no text, {'text': 5}"), ("a.jsonl", '{"text": "x"', "cannot be read")),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}' * 99, mtime=0)[:-9], "cannot be read"),
        ("a.txt.gz", gzip.compress(bytes(2**21), mtime=0), "NUL at character 0"),
    ],
)
def test_a_table_without_texts_is_one_line(tmp_path, name, content, words):
    """`tasks/test_rows.py` has more tables that the same reader refuses."""
    if isinstance(content, dict):
        pyarrow.parquet.write_table(pyarrow.table(content), tmp_path / name)
    else:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"{name}.*{words}") as error:
        list(corpus(str(tmp_path / name), split="train").texts())
    assert "\n" not in str(error.value)


def test_contents_are_hashed_once_and_again_after_a_change(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "a.txt"
    file.write_text("text")
    text = corpus(str(file), split="train")
    hashed = text.sha256()
    monkeypatch.setattr(corpora.hashlib, "sha256", None)  # fails if it is called
    assert text.sha256() == hashed
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file.write_text("other")
    assert text.sha256() != hashed
    file.unlink()
    with pytest.raises(ValueError, match=r"a\.txt cannot be read"):
        text.sha256()


def text_of(corpus):
    return "".join(corpus.texts())


def test_a_single_file_is_split_by_position(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{number}\n" for number in range(1000)))
    config = PretrainConfig(data_glob=str(tmp_path / "*.txt"))
    train, held_out = text_of(training_text(config)), text_of(validation_text(config))
    assert train + held_out == (tmp_path / "a.txt").read_text()
    assert len(held_out) == pytest.approx(HELD_OUT_END * len(train + held_out), abs=1)
    (tmp_path / "b.txt").write_text("other")
    both = PretrainConfig(data_glob=str(tmp_path / "a.txt"), validation_glob=str(tmp_path / "b.txt"))
    assert text_of(training_text(both)) == train + held_out
    assert text_of(validation_text(both)) == "other"


@pytest.mark.parametrize("validation", ["a.txt", "*.txt", "link.txt"])
def test_a_file_to_train_on_is_not_validated_on(tmp_path, validation):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text")
    (tmp_path / "link.txt").symlink_to("a.txt")
    values = {"data_glob": str(tmp_path / "a.*"), "validation_glob": str(tmp_path / validation)}
    with pytest.raises(ValueError, match=r"validation_glob = .* names .*a\.txt"):
        validation_text(PretrainConfig(**values))
    validation_text(PretrainConfig(data_glob="stdlib", validation_glob="stdlib"))  # split by file


def test_text_of_the_hub_is_read_from_its_copy(tmp_path, monkeypatch):
    monkeypatch.setenv("LOSSYTP_DATA", str(tmp_path))
    copy = tmp_path / "karpathy" / "tiny_shakespeare"
    copy.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"dataset = 'shakespeare': .* holds no \.parquet or \.txt file: put one"):
        training_text(PretrainConfig(dataset="shakespeare"))
    (copy / "input.txt").write_text("a" * 90 + "b" * 10)
    for name in ("shakespeare", "karpathy/tiny_shakespeare"):
        config = PretrainConfig(dataset=name)
        assert (text_of(training_text(config)), text_of(validation_text(config))) == ("a" * 90, "b" * 10)
        assert config.task == name


def by_hand(logits_TV, ids_T):
    probabilities = torch.softmax(logits_TV[:-1], -1)
    return [-probabilities[place, token].log().item() for place, token in enumerate(ids_T[1:].tolist())]


def test_it_is_the_mean_over_ranks_of_each_tokens_own():
    ids = torch.tensor([[3, 0, 2], [1, 1, 4]])
    logits = torch.randn(2, 2, 3, 5, generator=torch.Generator().manual_seed(0))
    found = token_losses(lambda **_: SimpleNamespace(logits=logits[0], rank_logits=logits), ids)
    for text in (0, 1):
        ranks = [by_hand(logits[rank, text], ids[text]) for rank in (0, 1)]
        assert found[text].tolist() == pytest.approx([(one + other) / 2 for one, other in zip(*ranks, strict=True)])
