"""Data parallelism: every rank computes a share of each batch, with a copy of the model or with fetched weights.

torchrun --standalone --nproc_per_node 2 notebooks/labs/data_parallel.py
torchrun --standalone --nproc_per_node 2 notebooks/labs/data_parallel.py --data_parallel_type fsdp --loss_rate 0.1

"ddp" keeps a copy of all weights on every rank, and averages the gradients with an all-reduce. The copies stay equal
as long as all ranks receive the same average (Li et al., "PyTorch Distributed", VLDB 2020).

"fsdp" keeps 1 / R of the weights, of their gradients and of Adam's moments on each of R ranks. It gathers a layer's
weights just before it needs them, in forward and again in backward, and then drops them. A reduce-scatter brings each
rank its share of the average gradient (Zhao et al., "PyTorch FSDP", VLDB 2023). If a weight is lost on its way to a
rank, the rank computes that pass with zero in its place.
"""

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lab import BackendLabConfig, Model, check_splits, load_digits, perceptron, place, train
from lossytp.parallel.backend import this_device
from lossytp.training.command_line import parse, run_as_command
from lossytp.training.engine import connected_processes


class DataParallelConfig(BackendLabConfig):
    """The perceptron, and how its replicas hold the parameters."""

    data_parallel_type: Literal["ddp", "fsdp"] = "ddp"
    """Replicate the parameters, or shard them over the replicas."""


def run(config: DataParallelConfig) -> dict[str, Any]:
    """Train the perceptron on this process's share of each batch; return the result."""
    layout = place(config, needs_processes="data_parallel")
    check_splits("batch_size", config.batch_size, layout.world_size)
    device = this_device(layout.rank)
    with connected_processes(config, layout) as network:
        digits = load_digits(config, device)
        mesh = init_device_mesh(device.type, (layout.world_size,))

        def build() -> Model:
            dense = perceptron(config, digits.train[0].shape[1]).to(device)
            model: Any
            if config.data_parallel_type == "ddp":
                with network.reliable():  # rank 0 sends its weights
                    model = DistributedDataParallel(dense, process_group=mesh.get_group())
            else:
                for layer in dense:
                    if isinstance(layer, nn.Linear):
                        fully_shard(layer, mesh=mesh)
                model = fully_shard(dense, mesh=mesh)

            def training_loss(images: Tensor, labels: Tensor) -> float:
                mine = slice(layout.rank, None, layout.world_size)
                loss = F.cross_entropy(model(images[mine]), labels[mine])
                loss.backward()
                return loss.item()

            return Model(model, training_loss, model)

        return train(f"data_parallel_{config.data_parallel_type}", config, digits, build, network)


def main() -> None:
    """Run the lab from the command line."""
    run(parse(DataParallelConfig, __doc__))


if __name__ == "__main__":
    run_as_command(main)
