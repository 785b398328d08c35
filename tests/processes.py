"""Functions run on several gloo processes, which are kept for the whole test session: starting one takes seconds."""

import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.ports import held_port

TIMEOUT_S = 300
START_S = 300  # that a process has to import what it needs, on a busy machine
STACK_S = 10  # that a process has to write its stack
LINES = 60  # of what a rank has written to stderr, in a failure's message
MOST_FILES = 500  # open in a process; gloo leaves some open for each process group


class Processes:
    """Starts processes when they are first needed; `stop` ends them."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []
        self._ready: set[int] = set()
        self._folder = tempfile.TemporaryDirectory()  # a file for each worker's stderr

    def run(self, number: int, function: Callable, *arguments: Any) -> list[Any]:
        """`function(*arguments)` on `number` processes, with the variables of torchrun; its results by rank.

        `function` stands at the top level of a module, and initialises torch.distributed itself. AssertionError, with
        the tracebacks and the stderr of all ranks, where it raises on any rank; all of them are then started anew.
        """
        if any(_open_files(worker.pid) > MOST_FILES for worker, _ in self._workers):
            self.stop()
        while len(self._workers) < number:
            here, there = multiprocessing.get_context("spawn").Pipe()
            given = (there, self._stderr_of(len(self._workers)))
            worker = multiprocessing.get_context("spawn").Process(target=_work, args=given, daemon=True)
            worker.start()
            there.close()
            self._workers.append((worker, here))
        for rank in set(range(number)) - self._ready:
            self._wait_for_start(rank)
        with held_port() as port:
            return self._run_at(port, number, function, arguments)

    def _wait_for_start(self, rank: int) -> None:
        connection = self._workers[rank][1]
        try:
            started = connection.poll(START_S) and connection.recv()
        except EOFError:
            started = False
        if not started:
            told = self._told(set(), rank + 1)
            self.stop()
            raise AssertionError("\n".join([*told, f"rank {rank} did not start"]))
        self._ready.add(rank)

    def _run_at(self, port: int, number: int, function: Callable, arguments: tuple) -> list[Any]:
        connections = [connection for _, connection in self._workers[:number]]
        for rank, connection in enumerate(connections):
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": number}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            connection.send(({name: str(value) for name, value in variables.items()}, function, arguments))
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < number:
            failed = not all(worked for worked, _ in answers.values())
            waiting = [connection for rank, connection in enumerate(connections) if rank not in answers]
            ready = wait(waiting, 5 if failed else TIMEOUT_S)  # once one has failed the others wait for it in vain
            if not ready:
                break
            for connection in ready:
                try:
                    answer = connection.recv()
                except EOFError:
                    answer = False, "the process died"
                answers[connections.index(connection)] = answer
        failures = [f"rank {rank} did not end" for rank in range(number) if rank not in answers]
        failures += [f"rank {rank}: {error}" for rank, (worked, error) in answers.items() if not worked]
        if failures:
            failures = [*self._told(set(range(number)) - set(answers), number), *failures]
            self.stop()
            raise AssertionError("\n".join(failures))
        return [answers[rank][1] for rank in range(number)]

    def _told(self, running: set[int], number: int) -> list[str]:
        """The last lines of every rank's stderr, to which those that are still running first add their stacks."""
        for rank in running:
            os.kill(self._workers[rank][0].pid, signal.SIGUSR1)
        until = time.monotonic() + STACK_S
        while time.monotonic() < until and not all("(most recent" in self._told_by(rank) for rank in running):
            time.sleep(0.1)
        told = [self._told_by(rank).splitlines()[-LINES:] for rank in range(number)]
        return ["\n".join([f"stderr of rank {rank}:", *lines]) for rank, lines in enumerate(told) if lines]

    def _told_by(self, rank: int) -> str:
        return self._stderr_of(rank).read_text(errors="replace")

    def _stderr_of(self, rank: int) -> Path:
        return Path(self._folder.name) / f"{rank}.txt"

    def stop(self) -> None:
        for worker, connection in self._workers:
            connection.close()
            worker.kill()
            worker.join()
        self._workers, self._ready = [], set()


def _open_files(process: int) -> int:
    """How many files a process has open; 0 where the system does not tell."""
    folder = Path(f"/proc/{process}/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def _work(connection: Connection, stderr: Path) -> None:
    with stderr.open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    faulthandler.enable()  # a crash shows its stack
    faulthandler.register(signal.SIGUSR1)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    importlib.import_module("lossytp.parallel.convert")  # now, as long as no other rank waits for it

    torch.set_num_threads(1)
    connection.send(True)  # ready
    while True:
        try:
            variables, function, arguments = connection.recv()
        except EOFError:
            sys.exit()
        os.environ.update(variables)
        try:
            result = function(*arguments)
            if dist.is_initialized():
                dist.destroy_process_group()
            connection.send((True, result))
        except BaseException:
            connection.send((False, traceback.format_exc()))
