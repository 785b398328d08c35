"""Compute the microbatches of a small model side by side.

A few Python threads, each with one torch thread, compute microbatches. With small models this is faster than torch's
own threads, which wait for each other at every kernel. Gradients are added in the order of the microbatches, so the
number of threads changes no result.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor, nn

Item = TypeVar("Item")
Result = TypeVar("Result")


class SideBySide:
    """Threads that share a model. `close` ends them.

    Args:
        threads: number of threads.
    """

    def __init__(self, threads: int) -> None:
        self._torch_threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield `function` of each item, in order."""
        return self._pool.map(function, items)

    def accumulate_(
        self, loss: Callable[[Item], Tensor], parts: list[tuple[Item, float]], parameters: list[nn.Parameter]
    ) -> list[float]:
        """Add the gradients of all parts to the parameters.

        Args:
            loss: computes the training loss of a part.
            parts: each part, and the weight of its gradients.
            parameters: all of them must take part in the loss.

        Returns:
            The loss of each part, without its weight.
        """

        def gradients(part: tuple[Item, float]) -> tuple[float, tuple[Tensor, ...]]:
            value = loss(part[0])
            return value.item(), torch.autograd.grad(value, parameters)

        values = []
        for (_, weight), (value, of_part) in zip(parts, self._pool.map(gradients, parts), strict=True):
            values.append(value)
            for parameter, gradient in zip(parameters, of_part, strict=True):
                if parameter.grad is None:
                    parameter.grad = gradient * weight
                else:
                    parameter.grad.add_(gradient, alpha=weight)
        return values

    def close(self) -> None:
        """End the threads, and restore torch's number of threads, which they changed."""
        self._pool.shutdown()
        torch.set_num_threads(self._torch_threads)
