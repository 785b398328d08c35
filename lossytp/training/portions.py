"""A batch in portions, whose gradients are added up before the optimiser's step."""

from collections.abc import Iterator

from torch import Tensor


def portions(batch: dict[str, Tensor], number: int) -> Iterator[tuple[dict[str, Tensor], float]]:
    """`number` portions of nearly as many examples each, fewer where there are too few examples.

    With each portion what its mean training loss counts in that of the batch; these add up to 1.
    """
    if number == 1:
        yield batch, 1.0
        return
    examples, whole = len(batch["labels"]), counted(batch["labels"])
    number = min(number, examples)
    for index in range(number):
        rows = slice(examples * index // number, examples * (index + 1) // number)
        portion = {name: tensor[rows] for name, tensor in batch.items()}
        yield portion, counted(portion["labels"]) / whole


def counted(labels: Tensor) -> int:
    """What a training loss is the mean over: examples, or the tokens (examples, tokens) that are to be predicted."""
    return len(labels) if labels.ndim == 1 else int((labels[:, 1:] != -100).sum())
