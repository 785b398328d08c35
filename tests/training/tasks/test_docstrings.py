import re

import pytest

from lossytp.training.batches import load_dataset
from lossytp.training.docstrings import LIBRARIES, docstrings_of, mask_names, split_of
from lossytp.training.models import load_tokenizer
from lossytp.training.tasks import TASKS, Classification, Table
from paper.baseline import bag_of_tokens, bag_of_words

LONG = "Return something that takes a hundred characters to say " * 3


def test_names_and_aliases_are_masked_whole():
    text = "numpy.ndarray, np.sum, PyTorch, SciPy; torchvision and input stay"
    assert mask_names(text) == "lib.ndarray, lib.sum, lib, lib; torchvision and input stay"


def test_functions_classes_and_methods_are_read_and_broken_code_is_skipped():
    source = f'class A:\n    """{LONG}a"""\n    def f(self):\n        """{LONG}b"""\n\ndef g():\n    """short"""\n'
    assert docstrings_of(source) == [" ".join(f"{LONG}{end}".split()) for end in "ab"]
    assert docstrings_of("def broken(:") == []


def test_a_module_is_in_one_split_and_about_15_percent_are_test():
    assert split_of("numpy/linalg.py") == split_of("numpy/linalg.py")
    shares = [split_of(f"m{number}.py") == "test" for number in range(4000)]
    assert 0.13 < sum(shares) / len(shares) < 0.17


@pytest.mark.slow
def test_the_embedded_task_has_nine_classes_no_leak_and_no_names():
    examples = {split: TASKS["docstrings"].examples(split) for split in ("train", "test")}
    train, test = ({example.body for example in examples[split]} for split in ("train", "test"))
    assert len(train) == len(examples["train"])  # no duplicates
    assert not train & test
    assert {example.label for example in examples["test"]} == set(range(len(LIBRARIES))) == set(range(9))
    names = re.compile(r"(?<![a-z])(" + "|".join(LIBRARIES) + r")(?![a-z])", re.IGNORECASE)
    assert not any(names.search(text) for text in train | test)
    assert 0.2 < TASKS["docstrings"].chance([example.label for example in examples["test"]])["score"] < 0.35


def test_a_bag_of_words_classifies_a_sample(monkeypatch):
    words = ("alpha beta", "gamma delta", "gamma epsilon")
    rows = [{"text": f"{words[i % 3]} {i}", "label": min(i % 3, 1)} for i in range(60)]
    source = Table(train=rows, test=rows)
    monkeypatch.setitem(TASKS, "toy", Classification(source=source, body="{text}", labels=("a", "b")))
    with pytest.raises(ValueError, match=r"dataset = 'nope' is unknown: choose one of .*toy"):
        bag_of_words("nope", eval_samples=30)
    result = bag_of_words("toy", eval_samples=30)
    assert (result["dataset"], result["classes"], result["test_examples"]) == ("toy", 2, 30)
    assert result["bag_of_words"] == 1
    assert 0.5 < result["majority_share"] < 0.9
    with pytest.raises(
        ValueError, match=r"dataset = 'stsb' is a regression task, but a bag of words needs a classification"
    ):
        bag_of_words("stsb", eval_samples=None)


@pytest.mark.parametrize(("max_length", "accuracy"), [(64, 0.8), (2, 0.4)])
def test_a_bag_of_tokens_reads_what_the_model_does_and_no_more(tmp_path, monkeypatch, max_length, accuracy):
    """The last word gives the class of four in five test texts; cut texts are equal, and get the larger class."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    texts = ("return alpha", "return beta")
    train = [{"text": texts[label], "label": label} for label in [0, 0, 1] * 10]
    test = [{"text": texts[told], "label": label} for told, label in [(0, 0), (0, 0), (1, 1), (1, 1), (0, 1)]]
    task = Classification(source=Table(train=train, test=test), body="{text}", labels=("a", "b"))
    monkeypatch.setitem(TASKS, "toy", task)
    tokenizer = load_tokenizer("gpt2-nano-scratch")
    data = load_dataset("toy", tokenizer, max_length=max_length, train_samples=None, test_samples=None)
    assert bag_of_tokens(data) == accuracy
