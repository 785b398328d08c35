import math

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, log_loss

from lossytp.training.metrics import Classification, time_to_accuracy


def score(logits, labels):
    return Classification(keep_in_memory=True).compute(predictions=logits, references=labels)


def test_agrees_with_scikit_learn():
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(500, 4)).astype(np.float32)
    labels = generator.integers(4, size=500)
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    result = score(logits, labels)
    assert result["accuracy"] == accuracy_score(labels, logits.argmax(1))
    assert result["cross_entropy"] == pytest.approx(log_loss(labels, probabilities), rel=1e-5)


def test_perfect_and_constant_predictors():
    labels = np.array([0, 1, 2, 2])
    assert score(50.0 * np.eye(3)[labels], labels)["accuracy"] == 1
    constant = score(np.zeros((4, 3)), labels)
    assert constant["accuracy"] == 0.25
    assert constant["cross_entropy"] == pytest.approx(math.log(3))


def test_logits_that_are_not_finite_are_wrong_answers():
    result = score(np.array([[np.nan, 0.0], [5.0, 0.0]]), np.array([0, 0]))
    assert result == {"accuracy": 0.5, "cross_entropy": None}


def test_time_to_accuracy_is_the_first_evaluation_that_holds():
    accuracies = [0.5, 0.8, 0.7, 0.8, 0.9]
    points = [{"step": 10 * i, "seconds": 1.0 * i, "accuracy_lossy": a} for i, a in enumerate(accuracies, 1)]
    reached = {"target": 0.75, "step": 40, "seconds": 4.0}
    assert time_to_accuracy(points, 0.75) == {**reached, "simulated_seconds": None}
    assert time_to_accuracy(points, 0.75, 0.5) == {**reached, "simulated_seconds": 20.0}
    assert time_to_accuracy(points, 0.85) is None  # reached at the last one, held by none
    assert time_to_accuracy(points, None) is None
