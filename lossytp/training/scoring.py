"""A task's metrics for what a model answers, over whatever network it answers.

Shapes: L ranks, B examples, C classes or options.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lossytp.parallel.replicas import gathered
from lossytp.training.engine import Engine
from lossytp.training.tasks.data import ANSWER_TOKENS, Dataset, evaluation_batches

EVALUATION_BATCH = 64


def scores(engine: Engine, data: Dataset) -> list[dict[str, Any]]:
    """The metrics on the test split: of each process that has results, or of each rank that has a stream of its own.

    A generated text is the first rank's on all processes.
    """
    score = _generated if data.task.kind == "generation" else _chosen
    return [each for theirs in gathered(score(engine, data), engine.network) for each in theirs]


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
    options = max(each.shape[-1] for each in logits)  # of a batch's examples, which may have fewer than another's
    padded = [torch.nn.functional.pad(each, (0, options - each.shape[-1]), value=-torch.inf) for each in logits]
    metric = data.task.metric()
    return [metric.compute(predictions=theirs.numpy(), references=references) for theirs in torch.cat(padded, 1)]


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
