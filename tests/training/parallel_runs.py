"""Run a small task on several processes, and compute from shapes alone how many packets the runs must send.

Shapes: B examples, T tokens, D model width.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import GPT2ForSequenceClassification

from lossytp.training import tasks
from lossytp.training.batches import Dataset, load_dataset, training_batches
from lossytp.training.config import TrainConfig
from lossytp.training.engine import Engine
from lossytp.training.loop import run
from lossytp.training.models import load_tokenizer

STEPS, BATCH, SEED = 20, 8, 0
MODEL = "gpt2-nano-scratch"
WIDTH, BLOCKS, VOCABULARY, POSITIONS = 128, 4, 4096, 128  # gpt2-nano's
ELEMENTS = (1500 - 44) // 4  # float32 elements in a packet
ALL_REDUCES = 4 * BLOCKS  # tensor-parallel all-reduces of a step: attention and MLP, forward and backward
MICROBATCHES = 4
FIRST_BUCKET = 2**20 // 4  # elements of DDP's first bucket; its second, of 25 MiB, takes all the rest
PARALLELISMS: dict[str, tuple[int, dict[str, Any]]] = {  # number of processes, and settings
    "lossytp": (2, {"tensor_parallel_size": 2}),
    "lossytp, two ranks a process": (2, {"tensor_parallel_size": 4}),
    "dtensor": (2, {"tensor_parallel_size": 2, "implementation": "dtensor"}),
    "megatron": (2, {"tensor_parallel_size": 2, "implementation": "megatron"}),
    "ddp": (2, {"data_parallel_size": 2}),
    "fsdp": (2, {"data_parallel_size": 2, "data_parallel_type": "fsdp"}),
    "gpipe": (2, {"pipeline_parallel_size": 2}),
    "1f1b": (2, {"pipeline_parallel_size": 2, "pipeline_schedule": "1f1b"}),
    "lossytp and ddp": (4, {"tensor_parallel_size": 2, "data_parallel_size": 2}),
    "lossytp and fsdp": (4, {"tensor_parallel_size": 2, "data_parallel_size": 2, "data_parallel_type": "fsdp"}),
    "virtual ranks and ddp": (2, {"tensor_parallel_size": 2, "data_parallel_size": 2}),
}


def texts_of_many_lengths() -> tasks.Table:
    """Return rows whose batches have many shapes. Every word is at least one token."""
    words = {0: "alpha beta", 1: "delta epsilon"}
    rows = {
        split: [{"text": words[i % 2] + " gamma" * (i % 13) + f" {split} {i}", "label": i % 2} for i in range(number)]
        for split, number in (("train", 64), ("test", 30))
    }
    return tasks.Table(train=rows["train"], test=rows["test"])


def settings(folder: Path, **values: Any) -> TrainConfig:
    """Return the configuration of a short dense run; the folder below `folder` is named after `values`."""
    name = " ".join(f"{key} {value}" for key, value in values.items()) or "dense"
    defaults = {"model_name": MODEL, "dataset": "lengths", "max_steps": STEPS, "batch_size": BATCH, "seed": SEED}
    return TrainConfig(**{**defaults, "tensor_parallel_size": 1, "output_dir": str(folder / name), **values})


@contextmanager
def task_in(folder: Path) -> Iterator[None]:
    """Register the task within the block, with its data cached below `folder`."""
    task = tasks.Classification(source=texts_of_many_lengths(), body="{text}", labels=("first", "second"))
    with patch.dict(tasks.TASKS, lengths=task), patch.dict(os.environ, XDG_CACHE_HOME=str(folder / "cache")):
        yield


def train(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    with task_in(folder):
        return run(settings(folder, **values))


def comparable(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without its seconds, which differ from run to run."""
    points = [{name: value for name, value in point.items() if name != "seconds"} for point in record["curves"]["eval"]]
    kept = {name: value for name, value in record.items() if name != "timing"}
    return kept | {"curves": {**record["curves"], "eval": points}}


def curve(record: dict) -> list[float]:
    return [point["loss"] for point in record["curves"]["train_loss"]]


@contextmanager
def spied(before: Any = None, after: Any = None) -> Iterator[None]:
    """Call `before(engine)` and `after(engine, scaler)` around every training step's gradients."""
    forward_backward = Engine.forward_backward

    def stepped(engine: Engine, batch: dict, scaler: torch.amp.GradScaler) -> float:
        if before is not None:
            before(engine)
        loss = forward_backward(engine, batch, scaler)
        if after is not None:
            after(engine, scaler)
        return loss

    with patch.object(Engine, "forward_backward", stepped):
        yield


def batches(folder: Path, steps: int = STEPS) -> list[dict[str, torch.Tensor]]:
    with task_in(folder):
        return list(islice(training_batches(the_data().train, batch_size=BATCH, seed=SEED), steps))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return GPT2ForSequenceClassification.from_pretrained(folder).state_dict()


def the_data() -> Dataset:
    return load_dataset("lengths", load_tokenizer(MODEL), max_length=64, train_samples=None, test_samples=None)


def direct(elements: int, ranks: int) -> int:
    """Count the packets of one phase of `direct`: each rank sends every other rank one chunk."""
    chunk = math.ceil(elements / ranks)
    chunks = [max(0, min(chunk, elements - chunk * rank)) for rank in range(ranks)]
    return (ranks - 1) * sum(math.ceil(length / ELEMENTS) for length in chunks)


def backend(elements: int, ranks: int = 2) -> int:
    """Count the same over the backend, where a message of one packet is reliable and not counted."""
    return direct(elements, ranks) if elements > ELEMENTS else 0


def block_shapes(tensor_parallel_size: int, processes: int) -> list[tuple[int, ...]]:
    """Return the shapes of a block's parameters in one process: transformers' own, or those of the project's layers."""
    ranks, here = tensor_parallel_size, tensor_parallel_size // processes
    attention, inner = WIDTH // ranks, 4 * WIDTH // ranks
    norm: list[tuple[int, ...]] = [(WIDTH,), (WIDTH,)]
    if ranks == 1:
        layers: list[list[tuple[int, ...]]] = [
            [(inputs * WIDTH, outputs * WIDTH), (outputs * WIDTH,)]
            for inputs, outputs in ((1, 3), (1, 1), (1, 4), (4, 1))
        ]
    else:
        layers = [
            [(WIDTH, 3 * here * attention), (3 * here * attention,)],
            [(here, attention, WIDTH), (WIDTH,)],
            [(WIDTH, here * inner), (here * inner,)],
            [(here, inner, WIDTH), (WIDTH,)],
        ]
    return norm + layers[0] + layers[1] + norm + layers[2] + layers[3]


ROOT_SHAPES = [(VOCABULARY, WIDTH), (POSITIONS, WIDTH), (WIDTH,), (WIDTH,), (2, WIDTH)]


def expected_packets(shapes: list[tuple[int, int]], processes: int, config: TrainConfig) -> int:
    """Count the packets of training on batches of these shapes (B, T)."""
    ranks, replicas = config.network.tensor_parallel_size, config.parallelism.data_parallel_size
    tensor_processes = processes // replicas // config.parallelism.pipeline_parallel_size
    total = 0
    for step, (examples, tokens) in enumerate(shapes):
        if ranks > 1:
            all_reduce = direct if config.parallelism.implementation == "lossytp" else backend
            total += replicas * ALL_REDUCES * all_reduce(examples // replicas * tokens * WIDTH, ranks)
        if config.parallelism.pipeline_parallel_size > 1:
            message = math.ceil(examples // MICROBATCHES * tokens * WIDTH / ELEMENTS)
            total += 2 * MICROBATCHES * (message if message > 1 else 0)
        if replicas > 1:
            block = block_shapes(ranks, tensor_processes)
            total += tensor_processes * (
                _fsdp(block) if config.parallelism.data_parallel_type == "fsdp" else _ddp(block, step)
            )
    return total


def expected_links(processes: int, config: TrainConfig) -> set[str]:
    """Return the links in use: tensor-parallel ones by rank, those of other parallelisms by process."""
    ranks, replicas = config.network.tensor_parallel_size, config.parallelism.data_parallel_size
    groups = [range(ranks * replica, ranks * (replica + 1)) for replica in range(replicas)]
    apart = processes // (replicas * config.parallelism.pipeline_parallel_size)
    groups += [range(first, processes, apart) for first in range(apart) if apart < processes]
    return {f"{src}->{dst}" for group in groups for src in group for dst in group if src != dst}


def _ddp(block: list[tuple[int, ...]], step: int) -> int:
    """Count DDP's packets: at first one message of all gradients, then buckets, the last layers first."""
    sizes = [math.prod(shape) for shape in reversed(ROOT_SHAPES[:2] + block * BLOCKS + ROOT_SHAPES[2:])]
    if step == 0:
        return backend(sum(sizes))
    first = 0
    while first < FIRST_BUCKET:
        first += sizes.pop(0)
    return backend(first) + backend(sum(sizes))


def _fsdp(block: list[tuple[int, ...]]) -> int:
    """Count FSDP's packets: units are gathered, blocks again in backward, and reduce-scattered; rows are padded."""

    def unit(shapes: list[tuple[int, ...]]) -> int:
        return backend(sum(2 * math.ceil(shape[0] / 2) * math.prod(shape[1:]) for shape in shapes))

    return 2 * unit(ROOT_SHAPES) + 3 * BLOCKS * unit(block)
