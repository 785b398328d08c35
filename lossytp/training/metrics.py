"""The metrics of tasks, as `evaluate.Metric`: `evaluate.load` would ask a server.

Predictions that are not finite count as wrong.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import datasets
import evaluate
import numpy as np
from scipy.special import logsumexp

from lossytp.training.rows import cache_folder

Scores = dict[str, float | None]


class TaskMetric(evaluate.Metric):
    """The metrics of a kind of task, and the first of those that `metrics` names as "score" too.

    Predictions are logits (examples, outputs), or strings in generation; references are labels, or lists of accepted
    strings.
    """

    def __init__(self, kind: str, metrics: Sequence[str]) -> None:
        self.kind, self.metrics = kind, tuple(metrics)
        # the library's default folder is below the home folder, which may not be writable
        super().__init__(keep_in_memory=True, cache_dir=str(cache_folder() / "metrics"))

    def _info(self) -> evaluate.MetricInfo:
        _, predictions, references = KINDS[self.kind]
        features = datasets.Features({"predictions": predictions, "references": references})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions: Any, references: Any) -> Scores:
        if self.kind != "generation":
            predictions, references = np.asarray(predictions, dtype=np.float64), np.asarray(references)
        scores = KINDS[self.kind][0](predictions, references, self.metrics)
        return {**scores, "score": scores[self.metrics[0]]}


def classification(logits: np.ndarray, labels: np.ndarray, metrics: Sequence[str]) -> Scores:
    """Return accuracy and cross-entropy (nats) of logits (examples, classes), and what else `metrics` names.

    Logits that are not finite make the cross-entropy null.
    """
    finite = np.asarray(np.isfinite(logits).all(axis=1))
    chosen = np.where(finite, logits.argmax(axis=1), (labels + 1) % logits.shape[1])  # the next class is wrong
    scores: Scores = {"accuracy": float((chosen == labels).mean())}
    scores["cross_entropy"] = _cross_entropy(logits, labels, finite)
    if {"matthews_correlation", "f1"}.intersection(metrics):
        from sklearn.metrics import f1_score, matthews_corrcoef  # take a second to import

        others = {"matthews_correlation": matthews_corrcoef, "f1": partial(f1_score, zero_division=0)}
        scores |= {name: float(others[name](labels, chosen)) for name in metrics if name in others}
    return scores


def regression(logits: np.ndarray, numbers: np.ndarray, metrics: Sequence[str]) -> Scores:
    """Return correlations of logits (examples, 1) with numbers (examples,); 0 if one is constant or not finite."""
    from scipy.stats import pearsonr, spearmanr  # take a second to import

    given, truth = logits[:, 0], numbers.astype(np.float64)
    defined = np.isfinite(given).all() and np.ptp(given) > 0 and np.ptp(truth) > 0
    correlations: dict[str, Any] = {"pearson": pearsonr, "spearman": spearmanr}
    return {name: float(correlations[name](given, truth).statistic) if defined else 0.0 for name in metrics}


def multiple_choice(logits: np.ndarray, labels: np.ndarray, metrics: Sequence[str]) -> Scores:
    """Return accuracy and cross-entropy (nats) of logits (examples, options), which are -inf for missing options.

    Other logits that are not finite make the cross-entropy null.
    """
    right = logits[np.arange(len(labels)), labels]
    usable: np.ndarray = (np.isfinite(logits) | np.isneginf(logits)).all(axis=1) & np.isfinite(right)
    correct = usable & (logits.argmax(axis=1) == labels)
    return {"accuracy": float(correct.mean()), "cross_entropy": _cross_entropy(logits, labels, usable)}


def generation(texts: Sequence[str], accepted: Sequence[Sequence[str]], metrics: Sequence[str]) -> Scores:
    """Return exact match and F1 of words, in [0, 1], of the best match (Rajpurkar et al., EMNLP 2016, section 6.1)."""
    measures = {"exact_match": exact_match, "f1": word_f1}
    pairs = list(zip(texts, accepted, strict=True))
    return {
        name: float(np.mean([max(measure(text, answer) for answer in answers) for text, answers in pairs]))
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


LOGITS, TEXT = datasets.Sequence(datasets.Value("float32")), datasets.Value("string")
KINDS: dict[str, tuple[Callable[[Any, Any, Sequence[str]], Scores], Any, Any]] = {
    "classification": (classification, LOGITS, datasets.Value("int64")),
    "regression": (regression, LOGITS, datasets.Value("float32")),
    "multiple choice": (multiple_choice, LOGITS, datasets.Value("int64")),
    "generation": (generation, TEXT, datasets.Sequence(TEXT)),
}


def time_to_accuracy(evaluations: list[dict], target: float | None) -> dict | None:
    """Return "target", "step" and "seconds" of the first of two evaluations in a row whose lossy score reaches it."""

    def reached(evaluation: dict) -> bool:
        return target is not None and evaluation["score_lossy"] is not None and evaluation["score_lossy"] >= target

    for now, following in pairwise(evaluations):
        if reached(now) and reached(following):
            return {"target": target, "step": now["step"], "seconds": now["seconds"]}
    return None
