import math

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, log_loss, matthews_corrcoef

from lossytp.training.metrics import TaskMetric, normalised, time_to_accuracy, word_f1


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


def test_matthews_correlation_and_f1_if_asked_for():
    generator = np.random.default_rng(1)
    logits, labels = generator.normal(size=(300, 2)), generator.integers(2, size=300)
    result = score(logits, labels, ("matthews_correlation", "f1"))
    assert result["matthews_correlation"] == result["score"] == matthews_corrcoef(labels, logits.argmax(1))
    assert result["f1"] == f1_score(labels, logits.argmax(1))
    assert "accuracy" in result
    assert "f1" not in score(logits, labels)


def test_perfect_and_constant_predictors():
    labels = np.array([0, 1, 2, 2])
    assert score(50.0 * np.eye(3)[labels], labels)["accuracy"] == 1
    constant = score(np.zeros((4, 3)), labels)
    assert constant["accuracy"] == 0.25
    assert constant["cross_entropy"] == pytest.approx(math.log(3))


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


def test_missing_options_are_not_chosen_and_cost_nothing():
    logits = np.array([[1.0, 3.0, -np.inf], [0.0, 0.0, 0.0], [2.0, 1.0, -np.inf]])
    result = TaskMetric("multiple choice", ("accuracy",)).compute(predictions=logits, references=[1, 2, 1])
    assert result["accuracy"] == result["score"] == pytest.approx(1 / 3)
    expected = (math.log1p(math.exp(-2)) + math.log(3) + math.log1p(math.exp(1))) / 3
    assert result["cross_entropy"] == pytest.approx(expected)


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
