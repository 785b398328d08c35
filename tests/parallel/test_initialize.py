"""Starting torch.distributed over a lossy network, and what is said where that fails."""

import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import lossytp as ltp
from lossytp.parallel import backend as initialize
from lossytp.parallel.backend import this_device, wrapped_backend
from lossytp.parallel.group import under_torchrun
from tests.ports import held_port

VARIABLES = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: neither CUDA tensors nor NCCL exist without one"
)


def network(loss_rate: float = 0.0) -> ltp.LossyNetwork:
    return ltp.LossyNetwork(ltp.Bernoulli(loss_rate=loss_rate))


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """`torchrun(NAME=value)` sets all variables, with changes; None leaves one out."""

    def put(**changes: str | None) -> None:
        for name, value in {**VARIABLES, **changes}.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(initialize, "_settings", None)
    return put


def run_alone(program: str) -> subprocess.CompletedProcess:
    start = "import torch, torch.distributed as dist, lossytp as ltp\n"
    start += "network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=1.0))\n"
    command = [sys.executable, "-c", start + textwrap.dedent(program)]
    with held_port() as port:
        alone = os.environ | VARIABLES | {"WORLD_SIZE": "1", "MASTER_PORT": str(port)}
        return subprocess.run(command, env=alone, capture_output=True, text=True, timeout=60, check=False)


def on_rank_differ(changes: dict[str, Any]) -> str:
    mine = changes if os.environ["RANK"] == "1" else {}
    wire = ltp.Wire(mtu_bytes=mine.pop("mtu_bytes", 1500))
    rate, seed = mine.pop("loss_rate", 0.0), mine.pop("seed", 0)
    if "WORLD_SIZE" in mine:
        os.environ["WORLD_SIZE"] = mine.pop("WORLD_SIZE")
    lossy = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=rate), seed=seed, wire=wire)
    with pytest.raises(ValueError, match="start all processes of a job alike") as error:
        ltp.init_process_group(lossy, timeout_s=20, **mine)
    assert not dist.is_initialized()
    return str(error.value)


OTHERWISE = {"seed": 5, "algorithm": "ring", "repair": "rescale", "reliable_gather": False, "wraps": "auto"}
OTHERWISE["WORLD_SIZE"] = "3"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {name: value}) for name, value in OTHERWISE.items()),
        *(("process", {"loss_rate": 0.5}), ("wire", {"mtu_bytes": 900})),
        ("learning_rate", {"compared": {"learning_rate": 0.5}}),
    ],
)
def test_processes_that_were_started_differently_are_told_so_on_every_rank(processes, name, changes):
    first, second = processes(2, on_rank_differ, changes)
    assert first == second
    assert re.match(f"{name} = .* on rank 0 and .* on rank 1", first)


@pytest.mark.parametrize(
    ("visible", "local_rank", "device"),
    [(0, "1", "cpu"), (1, "1", "cuda:0"), (2, "1", "cuda:1"), (2, "3", "cuda:1"), (4, None, "cuda:2")],
)
def test_each_process_takes_one_of_the_gpus_that_it_sees(monkeypatch, visible, local_rank, device):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert this_device(6) == torch.device(device)


def on_rank_see_gpus(uuids: list[list[str]]) -> tuple[str | None, list[str], float]:
    seen = uuids[int(os.environ["RANK"])]
    chosen: list[str] = []
    with (
        patch.object(torch.cuda, "device_count", lambda: len(seen)),
        patch.object(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=seen[device.index])),
        patch.object(torch.cuda, "set_device", lambda device: chosen.append(str(device))),
        patch.object(dist, "ProcessGroupNCCL", GlooForNccl, create=True),
    ):
        ltp.init_process_group(network(), wraps="auto")
    x = torch.ones(2)
    dist.all_reduce(x)
    return wrapped_backend(), chosen, x.sum().item()


@pytest.mark.parametrize(
    ("uuids", "backend", "devices"),
    [
        ([["a", "b"], ["a", "b"]], "nccl", ["cuda:0", "cuda:1"]),  # torchrun
        ([["a"], ["b"]], "nccl", ["cuda:0", "cuda:0"]),  # CUDA_VISIBLE_DEVICES of its own for each
        ([["a"], ["a"]], "gloo", ["cuda:0", "cuda:0"]),  # which NCCL refuses
        ([[""], [""]], "gloo", ["cuda:0", "cuda:0"]),  # unknown
        ([["a", "b"], ["c"]], "nccl", ["cuda:0", "cuda:0"]),  # machines that differ
    ],
)
def test_all_ranks_choose_one_backend_from_what_each_sees(processes, uuids, backend, devices):
    assert processes(2, on_rank_see_gpus, uuids) == [(backend, [device], 4.0) for device in devices]


def on_rank_wait_in_vain() -> float:
    ltp.init_process_group(network(), timeout_s=6)  # long enough to join on a busy machine
    started = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(14)
    else:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(2))
    return time.monotonic() - started


@pytest.mark.slow
def test_a_rank_waits_in_a_collective_for_no_longer_than_it_should(processes):
    waited, _ = processes(2, on_rank_wait_in_vain)
    assert 5 < waited < 13


def on_rank_share_a_gpu() -> list[float]:
    ltp.init_process_group(network(1.0))
    torch.cuda.set_device(0)
    x_N, gathered_N = torch.ones(4000, device="cuda"), torch.ones(8000, device="cuda")
    dist.all_reduce(x_N)
    dist.all_gather_into_tensor(gathered_N, torch.ones(4000, device="cuda"))
    return [x_N.sum().item(), gathered_N.sum().item()]


class GlooForNccl:
    """Stands in for NCCL where there is no GPU: a backend that the CPU's messages must not reach."""

    class Options:
        pass

    def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, options._timeout)


def on_rank_around_nccl() -> tuple[list[int], float, list[str]]:
    with patch.object(dist, "ProcessGroupNCCL", GlooForNccl, create=True), patch.object(torch.cuda, "set_device"):
        ltp.init_process_group(network(), wraps="nccl")
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, dist.get_rank())
    x = torch.ones(4000)
    dist.all_reduce(x)
    wrapped: Any = dist.group.WORLD.wrapped
    cpu, cuda = (wrapped._get_backend(torch.device(device)) for device in ("cpu", "cuda"))
    return objects, x.sum().item(), ["apart" if cpu is not cuda else "one"]


def test_around_nccl_gloo_carries_objects_and_what_lies_on_the_cpu(processes):
    """Without it no run could start there: who has the record is told as an object."""
    assert processes(2, on_rank_around_nccl) == [([0, 1], 8000.0, ["apart"])] * 2


@needs_gpu
def test_two_ranks_share_a_gpu_over_gloo(processes):
    assert processes(2, on_rank_share_a_gpu) == [[4000.0, 4000.0]] * 2  # what crosses no link


@needs_gpu
def test_nccl_carries_a_group_of_one():
    program = """
        ltp.init_process_group(network, wraps="nccl")
        x = torch.ones(5000, device="cuda")
        dist.all_reduce(x)
        print(dist.get_world_size(), dist.get_backend(), x.sum().item())
        """
    done = run_alone(program)
    assert done.stdout.split() == ["1", "lossy", "5000.0"], done.stderr


def test_under_torchrun_when_all_variables_are_set(torchrun):
    torchrun()
    assert under_torchrun() is True
    torchrun(**dict.fromkeys(VARIABLES))
    assert under_torchrun() is False


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"RANK": "2"}, {}, "RANK = 2 is not below WORLD_SIZE = 2"),
        *(
            ({name: value}, {}, f"{name} = ")
            for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")
            for value in ("-1", "1.5")
        ),
        (dict.fromkeys(VARIABLES), {}, "torch.distributed needs several processes"),
        ({"RANK": None}, {}, "WORLD_SIZE is set but RANK is not"),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, {}, "RANK is set but MASTER_ADDR, MASTER_PORT is not"),
        *(({}, {"wraps": "mpi"}, "wraps = 'mpi'"), ({}, {"algorithm": "rings"}, "algorithm = 'rings'")),
        ({}, {"repair": "magic"}, "repair = 'magic'"),
    ],
)
def test_what_cannot_start_is_refused_at_once(torchrun, changes, settings, message):
    torchrun(**changes)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        ltp.init_process_group(network(), **settings)
    assert not dist.is_initialized()


@pytest.mark.slow
def test_a_group_may_begin_again_once_it_has_ended():
    program = """
        for _ in range(2):
            ltp.init_process_group(network)
            x = torch.ones(5000)
            dist.all_reduce(x)  # a group of one sends nothing
            assert (dist.get_backend(), x.sum().item(), len(network.report())) == ("lossy", 5000.0, 0)
            dist.destroy_process_group()
            try:
                ltp.reliable().__enter__()
            except ValueError as error:
                print(str(error).split(":")[0])
        """
    done = run_alone(program)
    assert done.stdout.splitlines() == ["no lossy process group is running"] * 2, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "others"), [("0", "rank 1 of 2"), ("1", r"rank 0 at 127.0.0.1:\d+")])
def test_ranks_that_do_not_come_are_told_also_before_the_wait_ends(torchrun, monkeypatch, capsys, rank, others):
    monkeypatch.setattr(initialize, "SILENT_S", 0.2)
    started = time.monotonic()
    with held_port() as port:
        torchrun(RANK=rank, MASTER_PORT=str(port))
        with pytest.raises(ValueError, match=f"^rank {rank} waits for {others}, in vain for timeout_s = 1 seconds: "):
            ltp.init_process_group(network(), timeout_s=1)
    assert time.monotonic() - started < 15
    assert re.match(f"rank {rank} waits for {others}, for timeout_s = 1 seconds at most\n$", capsys.readouterr().err)
