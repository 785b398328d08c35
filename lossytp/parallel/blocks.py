"""Define the blocks of a tensor-parallel model, and the replicated modules between their sharded layers."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.func import functional_call

from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.tape import LossTape
from lossytp.parallel.gathers import sum_gradient
from lossytp.parallel.group import RankGroup
from lossytp.parallel.layers import ColumnParallelLinear, RowParallelLinear

SHARDED = (ColumnParallelLinear, RowParallelLinear)


class TensorParallelBlock:
    """A block that gradient checkpointing recomputes with the losses of its first pass.

    When checkpointing is enabled, transformers sets `_gradient_checkpointing_func` on every block, and then calls it in
    place of the block's forward.
    """

    @property
    def _gradient_checkpointing_func(self) -> Callable:
        if "_gradient_checkpointing_func" not in self.__dict__:
            raise AttributeError("gradient checkpointing was never enabled")
        checkpoint: Callable = self.__dict__["_gradient_checkpointing_func"]
        block: Any = self
        sharded: Any = next(layer for layer in block.modules() if isinstance(layer, SHARDED))
        network: LossyNetwork = sharded.collective.network

        def checkpoint_with_tape(function: Callable, *args: Any, **kwargs: Any) -> Any:
            tape = LossTape()

            def run(*inputs: Any, **named: Any) -> Any:
                with network.recording(tape):
                    return function(*inputs, **named)

            return checkpoint(run, *args, **kwargs)

        return checkpoint_with_tape

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, checkpoint: Callable) -> None:
        self.__dict__["_gradient_checkpointing_func"] = checkpoint


class SummedGradients(nn.Module):
    """A replicated module between sharded layers. Processes sum the gradients of its parameters reliably."""

    def __init__(self, module: nn.Module, group: RankGroup) -> None:
        super().__init__()
        self.module, self.group = module, group

    def forward(self, *inputs: Any) -> Any:
        parameters = {name: sum_gradient(each, self.group) for name, each in self.module.named_parameters()}
        return functional_call(self.module, parameters, inputs)
