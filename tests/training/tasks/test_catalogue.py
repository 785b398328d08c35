"""Test the tasks that are known by name: their prompts, labels and scores."""

import os
import subprocess
import sys

import numpy as np
import pytest

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
    """Return 1 for the chosen option of each example, 0 for its others, and -inf for missing options."""
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


@pytest.mark.parametrize("name", [name for name in NAMES if isinstance(TASKS[name], MultipleChoice)])
def test_permuted_options_change_nothing(name):
    task = TASKS[name]
    for row in ROWS[name]:
        example, turned = task.example(row), task.example(backwards(name, row))
        assert turned.body == example.body
        assert turned.endings == example.endings[::-1]
        assert turned.endings[turned.label] == example.endings[example.label]
        assert turned.label == len(example.endings) - 1 - example.label
    metric, rows = task.metric(), [task.example(row) for row in ROWS[name]]
    turned = [task.example(backwards(name, row)) for row in ROWS[name]]
    scores = [
        metric.compute(predictions=logits_by_text(examples), references=[example.label for example in examples])
        for examples in (rows, turned)
    ]
    assert scores[0] == pytest.approx(scores[1])
    assert scores[0]["cross_entropy"] > 0


def logits_by_text(examples):
    """Return logits that depend only on the text."""
    width = max(len(example.endings) for example in examples)
    return [
        [sum(map(ord, ending)) % 97 / 9.7 for ending in example.endings] + [-np.inf] * (width - len(example.endings))
        for example in examples
    ]


def backwards(name, row):
    """Return the row with its options in reverse order, and the gold index changed accordingly."""
    lists = {"hellaswag": ("endings", "label"), "quality": ("options", "answer")}
    if name in lists:
        options, gold = lists[name]
        turned = type(row[gold])(len(row[options]) - 1 - int(row[gold]))
        return {**row, options: row[options][::-1], gold: turned}
    if name == "arc_easy":
        names = row["choices"]["label"]
        gold = names[len(names) - 1 - names.index(row["answerKey"])]
        return {**row, "choices": {"text": row["choices"]["text"][::-1], "label": names}, "answerKey": gold}
    columns = TASKS[name].options
    turned = {column: row[other] for column, other in zip(columns, reversed(columns), strict=True)}
    if name == "winogrande_l":
        return {**row, **turned, "answer": {"1": "2", "2": "1"}[row["answer"]]}
    return {**row, **turned, "label": len(columns) - 1 - row["label"]}


def test_prompts_read_naturally():
    def whole(name, number=0):
        example = TASKS[name].example(ROWS[name][number])
        label = example.label if isinstance(TASKS[name], MultipleChoice) else 0
        return example.body + example.endings[label]

    assert whole("winogrande_l") == "Sarah was a better surgeon than Maria so Sarah got the harder cases."
    assert whole("winogrande_l", 2) == "Eve's cup did not fit the shelf, for the cup was big."
    assert whole("hellaswag") == "Cutting bread: How to cut A cook takes a knife. she cuts the bread 0. Done."
    assert whole("arc_easy", 2) == "Question: What flies? Answer: a wren"
    assert whole("imdb") == "Not bad. I saw it 0 times. ."
    assert whole("mnli") == "The boat of number 0 sails . Hypothesis: Does boat 0 sail ?"
    assert whole("hotpotqa").startswith(
        "Acme: Jo Moe founded Acme.\nParis: Paris is old. It is big.\nJo Moe: Jo is a man."
    )
    assert TASKS["squad"].example(ROWS["squad"][0]).label == ("Egypt", "through Egypt")


def test_every_task_says_how_many_logits_it_needs():
    assert {name: TASKS[name].num_logits for name in ("sst2", "mnli", "stsb", "arc_easy", "squad")} == {
        "sst2": 2,
        "mnli": 3,
        "stsb": 1,
        "arc_easy": 1,
        "squad": None,
    }


def test_naming_tasks_imports_nothing_slow():
    code = "import sys, lossytp; old = set(sys.modules); import lossytp.training.tasks; print(set(sys.modules) - old)"
    new = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "lossytp.training.tasks" in new
    assert not {"'datasets'", "'evaluate'", "'transformers'", "'sklearn'"} & set(new.strip("{}\n").split(", "))


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
