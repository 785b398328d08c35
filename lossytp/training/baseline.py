"""What needs no GPT-2: the most frequent class, and a bag of words."""

from typing import Any

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from lossytp.training.data import load_texts, sample_indices
from lossytp.training.tasks import TASKS


def bag_of_words(dataset: str, *, eval_samples: int | None) -> dict[str, Any]:
    """Test accuracy of TF-IDF and logistic regression on all training text, and of the most frequent class.

    The test sample is the one that a training run with the same `eval_samples` evaluates on.
    """
    splits = load_texts(dataset)
    texts, labels = zip(*splits["train"], strict=True)
    test = [splits["test"][i] for i in sample_indices(len(splits["test"]), eval_samples)]
    test_texts, test_labels = zip(*test, strict=True)
    model = make_pipeline(TfidfVectorizer(sublinear_tf=True, min_df=2), LogisticRegression(C=10, tol=1e-3))
    model.fit(texts, labels)
    counts = np.bincount(test_labels, minlength=len(TASKS[dataset].labels))
    return {
        "dataset": dataset,
        "classes": len(counts),
        "labels": list(TASKS[dataset].labels),
        "test_examples": len(test),
        "majority_share": float(counts.max() / counts.sum()),
        "bag_of_words": float(model.score(test_texts, test_labels)),
    }
