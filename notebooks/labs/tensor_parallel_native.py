"""Tensor parallelism with PyTorch's own API: a plan says how each layer is split, and DTensor does the rest.

torchrun --standalone --nproc_per_node 2 notebooks/labs/tensor_parallel_native.py
torchrun --standalone --nproc_per_node 2 notebooks/labs/tensor_parallel_native.py --loss_rate 0.1

The layers and the sums between the ranks are those of `tensor_parallel_manual`, which writes the sums out. Here
`ColwiseParallel` and `RowwiseParallel` insert them. PyTorch sends its messages over the backend `lossy`, so they lose
packets although no layer knows of it.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lab import BackendLabConfig, Model, check_splits, load_digits, perceptron, place, train
from lossytp.parallel.backend import this_device
from lossytp.parallel.group import check_reaches
from lossytp.training.command_line import parse, run_as_command
from lossytp.training.engine import connected_processes

PLAN: dict[str, type[ColwiseParallel | RowwiseParallel]] = {
    "0": ColwiseParallel,
    "2": RowwiseParallel,
    "4": ColwiseParallel,
    "6": RowwiseParallel,
}


def run(config: BackendLabConfig) -> dict[str, Any]:
    """Train this process's shard of the perceptron; return the result."""
    layout = place(config, needs_processes="tensor_parallel_native")
    check_splits("hidden_dim", config.hidden_dim, layout.world_size)
    device = this_device(layout.rank)
    with connected_processes(config, layout) as network:
        check_reaches(network, layout.tensor_group(), config.comm())
        digits = load_digits(config, device)
        mesh = init_device_mesh(device.type, (layout.world_size,))

        def build() -> Model:
            dense = perceptron(config, digits.train[0].shape[1]).to(device)
            with network.reliable():  # rank 0 sends the shards
                model = parallelize_module(dense, mesh, {name: style() for name, style in PLAN.items()})

            def training_loss(images: Tensor, labels: Tensor) -> float:
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                return loss.item()

            return Model(model, training_loss, model)

        return train("tensor_parallel_native", config, digits, build, network)


def main() -> None:
    """Run the lab from the command line."""
    run(parse(BackendLabConfig, __doc__))


if __name__ == "__main__":
    run_as_command(main)
