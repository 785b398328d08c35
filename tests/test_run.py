"""`python -m lossytp.run` runs other people's programs unchanged, but for lost packets."""

import importlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from multiprocessing import spawn
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import lossytp as ltp
from lossytp import run
from lossytp.network import CommConfig
from lossytp.parallel import backend
from lossytp.parallel.process_group import LossyProcessGroup
from lossytp.training.command_line import parse, split_at_program
from tests.parallel.families import tiny
from tests.ports import held_port

PROGRAMS = Path(__file__).parent / "programs"
RUN = ["-m", "lossytp.run"]


@contextmanager
def undone() -> Iterator[None]:
    """Undo at the end what a program and a lossy run change in this process."""
    c10d, variables, path, argv = dist.distributed_c10d, dict(os.environ), list(sys.path), sys.argv
    before = c10d._new_process_group_helper, c10d._register_pg_in_world, spawn.get_preparation_data
    try:
        yield
    finally:
        c10d._new_process_group_helper, c10d._register_pg_in_world, spawn.get_preparation_data = before
        sys.path, sys.argv = path, argv
        os.environ.clear()
        os.environ.update(variables)
        if "accelerate" in sys.modules:
            accelerate = importlib.import_module("accelerate.state")
            accelerate.AcceleratorState._reset_state(reset_partial_state=True)
            accelerate.GradientState._reset_state()


def on_rank_run(words: list[str], flags: list[str] | None) -> tuple[str, str]:
    """Run a program, over a lossy network if there are flags; what it printed, and the report."""
    printed, told = io.StringIO(), io.StringIO()
    with undone():
        program = run.Program(words)
        lossy = None if flags is None else run.LossyRun(parse(run.RunConfig, None, flags), program)
        if lossy is not None:
            lossy.ends_with = os.getpid()  # the report is due now, not when this process ends
            lossy.install()
        with redirect_stdout(printed):
            names = program.run("__main__")
        # DDP frees its group with the GIL held, and waits for gloo's threads, which may wait for the GIL: free it last.
        groups = [value.process_group for value in names.values() if isinstance(value, DistributedDataParallel)]
        del names
        del groups
        if lossy is not None:
            with redirect_stderr(told):
                lossy._end()
    return printed.getvalue().splitlines()[-1], told.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with a tiny Llama."""
    path = tmp_path_factory.mktemp("model")
    tiny("llama", dtype=torch.float32).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("program", ["plain_ddp", "with_accelerate", "with_trainer", "with_lora", "sharded"])
def test_a_program_computes_the_same_but_for_lost_packets(
    program: str, folder: str, tmp_path: Path, processes: Callable
) -> None:
    words, file = [str(PROGRAMS / f"{program}.py"), folder, str(tmp_path / "output")], tmp_path / "reports" / "one.json"
    small = ["--mtu_bytes", "200"]  # many packets
    (plain, _), (plain_1, _) = processes(2, on_rank_run, words, None)
    (lossless, told), (lossless_1, told_1) = processes(2, on_rank_run, words, small)
    assert (lossless, lossless_1) == (plain, plain_1)
    assert told.startswith("lossytp.run: lost 0 of ")
    assert told_1 == "", "rank 0 alone reports"
    flags = [*small, "--loss_rate", "0.1", "--report", str(file)]
    (lossy, told), _ = processes(2, on_rank_run, words, flags)
    assert lossy != plain
    report = json.loads(file.read_text())
    lost, packets = report["network"]["lost"], report["network"]["packets"]
    assert told.startswith(f"lossytp.run: lost {lost:,} of {packets:,} packets, 2 processes\n")
    assert 0.05 < lost / packets < 0.2
    assert (report["program"], report["config"]["loss_rate"], report["processes"]) == (words, 0.1, 2)
    assert set(report["network"]["by_link"]) == {"0->1", "1->0"}


@pytest.mark.slow
def test_under_torchrun_the_report_counts_every_packet_of_both_ranks(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    words = [*RUN, "--loss_rate", "0.1", "--report", "report.json", str(PROGRAMS / "plain_ddp.py")]
    environment = os.environ | {"PYTHONPATH": str(Path(ltp.__file__).parents[1])}
    subprocess.run([sys.executable, *launcher, *words], cwd=tmp_path, env=environment, check=True, timeout=300)
    counted = json.loads((tmp_path / "report.json").read_text())["network"]
    parameters = 32 * 256 + 256 + 256 * 10 + 10
    packets = -(-(parameters // 2) // ((1500 - 44) // 4))  # of the half that a rank sends to the other
    assert counted["packets"] == 10 * 2 * packets
    assert counted["messages"]["called"] == 10


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_program_may_start_its_processes_itself(method: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    flags = ["--loss_rate", "0.2", "--report", str(file)]
    with held_port() as port:
        command = [sys.executable, *RUN, *flags, str(PROGRAMS / "spawning.py"), str(port), method]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    *sums, joined = done.stdout.split()
    assert joined == "joined"
    assert sums[0] == sums[1]
    assert 5_000 < int(sums[0]) < 10_000
    assert done.stderr.count("lossytp.run: lost ") == 1
    assert json.loads(file.read_text())["network"]["packets"] == 2 * 7  # halves of 2,500 elements


def on_rank_groups() -> list:
    """Return the kinds and names of groups that a program makes while `serve_all_groups` acts."""
    network, started = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.5)), []
    with undone():
        backend.serve_all_groups(network, CommConfig.named(), lambda store, rank, size: started.append((rank, size)))
        dist.init_process_group()
        own = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))["b"].get_group()
        fake = dist.new_group(backend="fake")
        groups = (dist.group.WORLD, own, both, fake)
        dist.all_reduce(torch.ones(5_000), group=both)
        counted = network.summary("training")
        with ltp.reliable():
            dist.all_reduce(torch.ones(5_000), group=both)
        assert network.summary("training") == counted
        kinds = [isinstance(each, LossyProcessGroup) for each in groups]
        return [kinds, [dist.get_backend(each) for each in groups], started, counted["lost"]]


def test_every_group_is_lossy_and_keeps_the_name_of_what_was_asked_for(processes: Callable) -> None:
    for rank, (kinds, names, started, lost) in enumerate(processes(2, on_rank_groups)):
        assert kinds == [True, True, True, False]
        assert names == ["undefined", "gloo", "undefined", "fake"]
        assert started == [(rank, 2)]
        assert 0 < lost < 2 * 7  # halves of 2,500 elements


def on_rank_seeds(started: list) -> str:
    with undone():
        network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.5), seed=int(os.environ["RANK"]))
        backend.serve_all_groups(network, CommConfig.named(), lambda *of: started.append(of))
        with pytest.raises(ValueError, match="seed") as refused:
            dist.init_process_group("gloo")
        assert not started
        return str(refused.value)


def test_ranks_with_different_networks_are_refused(processes: Callable) -> None:
    for message in processes(2, on_rank_seeds, []):
        assert message == "seed = 0 on rank 0 and 1 on rank 1: start all processes of a job alike"


# What follows needs no processes.


@pytest.fixture
def as_command(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Return `as_command(words)`, which runs the command in this process, whose groups stay as they are."""
    monkeypatch.setattr(run.LossyRun, "install", lambda self: None)
    monkeypatch.setattr(run.LossyRun, "report_at_the_end", lambda self: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def start(words: list[str]) -> None:
        monkeypatch.setattr(sys, "argv", ["run.py", *words])
        run.main()

    return start


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the program is missing: give a Python file, such as train.py, or -m and a module's name"),
        (["-m"], "the program is missing: .*"),
        (["there_is_none.py"], r"program = 'there_is_none\.py' is not a file: give a Python file"),
        (["."], r"program = '\.' is a folder: give a Python file"),
        (["-m", "no.such"], "module = 'no.such' is not installed here: give another one's name, or a Python file"),
        (["--loss_rate", "1.5", "x.py"], r"loss_rate = 1\.5 is above 1: give 1 or less"),
        (["--loss_rat", "0.1", "x.py"], "unknown parameter 'loss_rat': did you mean loss_rate\\?"),
        (["--tensor_parallel_size", "4", "x.py"], "tensor_parallel_size = 4 is the program's choice: leave it out"),
        (["--wire_dtype", "bf16", "x.py"], "wire_dtype = 'bf16' works only in this project's layers: leave it out"),
        (["--repair", "stale", "x.py"], "repair = 'stale' works only in this project's layers: leave it out"),
        (["--repair", "protect_first(2)", "x.py"], "repair = .* works only in this project's layers: leave it out"),
        (["--repair", "protect(0.1)", "--algorithm", "ring", "x.py"], "repair = .* needs packets of one rank .*"),
        (["--repair", "protect(0.1)", "--loss_rate", "1", "x.py"], "repair = .* the link 0>1 loses all: .*"),
        (["--report", ".", "x.py"], "report = '.*' is a folder: give a file in it"),
        (["--report", "/dev/null/report", "x.py"], "the folder of report = '/dev/null' cannot be written .*: give .*"),
    ],
)
def test_a_wrong_command_ends_with_one_line(
    words: list[str], message: str, as_command: Callable, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as stop:
        as_command(words)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f"error: {message}", line)


def test_a_wrong_command_does_not_wait_for_torch(tmp_path: Path) -> None:
    check = "import sys\nfrom lossytp import run\ntry:\n    run.main()\nfinally:\n    print('torch' in sys.modules)"
    command = [sys.executable, "-c", check, "--loss_rate", "2", "x.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "False\n")


@pytest.mark.parametrize(
    ("flags", "program"),
    [
        ("--loss_rate 0.1", "train.py --loss_rate 7 --help -- -x"),
        ("--loss-rate=0.1 --no-reliable_gather", "train.py"),
        *(("--reliable_gather --report r.json", "-m train --report other"), ("--lossy_links -1>0 --", "train.py --")),
        *(("-h", "train.py"), ("", "train.py"), ("--loss_rate --seed 3", "")),
    ],
)
def test_flags_end_where_the_program_begins(flags: str, program: str) -> None:
    assert split_at_program(run.RunConfig, [*flags.split(), *program.split()]) == (flags.split(), program.split())


def test_a_program_finds_what_python_would_give_it(
    tmp_path: Path, as_command: Callable, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "neighbour.py").write_text("here = __name__")
    program = tmp_path / "program.py"
    program.write_text("import sys, neighbour\nprint(__name__, __file__, sys.argv, neighbour.here)")
    as_command(["--loss_rate", "0.1", str(program), "--loss_rate", "7", "--"])
    arguments = [str(program), "--loss_rate", "7", "--"]
    assert capsys.readouterr().out == f"__main__ {program} {arguments} neighbour\n"
    monkeypatch.syspath_prepend(tmp_path)
    as_command(["-m", "program", "-m"])
    assert capsys.readouterr().out == f"__main__ {program} {[str(program), '-m']} neighbour\n"


@pytest.mark.parametrize(
    ("last_line", "kind", "value", "failed"),
    [
        *(("raise ValueError('mine')", ValueError, "mine", True), ("import sys; sys.exit(3)", SystemExit, "3", True)),
        *(("import sys; sys.exit()", SystemExit, "", False), ("raise KeyboardInterrupt", KeyboardInterrupt, "", True)),
    ],
)
def test_a_program_ends_as_it_wants_to(
    last_line: str, kind: type, value: str, failed: bool, tmp_path: Path, as_command: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "program.py").write_text(last_line)
    runs = []
    monkeypatch.setattr(run.LossyRun, "install", lambda self: runs.append(self))
    with pytest.raises(kind) as stop:
        as_command([str(tmp_path / "program.py")])
    assert str(stop.value) == value
    assert runs[0].failed == failed


def two_ranks(tmp_path: Path, **sent: int) -> tuple[run.LossyRun, run.LossyRun]:
    """Return two ranks that share a store; each has sent packets on its own link."""
    (tmp_path / "program.py").write_text("")
    store, ranks = dist.HashStore(), []
    for rank in range(2):
        config = run.RunConfig(loss_rate=0.5, report=str(tmp_path / "report.json"))
        ranks.append(run.LossyRun(config, run.Program([str(tmp_path / "program.py")])))
        ranks[rank].ends_with = os.getpid()  # not at the end of the tests
        ranks[rank]._started(store, rank, 2)
        ranks[rank].network.lost_packets(rank, 1 - rank, 100 + rank)
    return ranks[0], ranks[1]


def test_a_failed_rank_0_waits_for_nobody(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    first, _ = two_ranks(tmp_path)
    first.failed = True
    first._end()
    assert "of 100 packets, 2 processes; without rank 1, which did not end in time\n" in capsys.readouterr().err


def test_ranks_that_count_differently_are_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    first, second = two_ranks(tmp_path)
    second.network.lost_packets(0, 1, 1)
    second._end()
    first._end()
    assert "; without rank 1: processes disagree on the traffic of " in capsys.readouterr().err


def test_a_program_without_processes_is_told_to_start_some(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    first, _ = two_ranks(tmp_path)
    first.store, first.processes, first.network = None, 1, ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.5))
    first._end()
    assert "write torchrun, or another launcher, before -m lossytp.run" in capsys.readouterr().err
    first.has_children = True  # of processes that report themselves
    first._end()
    assert capsys.readouterr().err == ""
