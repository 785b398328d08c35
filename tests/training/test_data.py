import numpy as np
import pytest
import torch

from lossytp.training.data import (
    END,
    PAD_ID,
    Split,
    evaluation_batches,
    load_dataset,
    load_tokenizer,
    sample_indices,
    training_batches,
)


@pytest.fixture
def split():
    lengths = np.array([3, 9, 1, 4, 7, 2, 5, 8, 6, 10] * 20)
    tokens = np.concatenate([np.full(length, number + 1) for number, length in enumerate(lengths)])
    return Split(tokens, np.concatenate(([0], np.cumsum(lengths))), np.arange(len(lengths)) % 3)


def test_a_batch_is_padded_on_the_right_and_cut(split):
    batch = split.batch(np.array([0, 1]), max_length=5)
    assert batch["input_ids"].tolist() == [[1, 1, 1, PAD_ID, PAD_ID], [2, 2, 2, 2, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch["labels"].tolist() == [0, 1]


def test_an_epoch_of_training_batches_holds_every_example_once(split):
    batches = training_batches(split, batch_size=8, max_length=16, seed=0)
    seen = [int(row[0]) for _ in range(25) for row in next(batches)["input_ids"]]
    assert sorted(seen) == list(range(1, 201))
    second = [int(row[0]) for _ in range(25) for row in next(batches)["input_ids"]]
    assert sorted(second) == sorted(seen)
    assert second != seen


def test_order_depends_on_the_seed_alone(split):
    def order(seed):
        batches = training_batches(split, batch_size=8, max_length=16, seed=seed)
        return torch.cat([next(batches)["labels"] for _ in range(10)]).tolist()

    torch.manual_seed(1)
    first = order(0)
    torch.manual_seed(2)
    assert order(0) == first
    assert order(1) != first


def test_batches_of_like_length_hold_little_padding(split):
    batches = training_batches(split, batch_size=8, max_length=16, seed=0)
    masks = [next(batches)["attention_mask"] for _ in range(25)]
    real = sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)
    at_random = split.lengths(16).mean() / 10  # padded to the longest of all
    assert real > 0.9 > at_random


def test_evaluation_covers_every_example_once(split):
    rows = [
        int(row[0]) for batch in evaluation_batches(split, batch_size=7, max_length=4) for row in batch["input_ids"]
    ]
    assert sorted(rows) == list(range(1, 201))


def test_a_sample_is_fixed_and_of_the_size_asked_for(split):
    assert len(split.head(50)) == 50
    assert np.array_equal(split.head(50).tokens, split.head(50).tokens)
    assert split.head(None) is split
    assert split.head(1000) is split
    assert list(split.head(50).labels) == list(split.labels[sample_indices(200, 50)])


def test_tokenizer_round_trip_and_cached_data(toy):
    data = load_dataset("toy", train_samples=None, test_samples=10)
    assert (len(data.train), len(data.test)) == (64, 10)
    tokenizer = load_tokenizer("toy")
    text = "alpha beta gamma number 0"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.pad_token_id == PAD_ID
    assert tokenizer.eos_token == END
    first = data.train.tokens[: data.train.offsets[1]]
    assert tokenizer(text)["input_ids"] == first.tolist()
    assert load_dataset("toy", train_samples=None, test_samples=10).sha256 == data.sha256
