"""Test the tasks that are known by name: their prompts, labels and scores, and the docstrings of libraries."""

import os
import re

import numpy as np
import pytest

from lossytp.training.docstrings import LIBRARIES, docstrings_of, mask_names, split_of
from lossytp.training.tasks import TASKS, Classification, Generation, MultipleChoice, Regression
from tests.training.tasks.hub_rows import ROWS, write_hub

NAMES = sorted(ROWS)
GOLD = {  # columns that hold the answer, and another possible value
    "label": lambda value: type(value)(1) if value != type(value)(1) else type(value)(0),
    "answer": lambda value: {"1": "2", "2": "1"}.get(value, "SENTINEL") if isinstance(value, str) else (value + 1) % 2,
    "answerKey": lambda value: "A" if value in "BCDE" else "2",
    "answers": lambda value: {"text": ["SENTINEL"], "answer_start": [0]},
    "supporting_facts": lambda value: {"title": ["SENTINEL"], "sent_id": [7]},
    "type": lambda value: "SENTINEL",
    "level": lambda value: "SENTINEL",
    "hard": lambda value: not value,
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    write_hub(tmp_path / "data")
    monkeypatch.setenv("LOSSYTP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def score(task, examples, predictions):
    return task.metric().compute(predictions=predictions, references=[example.label for example in examples])


def logits(examples, chosen):
    options = max(len(example.endings) for example in examples)
    rows = np.full((len(examples), options), -np.inf)
    for row, example, choice in zip(rows, examples, chosen, strict=True):
        row[: len(example.endings)] = np.arange(len(example.endings)) == choice
    return rows


def predictions_of(task, examples, answers):
    if isinstance(task, Classification):
        return 50.0 * np.eye(task.num_logits)[answers]
    if isinstance(task, Regression):
        return np.array(answers)[:, None]
    return answers if isinstance(task, Generation) else logits(examples, answers)


@pytest.mark.parametrize("name", NAMES)
def test_a_perfect_predictor_scores_1_and_a_constant_one_chance(name, hub):
    task = TASKS[name]
    for split in ("train", "test"):
        examples = task.examples(split)
        assert len(examples) == len(ROWS[name])
        labels = [example.label for example in examples]
        best = [label[-1] for label in labels] if isinstance(task, Generation) else labels
        perfect = score(task, examples, predictions_of(task, examples, best))
        assert [perfect[metric] for metric in (*task.metrics, "score")] == pytest.approx([1] * (len(task.metrics) + 1))
        frequent = "no idea" if isinstance(task, Generation) else max(set(labels), key=labels.count)
        constant = score(task, examples, predictions_of(task, examples, [frequent] * len(examples)))
        chance = task.chance(labels)
        assert set(chance) >= {*task.metrics, "score"}
        assert {metric: constant[metric] for metric in chance} == chance
        assert chance["score"] < 1


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_does_not_depend_on_the_gold_answer(name):
    """The context may contain the answer, but nothing in the prompt may depend on which answer is right."""
    task = TASKS[name]
    for row in ROWS[name]:
        example = task.example(row)
        columns = GOLD.keys() & row.keys()
        assert columns
        other = {column: GOLD[column](row[column]) for column in columns}
        assert all(other[column] != row[column] for column in columns)
        changed = task.example({**row, **other})
        assert changed.label != example.label
        assert (changed.body, changed.endings) == (example.body, example.endings)
        text = example.body + "".join(example.endings)
        assert "SENTINEL" not in text
        if isinstance(task, Generation):
            (ending,) = example.endings
            assert ending.endswith("Answer:")
            assert row["question"] in ending
            assert not any(answer in ending for answer in example.label)


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_holds_all_of_the_text_and_is_cut_if_long(name):
    task = TASKS[name]
    texts = ("sentence", "sentence1", "sentence2", "premise", "hypothesis", "question", "context", "goal", "article")
    for row in ROWS[name]:
        example = task.example(row)
        for column in texts:
            if isinstance(row.get(column), str) and name != "winogrande_l":
                assert all(row[column].strip() in example.body + ending for ending in example.endings)
        assert example.body == example.body.strip()
        assert all(ending == ending.rstrip() for ending in example.endings)
        if isinstance(task, MultipleChoice | Generation):
            assert task.cut == "left"
            assert len(example.endings) == (1 if isinstance(task, Generation) else len(set(example.endings)))
        else:
            assert task.cut == "right"
            assert len(example.endings) == 1


def test_prompts_read_naturally():
    def whole(name, number=0):
        example = TASKS[name].example(ROWS[name][number])
        label = example.label if isinstance(TASKS[name], MultipleChoice) else 0
        return example.body + example.endings[label]

    assert whole("winogrande_l") == "Sarah was a better surgeon than Maria so Sarah got the harder cases."
    assert whole("winogrande_l", 2) == "Eve's cup did not fit the shelf, for the cup was big."
    assert whole("hellaswag") == "Cutting bread: How to cut A cook takes a knife. she cuts the bread 0. Done."
    assert whole("arc_easy", 2) == "Question: What flies? Answer: a wren"
    assert whole("arc_easy", 1) == "Question: What melts? Answer: ice"
    assert whole("hellaswag", 1).endswith("she reads the bread 1. Done.")
    assert whole("piqa", 1) == "Question: open jar 1 Answer: kick the wall 1"
    assert whole("quality", 1).endswith("It never came back. Question: What left in year 1? Answer: A song")
    assert whole("cosmosqa", 2).endswith("rained . Question: Why did I run ? Answer: The bus came .")
    assert whole("imdb") == "Not bad. I saw it 0 times. ."
    assert whole("mnli") == "The boat of number 0 sails . Hypothesis: Does boat 0 sail ?"
    assert whole("hotpotqa").startswith(
        "Acme: Jo Moe founded Acme.\nParis: Paris is old. It is big.\nJo Moe: Jo is a man."
    )
    assert TASKS["squad"].example(ROWS["squad"][0]).label == ("Egypt", "through Egypt")


SUBSETS = {"qnli": ("train",), "mnli": ("train", "test")}  # in the project's own copy of the data


@pytest.mark.parametrize("name", ["sst2", "cola", "mrpc", "rte", "qnli", "mnli", "stsb", "imdb"])
def test_the_real_data(name, tmp_path, monkeypatch):
    source = TASKS[name].source
    if not os.environ.get("LOSSYTP_DATA") or not source.folder.is_dir():
        pytest.skip(f"needs LOSSYTP_DATA, a folder laid out like the hub, with {source.path}/{source.name}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for split in ("train", "test"):
        rows, official = len(source.rows(split)), source.official_rows[split]
        assert rows == official or (split in SUBSETS.get(name, ()) and rows < official)
        assert source.subset(split) is (rows < official)
        examples = TASKS[name].examples(split, 200)
        assert len(examples) == 200
        chance = TASKS[name].chance([example.label for example in examples])
        assert chance["score"] < 0.8
        assert all(len(example.body) > 1 for example in examples)


LONG = "Return something that takes a hundred characters to say " * 3


def test_docstrings_are_masked_read_and_split_by_module():
    text = "numpy.ndarray, np.sum, PyTorch, SciPy; torchvision and input stay"
    assert mask_names(text) == "lib.ndarray, lib.sum, lib, lib; torchvision and input stay"
    source = f'class A:\n    """{LONG}a"""\n    def f(self):\n        """{LONG}b"""\n\ndef g():\n    """short"""\n'
    assert docstrings_of(source) == [" ".join(f"{LONG}{end}".split()) for end in "ab"]
    assert docstrings_of("def broken(:") == []
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
