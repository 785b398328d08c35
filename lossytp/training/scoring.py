"""Score a model on a task over the current network.

Shapes: L ranks, B examples, C classes or options.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lossytp.parallel.replicas import gathered
from lossytp.training.engine import Engine
from lossytp.training.tasks.data import ANSWER_TOKENS, Dataset, evaluation_batches

if TYPE_CHECKING:
    import evaluate

EVALUATION_BATCH = 64


def scores(engine: Engine, data: Dataset) -> list[dict[str, Any]]:
    """Compute the metrics on the test split and on each of its parts.

    Returns:
        One dict of metrics for each process that has results, or for each rank if ranks have their own streams.
        Generated text is the first rank's on every process.
    """
    score = _generated if data.task.kind == "generation" else _chosen
    return [each for theirs in gathered(score(engine, data), engine.network) for each in theirs]


def mean_over_ranks(everyones: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the mean over ranks of each metric of `scores`; None if a rank lacks the metric."""
    means: dict[str, float | None] = {}
    for metric in everyones[0]:
        values = [theirs[metric] for theirs in everyones]
        means[metric] = None if None in values else sum(values) / len(values)
    return means


def _chosen(engine: Engine, data: Dataset) -> list[dict[str, Any]]:
    logits: list[Tensor] = []
    order: list[int] = []
    for indices in evaluation_batches(data.test, batch_size=EVALUATION_BATCH):
        batch = data.test.batch(indices)
        del batch["labels"]
        answers = engine.logits(batch)  # (L, B, C)
        if answers is not None:
            order.extend(indices)
            logits.append(answers)
    if not logits:
        return []
    references = np.asarray(data.test.references)[order]
    options = max(each.shape[-1] for each in logits)  # batches may differ in their largest number of options
    padded = [torch.nn.functional.pad(each, (0, options - each.shape[-1]), value=-torch.inf) for each in logits]
    metric, parts = data.task.metric(), data.test.parts[order]
    return [_with_parts(metric, theirs.numpy(), references, parts) for theirs in torch.cat(padded, 1)]


def _with_parts(
    metric: "evaluate.Metric", predictions: np.ndarray, references: np.ndarray, parts: np.ndarray
) -> dict[str, Any]:
    """Return the metrics of all examples, and of each named part under names such as "accuracy_official"."""
    found = metric.compute(predictions=predictions, references=references)
    for part in filter(None, np.unique(parts)):
        of_part = metric.compute(predictions=predictions[parts == part], references=references[parts == part])
        found |= {f"{name}_{part}": value for name, value in of_part.items()}
    return found


def _generated(engine: Engine, data: Dataset) -> list[dict[str, Any]]:
    predictions: list[str] = []
    references: list[tuple[str, ...]] = []
    for indices in evaluation_batches(data.test, batch_size=EVALUATION_BATCH):
        prompts = data.test.prompts(indices)
        ids = engine.generate(prompts, new_tokens=ANSWER_TOKENS, tokenizer=data.tokenizer)
        answers = ids[:, prompts["input_ids"].shape[1] :]
        predictions += [text.strip() for text in data.tokenizer.batch_decode(answers, skip_special_tokens=True)]
        references += [data.test.answers[i] for i in indices]
    return [data.task.metric().compute(predictions=predictions, references=references)]
