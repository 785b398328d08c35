"""Step-time ratios on two processes: `torchrun --standalone --nproc_per_node 2 -m tests.bench.processes OUTPUT_FILE`.

All arms live in the same processes and take turns, one step each.
"""

import json
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
from lossytp.parallel.dtensor import parallelize_dtensor
from lossytp.parallel.megatron import parallelize_megatron
from lossytp.training.models import PRESETS
from lossytp.training.record import write_atomically

ROUNDS, BATCH, LENGTH = 25, 8, 128


def together(arms: dict[str, Callable[[], object]], label: str) -> dict[str, float]:
    """Median seconds of each arm, from a barrier to a barrier, after two rounds that do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for count in tqdm(range(ROUNDS + 2), desc=label, mininterval=5, disable=dist.get_rank() > 0):
        for name, arm in arms.items():
            dist.barrier()
            start = time.perf_counter()
            arm()
            dist.barrier()
            if count > 1:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


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

    backends = {
        f"{kind}_{name}_s": training_step(model, tokens)
        for name, mesh in meshes.items()
        for kind, model in (
            ("dtensor", parallelize_dtensor(dense, mesh)),
            ("ddp", data_parallel(_copy(dense), mesh, "ddp")),
            ("fsdp", data_parallel(_copy(dense), mesh, "fsdp")),
        )
    }
    seconds = together(backends, "lossy against plain gloo")
    for kind in ("dtensor", "ddp", "fsdp"):
        plain_s, lossy_s = seconds[f"{kind}_plain_s"], seconds[f"{kind}_lossy_s"]
        results[f"lossy_backend_{kind}"] = {
            "plain_s": plain_s,
            "lossy_s": lossy_s,
            "ratio": lossy_s / plain_s,
            "target": "at most 1.05",
        }
    implementations = {
        "lossytp": ltp.parallelize(dense, network, tensor_parallel_size=2),
        "dtensor": parallelize_dtensor(dense, meshes["lossy"]),
        "megatron": parallelize_megatron(dense, dist.group.WORLD),
    }
    seconds = together(
        {name: training_step(model, tokens) for name, model in implementations.items()}, "implementations"
    )
    results["implementations"] = {
        **{f"{name}_s": value for name, value in seconds.items()},
        **{f"lossytp_to_{name}": seconds["lossytp"] / seconds[name] for name in ("dtensor", "megatron")},
        "target": "at most 1 each",
    }
    if dist.get_rank() == 0:
        write_atomically(file, json.dumps(results, indent=2))
    dist.destroy_process_group()


def _copy(dense: GPT2LMHeadModel) -> GPT2LMHeadModel:
    copy = GPT2LMHeadModel(dense.config)
    copy.load_state_dict(dense.state_dict())
    return copy


if __name__ == "__main__":
    main(Path(sys.argv[1]))
