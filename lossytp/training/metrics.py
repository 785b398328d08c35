"""Metrics as `evaluate` knows them, computed here: `evaluate.load` by name would ask a server."""

from typing import Any

import datasets
import evaluate
import numpy as np
from scipy.special import logsumexp


class Classification(evaluate.Metric):
    """Accuracy and cross-entropy (nats) of logits against labels.

    `predictions` are logits (examples, classes), `references` labels (examples,). Logits that are not finite score
    as a wrong answer, and make the cross-entropy null.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="accuracy and cross-entropy of a classifier",
            citation="",
            inputs_description="predictions: logits, references: labels",
            features=datasets.Features(
                {"predictions": datasets.Sequence(datasets.Value("float32")), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float | None]:
        logits = np.asarray(predictions, dtype=np.float64)
        labels = np.asarray(references)
        finite = np.isfinite(logits).all(axis=1)
        correct = finite & (logits.argmax(axis=1) == labels)
        losses = logsumexp(logits, axis=1) - logits[np.arange(len(labels)), labels]
        return {
            "accuracy": float(correct.mean()),
            "cross_entropy": float(losses.mean()) if finite.all() else None,
        }


def time_to_accuracy(evaluations: list[dict], target: float | None, step_s: float | None = None) -> dict | None:
    """Step and seconds of the first evaluation at which lossy accuracy reached `target` and held it at the next one.

    `evaluations` have "step", "seconds" and "accuracy_lossy". "simulated_seconds" are those of steps that take `step_s`
    seconds each, None where that is not known. None where there is no target or it was never held.
    """
    if target is None:
        return None
    reached = [evaluation["accuracy_lossy"] >= target for evaluation in evaluations]
    for now, following, evaluation in zip(reached, reached[1:], evaluations, strict=False):
        if now and following:
            step = evaluation["step"]
            simulated = None if step_s is None else step * step_s
            return {"target": target, "step": step, "seconds": evaluation["seconds"], "simulated_seconds": simulated}
    return None
