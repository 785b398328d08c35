"""Test splits, batches, and examples cut to length."""

from copy import deepcopy

import numpy as np
import pytest
import torch

from lossytp.parallel.vocabulary import IGNORED
from lossytp.training import tasks
from lossytp.training.batches import ANSWER_TOKENS, TokenizedSplit, evaluation_batches, load_dataset, training_batches
from lossytp.training.models import load_tokenizer
from lossytp.training.task_kinds import Task
from tests.training.bos import BOS, with_bos
from tests.training.tasks_of_all_kinds import TASKS

PAD = 0


def split_of(sequences, options=None, labels=None, **values):
    """Return a split of these sequences of tokens; `options` gives the number of sequences of each example."""
    counts = options or [1] * len(sequences)
    defaults = {"kind": "classification", "answer_lengths": np.zeros(len(sequences), dtype=int), "answers": ()}
    defaults |= {"parts": np.array([""] * len(counts)), "cut": np.zeros(len(counts), dtype=bool), "incomplete": {}}
    return TokenizedSplit(
        tokens=np.concatenate(sequences),
        offsets=np.cumsum([0, *map(len, sequences)]),
        first=np.cumsum([0, *counts]),
        labels=np.array(labels or np.arange(len(counts)) % 3, dtype=float),
        pad_id=PAD,
        **{**defaults, **values},
    )


@pytest.fixture
def split():
    lengths = [3, 9, 1, 4, 7, 2, 5, 8, 6, 10] * 20
    return split_of([np.full(length, number + 1) for number, length in enumerate(lengths)])


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("gpt2-nano-scratch")


@pytest.fixture
def load(tmp_path, monkeypatch, tokenizer):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def loaded(kind: type[Task], rows, *, max_length=64, train_samples=None, **values):
        task = kind(source=tasks.Table(train=rows, test=rows), **values)
        monkeypatch.setitem(tasks.TASKS, "rows", task)
        return load_dataset("rows", tokenizer, max_length=max_length, train_samples=train_samples, test_samples=None)

    return loaded


def texts_in(split, tokenizer, example):
    return [
        tokenizer.decode(split.tokens[split.offsets[s] : split.offsets[s + 1]])
        for s in range(split.first[example], split.first[example + 1])
    ]


def test_a_batch_is_padded_on_the_right_and_a_missing_option_masked():
    batch = split_of([[5, 5, 5], [6] * 5], labels=[0, 1]).batch(np.array([0, 1]))
    assert batch["input_ids"].tolist() == [[5, 5, 5, PAD, PAD], [6] * 5]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert batch["labels"].tolist() == [0, 1]
    assert batch["labels"].dtype == torch.int64
    split = split_of([[1, 1], [2], [3, 3, 3], [4], [5]], options=[2, 3], labels=[1, 0], kind="multiple choice")
    batch = split.batch(np.array([0, 1]))
    assert batch["input_ids"].tolist() == [[[1, 1, 0], [2, 0, 0], [1, 1, 0]], [[3, 3, 3], [4, 0, 0], [5, 0, 0]]]
    assert batch["attention_mask"].sum(-1).tolist() == [[2, 1, 0], [3, 1, 1]]
    assert batch["labels"].tolist() == [1, 0]


def test_only_the_answer_is_trained_on_and_prompts_end_where_it_begins():
    split = split_of([[1, 2, 3, 8, 9], [4, 7]], kind="generation", answer_lengths=np.array([2, 1]))
    batch = split.batch(np.array([0, 1]))
    assert batch["input_ids"].tolist() == [[1, 2, 3, 8, 9], [4, 7, PAD, PAD, PAD]]
    assert batch["labels"].tolist() == [[IGNORED] * 3 + [8, 9], [IGNORED, 7] + [IGNORED] * 3]
    prompts = split.prompts(np.array([0, 1]))
    assert prompts["input_ids"].tolist() == [[1, 2, 3], [PAD, PAD, 4]]
    assert prompts["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_an_epoch_of_training_batches_holds_every_example_once(split):
    batches = training_batches(split, batch_size=8, seed=0)
    seen = [int(row[0]) for _ in range(25) for row in next(batches)["input_ids"]]
    assert sorted(seen) == list(range(1, 201))
    second = [int(row[0]) for _ in range(25) for row in next(batches)["input_ids"]]
    assert sorted(second) == sorted(seen)
    assert second != seen


@pytest.mark.parametrize("skip", [0, 1, 24, 30])  # 25 are an epoch
def test_skipping_leaves_out_the_first_batches_without_making_them(split, monkeypatch, skip):
    whole = training_batches(split, batch_size=8, seed=0)
    expected = [next(whole)["input_ids"] for _ in range(skip + 3)][skip:]
    made, original = [], type(split).batch
    monkeypatch.setattr(type(split), "batch", lambda *arguments: made.append(1) or original(*arguments))
    late = training_batches(split, batch_size=8, seed=0, skip=skip)
    assert all(torch.equal(next(late)["input_ids"], batch) for batch in expected)
    assert len(made) == 3


def test_only_the_seed_determines_the_order(split):
    def order(seed):
        batches = training_batches(split, batch_size=8, seed=seed)
        return torch.cat([next(batches)["labels"] for _ in range(10)]).tolist()

    torch.manual_seed(1)
    first = order(0)
    torch.manual_seed(2)
    assert order(0) == first
    assert order(1) != first


def test_batches_of_similar_length_hold_little_padding(split):
    batches = training_batches(split, batch_size=8, seed=0)
    masks = [next(batches)["attention_mask"] for _ in range(25)]
    real = sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)
    at_random = split.lengths().mean() / 10  # padding if batches mixed all lengths
    assert real > 0.9 > at_random


def test_evaluation_covers_every_example_once_by_length(split):
    order = np.concatenate(list(evaluation_batches(split, batch_size=7)))
    assert sorted(order) == list(range(200))
    assert (np.diff(split.lengths()[order]) >= 0).all()


def test_the_order_does_not_follow_a_file_sorted_by_class():
    """Otherwise `stale`, which fills in the previous batch's activations, would reveal the class."""
    split = split_of([[1, 2]] * 400, labels=[0] * 200 + [1] * 200)
    batches = [split.labels[indices].mean() for indices in evaluation_batches(split, batch_size=50)]
    assert 0.25 < min(batches) < max(batches) < 0.75


PAIRS = [
    {"premise": "one two three four five six seven eight nine ten", "claim": "numbers", "label": i % 2}
    for i in range(3)
]


def test_a_long_body_is_cut_on_the_right_and_its_ending_kept(load, tokenizer):
    values = {"body": "{premise}", "ending": " Claim: {claim}", "labels": ("no", "yes")}
    whole = texts_in(load(tasks.Classification, PAIRS, **values).train, tokenizer, 0)[0]
    assert whole == "one two three four five six seven eight nine ten Claim: numbers"
    cut = load(tasks.Classification, PAIRS, max_length=10, **values).train
    assert cut.lengths().tolist() == [10] * 3
    text = texts_in(cut, tokenizer, 0)[0]
    assert text.startswith("one two")
    assert text.endswith(" Claim: numbers")


def test_options_are_encoded_after_a_body_cut_on_the_left(load, tokenizer):
    rows = [{"question": "zero " * 30 + "which", "options": ["this one", "that"], "label": 1}] * 2
    split = load(tasks.MultipleChoice, rows, max_length=8, body="{question}", options="options").train
    first, second = texts_in(split, tokenizer, 0)
    assert first.endswith(" which this one")
    assert second.endswith(" which that")
    assert split.lengths().tolist() == [8, 8]
    assert len(split) == 2


def test_an_answer_ends_with_the_end_token_and_leaves_room_for_its_prompt(load, tokenizer):
    rows = [{"context": "sea " * 100, "question": "where", "answer": "at sea"}] * 2
    split = load(
        tasks.Generation, rows, body="{context}", ending=" Question: {question} Answer:", answers="answer"
    ).test
    ids = split.tokens[: split.offsets[1]]
    answer = ids[-split.answer_lengths[0] :]
    assert tokenizer.decode(answer) == f" at sea{tokenizer.eos_token}"
    assert len(ids) - len(answer) == 64 - ANSWER_TOKENS
    assert split.answers == (("at sea",),) * 2
    prompt = tokenizer.decode(split.prompts(np.array([0]))["input_ids"][0])
    assert prompt.endswith("sea sea Question: where Answer:")


def test_the_hash_depends_on_all_accepted_answers(load):
    """Training sees the first one only, and evaluation accepts any."""

    def sha256(accepted):
        rows = [{"question": "is it lost", "answer": accepted}] * 2
        return load(tasks.Generation, rows, body="{question}", ending="?", answers="answer").sha256

    assert sha256(["yes"]) == sha256(["yes"]) != sha256(["yes", "sure"])


def test_an_empty_text_has_one_token(load, tokenizer):
    rows = [{"text": "", "label": 0}, {"text": "word", "label": 1}]
    split = load(tasks.Classification, rows, body="{text}", labels=("a", "b")).train
    assert split.lengths().tolist()[0] == 1


def test_data_is_prepared_once_and_again_if_rows_length_or_sample_change(load, monkeypatch):
    values = {"body": "{text}", "labels": ("a", "b")}
    rows = [{"text": f"text number {i}", "label": i % 2} for i in range(20)]
    first = load(tasks.Classification, rows, **values)
    with monkeypatch.context() as patch:
        patch.setattr(Task, "examples", lambda *_: pytest.fail("examples are made again"))
        assert load(tasks.Classification, rows, **values).sha256 == first.sha256
    others = (
        load(tasks.Classification, rows, max_length=3, **values),
        load(tasks.Classification, rows, train_samples=5, **values),
        load(tasks.Classification, [{**row, "label": 1 - row["label"]} for row in rows], **values),
    )
    assert len({first.sha256, *(other.sha256 for other in others)}) == 4
    assert len(others[1].train) == 5
    assert len(others[1].test) == 20


@pytest.mark.parametrize("kind", TASKS)
def test_every_sequence_begins_with_the_token_that_the_tokenizer_asks_for(tmp_path, monkeypatch, tokenizer, kind):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sizes = {"max_length": 64, "train_samples": None, "test_samples": None, "task": TASKS[kind]}
    bare, asks = (load_dataset(kind, each, **sizes).test for each in (tokenizer, with_bos(deepcopy(tokenizer))))
    bos = tokenizer.convert_tokens_to_ids(BOS)
    assert len(asks.offsets) == len(bare.offsets)
    for number in range(len(bare.offsets) - 1):
        assert asks._tokens(number).tolist() == [bos, *bare._tokens(number)]
    with pytest.raises(ValueError, match="max_length = 1 leaves no room"):
        load_dataset(kind, with_bos(deepcopy(tokenizer)), **{**sizes, "max_length": 1})


def test_what_is_left_out_or_lacks_a_text_is_counted_and_said(load, capfd):
    rows = [{"text": text, "label": label} for text, label in (("a", 0), ("b", 1), (None, 1), ("c", -1), ("d", None))]
    for _ in range(2):  # the second time from the cache
        data = load(tasks.Classification, rows, body="{text}", labels=("x", "y"))
        assert (len(data.train), data.train.incomplete) == (3, {"without_label": 2, "without_text": 1})
        told = capfd.readouterr().err
        assert "2 train rows of rows are without a label" in told
        assert "1 test rows of rows are without a text" in told
