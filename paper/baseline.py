"""Baselines without GPT-2: the most frequent class, and bags of words and tokens. Notebook 15 calls them."""

from typing import Any

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline

from lossytp.training.batches import Dataset, TokenizedSplit
from lossytp.training.task_kinds import Classification, Task
from lossytp.training.tasks import task_named


def bag_of_words(dataset: str, *, eval_samples: int | None, task: Task | None = None) -> dict[str, Any]:
    """Return the test accuracies of TF-IDF with logistic regression, and of always choosing the most frequent class.

    Logistic regression trains on all training text. The test sample is that of a training run with the same
    `eval_samples`. `task` replaces the task of this name in TASKS.

    Raises:
        ValueError: if the task is unknown, or is not a classification.
    """
    task = task or task_named(dataset)
    if not isinstance(task, Classification):
        raise ValueError(
            f"dataset = {dataset!r} is a {task.kind} task, but a bag of words needs a classification: give one"
        )
    train, test = task.examples("train"), task.examples("test", eval_samples)
    model = _classifier()
    model.fit([each.body + each.endings[0] for each in train], [each.label for each in train])
    labels = [each.label for each in test]
    return {
        "dataset": dataset,
        "classes": len(task.labels),
        "labels": list(task.labels),
        "test_examples": len(test),
        "majority_share": task.chance(labels)["accuracy"],
        "bag_of_words": float(model.score([each.body + each.endings[0] for each in test], labels)),
    }


def bag_of_tokens(data: Dataset) -> float:
    """Return the test accuracy of the same classifier on the tokens that GPT-2 reads, truncated alike."""
    model = _classifier(analyzer=lambda tokens: tokens)
    model.fit(_token_lists(data.train), data.train.labels)
    return float(model.score(_token_lists(data.test), data.test.labels))


def _classifier(**options: Any) -> Pipeline:
    return make_pipeline(TfidfVectorizer(sublinear_tf=True, min_df=2, **options), LogisticRegression(C=10, tol=1e-3))


def _token_lists(split: TokenizedSplit) -> list[list[int]]:
    return [part.tolist() for part in np.split(split.tokens, split.offsets[1:-1])]
