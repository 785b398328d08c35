"""Run a program unchanged over a lossy network, wherever it asks torch.distributed for gloo, nccl or no backend.

torchrun --standalone --nproc_per_node 2 -m lossytp.run --loss_rate 0.01 --report lost.json train.py ARGUMENTS
torchrun --standalone --nproc_per_node 2 -m lossytp.run --loss_rate 0.01 -m package.train ARGUMENTS
python -m lossytp.run --loss_rate 0.01 spawns_its_own_processes.py ARGUMENTS

The program's output, exit code and exceptions are its own. At its end, rank 0 prints on stderr what was lost.
"""

import importlib.util
import json
import os
import runpy
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import spawn, util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import field_validator, model_validator

from lossytp.network.checks import refuse_if
from lossytp.network.repairs import ZERO
from lossytp.network.routes import check_links_within
from lossytp.network.scope import Counters
from lossytp.training.command_line import parse, refuse, split_at_program
from lossytp.training.files import check_writable, write_atomically
from lossytp.training.groups import BackendNetwork
from lossytp.training.settings import Seed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PATIENCE_S = 60.0  # that rank 0 has at its end for the other ranks to end
OF_THE_PROGRAM = ("tensor_parallel_size", "sequence_parallel", "timeout_s")


class RunConfig(BackendNetwork):
    """The network between the program's processes. All flags stand before the program."""

    seed: Seed = 1234
    """Seed of packet losses."""
    report: str | None = None
    """File for the report, in JSON. The program's rank 0 writes it."""

    @field_validator("report")
    @classmethod
    def _found_from_anywhere(cls, value: str | None) -> str | None:
        return None if value is None else os.path.abspath(value)  # the program may change the folder

    @model_validator(mode="after")
    def _check_run(self) -> Self:
        for name in OF_THE_PROGRAM:
            refuse_if(name in self.model_fields_set, name, getattr(self, name), "is the program's choice: leave it out")
        comm, network, world = self.comm(), self.build(), os.environ.get("WORLD_SIZE", "")
        several = comm.repair.part("select") != ZERO and not comm.algorithm.hops_carry_one()
        fault = f"needs packets of one rank each, but algorithm = {self.algorithm!r} sends sums: choose direct"
        refuse_if(several, "repair", self.repair, fault)
        if world.isdigit():
            check_links_within(network.named_links, int(world))
        comm.check_delivers(network, tuple(range(int(world) if world.isdigit() else 2)))
        if self.report is not None:
            check_writable(str(Path(self.report).parent), "the folder of report")
            refuse_if(Path(self.report).is_dir(), "report", self.report, "is a folder: give a file in it")
        return self


class Program:
    """A Python file, or -m and a module's name, with arguments: `words`, as on Python's own command line.

    Raises:
        ValueError: if there is no such program.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.is_module = list(words[:1]) == ["-m"]
        self.words = list(words[self.is_module :])
        if not self.words:
            raise ValueError("the program is missing: give a Python file, such as train.py, or -m and a module's name")
        name, self.target = self.words[0], self.words[0]
        if self.is_module:
            with suppress(ModuleNotFoundError):  # of the package around it
                if importlib.util.find_spec(name) is not None:
                    return
            raise ValueError(f"module = {name!r} is not installed here: give another one's name, or a Python file")
        if not Path(name).is_file():
            what = "a folder" if Path(name).is_dir() else "not a file"
            raise ValueError(f"program = {name!r} is {what}: give a Python file")
        self.target = str(Path(name).absolute())

    def run(self, run_name: str) -> dict[str, Any]:
        """Run it as Python would, as the module `run_name`; return its names."""
        sys.argv = self.words
        if self.is_module:
            return runpy.run_module(self.target, run_name=run_name, alter_sys=True)
        sys.path[0] = str(Path(self.target).parent)
        return runpy.run_path(self.target, run_name=run_name)


class LossyRun:
    """A program's network, in one of its processes, and the report on it."""

    def __init__(self, config: RunConfig, program: Program) -> None:
        self.config, self.program, self.network = config, program, config.build()
        self.store: Store | None = None  # of the last default group
        self.rank, self.processes = 0, 1
        self.has_children = self.failed = False
        self.ends_with = 0  # the process at whose end the report is due

    def install(self) -> None:
        """Serve all groups of this process, and of those that it starts."""
        from lossytp.parallel.backend import backend_comm, serve_all_groups  # torch takes seconds to import

        names = {name: getattr(self.config, name) for name in ("algorithm", "repair", "reliable_gather")}
        serve_all_groups(self.network, backend_comm(**names), self._started)
        becomes_a_parent, prepared = partial(setattr, self, "has_children", True), spawn.get_preparation_data
        os.register_at_fork(after_in_parent=becomes_a_parent)

        def prepared_here(name: str) -> dict[str, Any]:
            """Let a spawned process import this module, which runs the program, in place of the program."""
            becomes_a_parent()
            data = {key: value for key, value in prepared(name).items() if key != "init_main_from_path"}
            words = ["-m"] * self.program.is_module + [self.program.target, *self.program.words[1:]]
            argv = [self.program.words[0], json.dumps([self.config.changes(), words])]
            return data | {"init_main_from_name": "lossytp.run", "sys_argv": argv}

        spawn.get_preparation_data = prepared_here

    def report_at_the_end(self) -> None:
        """Report when this process ends; children of multiprocessing drop what their parent planned, and atexit too."""
        if self.ends_with != os.getpid():
            self.ends_with = os.getpid()
            util.Finalize(None, self._end, exitpriority=0)

    def _started(self, store: "Store", rank: int, processes: int) -> None:
        self.store, self.rank, self.processes = store, rank, processes
        self.report_at_the_end()

    def _end(self) -> None:
        """Tell rank 0 what this process counted. Rank 0 adds up what all have counted, prints it and writes it.

        The ranks meet in the store, because the program may have destroyed its groups.
        """
        store = self.store
        if store is None and self.has_children:
            return  # one of them reports
        if store is not None and self.rank:
            with suppress(RuntimeError):  # rank 0 has left
                store.set(f"counted by {self.rank}", json.dumps(self.network.counters.state_dict()))
            return
        until = time.monotonic() + (0 if self.failed or _failed(sys.exc_info()[1]) else PATIENCE_S)
        self._print("".join(self._add(store, other, until) for other in range(1, self.processes)))

    def _add(self, store: Any, other: int, until: float) -> str:
        """Add what another rank counted; return why that is impossible, or ""."""
        key, counted = f"counted by {other}", Counters()
        try:
            while not store.check([key]):
                if time.monotonic() > until:
                    return f"; without rank {other}, which did not end in time"
                time.sleep(0.02)
            counted.load_state_dict(json.loads(store.get(key)))
            self.network.counters.merge(counted)
        except (RuntimeError, ValueError) as error:  # the store is gone, or a program failed between two ranks' counts
            return f"; without rank {other}: {error}"
        return ""

    def _print(self, note: str) -> None:
        summary, table = self.network.summary("training"), self.network.report()
        lost, packets, processes = summary["lost"], summary["packets"], self.processes
        where = f"{processes} process{'es' * (processes > 1)}"
        print(f"lossytp.run: lost {lost:,} of {packets:,} packets, {where}{note}", file=sys.stderr)
        if packets:
            sums = table.groupby(["direction", "operation", "phase"])[["packets", "lost"]].sum()
            print(sums.assign(observed_loss_rate=sums["lost"] / sums["packets"]).to_string(), file=sys.stderr)
        else:
            hint = "" if processes > 1 else ": write torchrun, or another launcher, before -m lossytp.run"
            print(f"No process sent a message of more than one packet that may lose any{hint}", file=sys.stderr)
        if self.config.report is not None:
            unused = (*OF_THE_PROGRAM, "report")
            config = {name: value for name, value in self.config.as_dict().items() if name not in unused}
            content = {"program": self.program.words, "config": config, "processes": processes, "network": summary}
            write_atomically(Path(self.config.report), json.dumps(content, indent=1) + "\n")


def main() -> None:
    """Run the program of the command line."""
    try:
        own, words = split_at_program(RunConfig, sys.argv[1:])
        sys.argv[1:] = own
        config = parse(RunConfig, __doc__)
        run = LossyRun(config, Program(words))
    except (ValueError, ModuleNotFoundError) as error:
        refuse(error)
    run.install()
    run.report_at_the_end()
    try:
        run.program.run("__main__")
    except BaseException as error:
        run.failed = _failed(error)
        raise


def _failed(error: BaseException | None) -> bool:
    return error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))


def in_child() -> dict[str, Any]:
    """Return the names of the program, in a process that it has spawned."""
    changes, words = json.loads(sys.argv[1])
    run = LossyRun(RunConfig(**changes), Program(words))
    run.install()
    return run.program.run("__mp_main__")


if __name__ == "__main__":
    main()
if __name__ == "__mp_main__":
    from lossytp import run  # apart from the program's names

    globals().update(run.in_child())
