"""Test the entry point under a real torchrun or started by hand, and how it ends when something fails."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import lossytp as ltp
from lossytp.training.record import read_record
from tests.ports import held_port

pytestmark = pytest.mark.slow

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
QUICK = ["--tensor_parallel_size", "2", "--batch_size", "4", "--max_samples", "48", "--eval_samples", "20"]
QUICK += ["--max_length", "16", "--loss_rate", "0.1"]
ENDLESS = ["--max_steps", "1000000"]
SECONDS_TO_END = 30
RANK_1_FAILS = """
from lossytp.training import engine
step, steps = engine.Engine.forward_backward, []
def fail(self, *arguments):
    steps.append(1)
    if self.layout.rank == 1 and len(steps) == 5:
        raise RuntimeError("out of memory, say")
    return step(self, *arguments)
engine.Engine.forward_backward = fail
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable]:
    """Return `start(command, **variables)`, which starts a process with its output in a file.

    All processes are killed after the test.
    """
    started: list[subprocess.Popen] = []

    def run(command: list[str], **variables: Any) -> tuple[subprocess.Popen, Path]:
        told = tmp_path / f"stderr{len(started)}"
        here = {
            name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"
        }  # not that of other tests
        environment = here | {"PYTHONPATH": str(Path(ltp.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        environment |= {name: str(value) for name, value in variables.items()}
        with told.open("w") as file:
            process = subprocess.Popen(command, env=environment, stderr=file, stdout=file)
        started.append(process)
        return process, told

    yield run
    for process in started:
        for each in family(process):
            each.kill()
        process.wait()


def family(process: subprocess.Popen) -> list[psutil.Process]:
    try:
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def module(tmp_path: Path, *flags: str) -> list[str]:
    return ["-m", "lossytp.train", *QUICK, *flags, "--output_dir", str(tmp_path / "run")]


def script(tmp_path: Path, change: str, *flags: str) -> list[str]:
    file = tmp_path / "changed.py"
    call = "from lossytp import train\nfrom lossytp.training.command_line import run_as_command\n"
    file.write_text(f"{change}\n{call}run_as_command(train.main)\n")
    return [str(file), *QUICK, *flags, "--output_dir", str(tmp_path / "run")]


def steps_began(tmp_path: Path, ranks: list[psutil.Process]) -> None:
    while not (tmp_path / "run").exists():
        assert all(rank.is_running() for rank in ranks)
        time.sleep(0.05)
    first = [rank.cpu_times().user for rank in ranks]
    while any(rank.cpu_times().user - before < 1.5 for rank, before in zip(ranks, first, strict=True)):
        time.sleep(0.05)


def ranks_of(agent: subprocess.Popen, number: int) -> list[psutil.Process]:
    while agent.poll() is None:
        ranks = {}
        for process in family(agent)[1:]:
            with contextlib.suppress(psutil.Error):  # the process is just ending
                ranks[process.environ().get("RANK")] = process
        if all(str(rank) in ranks for rank in range(number)):
            return [ranks[str(rank)] for rank in range(number)]
        time.sleep(0.05)
    raise AssertionError("torchrun ended")


def ended(process: subprocess.Popen) -> int:
    """Return the exit code. Assert that the process and all its descendants end in time."""
    until, seen = time.monotonic() + SECONDS_TO_END, set(family(process))
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
        seen |= set(family(process))
    _, alive = psutil.wait_procs(list(seen), max(0.0, until - time.monotonic()))
    assert not alive
    return process.wait()


def test_torchrun_trains_as_virtual_ranks_do(tmp_path, start):
    agent, told = start([*TORCHRUN, "2", *module(tmp_path, "--max_steps", "12")])
    assert agent.wait(120) == 0, told.read_text()
    lines = [line for line in told.read_text().splitlines() if ": accuracy " in line]
    assert len(lines) == 1, "the first rank alone speaks"
    virtual, told = start([sys.executable, *module(tmp_path / "virtual", "--max_steps", "12")])
    assert virtual.wait(60) == 0, told.read_text()
    there, here = read_record(tmp_path / "run"), read_record(tmp_path / "virtual" / "run")
    assert there is not None
    assert here is not None
    assert (there["processes"], here["processes"]) == (2, 1)
    curves = [[point["loss"] for point in record["curves"]["train_loss"]] for record in (there, here)]
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)
    assert len(curves[0]) == 12
    assert there["network"] == here["network"]


def test_a_killed_rank_ends_all(tmp_path, start):
    agent, told = start([*TORCHRUN, "2", *module(tmp_path, *ENDLESS)])
    ranks = ranks_of(agent, 2)
    steps_began(tmp_path, ranks)
    ranks[1].send_signal(signal.SIGKILL)
    assert ended(agent) != 0
    text = told.read_text()
    assert "Signal 9 (SIGKILL)" in text
    assert "rank      : 1 (local_rank: 1)" in text
    assert read_record(tmp_path / "run") is None


def test_a_rank_that_fails_ends_all_and_says_why(tmp_path, start):
    agent, told = start([*TORCHRUN, "2", *script(tmp_path, RANK_1_FAILS, *ENDLESS)])
    while "rank 1: error: RuntimeError: out of memory, say\n" not in told.read_text():
        assert agent.poll() is None, told.read_text()
        time.sleep(0.05)
    assert ended(agent) != 0
    summary = told.read_text().split("Root Cause")[1]
    assert "rank      : 1 (local_rank: 1)" in summary
    assert "RuntimeError: out of memory, say" in summary


def test_a_wrong_number_of_processes_is_refused_once(tmp_path, start):
    agent, told = start([*TORCHRUN, "3", *module(tmp_path)])
    assert ended(agent) != 0
    message = "error: tensor_parallel_size = 2 cannot be spread evenly over 3 processes: start with torchrun "
    assert told.read_text().count(f"rank 0: {message}--standalone --nproc_per_node 2 or 1\n") == 1
    assert "rank 1: error" not in told.read_text()
    assert not (tmp_path / "run").exists()


def by_hand(rank: int, port: int, world: int = 2) -> dict[str, Any]:
    return {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def errors_in(told: Path) -> list[str]:
    beside = ("Warning", "warn", "s so far")
    return [line for line in told.read_text().splitlines() if not any(word in line for word in beside)]


def test_a_start_by_hand_that_cannot_work_is_one_line_with_the_fix(tmp_path, start):
    """All commands run at once, since each takes seconds to import torch."""
    missing = by_hand(0, 1)
    del missing["MASTER_PORT"]
    with socket.socket() as taken, held_port() as free:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cases = [
            (start([sys.executable, *module(tmp_path)], **missing), "MASTER_PORT is not: start with torchrun"),
            (
                start([sys.executable, *module(tmp_path)], **by_hand(0, free) | {"MASTER_ADDR": "nowhere.invalid"}),
                "MASTER_ADDR = 'nowhere.invalid' names no machine ",
            ),
            (
                start([sys.executable, *module(tmp_path)], **by_hand(0, port)),
                f"MASTER_PORT = {port} is in use on 127.0.0.1: choose another",
            ),
            (
                start([sys.executable, *module(tmp_path, "--timeout_s", "1")], **by_hand(0, free)),
                "rank 0 waits for rank 1 of 2, in vain for timeout_s = 1 seconds: start it, or correct WORLD_SIZE",
            ),
        ]
        for (process, told), message in cases:
            assert ended(process) == 2, told.read_text()
            lines = errors_in(told)
            assert len(lines) == 1, told.read_text()
            assert lines[0].startswith("rank 0: error: ")
            assert message in lines[0]


def test_a_rank_whose_peer_is_killed_ends_with_one_line(tmp_path, start):
    with held_port() as port:
        started = [start([sys.executable, *module(tmp_path, *ENDLESS)], **by_hand(rank, port)) for rank in (0, 1)]
        steps_began(tmp_path, [psutil.Process(process.pid) for process, _ in started])
        (left, told), (killed, _) = started
        killed.kill()
        assert ended(left) == 1
        lines = [line for line in told.read_text().splitlines() if "error" in line]
        assert len(lines) == 1, told.read_text()
        assert lines[0].startswith("rank 0: error: the connection to another process is lost: see why that one ended")
        assert "Traceback" not in told.read_text()
