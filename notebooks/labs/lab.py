"""Define what all labs share: flags, digits, the multilayer perceptron, the training loop.

Each lab is a program of a page, to read from top to bottom and to run:

    python notebooks/labs/tensor_parallel_manual.py                                        # or under torchrun
    torchrun --standalone --nproc_per_node 2 notebooks/labs/tensor_parallel_native.py
    torchrun --standalone --nproc_per_node 2 notebooks/labs/data_parallel.py --data_parallel_type fsdp
    torchrun --standalone --nproc_per_node 2 notebooks/labs/pipeline.py

Shapes: N images, B of them in a batch, I pixels, C classes.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from lossytp.network.lossy_network import LossyNetwork
from lossytp.parallel.group import Layout, rank_and_world_size, under_torchrun
from lossytp.parallel.replicas import mean_over_processes, merge_counters, on_rank_zero
from lossytp.training.files import check_writable, write_atomically
from lossytp.training.groups import BackendNetwork, NetworkSettings
from lossytp.training.progress import Progress
from lossytp.training.rows import DATA_VARIABLE, Files, Source
from lossytp.training.settings import FASTEST, Count, CountFromZero

DEFAULT_EPOCHS = 8
VIRTUAL_RANKS = 2
TEST_EVERY = 5  # of scikit-learn's digits, which have no official split
EVALUATED_AT_ONCE = 1000
MNIST = Source(path="ylecun/mnist", name="mnist", splits={"train": "train", "test": "test"})
WIDEST = 2**13  # a square matrix of this width takes 256 MiB
Size = Annotated[int, Field(ge=1, le=WIDEST)]


class LabConfig(NetworkSettings):
    """A multilayer perceptron on handwritten digits, and the network between its ranks."""

    tensor_parallel_size: CountFromZero = 0
    """Number of ranks. 0 means one per process, or two virtual ranks without torchrun."""
    dataset: Literal["digits", "mnist"] | None = None
    """digits (scikit-learn's, 8 x 8 pixels) or mnist. If left out, mnist if it is on disc, else digits."""
    data_dir: str | None = None
    """Folder that contains ylecun/mnist, laid out like the hub. If left out, LOSSYTP_DATA."""
    epochs: Count | None = None
    """Number of passes over the training images. 8 if neither epochs nor steps are given."""
    steps: Count | None = None
    """Number of optimizer steps, in place of epochs."""
    batch_size: Count = 64
    """Images per step, over all ranks."""
    learning_rate: Annotated[float, Field(gt=0, le=FASTEST)] = 1e-3
    """Learning rate of Adam."""
    input_dim: Size | None = None
    """Pixels per image after scaling, a square number. If left out, images keep their size."""
    hidden_dim: Size = 512
    """Width of the hidden layers."""
    num_classes: Annotated[int, Field(ge=2, le=WIDEST)] = 10
    """Number of outputs. With fewer than 10, images of larger digits are left out."""
    output_dir: str = "output/labs"
    """Folder for the result, a JSON file named after the lab."""

    @model_validator(mode="after")
    def _check_lab(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"steps = {self.steps} and epochs = {self.epochs} are both given: give one")
        if self.sequence_parallel:
            raise ValueError("sequence_parallel = True is not part of the labs: leave it out")
        side = math.isqrt(self.input_dim or 0)
        if self.input_dim is not None and side**2 != self.input_dim:
            raise ValueError(
                f"input_dim = {self.input_dim} is not a square number: give {side**2} or {(side + 1) ** 2}"
            )
        return self


class BackendLabConfig(LabConfig, BackendNetwork):
    """A lab in which PyTorch sends the messages over the backend `lossy`."""

    elsewhere: ClassVar[str] = ", or run tensor_parallel_manual.py"


def place(config: LabConfig, needs_processes: str | None = None) -> Layout:
    """Return the lab's layout, with this process's rank.

    Args:
        config: the lab's flags.
        needs_processes: name of the lab, if it cannot run virtual ranks.

    Raises:
        ValueError: if the processes do not fit the ranks, or packets are to be lost but there is only one rank.
    """
    started, (rank, world) = under_torchrun(), rank_and_world_size()
    if needs_processes and not started:
        raise ValueError(
            f"{needs_processes} needs a process for each rank: start it with torchrun --standalone --nproc_per_node 2 "
            f"notebooks/labs/{needs_processes}.py"
        )
    ranks = config.tensor_parallel_size or (world if started else VIRTUAL_RANKS)
    if needs_processes and ranks != world:
        raise ValueError(
            f"tensor_parallel_size = {ranks} differs from the {world} processes, which hold one rank each: leave it "
            f"out, or start with torchrun --standalone --nproc_per_node {ranks}"
        )
    layout = Layout(ranks, rank=rank, world_size=world)
    if ranks == 1 and config.process().loss_rate > 0:
        raise ValueError(
            f"loss_rate = {config.process().loss_rate:g} has no effect on a single rank, which sends nothing: start "
            "more processes, or leave loss_rate out"
        )
    return layout


def check_splits(name: str, size: int, parts: int, what: str = "ranks") -> None:
    """Raise ValueError unless `size` can be split evenly."""
    if size % parts:
        raise ValueError(f"{name} = {size} cannot be split over {parts} {what}: give a multiple of {parts}")


class Digits(NamedTuple):
    """Images (N, I) with grey levels from 0 to 1 and their labels (N,), for training and for testing."""

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def load_digits(config: LabConfig, device: torch.device) -> Digits:
    """Load MNIST or scikit-learn's digits, as the flags say.

    Raises:
        ValueError: if `dataset` is "mnist", but neither disc nor hub has it.
    """
    source = _mnist(config)
    if source is None:
        from sklearn.datasets import load_digits as bundled

        pixels, labels = bundled(return_X_y=True)
        tested = np.arange(len(labels)) % TEST_EVERY == 0
        parts = [(pixels[chosen].reshape(-1, 8, 8) / 16, labels[chosen]) for chosen in (~tested, tested)]
    else:
        rows = [source.rows("train"), source.rows("test")]
        parts = [(np.stack([np.asarray(image) for image in each["image"]]) / 255, each["label"]) for each in rows]
    train, test = (_prepared(config, torch.tensor(images), torch.tensor(labels), device) for images, labels in parts)
    return Digits("digits" if source is None else "mnist", train, test)


def _mnist(config: LabConfig) -> Files | Source | None:
    """Return the source of MNIST, or None for scikit-learn's digits."""
    folder = Path(config.data_dir or os.environ.get(DATA_VARIABLE, ""), MNIST.path, "mnist").expanduser()
    files = Files(train="train-*.parquet", test="test-*.parquet", folder=folder)
    here = any(folder.glob("train-*.parquet")) and any(folder.glob("test-*.parquet"))
    if config.dataset == "digits":
        return None
    if config.dataset is None and not here:
        if config.data_dir is not None and rank_and_world_size()[0] == 0:
            print(f"no MNIST in {folder}: training on scikit-learn's handwritten digits instead", file=sys.stderr)
        return None
    return files if here else MNIST


def _prepared(config: LabConfig, images: Tensor, labels: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    kept = labels < config.num_classes
    images, side = images[kept].float(), math.isqrt(config.input_dim or images[0].numel())
    if images.shape[-1] != side:
        images = F.interpolate(images[:, None], size=(side, side), mode="bilinear", antialias=True)
    return images.flatten(1).to(device), labels[kept].to(device)


def perceptron(config: LabConfig, pixels: int) -> nn.Sequential:
    """Return the dense model. Its weights depend only on the seed.

    It has two pairs of layers, as a transformer block has. Tensor parallelism splits the first of a pair by columns and
    the second by rows. With a single pair, backward would send nothing: images need no gradient.
    """
    widths = [pixels, *[config.hidden_dim] * 3, config.num_classes]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        layers = [nn.Linear(*each) for each in pairwise(widths)]
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2], nn.ReLU(), layers[3])


class Model(NamedTuple):
    """One process's part of a model. Its functions return None where another process computes the result."""

    module: nn.Module
    """Holds the parameters that Adam updates."""
    training_loss: Callable[[Tensor, Tensor], float | None]
    """Computes gradients for images (B, I) and labels (B,), and returns the loss."""
    logits: Callable[[Tensor], Tensor | None]
    """Returns the logits of images (B, I): (B, C), or (ranks, B, C)."""


def train(
    name: str, config: LabConfig, digits: Digits, build: Callable[[], Model], network: LossyNetwork
) -> dict[str, Any]:
    """Train without losses and, if the network loses packets, again with them; print and write the results.

    Args:
        name: name of the lab, and of its file in `output_dir`.
        config: the lab's flags.
        digits: the data, the same on all ranks.
        build: returns the model with its initial weights.
        network: the network between the ranks.

    Returns:
        "without_losses" and, if packets were lost, "with_losses". Each has the training loss of every step ("losses"),
        the accuracy over the network of training, and the accuracy over a lossless one ("accuracy_clean"). "network"
        counts training's packets.

    Raises:
        ValueError: if `output_dir` cannot be written, or the training loss is not finite.
    """
    on_rank_zero(lambda: check_writable(config.output_dir), network)
    with network.reliable():
        result: dict[str, Any] = {"dataset": digits.name, "without_losses": _train(config, digits, build(), network)}
    clean, steps = result["without_losses"]["accuracy"], len(result["without_losses"]["losses"])
    outcome = f"{digits.name}, {steps} steps: accuracy {clean:.4f} without losses"
    if config.process().loss_rate > 0:
        result["with_losses"] = _train(config, digits, build(), network)
        merge_counters(network)
        result["network"] = traffic = network.summary("training")
        outcome += (
            f"; trained with losses, {result['with_losses']['accuracy']:.4f} over the same network and "
            f"{result['with_losses']['accuracy_clean']:.4f} over a lossless one; lost {traffic['lost']:,} of "
            f"{traffic['packets']:,} packets"
        )
    if rank_and_world_size()[0] == 0:
        file = Path(config.output_dir) / f"{name}.json"
        write_atomically(file, json.dumps({"config": config.as_dict(), **result}, indent=1) + "\n")
        print(f"{outcome}: see {file}", flush=True)
    return result


def _train(config: LabConfig, digits: Digits, model: Model, network: LossyNetwork) -> dict[str, Any]:
    optimizer = torch.optim.Adam(model.module.parameters(), lr=config.learning_rate)
    steps = _steps(config, len(digits.train[1]))
    progress, losses = Progress(steps, shown=rank_and_world_size()[0] == 0), []
    try:
        for step, batch in enumerate(_batches(config, len(digits.train[1])), 1):
            optimizer.zero_grad()
            loss = model.training_loss(*(each[batch] for each in digits.train))
            optimizer.step()
            losses.append(mean_over_processes(loss, network))
            progress.show(step, losses[-1])
            if not math.isfinite(losses[-1]):
                raise ValueError(f"the training loss is not finite at step {step}: lower learning_rate or loss_rate")
    finally:
        progress.close()
    with network.evaluation(steps):
        accuracy = _accuracy(model, digits, network)
    with network.reliable():
        clean = _accuracy(model, digits, network)
    return {"losses": losses, "accuracy": accuracy, "accuracy_clean": clean}


def _steps(config: LabConfig, examples: int) -> int:
    return config.steps or (config.epochs or DEFAULT_EPOCHS) * (examples // min(config.batch_size, examples))


def _batches(config: LabConfig, examples: int) -> Iterator[Tensor]:
    """Yield the indices of each step's images. Every epoch has its own order, and drops its incomplete batch."""
    generator = torch.Generator().manual_seed(config.seed)
    size = min(config.batch_size, examples)
    order = torch.empty(0, dtype=torch.long)
    for _ in range(_steps(config, examples)):
        if len(order) < size:
            order = torch.randperm(examples, generator=generator)
        batch, order = order[:size], order[size:]
        yield batch


@torch.no_grad()
def _accuracy(model: Model, digits: Digits, network: LossyNetwork) -> float:
    """Return the share of test images whose largest logit is their label's, averaged over ranks."""
    images, labels = digits.test
    right = []
    for start in range(0, len(labels), EVALUATED_AT_ONCE):
        part = slice(start, start + EVALUATED_AT_ONCE)
        logits = model.logits(images[part])
        if logits is not None:
            right.append((logits.argmax(-1) == labels[part]).float().flatten())
    return mean_over_processes(torch.cat(right).mean().item() if right else None, network)
