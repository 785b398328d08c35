"""Metrics as classes of `evaluate.Metric`, because `evaluate.load` would ask a server.

Each class returns its metrics, and the first of them as "score" too. Predictions that are not finite count as wrong.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import datasets
import evaluate
import numpy as np
from scipy.special import logsumexp

from lossytp.training.rows import cache_folder


class TaskMetric(evaluate.Metric):
    """The base of all tasks' metrics. `metrics` names the metrics to compute, the headline first."""

    predictions: Any = datasets.Sequence(datasets.Value("float32"))
    references: Any = datasets.Value("int64")

    def __init__(self, metrics: Sequence[str], **options: Any) -> None:
        self.metrics = tuple(metrics)
        # the library's default folder is below the home folder, which may not be writable
        super().__init__(**{"keep_in_memory": True, "cache_dir": str(cache_folder() / "metrics"), **options})

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=str(self.__doc__),
            citation="",
            inputs_description="",
            features=datasets.Features({"predictions": self.predictions, "references": self.references}),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float | None]:
        scores = self.scores(predictions, references)
        return {**scores, "score": scores[self.metrics[0]]}

    def scores(self, predictions: Any, references: Any) -> dict[str, float | None]:
        """Return the metrics by name."""
        raise NotImplementedError


class ClassificationMetric(TaskMetric):
    """Accuracy and cross-entropy (nats) of logits (examples, classes) against labels (examples,).

    Logits that are not finite make the cross-entropy null.
    """

    def scores(self, predictions: Any, references: Any) -> dict[str, float | None]:
        logits = np.asarray(predictions, dtype=np.float64)
        labels = np.asarray(references)
        finite = np.asarray(np.isfinite(logits).all(axis=1))
        chosen = np.where(finite, logits.argmax(axis=1), (labels + 1) % logits.shape[1])  # the next class is wrong
        scores = {"accuracy": float((chosen == labels).mean()), "cross_entropy": _cross_entropy(logits, labels, finite)}
        if {"matthews_correlation", "f1"}.intersection(self.metrics):
            from sklearn.metrics import f1_score, matthews_corrcoef  # take a second to import

            others = {"matthews_correlation": matthews_corrcoef, "f1": partial(f1_score, zero_division=0)}
            scores |= {name: float(others[name](labels, chosen)) for name in self.metrics if name in others}
        return scores


class RegressionMetric(TaskMetric):
    """Pearson's and Spearman's correlation of logits (examples, 1) with numbers (examples,).

    Both are 0 if all predictions or all numbers are equal, or a prediction is not finite.
    """

    references = datasets.Value("float32")

    def scores(self, predictions: Any, references: Any) -> dict[str, float | None]:
        numbers, truth = np.asarray(predictions, dtype=np.float64)[:, 0], np.asarray(references, dtype=np.float64)
        defined = np.isfinite(numbers).all() and np.ptp(numbers) > 0 and np.ptp(truth) > 0
        from scipy.stats import pearsonr, spearmanr

        correlations: dict[str, Any] = {"pearson": pearsonr, "spearman": spearmanr}
        return {name: float(correlations[name](numbers, truth).statistic) if defined else 0.0 for name in self.metrics}


class MultipleChoiceMetric(TaskMetric):
    """Accuracy and cross-entropy (nats) of logits (examples, options) against indices (examples,).

    The logit of a missing option is -inf. Other logits that are not finite make the cross-entropy null.
    """

    def scores(self, predictions: Any, references: Any) -> dict[str, float | None]:
        logits = np.asarray(predictions, dtype=np.float64)
        labels = np.asarray(references)
        right = logits[np.arange(len(labels)), labels]
        usable: np.ndarray = (np.isfinite(logits) | np.isneginf(logits)).all(axis=1) & np.isfinite(right)
        correct = usable & (logits.argmax(axis=1) == labels)
        return {"accuracy": float(correct.mean()), "cross_entropy": _cross_entropy(logits, labels, usable)}


class GenerationMetric(TaskMetric):
    """Exact match and F1 of words of generated strings, both in [0, 1] (Rajpurkar et al., EMNLP 2016, section 6.1).

    Each string is compared with all its accepted answers, and the best match counts.
    """

    predictions = datasets.Value("string")
    references = datasets.Sequence(datasets.Value("string"))

    def scores(self, predictions: Any, references: Any) -> dict[str, float | None]:
        pairs = list(zip(predictions, references, strict=True))
        measures = {"exact_match": exact_match, "f1": word_f1}
        return {
            name: float(np.mean([max(measure(given, answer) for answer in answers) for given, answers in pairs]))
            for name, measure in measures.items()
        }


def normalised(text: str) -> str:
    """Lower the case, remove punctuation and articles, and fold white space, as SQuAD's script does."""
    letters = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", letters).split())


def exact_match(given: str, answer: str) -> float:
    """Return 1 if both are equal once normalised, else 0."""
    return float(normalised(given) == normalised(answer))


def word_f1(given: str, answer: str) -> float:
    """Return the harmonic mean of precision and recall of the words; a repeated word counts each time."""
    words, expected = normalised(given).split(), normalised(answer).split()
    common = sum((Counter(words) & Counter(expected)).values())
    return 2 * common / (len(words) + len(expected)) if common else 0.0


def _cross_entropy(logits: np.ndarray, labels: np.ndarray, usable: np.ndarray) -> float | None:
    if not usable.all():
        return None
    return float((logsumexp(logits, axis=1) - logits[np.arange(len(labels)), labels]).mean())


def time_to_accuracy(evaluations: list[dict], target: float | None) -> dict | None:
    """Return "target", "step" and "seconds" of the first of two evaluations in a row whose lossy score reaches it."""

    def reached(evaluation: dict) -> bool:
        return target is not None and evaluation["score_lossy"] is not None and evaluation["score_lossy"] >= target

    for now, following in pairwise(evaluations):
        if reached(now) and reached(following):
            return {"target": target, "step": now["step"], "seconds": now["seconds"]}
    return None
