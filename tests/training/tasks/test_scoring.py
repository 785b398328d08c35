"""Compare scores of made-up answers with scores computed by hand, and metrics with scikit-learn's and scipy's."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, log_loss, matthews_corrcoef

import lossytp as ltp
from lossytp.training import objectives as scoring
from lossytp.training import tasks
from lossytp.training.batches import load_dataset
from lossytp.training.metrics import TaskMetric, normalised, time_to_accuracy, word_f1
from lossytp.training.models import load_tokenizer
from lossytp.training.objectives import scores


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("gpt2-nano-scratch")


@pytest.fixture
def load(tmp_path, monkeypatch, tokenizer):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(scoring, "EVALUATION_BATCH", 2)  # so that there are several batches

    def loaded(kind, rows, **values):
        monkeypatch.setitem(tasks.TASKS, "rows", kind(source=tasks.Table(train=rows, test=rows), **values))
        return load_dataset("rows", tokenizer, max_length=64, train_samples=None, test_samples=None)

    return loaded


class Answers:
    """An engine that answers each sequence or prompt with `answer(text)`."""

    def __init__(self, answer, tokenizer, ranks=1):
        self.network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.0))
        self.answer, self.tokenizer, self.ranks = answer, tokenizer, ranks

    def logits(self, batch):
        assert "labels" not in batch
        ids, mask = batch["input_ids"], batch["attention_mask"]
        if ids.ndim == 2:
            each = [self.answer(self.text(*row)) for row in zip(ids, mask, strict=True)]
        else:
            each = [
                [self.answer(self.text(*option)) if option[1].any() else -math.inf for option in zip(*row, strict=True)]
                for row in zip(ids, mask, strict=True)
            ]
        return torch.tensor(each, dtype=torch.float32).expand(self.ranks, -1, -1)

    def generate(self, prompts, *, new_tokens, tokenizer):
        rows = list(zip(prompts["input_ids"], prompts["attention_mask"], strict=True))
        texts = [tokenizer(self.answer(self.text(*row)))["input_ids"][: new_tokens - 1] for row in rows]
        longest = max(map(len, texts)) + 1
        pad = [[*text, tokenizer.eos_token_id] + [tokenizer.pad_token_id] * (longest - len(text) - 1) for text in texts]
        return torch.cat([prompts["input_ids"], torch.tensor(pad)], 1)

    def text(self, ids, mask):
        return self.tokenizer.decode(ids[mask.bool()])


REVIEWS = [
    {"text": f"it is {word} {'very ' * i}so", "label": i % 2} for i, word in enumerate(["bad", "good"] * 3 + ["bad"])
]


def test_classification(load, tokenizer):
    data = load(tasks.Classification, REVIEWS, body="{text}", labels=("bad", "good"), metrics=("accuracy", "f1"))
    perfect = Answers(lambda text: [5.0, 0.0] if "bad" in text else [0.0, 5.0], tokenizer)
    (result,) = scores(perfect, data)
    assert (result["score"], result["accuracy"], result["f1"]) == (1, 1, 1)
    assert result["cross_entropy"] == pytest.approx(math.log(1 + math.exp(-5)), rel=1e-5)
    (result,) = scores(Answers(lambda text: [1.0, 0.0], tokenizer), data)
    assert result["score"] == data.task.chance(data.test.references)["score"] == 4 / 7
    assert result["f1"] == 0
    wrong = Answers(lambda text: [5.0, 0.0] if "bad" in text or "very" not in text else [0.0, 5.0], tokenizer)
    (result,) = scores(wrong, data)
    right = sum(("very" in row["text"]) or row["label"] == 0 for row in REVIEWS)
    assert result["score"] == right / 7


def test_parts_are_also_scored_separately(load, tokenizer, monkeypatch):
    rows = [{**row, "part": "odd" if i % 3 else "even"} for i, row in enumerate(REVIEWS)]
    with monkeypatch.context() as patched:
        patched.setattr(tasks.Table, "has_parts", True, raising=False)
        data = load(tasks.Classification, rows, body="{text}", labels=("bad", "good"))
    (result,) = scores(Answers(lambda text: [1.0, 0.0], tokenizer), data)
    bad = {part: [row["label"] == 0 for row in rows if row["part"] == part] for part in ("odd", "even")}
    assert result["accuracy"] == 4 / 7
    assert result["accuracy_odd"] == result["score_odd"] == np.mean(bad["odd"])
    assert result["accuracy_even"] == np.mean(bad["even"]) != result["accuracy_odd"]
    plain = load(tasks.Classification, REVIEWS, body="{text}", labels=("bad", "good"))
    (result,) = scores(Answers(lambda text: [1.0, 0.0], tokenizer), plain)
    assert set(result) == {"accuracy", "cross_entropy", "score"}


def test_regression(load, tokenizer):
    rows = [{"text": "word " * (i + 1), "label": float(i * i)} for i in range(5)]
    data = load(tasks.Regression, rows, body="{text}", metrics=("pearson", "spearman"))
    perfect = Answers(lambda text: [2.0 * (text.count("word") - 1) ** 2 + 1], tokenizer)
    assert scores(perfect, data)[0] == pytest.approx({"pearson": 1, "spearman": 1, "score": 1})
    (linear,) = scores(Answers(lambda text: [-text.count("word")], tokenizer), data)
    assert linear["spearman"] == pytest.approx(-1)
    assert linear["score"] == linear["pearson"] == pytest.approx(-np.corrcoef(range(5), np.arange(5) ** 2)[0, 1])
    (constant,) = scores(Answers(lambda text: [3.0], tokenizer), data)
    assert constant["score"] == 0


OPTIONS = ("right wrong", "wrong other right", "right no wrong", "no right", "a b c right")
CHOICES = [
    {"question": "which " * (1 + i % 3), "options": words.split(), "label": words.split().index("right")}
    for i, words in enumerate(OPTIONS)
]


def test_multiple_choice_with_unequal_numbers_of_options(load, tokenizer):
    data = load(tasks.MultipleChoice, CHOICES, body="{question}", options="options")
    perfect = Answers(lambda text: 4.0 if text.endswith("right") else 1.0, tokenizer)
    (result,) = scores(perfect, data)
    assert result["score"] == 1
    others = [len(row["options"]) - 1 for row in CHOICES]
    assert result["cross_entropy"] == pytest.approx(np.mean([math.log(1 + n * math.exp(-3)) for n in others]), rel=1e-5)
    (constant,) = scores(Answers(lambda text: 0.0, tokenizer), data)
    assert constant["score"] == 2 / 5  # the first option of each example
    assert constant["cross_entropy"] == pytest.approx(np.mean([math.log(1 + n) for n in others]), rel=1e-5)
    (wrong,) = scores(Answers(lambda text: -4.0 if text.endswith("right") else 1.0, tokenizer), data)
    assert wrong["score"] == 0


ANSWERS = (["The two", "2"], ["three or four"], ["5"])
SUMS = [{"text": "sum " * (1 + i), "question": f"{i}?", "answers": answers} for i, answers in enumerate(ANSWERS)]


def test_generation(load, tokenizer):
    values = {"body": "{text}", "ending": " Question: {question} Answer:", "answers": "answers"}
    data = load(tasks.Generation, SUMS, metrics=("exact_match", "f1"), **values)
    perfect = Answers(lambda text: f" {ANSWERS[int(text.split('Question: ')[1][0])][-1]}", tokenizer)
    assert scores(perfect, data) == [{"exact_match": 1, "f1": 1, "score": 1}]
    constant = Answers(lambda text: " two four", tokenizer)
    (result,) = scores(constant, data)
    assert result["exact_match"] == 0
    assert result["f1"] == pytest.approx((2 / 3 + 2 / 5) / 3)  # for "two", "three or four" and "5"
    assert scores(Answers(lambda text: " three, or four!", tokenizer), data)[0]["score"] == pytest.approx(1 / 3)


def test_each_rank_with_its_own_stream_has_scores(load, tokenizer):
    data = load(tasks.Classification, REVIEWS, body="{text}", labels=("bad", "good"))
    engine = Answers(lambda text: [5.0, 0.0], tokenizer, ranks=3)
    same = engine.logits
    engine.logits = lambda batch: same(batch) * torch.tensor([1.0, -1.0, 1.0]).view(3, 1, 1)
    assert [each["score"] for each in scores(engine, data)] == [4 / 7, 3 / 7, 4 / 7]


def score(logits, labels, metrics=("accuracy",)):
    return TaskMetric("classification", metrics).compute(predictions=logits, references=labels)


def test_agrees_with_scikit_learn():
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(500, 4)).astype(np.float32)
    labels = generator.integers(4, size=500)
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    result = score(logits, labels)
    assert result["accuracy"] == result["score"] == accuracy_score(labels, logits.argmax(1))
    assert result["cross_entropy"] == pytest.approx(log_loss(labels, probabilities), rel=1e-5)
    generator = np.random.default_rng(1)
    logits, labels = generator.normal(size=(300, 2)), generator.integers(2, size=300)
    result = score(logits, labels, ("matthews_correlation", "f1"))
    assert result["matthews_correlation"] == result["score"] == matthews_corrcoef(labels, logits.argmax(1))
    assert result["f1"] == f1_score(labels, logits.argmax(1))
    assert "accuracy" in result
    assert "f1" not in score(logits, labels)


def test_logits_that_are_not_finite_are_wrong_answers():
    result = score(np.array([[np.nan, 0.0], [5.0, 0.0]]), np.array([0, 0]))
    assert result == {"accuracy": 0.5, "cross_entropy": None, "score": 0.5}
    infinite = score(np.array([[np.inf, 0.0], [-np.inf, 0.0]]), np.array([0, 1]), ("f1", "matthews_correlation"))
    assert (infinite["accuracy"], infinite["f1"], infinite["score"]) == (0, 0, 0)
    assert infinite["matthews_correlation"] == -1


def test_correlations_agree_with_scipy_and_are_0_if_undefined():
    generator = np.random.default_rng(2)
    truth = generator.uniform(0, 5, size=200).astype(np.float32)
    given = (truth**2 + generator.normal(size=200)).astype(np.float32)[:, None]

    def correlations(predictions):
        return TaskMetric("regression", ("pearson", "spearman")).compute(predictions=predictions, references=truth)

    result = correlations(given)
    assert result["pearson"] == result["score"] == pytest.approx(pearsonr(given[:, 0], truth).statistic)
    assert result["spearman"] == pytest.approx(spearmanr(given[:, 0], truth).statistic)
    assert result["spearman"] != pytest.approx(result["pearson"], abs=1e-3)
    given[3] = np.nan
    for undefined in (np.ones((200, 1)), given):
        assert correlations(undefined) == {"pearson": 0, "spearman": 0, "score": 0}


@pytest.mark.parametrize("row", [[np.nan, 0.0], [0.0, np.nan], [np.inf, 0.0], [-np.inf, -np.inf], [-np.inf, 0.0]])
def test_scores_of_options_that_are_not_finite_are_wrong_answers(row):
    result = TaskMetric("multiple choice", ("accuracy",)).compute(predictions=[row, [5.0, 0.0]], references=[0, 0])
    assert result == {"accuracy": 0.5, "cross_entropy": None, "score": 0.5}


def test_answers_are_compared_as_squad_does():
    assert normalised("The  Quick-brown (fox), an ox!") == "quickbrown fox ox"
    assert word_f1("the cat cat sat", "a cat sat down") == pytest.approx(2 * (2 / 3) * (2 / 3) / (4 / 3))
    assert word_f1("nothing", "in common") == 0
    result = TaskMetric("generation", ("exact_match", "f1")).compute(
        predictions=["the Eiffel Tower.", "in northern Egypt", ""],
        references=[["Louvre", "Eiffel tower"], ["Egypt", "southern Egypt"], ["yes"]],
    )
    assert result == {"exact_match": pytest.approx(1 / 3), "f1": pytest.approx(0.5), "score": pytest.approx(1 / 3)}


def test_time_to_accuracy_is_the_first_evaluation_that_holds():
    scores = [0.5, 0.8, 0.7, 0.8, 0.9]
    points = [{"step": 10 * i, "seconds": 1.0 * i, "score_lossy": a} for i, a in enumerate(scores, 1)]
    reached = {"target": 0.75, "step": 40, "seconds": 4.0}
    assert time_to_accuracy(points, 0.75) == reached
    assert time_to_accuracy(points, 0.85) is None  # reached at the last evaluation, and held by none
    assert time_to_accuracy(points, None) is None
    points[3]["score_lossy"] = None  # as in a run that is no longer finite
    assert time_to_accuracy(points, 0.75) is None
