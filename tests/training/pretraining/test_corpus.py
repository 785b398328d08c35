"""Test the order of documents, and the blocks that they are packed into."""

from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from lossytp.training.pretraining import corpus as corpora
from lossytp.training.pretraining.corpus import BEGINNING, STDLIB, PackedBlocks, Position, all_blocks, corpus, encode
from lossytp.training.pretraining.vocabulary import train_tokenizer

BLOCK = 8


def write(file: Path, texts, column="text", row_group_size=7):
    pa.parquet.write_table(pa.table({"id": range(len(texts)), column: texts}), file, row_group_size=row_group_size)


def document(number):
    return f"document {number}" + " more" * (number % 11)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([document(number) for number in range(100)], size=300)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder of 40 documents in two parquet files and one in a text file; 5 are read at once."""
    monkeypatch.setattr(corpora, "DOCUMENTS_AT_ONCE", 5)
    write(tmp_path / "a-0.parquet", [document(i) for i in range(23)])
    write(tmp_path / "a-1.parquet", [document(i) if i != 30 else None for i in range(23, 40)])
    (tmp_path / "b.txt").write_text("läst\n", encoding="utf-8")
    return tmp_path


def taken(text, start, number):
    """Return `number` documents from a position on."""
    found = []
    for _, texts in text.documents(start):
        found += texts
        if len(found) >= number:
            return found[:number]
    raise AssertionError("documents end")


def test_documents_are_the_rows_of_all_files_in_order_and_whole_other_files(folder):
    texts = list(corpus(str(folder / "*"), split="train").texts())
    assert texts == [*(document(i) for i in range(40) if i != 30), "läst\n"]


def test_passes_follow_each_other_without_end(folder):
    text = corpus(str(folder / "*"), split="train")
    once = list(text.texts())
    assert taken(text, BEGINNING, 100) == (once * 3)[:100]


def test_the_rest_is_the_same_from_any_position(folder):
    text = corpus(str(folder / "*"), split="train")
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


def test_files_are_split_by_document_if_asked(folder, monkeypatch):
    monkeypatch.setattr(corpora, "HELD_OUT_PERCENT", 30)
    pattern = str(folder / "*.parquet")
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


def test_a_pattern_without_a_file_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"no file matches '.*none-\*\.parquet': give another"):
        corpus(str(tmp_path / "none-*.parquet"), split="train")


def test_folders_that_a_pattern_matches_are_left_out(tmp_path):
    (tmp_path / "below").mkdir()
    with pytest.raises(ValueError, match="no file matches"):
        corpus(str(tmp_path / "*"), split="train")
    (tmp_path / "below" / "a.txt").write_text("läst", encoding="utf-8")
    assert list(corpus(str(tmp_path / "**"), split="train").texts()) == ["läst"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x89PNG\r\n\x1a\n", r"is not UTF-8 text \(byte 0x89 at 0\): save it as UTF-8, or narrow the pattern$"),
        ("läst".encode("latin-1"), r"is not UTF-8 text \(byte 0xe4 at 1\)"),
        (b"GIF\x00\x01", r"is not text \(NUL at character 3\): narrow the pattern$"),
    ],
)
def test_a_file_that_is_no_text_is_named(tmp_path, content, words):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_bytes(content)
    with pytest.raises(ValueError, match=rf"b\.txt {words}"):
        list(corpus(str(tmp_path / "*"), split="train").texts())


def test_a_file_without_a_text_column_is_named_with_those_it_has(tmp_path):
    write(tmp_path / "a.parquet", ["x"], column="body")
    with pytest.raises(ValueError, match=r"a\.parquet has no column 'text', but id, body"):
        list(corpus(str(tmp_path / "*"), split="train").texts())


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    (tmp_path / "a.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read"):
        list(corpus(str(tmp_path / "*"), split="train").texts())


def test_a_parquet_damaged_after_its_header_is_named(tmp_path):
    write(tmp_path / "a.parquet", [document(number) for number in range(40)], row_group_size=40)
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[4 : len(content) // 2] = b"\xff" * (len(content) // 2 - 4)  # the pages; the metadata at the end stays
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read \(.*\): give a whole") as error:
        list(corpus(str(tmp_path / "*"), split="train").texts())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("texts", "kind"), [([1, 2], "int64"), ([["a"], None], "list<.*>")])
def test_a_text_column_of_another_kind_is_named(tmp_path, texts, kind):
    write(tmp_path / "a.parquet", texts)
    with pytest.raises(ValueError, match=rf"a\.parquet has {kind} in its column 'text': give text$"):
        list(corpus(str(tmp_path / "*"), split="train").texts())


def test_files_without_text_end_the_search_for_it(tmp_path):
    write(tmp_path / "a.parquet", [None, ""])
    (tmp_path / "b.txt").write_text("")
    with pytest.raises(ValueError, match=r"a\.parquet and 1 others hold no text"):
        next(corpus(str(tmp_path / "*"), split="train").documents())


def test_text_too_short_for_a_block_is_refused(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(ValueError, match="fewer than a block of 128"):
        all_blocks(corpus(str(tmp_path / "a.txt"), split="validation"), tokenizer, block_size=128)


def packed(text, tokenizer, **values):
    return PackedBlocks(text, tokenizer, **{"block_size": BLOCK, "seed": 0, **values})


def stream_of(text, tokenizer, passes):
    return np.concatenate([ids for document in [*text.texts()] * passes for ids in encode(tokenizer, [document])])


def rows(blocks):
    return Counter(map(tuple, blocks.tolist()))


def test_documents_end_with_the_end_token(tokenizer):
    first, second = encode(tokenizer, ["document", ""])
    assert tokenizer.decode(first) == "document<|endoftext|>"
    assert second.tolist() == [tokenizer.eos_token_id]


def test_all_blocks_are_the_text_in_order(folder, tokenizer):
    text = corpus(str(folder / "*"), split="train")
    tokens = stream_of(text, tokenizer, 1)
    blocks = all_blocks(text, tokenizer, block_size=BLOCK)
    assert blocks.flatten().tolist() == tokens[: blocks.numel()].tolist()
    assert len(tokens) - blocks.numel() < BLOCK
    in_order = islice(packed(text, tokenizer).in_order(), len(blocks))
    assert np.array_equal(np.stack(list(in_order)), blocks)


@pytest.mark.parametrize("portion", [3, 10, 1000])
def test_streamed_blocks_are_all_of_the_text_shuffled_portion_by_portion(folder, tokenizer, monkeypatch, portion):
    """Portions span several passes; tokens left over by a block start the next one."""
    monkeypatch.setattr(corpora, "SHUFFLED_BLOCKS", portion)
    text = corpus(str(folder / "*"), split="train")
    passes = -(-portion * 2 * BLOCK // len(stream_of(text, tokenizer, 1)))
    tokens = stream_of(text, tokenizer, passes)
    blocks = packed(text, tokenizer)
    for start in (0, portion):
        expected = tokens[start * BLOCK : (start + portion) * BLOCK].reshape(-1, BLOCK)
        assert rows(blocks.batch(portion)) == rows(expected)


def test_a_document_longer_than_a_portion_is_read_once(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(corpora, "SHUFFLED_BLOCKS", 3)
    (tmp_path / "a.txt").write_text(" ".join(map(str, range(300))))
    text = corpus(str(tmp_path / "a.txt"), split="train")
    whole = len(stream_of(text, tokenizer, 1)) // BLOCK
    blocks = packed(text, tokenizer)
    for _ in range(whole // 3):
        blocks.batch(3)
    assert blocks.position.epoch == 0
    assert len(blocks.state_dict()["rest"]) < len(stream_of(text, tokenizer, 1))
    blocks.batch(6)
    assert blocks.position.epoch == 1


def test_without_streaming_a_whole_pass_is_shuffled(folder, tokenizer, monkeypatch):
    monkeypatch.setattr(corpora, "SHUFFLED_BLOCKS", 3)
    text = corpus(str(folder / "*"), split="train")
    tokens = stream_of(text, tokenizer, 2)
    once = len(tokens) // 2 // BLOCK
    both = len(tokens) // BLOCK
    blocks = packed(text, tokenizer, streaming=False)
    first = blocks.batch(once)
    assert blocks.position.epoch == 0
    assert rows(first) == rows(tokens[: once * BLOCK].reshape(-1, BLOCK))
    second = blocks.batch(both - once)
    assert blocks.position.epoch == 1
    assert rows(second) == rows(tokens[once * BLOCK : both * BLOCK].reshape(-1, BLOCK))
    assert not np.array_equal(first[:20], tokens[: 20 * BLOCK].reshape(-1, BLOCK))


def test_without_streaming_a_text_shorter_than_a_block_is_repeated_until_it_fills_one(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("a b")
    (tmp_path / "b.txt").write_text("c d")
    text = corpus(str(tmp_path / "*"), split="train")
    tokens = stream_of(text, tokenizer, 20)
    size = len(tokens) // 20 + 1
    blocks = packed(text, tokenizer, block_size=size, streaming=False)
    seen = np.concatenate([blocks.batch(1).flatten() for _ in range(5)])
    assert seen.tolist() == tokens[: len(seen)].tolist()


def test_only_the_seed_determines_the_order(folder, tokenizer, monkeypatch):
    monkeypatch.setattr(corpora, "SHUFFLED_BLOCKS", 40)
    text = corpus(str(folder / "*"), split="train")
    first, again, other = (packed(text, tokenizer, seed=seed).batch(40) for seed in (0, 0, 1))
    assert first.equal(again)
    assert not first.equal(other)
    assert not first.equal(all_blocks(text, tokenizer, block_size=BLOCK)[:40])


def test_batches_of_any_size_give_the_same_blocks(folder, tokenizer, monkeypatch):
    monkeypatch.setattr(corpora, "SHUFFLED_BLOCKS", 10)
    text = corpus(str(folder / "*"), split="train")
    whole, pieces = packed(text, tokenizer), packed(text, tokenizer)
    assert whole.batch(36).equal(torch.cat([pieces.batch(size) for size in (1, 15, 20)]))


@pytest.mark.parametrize("streaming", [True, False])
def test_the_same_blocks_follow_from_any_saved_state(folder, tokenizer, monkeypatch, streaming):
    """Also from the beginning, across the end of a portion, and into later passes."""
    monkeypatch.setattr(corpora, "SHUFFLED_BLOCKS", 10)
    text = corpus(str(folder / "*"), split="train")
    blocks = packed(text, tokenizer, streaming=streaming)
    states, batches = [], []
    while blocks.position.epoch < 3:
        states.append(blocks.state_dict())
        batches.append(blocks.batch(4))
    used = packed(text, tokenizer, streaming=streaming)
    used.batch(3)
    for start, state in enumerate(states):
        again = used if start % 2 else packed(text, tokenizer, streaming=streaming)
        again.load_state_dict(state)
        for expected in batches[start : start + 20]:
            assert again.batch(4).equal(expected)
