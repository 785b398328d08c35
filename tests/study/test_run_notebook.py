import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from lossytp.study.run import execute, main

pytestmark = pytest.mark.slow

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def notebook(folder, code, parameters="value = 1"):
    cells = [new_code_cell(parameters, metadata={"tags": ["parameters"]}), new_code_cell(code)]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    file = folder / "test.ipynb"
    nbformat.write(new_notebook(cells=cells, metadata=metadata), file)
    return file


def test_parameters_reach_the_notebook_and_parallel_kernels_do_not_clash(tmp_path):
    file = notebook(tmp_path, "import pathlib; pathlib.Path(out).write_text(str(value))", "value = 1\nout = ''")
    runs = [{"value": number, "out": str(tmp_path / f"{number}.txt")} for number in range(4)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda run: subprocess.run(
            [sys.executable, "-m", "lossytp.study.run", file, tmp_path / f"{run['value']}.ipynb",
             "--parameters", json.dumps(run)], check=True, capture_output=True), runs))  # fmt: skip
    assert [(tmp_path / f"{number}.txt").read_text() for number in range(4)] == ["0", "1", "2", "3"]


def test_a_value_error_in_a_cell_ends_with_one_line_and_exit_code_2(tmp_path):
    command = [sys.executable, "-m", "lossytp.study.run", NOTEBOOKS / "20_cells.ipynb"]
    values = {"cells": [{"loss_rate": 7, "output_dir": str(tmp_path / "cell")}]}
    command += [tmp_path / "out.ipynb", "--parameters", json.dumps(values)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "error: 20_cells.ipynb: loss_rate = 7" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "cell").exists()


@pytest.mark.parametrize("parameters", ["[1, 2]", "3", "{"])
def test_parameters_are_a_json_object(tmp_path, parameters):
    command = [sys.executable, "-m", "lossytp.study.run", NOTEBOOKS / "20_cells.ipynb", tmp_path / "out.ipynb"]
    result = subprocess.run([*command, "--parameters", parameters], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert re.fullmatch(rf"error: --parameters {re.escape(repr(parameters))} is .*JSON.*\n", result.stderr)


def test_what_cannot_be_run_or_written_is_one_line_and_another_error_whole(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"^test\.ipynb: .*No such file or directory: '/nowhere'"):
        execute(notebook(tmp_path, "open('/nowhere')"), tmp_path / "out.ipynb", {})
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file' cannot be written"):
        execute(notebook(tmp_path, "1"), tmp_path / "file" / "out.ipynb", {})
    with pytest.raises(ValueError, match=rf"^{tmp_path} is a folder: give the path of a file"):
        execute(notebook(tmp_path, "1"), tmp_path, {})
    with pytest.raises(ValueError, match="unknown parameter 'values'"):  # the notebook itself checks none
        execute(notebook(tmp_path, "1"), tmp_path / "out.ipynb", {"values": 2})
    with pytest.raises(Exception, match="ZeroDivisionError"):
        execute(notebook(tmp_path, "1 / 0"), tmp_path / "out.ipynb", {})
    monkeypatch.setenv("LOSSYTP_RUN_PID", "abc")
    monkeypatch.setattr(sys, "argv", ["run_notebook", "a.ipynb", "b.ipynb"])
    with pytest.raises(ValueError, match="LOSSYTP_RUN_PID = 'abc'"):
        main()


def test_a_readers_run_is_drawn_on_the_papers_curve(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # JupyterLab starts it in notebooks/, and papermill anywhere
    changes = {"loss_rate": 0.15, "max_steps": 2, "max_samples": 200, "eval_samples": 50}
    values = {"changes": changes, "output_dir": str(tmp_path)}
    execute(NOTEBOOKS / "22_my_run.ipynb", tmp_path / "out.ipynb", values)
    cells = nbformat.read(tmp_path / "out.ipynb", as_version=4).cells
    (cell,) = [cell for cell in cells if "sns.lineplot(" in cell.source and cell.outputs]
    assert "image/png" in cell.outputs[-1].data
    (record,) = [json.loads(path.read_text()) for path in tmp_path.glob("curve*/record.json")]
    assert (record["config"]["loss_rate"], record["config"]["batch_size"]) == (0.15, 32)


def test_a_run_ends_when_the_process_it_watches_does_and_takes_all_that_it_started_along(tmp_path):
    code = f"""import os, pathlib, subprocess, time
pids = [os.getpid(), subprocess.Popen(["sleep", "120"]).pid]
pathlib.Path({str(tmp_path / "part")!r}).write_text(str(pids))
os.rename({str(tmp_path / "part")!r}, {str(tmp_path / "pids")!r})
time.sleep(120)"""
    parent = subprocess.Popen(["sleep", "120"])
    runner = subprocess.Popen(
        [sys.executable, "-m", "lossytp.study.run", notebook(tmp_path, code), tmp_path / "out.ipynb"],
        env={**os.environ, "LOSSYTP_RUN_PID": str(parent.pid)},
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "pids").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    started = [psutil.Process(pid) for pid in json.loads((tmp_path / "pids").read_text())]
    parent.kill()
    parent.wait()
    assert runner.wait(timeout=20) == 1
    left = psutil.wait_procs(started, timeout=10)[1]
    for process in left:
        process.kill()
    assert left == []


def test_committed_notebooks_carry_no_outputs_and_only_lessons_define_functions():
    for file in NOTEBOOKS.glob("*.ipynb"):
        for cell in nbformat.read(file, as_version=4).cells:
            if cell.cell_type == "code":
                assert not cell.outputs, file
                assert cell.execution_count is None, file
                defines = re.search(r"^\s*(?:def|class) ", cell.source, re.MULTILINE)
                assert not defines or file.stem in ("00_explore", "12_collectives", "40_lab"), file
