"""Step-time ratios on two processes: `torchrun --standalone --nproc_per_node 2 -m tests.bench.processes OUTPUT_FILE`.

All arms live in the same processes and take turns, one step each.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel, logging

import lossytp as ltp
from lossytp.parallel.data_parallel import data_parallel
from lossytp.parallel.others import parallelize_dtensor, parallelize_megatron
from lossytp.training.files import write_atomically
from lossytp.training.shapes import PRESETS

ROUNDS, BATCH, LENGTH = 30, 8, 128


def time_in_turns(arms: dict[str, Callable[[], object]], label: str) -> dict[str, list[float]]:
    """Seconds of each arm in each round, from a barrier to a barrier, after two rounds that do not count.

    Every round has an order of its own: a step's time depends on which came before it.
    """
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for count in tqdm(range(ROUNDS + 2), desc=label, mininterval=5, disable=dist.get_rank() > 0):
        for name in random.Random(count).sample(sorted(arms), len(arms)):
            dist.barrier()
            start = time.perf_counter()
            arms[name]()
            dist.barrier()
            if count > 1:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], arm: str, to: str) -> dict:
    """Of two arms: the median over rounds of their ratio, between its quartiles, and both medians."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(seconds[arm], seconds[to], strict=True)], n=4)
    medians = {f"{name}_s": statistics.median(seconds[name]) for name in (arm, to)}
    return {**medians, "ratio": middle, "quartiles": [low, high]}


def training_step(model: nn.Module, tokens: torch.Tensor) -> Callable[[], None]:
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": parameters} for parameters in groups.values()])

    def step() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main(file: Path) -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.01))
    ltp.init_process_group(network)
    plain = dist.new_group(backend="gloo")
    meshes = {
        "plain": DeviceMesh.from_group(plain, "cpu", mesh_dim_names=("tp",)),
        "lossy": DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("tp",)),
    }
    torch.manual_seed(0)
    dense = GPT2LMHeadModel(GPT2Config(**PRESETS["gpt2-micro"], bos_token_id=0, eos_token_id=0))
    tokens = torch.randint(4096, (BATCH, LENGTH))
    results: dict[str, dict] = {}

    kinds = {
        "dtensor": parallelize_dtensor,
        "ddp": lambda model, mesh: data_parallel(_copy(model), mesh, "ddp"),
        "fsdp": lambda model, mesh: data_parallel(_copy(model), mesh, "fsdp"),
    }
    for kind, build in kinds.items():
        arms = {name: training_step(build(dense, mesh), tokens) for name, mesh in meshes.items()}
        seconds = time_in_turns(arms, f"{kind}, lossy against plain gloo")
        results[f"lossy_backend_{kind}"] = {**ratio(seconds, "lossy", "plain"), "target": "at most 1.05"}
    for kind in ("ddp", "fsdp"):
        arms = {
            name: training_step(data_parallel(_copy(dense), meshes["plain"], kind, custom=custom), tokens)
            for name, custom in (("pytorch", False), ("custom", True))
        }
        seconds = time_in_turns(arms, f"{kind}, custom against PyTorch's")
        results[f"custom_{kind}_speed"] = {**ratio(seconds, "pytorch", "custom"), "target": "at least 0.95"}
    implementations = {
        "lossytp": ltp.parallelize(dense, network, tensor_parallel_size=2),
        "dtensor": parallelize_dtensor(dense, meshes["lossy"]),
        "megatron": parallelize_megatron(dense, dist.group.WORLD),
    }
    seconds = time_in_turns(
        {name: training_step(model, tokens) for name, model in implementations.items()}, "implementations"
    )
    for other in ("dtensor", "megatron"):
        results[f"lossytp_to_{other}"] = {**ratio(seconds, "lossytp", other), "target": "at most 1"}
    if dist.get_rank() == 0:
        write_atomically(file, json.dumps(results, indent=2))
    dist.destroy_process_group()


def _copy(dense: GPT2LMHeadModel) -> GPT2LMHeadModel:
    copy = GPT2LMHeadModel(dense.config)
    copy.load_state_dict(dense.state_dict())
    return copy


if __name__ == "__main__":
    main(Path(sys.argv[1]))
