"""Tensor parallelism written out: a column-parallel and a row-parallel layer, and the sums between the ranks.

python notebooks/labs/tensor_parallel_manual.py --loss_rate 0.1                       # two virtual ranks
torchrun --standalone --nproc_per_node 2 notebooks/labs/tensor_parallel_manual.py     # a rank in each process

Shoeybi et al., "Megatron-LM", 2019, section 3. Rank r of R holds a slice of every weight. In a pair of layers

    y_r = relu(f(x) A_r + a_r)        A split by columns: each rank computes some of the hidden units
    z   = g(y_r B_r) + b              B split by rows: the product is the sum of the ranks' products

f copies x to the ranks; in backward it adds up their gradients of x. g adds up the ranks' products; in backward it
copies the sum's gradient to them (`lossytp/parallel/mappings.py`). Autograd must know both: if only forward had an
all-reduce, a layer before f would get one rank's part of its gradient.

Every tensor has a leading axis for the ranks in this process, as if each line ran on all of them. Copies that all ranks
hold, such as z and b, stay equal unless ranks lose different packets of a sum's result (--no-reliable_gather).

Shapes: L ranks in this process, R in all, B images, D inputs of a layer, O its outputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab import LabConfig, Model, check_splits, load_digits, perceptron, place, train
from lossytp.network.scope import Site
from lossytp.parallel.backend import this_device
from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.group import check_layers, check_reaches
from lossytp.parallel.mappings import copy_to_tensor_parallel_region, reduce_from_tensor_parallel_region
from lossytp.training.command_line import parse, run_as_command
from lossytp.training.engine import connected_processes


class ColumnLinear(nn.Module):
    """y_r = f(x) A_r + a_r: each rank computes O / R of the outputs."""

    def __init__(self, dense: nn.Linear, collective: LossyCollective, layer: int) -> None:
        super().__init__()
        here, ranks = list(collective.group.local), collective.group.size
        weight_RDO = torch.stack(dense.weight.detach().t().chunk(ranks, dim=1))
        bias_R1O = torch.stack(dense.bias.detach().chunk(ranks)).unsqueeze(1)
        self.weight_LDO, self.bias_L1O = nn.Parameter(weight_RDO[here]), nn.Parameter(bias_R1O[here])
        self.collective, self.site = collective, Site(layer, "mlp", "backward")

    def forward(self, x_LBD: Tensor) -> Tensor:
        return copy_to_tensor_parallel_region(x_LBD, self.collective, self.site) @ self.weight_LDO + self.bias_L1O


class RowLinear(nn.Module):
    """z = g(y_r B_r) + b: each rank multiplies its D / R inputs. The bias is added once, after the sum."""

    def __init__(self, dense: nn.Linear, collective: LossyCollective, layer: int) -> None:
        super().__init__()
        here, ranks = list(collective.group.local), collective.group.size
        weight_RDO = torch.stack(dense.weight.detach().t().chunk(ranks, dim=0))
        self.weight_LDO = nn.Parameter(weight_RDO[here])
        self.bias_L1O = nn.Parameter(dense.bias.detach().expand(len(here), 1, -1).clone())
        self.collective, self.site = collective, Site(layer, "mlp", "forward")

    def forward(self, y_LBD: Tensor) -> Tensor:
        return reduce_from_tensor_parallel_region(y_LBD @ self.weight_LDO, self.collective, self.site) + self.bias_L1O


def parallel(dense: nn.Sequential, collective: LossyCollective) -> nn.Sequential:
    """Return a tensor-parallel copy of the perceptron: layers 0 and 4 split by columns, 2 and 6 by rows."""
    layers: list[Any] = list(dense)
    for pair, first in enumerate((0, 4)):
        layers[first] = ColumnLinear(layers[first], collective, pair)
        layers[first + 2] = RowLinear(layers[first + 2], collective, pair)
    return nn.Sequential(*layers)


def run(config: LabConfig) -> dict[str, Any]:
    """Train the perceptron on virtual ranks, or on this process's; return the result."""
    layout = place(config)
    check_splits("hidden_dim", config.hidden_dim, layout.tensor_parallel_size)
    device = this_device(layout.rank)
    with connected_processes(config, layout) as network:
        collective = LossyCollective(network, layout.tensor_group(), config.comm().of_model(2))
        check_reaches(network, collective.group, collective.comm)
        check_layers(network, 2)
        digits = load_digits(config, device)

        def build() -> Model:
            model = parallel(perceptron(config, digits.train[0].shape[1]), collective).to(device)

            def logits(images: Tensor) -> Tensor:
                return model(images.expand(len(collective.group.local), -1, -1))

            def training_loss(images: Tensor, labels: Tensor) -> float:
                logits_LBC = logits(images)
                labels_LB = labels.expand(len(logits_LBC), -1)
                losses_L = F.cross_entropy(logits_LBC.transpose(1, 2), labels_LB, reduction="none").mean(1)
                losses_L.sum().backward()  # every rank differentiates its own
                return losses_L.mean().item()

            return Model(model, training_loss, logits)

        return train("tensor_parallel_manual", config, digits, build, network)


def main() -> None:
    """Run the lab from the command line."""
    run(parse(LabConfig, __doc__))


if __name__ == "__main__":
    run_as_command(main)
