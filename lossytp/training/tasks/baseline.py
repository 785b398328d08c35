"""What needs no GPT-2: the most frequent class, and a bag of words."""

from typing import Any

from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from lossytp.training.tasks import TASKS, Classification


def bag_of_words(dataset: str, *, eval_samples: int | None) -> dict[str, Any]:
    """Test accuracy of TF-IDF and logistic regression on all training text, and of the most frequent class.

    The test sample is the one that a training run with the same `eval_samples` evaluates on. ValueError where the
    task is no classification.
    """
    task = TASKS[dataset]
    if not isinstance(task, Classification):
        raise ValueError(f"dataset = {dataset!r} is {task.kind}, and a bag of words tells classes: give one of those")
    train, test = task.examples("train"), task.examples("test", eval_samples)
    model = make_pipeline(TfidfVectorizer(sublinear_tf=True, min_df=2), LogisticRegression(C=10, tol=1e-3))
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
