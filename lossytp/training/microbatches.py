"""Split a batch into microbatches, whose gradients are accumulated before the optimizer's step."""

from collections.abc import Iterator

from torch import Tensor

from lossytp.parallel.loss_parallel import IGNORED


def microbatches(batch: dict[str, Tensor], number: int) -> Iterator[tuple[dict[str, Tensor], float]]:
    """Split a batch into `number` microbatches of nearly equal size; fewer if there are fewer examples.

    Yields:
        Each microbatch, and its weight: its mean training loss counts by this much in the batch's. Weights add up to 1.
    """
    if number == 1:
        yield batch, 1.0
        return
    examples, whole = len(batch["labels"]), loss_terms(batch["labels"])
    number = min(number, examples)
    for index in range(number):
        rows = slice(examples * index // number, examples * (index + 1) // number)
        microbatch = {name: tensor[rows] for name, tensor in batch.items()}
        yield microbatch, loss_terms(microbatch["labels"]) / whole


def loss_terms(labels: Tensor) -> int:
    """Return how many terms a mean training loss has: examples, or predicted tokens for labels (examples, tokens)."""
    return len(labels) if labels.ndim == 1 else int((labels[:, 1:] != IGNORED).sum())
