"""Lines on two gloo processes, each of which holds all arms: `torchrun -m tests.bench.processes LINE FILE`."""

import copy
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import lossytp as ltp
from lossytp.parallel.data_parallel import data_parallel
from lossytp.parallel.group import RankGroup
from lossytp.parallel.others import megatron_is_installed, parallelize_dtensor, parallelize_megatron
from lossytp.training.files import write_atomically
from tests.bench.measure import Arms, Measured, in_turns, line, one_thread
from tests.bench.steps import GPT2_7M, gpt2

PAIRS = {"DTensor": "at most 1.05", "DDP": "at most 1.05", "FSDP": "at most 1.05"}


def in_processes(name: str) -> dict[str, list[float]]:
    """Return the seconds of the arms of one of `ARMS`, in two processes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seconds.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        command = [*launcher, "-m", "tests.bench.processes", name, str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        seconds: dict[str, list[float]] = json.loads(file.read_text(encoding="utf-8"))
    return seconds


def training_step(model: nn.Module, tokens: Tensor) -> Callable[[], None]:
    """Return a function that takes a step of AdamW; parameters of one device mesh share a group."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": parameters} for parameters in groups.values()])

    def step() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@line("Training step on two gloo processes, GPT-2 7 M, TP 2", "lossytp, 1 %")
def tensor_parallel_processes() -> Measured:
    """The other arms lose nothing. In two of them one process computes, and the other waits."""
    return Measured(
        in_processes("tensor_parallel"), "lossytp, 1 %", dict.fromkeys(("DTensor", "Megatron-core"), "at least 1")
    )


@line("Backend `lossy` on two processes, GPT-2 7 M", "plain gloo")
def lossy_backend() -> Measured:
    bases = {f"{name}, lossy": f"{name}, gloo" for name in PAIRS}
    return Measured(in_processes("backend"), bases, dict.fromkeys(bases, "at most 1.05"))


@line("DDP and FSDP on two processes, GPT-2 7 M", "PyTorch's")
def data_parallel_processes() -> Measured:
    bases = {f"{name}, lossytp's": f"{name}, PyTorch's" for name in ("DDP", "FSDP")}
    return Measured(in_processes("data_parallel"), bases, dict.fromkeys(bases, "at most 1.05"))


def tensor_parallel_arms(tokens: Tensor, plain: DeviceMesh, lossy: DeviceMesh) -> Arms:
    dense = gpt2(GPT2_7M)
    networks = [ltp.LossyNetwork(ltp.Bernoulli(loss_rate=rate)) for rate in (0.01, 0.0, 0.01)]
    virtual = ltp.parallelize(dense, networks[2], tensor_parallel_size=2, group=RankGroup(2))
    arms = {
        "lossytp, 1 %": ltp.parallelize(dense, networks[0], tensor_parallel_size=2),
        "lossytp, no loss": ltp.parallelize(dense, networks[1], tensor_parallel_size=2),
        "DTensor": parallelize_dtensor(dense, plain),
        **({"Megatron-core": parallelize_megatron(dense, plain.get_group())} if megatron_is_installed() else {}),
    }
    alone = {"virtual ranks, 1 %": training_step(virtual, tokens), "dense": training_step(dense, tokens)}
    waits = {name: (step if dist.get_rank() == 0 else lambda: None) for name, step in alone.items()}
    return {name: training_step(model, tokens) for name, model in arms.items()} | waits


def backend_arms(tokens: Tensor, plain: DeviceMesh, lossy: DeviceMesh) -> Arms:
    dense = gpt2(GPT2_7M)
    builds: dict[str, Callable[[DeviceMesh], nn.Module]] = {
        "DTensor": lambda mesh: parallelize_dtensor(dense, mesh),
        "DDP": lambda mesh: data_parallel(copy.deepcopy(dense), mesh, "ddp"),
        "FSDP": lambda mesh: data_parallel(copy.deepcopy(dense), mesh, "fsdp"),
    }
    return {
        f"{name}, {backend}": training_step(build(mesh), tokens)
        for name, build in builds.items()
        for backend, mesh in {"gloo": plain, "lossy": lossy}.items()
    }


def data_parallel_arms(tokens: Tensor, plain: DeviceMesh, lossy: DeviceMesh) -> Arms:
    return {
        f"{name}, {whose}": training_step(
            data_parallel(gpt2(GPT2_7M), plain, name.lower(), custom=whose == "lossytp's"), tokens
        )
        for name in ("DDP", "FSDP")
        for whose in ("PyTorch's", "lossytp's")
    }


ARMS = {"tensor_parallel": tensor_parallel_arms, "backend": backend_arms, "data_parallel": data_parallel_arms}


def main(name: str, file: Path) -> None:
    one_thread()
    ltp.init_process_group(ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.01)))
    plain, lossy = (
        DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
        for group in (dist.new_group(backend="gloo"), dist.group.WORLD)
    )
    torch.manual_seed(0)
    seconds = in_turns(ARMS[name](torch.randint(4096, (4, 128)), plain, lossy), barrier=dist.barrier)
    if dist.get_rank() == 0:
        write_atomically(file, json.dumps(seconds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
