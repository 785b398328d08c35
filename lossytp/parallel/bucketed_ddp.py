"""Data parallelism by hand: average the gradients of replicas while backward still computes others.

Li et al., "PyTorch Distributed: experiences on accelerating data parallel training", VLDB 2020, section 3.2. Backward
reaches the last layers first. So the gradients lie in buckets in reverse order, and each bucket is summed over the
replicas as soon as its gradients are there:

    backward   last layer ................................. first layer
    bucket 0   [gradients]---- all-reduce ---->
    bucket 1              [gradients]---- all-reduce ---->
    bucket 2                         [gradients]---- all-reduce ---->
                                                            | wait for all

`lossytp.parallel.flat_fsdp` also shards the parameters. `lossytp.parallel.data_parallel` chooses between these two and
PyTorch's own.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed import ProcessGroup, Work

FIRST_BUCKET_BYTES = 2**20  # small, so that the first message leaves early; as in PyTorch
BUCKET_BYTES = 25 * 2**20


class Bucket:
    """Gradients that travel in one message, side by side in `flat`.

    Args:
        parameters: the parameters by name, all of one dtype.
    """

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        first = next(iter(parameters.values()))
        sizes = [parameter.numel() for parameter in parameters.values()]
        self.flat = first.new_zeros(sum(sizes))
        pieces = zip(parameters.items(), self.flat.split(sizes), strict=True)
        self.views = {name: piece.view_as(parameter) for (name, parameter), piece in pieces}
        self.missing = set(self.views)  # gradients that this backward has not computed yet
        self.work: Work | None = None  # the all-reduce under way


class BucketedDDP(nn.Module):
    """Replicas of `module` that see different examples and train on the mean of their gradients.

    Call it instead of `module`. After `backward()` every replica holds the same gradients. Every parameter that is not
    frozen must get a gradient in each backward.

    Args:
        module: the model, on its device; the first replica's parameters and buffers replace the others'.
        process_group: the replicas.
        bucket_bytes: largest size of a message; one parameter may exceed it. The first message is smaller.
    """

    def __init__(self, module: nn.Module, process_group: ProcessGroup, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__()
        self.module = module
        self.process_group = process_group
        self.averages = True
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), group_src=0, group=process_group)
        trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        self.buckets = [Bucket(parameters) for parameters in _filled(reversed(trained), bucket_bytes)]
        self._in_backward = False
        self._sent: list[Bucket] = []
        for bucket in self.buckets:
            for name in bucket.views:
                hook = partial(self._take_gradient, bucket, name)
                module.get_parameter(name).register_post_accumulate_grad_hook(hook)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self._in_backward:  # the last one failed
            self._reset()
        return self.module(*inputs, **named)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let `backward()` within the block add up this replica's gradients; the next one outside averages the sum."""
        averaged, self.averages = self.averages, False
        try:
            yield
        finally:
            self.averages = averaged

    def _take_gradient(self, bucket: Bucket, name: str, parameter: nn.Parameter) -> None:
        """Move a gradient into its bucket, and send the bucket if it is full."""
        if not self.averages:
            return
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._finish)
        assert parameter.grad is not None
        torch.mul(parameter.grad, 1 / self.process_group.size(), out=bucket.views[name])
        parameter.grad = bucket.views[name]
        bucket.missing.remove(name)
        for ready in self.buckets[len(self._sent) :]:  # all replicas send them in the same order
            if ready.missing:
                break
            ready.work = dist.all_reduce(ready.flat, group=self.process_group, async_op=True)
            self._sent.append(ready)

    def _finish(self) -> None:
        """Wait for the messages, at the end of backward.

        Raises:
            RuntimeError: if a parameter got no gradient.
        """
        missing = [name for bucket in self.buckets for name in sorted(bucket.missing)]
        self._reset()
        check_all_arrived(missing)

    def _reset(self) -> None:
        """Wait for the messages, and make ready for the next backward."""
        for bucket in self._sent:
            assert bucket.work is not None
            bucket.work.wait()
        for bucket in self.buckets:
            bucket.missing, bucket.work = set(bucket.views), None
        self._in_backward, self._sent = False, []


def check_all_arrived(missing: list[str]) -> None:
    """Raise RuntimeError if backward gave some parameters no gradient."""
    if missing:
        raise RuntimeError(
            f"backward gave no gradient to {len(missing)} parameters, such as {missing[0]}: freeze what the training "
            "loss does not use, with requires_grad_(False)"
        )


def _filled(parameters: Iterable[tuple[str, nn.Parameter]], bucket_bytes: int) -> list[dict[str, nn.Parameter]]:
    """Return the parameters in order, in groups of one dtype and at most `bucket_bytes`."""
    groups: list[dict[str, nn.Parameter]] = []
    room, dtype = 0, None
    for name, parameter in parameters:
        if parameter.nbytes > room or parameter.dtype != dtype:
            room, dtype = bucket_bytes if groups else min(bucket_bytes, FIRST_BUCKET_BYTES), parameter.dtype
            groups.append({})
        groups[-1][name] = parameter
        room -= parameter.nbytes
    return groups
