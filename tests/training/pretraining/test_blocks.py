"""Test the blocks that documents are packed into."""

import multiprocessing
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch

from lossytp.training import text as packing
from lossytp.training.corpus import Corpus, corpus
from lossytp.training.text import PackedBlocks, all_blocks, encode, in_order, train_tokenizer
from tests.training.bos import BOS, with_bos
from tests.training.pretraining.documents import document

BLOCK = 8


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([document(number) for number in range(100)], size=300)


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


def test_all_blocks_are_the_text_in_order(documents, tokenizer):
    text = corpus(str(documents / "*"), split="train")
    tokens = stream_of(text, tokenizer, 1)
    blocks = all_blocks(text, tokenizer, block_size=BLOCK)
    assert blocks.flatten().tolist() == tokens[: blocks.numel()].tolist()
    assert len(tokens) - blocks.numel() < BLOCK
    pieces = islice(in_order((texts for _, texts in text.documents()), tokenizer, BLOCK), len(blocks))
    assert np.array_equal(np.stack(list(pieces)), blocks)


def test_every_block_begins_as_the_tokenizer_asks_and_the_text_fills_the_rest(documents, tokenizer):
    text = corpus(str(documents / "*"), split="train")
    asks = with_bos(train_tokenizer([document(number) for number in range(100)], size=300))
    tokens = stream_of(text, tokenizer, 1)
    blocks = all_blocks(text, asks, block_size=BLOCK)
    assert set(blocks[:, 0].tolist()) == {asks.convert_tokens_to_ids(BOS)}
    assert blocks[:, 1:].flatten().tolist() == tokens[: len(blocks) * (BLOCK - 1)].tolist()
    assert rows(packed(text, asks, streaming=False).batch(len(blocks))) == rows(blocks)
    with pytest.raises(ValueError, match="block_size = 1"):
        all_blocks(text, asks, block_size=1)


@pytest.mark.parametrize(("block_size", "blocks"), [(32, 8192), (128, 8192), (512, 2048), (4096, 256), (2**21, 1)])
def test_portions_are_bounded_in_tokens(tokenizer, block_size, blocks):
    """At the study's block sizes they are what they were: the order of blocks does not move."""
    assert packed(Corpus(()), tokenizer, block_size=block_size).state_dict()["portion_blocks"] == blocks


@pytest.mark.slow
@pytest.mark.parametrize(("num_proc", "started"), [(None, 0), (1, 0), (2, 2)])
def test_several_processes_tokenise_the_same_blocks(documents, tokenizer, num_proc, started):
    before = set(multiprocessing.active_children())
    text = corpus(str(documents / "*"), split="train")
    blocks = packed(text, tokenizer, num_proc=num_proc)
    assert len(set(multiprocessing.active_children()) - before) == started
    assert torch.equal(blocks.batch(50), packed(text, tokenizer).batch(50))


@pytest.mark.parametrize("portion", [3, 10, 1000])
def test_streamed_blocks_are_all_of_the_text_shuffled_portion_by_portion(documents, tokenizer, monkeypatch, portion):
    """Portions span several passes; tokens left over by a block start the next one."""
    monkeypatch.setattr(packing, "SHUFFLED_BLOCKS", portion)
    text = corpus(str(documents / "*"), split="train")
    passes = -(-portion * 2 * BLOCK // len(stream_of(text, tokenizer, 1)))
    tokens = stream_of(text, tokenizer, passes)
    blocks = packed(text, tokenizer)
    for start in (0, portion):
        expected = tokens[start * BLOCK : (start + portion) * BLOCK].reshape(-1, BLOCK)
        assert rows(blocks.batch(portion)) == rows(expected)


def test_without_streaming_a_whole_pass_is_shuffled(documents, tokenizer, monkeypatch):
    monkeypatch.setattr(packing, "SHUFFLED_BLOCKS", 3)
    text = corpus(str(documents / "*"), split="train")
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


def test_without_streaming_later_passes_are_shuffled_as_a_whole_too(documents, tokenizer):
    text = corpus(str(documents / "*"), split="train")
    once = len(stream_of(text, tokenizer, 1)) // BLOCK
    start = stream_of(text, tokenizer, 2)[once * BLOCK :][:BLOCK].tolist()  # of the second pass
    places = []
    for seed in range(3):
        blocks = packed(text, tokenizer, streaming=False, seed=seed)
        blocks.batch(once)
        places.append(blocks.batch(once).tolist().index(start))
    assert max(places) > once // 4, "the first document is not read alone"


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [True, False])
def test_text_shorter_than_a_block_is_refused(tmp_path, tokenizer, streaming):
    """Repeated until it filled a portion, it would be read a million times."""
    (tmp_path / "a.txt").write_text("a b")
    (tmp_path / "b.txt").write_text("c d")
    text = corpus(str(tmp_path / "*"), split="train")
    tokens = len(stream_of(text, tokenizer, 1))
    words = rf"a\.txt and 1 more hold {tokens} tokens, fewer than a block of {tokens + 1}: give more text$"
    with pytest.raises(ValueError, match=words):
        packed(text, tokenizer, block_size=tokens + 1, streaming=streaming).batch(1)
    (tmp_path / "c").write_text("a b " * 10)
    alone = corpus(str(tmp_path / "c"), split="validation", splits_files=True)
    with pytest.raises(ValueError, match=r"c holds \d tokens, .* of 128, for validation: give more"):
        all_blocks(alone, tokenizer, block_size=128)
    assert packed(text, tokenizer, block_size=tokens, streaming=streaming).batch(3).shape == (3, tokens)


def test_the_next_portion_is_read_while_this_one_is_used(documents, tokenizer, monkeypatch):
    monkeypatch.setattr(packing, "SHUFFLED_BLOCKS", 10)
    text = corpus(str(documents / "*"), split="train")
    blocks, other = packed(text, tokenizer), packed(text, tokenizer)
    blocks.batch(1)
    assert blocks._next.exception(timeout=60) is None
    blocks.text = None  # fails if it is read
    assert blocks.batch(10).equal(other.batch(11)[1:])


def test_an_error_in_a_later_portion_reaches_the_caller_when_it_is_needed(documents, tokenizer, monkeypatch):
    monkeypatch.setattr(packing, "SHUFFLED_BLOCKS", 3)
    (documents / "b.txt").write_bytes(b"\xff")
    blocks = packed(corpus(str(documents / "*"), split="train"), tokenizer)
    with pytest.raises(ValueError, match=r"b\.txt cannot be read as UTF-8 text"):
        blocks.batch(10**4)
    assert blocks.position.epoch == 0


def test_only_the_seed_determines_the_order(documents, tokenizer, monkeypatch):
    monkeypatch.setattr(packing, "SHUFFLED_BLOCKS", 40)
    text = corpus(str(documents / "*"), split="train")
    first, again, other = (packed(text, tokenizer, seed=seed).batch(40) for seed in (0, 0, 1))
    assert first.equal(again)
    assert not first.equal(other)
    assert not first.equal(all_blocks(text, tokenizer, block_size=BLOCK)[:40])


@pytest.mark.parametrize("streaming", [True, False])
def test_the_same_blocks_follow_from_any_saved_state(documents, tokenizer, monkeypatch, streaming):
    monkeypatch.setattr(packing, "SHUFFLED_BLOCKS", 10)
    text = corpus(str(documents / "*"), split="train")
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
