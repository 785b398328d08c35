import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from papermill.translators import PythonTranslator
from traitlets.config import Config

from lossytp.study.parameters import REPOSITORY, in_repository
from lossytp.training.config import PretrainConfig, TrainConfig
from lossytp.training.record import read_record

pytestmark = pytest.mark.slow

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
CHECK = "from lossytp.study.parameters import check_parameters; check_parameters()"
OTHER_KIND = {"str": ["text"], "list": {"a": 1}, "dict": [1], "float": [0.5], "int": 0.5, "object": None}
TINY = {"max_steps": 2, "warmup_steps": 0, "max_length": 16, "max_samples": 100, "eval_samples": 20}


def parameter_cell(file):
    cells = nbformat.read(file, as_version=4).cells
    (at,) = [number for number, cell in enumerate(cells) if "parameters" in cell.metadata.get("tags", [])]
    return cells[at], cells[at + 1].source


@pytest.fixture
def shell(monkeypatch):
    """Return a kernel's shell, without the kernel; its errors are kept as they are shown."""
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"hist_file": ":memory:"}}))
    shell.shown = []
    monkeypatch.setattr(shell, "_showtraceback", lambda kind, error, lines: shell.shown.extend(lines))
    yield shell
    shell.history_manager.end_session()
    shell.restore_sys_module_state()  # other tests start processes, which import __main__
    InteractiveShell.clear_instance()


def start(shell, parameters, check, given=None):
    """Run a notebook's first cells as papermill does; return what the check shows."""
    for source in (parameters, *([PythonTranslator.codify(given)] if given else []), check):
        shell.run_cell(source, store_history=True)
    return shell.shown


def by_hand(notebook, tmp_path, *words):
    """Run a notebook with papermill's own command line."""
    command = [sys.executable, "-m", "papermill", "--no-progress-bar", notebook, tmp_path / "out.ipynb", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_every_notebook_takes_its_defaults_and_refuses_unknown_names_and_other_kinds(file, shell):
    cell, check = parameter_cell(file)
    assert "\n".join(start(shell, cell.source, check)) == ""
    (line,) = start(shell, cell.source, check, {"nonsense": 1})
    assert line.startswith("ValueError: unknown parameter 'nonsense'")
    for declared in PythonTranslator.inspect(cell):
        kind = declared.inferred_type_name.partition("[")[0]
        assert kind in OTHER_KIND, f"{declared.name} has no type that papermill reads"
        if kind != "object":
            shell.shown.clear()
            (line,) = start(shell, cell.source, check, {declared.name: OTHER_KIND[kind]})
            assert line.startswith(f"ValueError: {declared.name} = ")


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"rates": "[1, x]"}, "rates = 'x' is of the wrong type"),
        *(({"rates": "[1"}, "rates = '[1' is of the wrong type"), ({"count": None}, None)),
        *(({"count": 1.5}, "count = 1.5 is of the wrong type"), ({"rate": None}, "rate = None is of the wrong type")),
        *(({"rate": True}, "rate = True is of the wrong type"), ({"rate": 1}, None)),
    ],
)
def test_none_is_allowed_where_it_is_the_default_and_elements_have_kinds(shell, given, fault):
    shown = start(shell, "rates: list[float] = [0.5]\ncount: int = None\nrate: float = 0.5", CHECK, given)
    assert len(shown) == (fault is not None)
    shell.shown = []
    assert start(shell, "rate: float = 0.5", CHECK) == [], "a corrected parameter is accepted without a new kernel"
    assert all(line.startswith(f"ValueError: {fault}") for line in shown)


def test_text_for_what_is_no_text_is_read_as_yaml(shell):
    given = {"cells": "[{loss_rate: 1e-3}]", "rate": "1e-3", "name": "[1]"}
    assert start(shell, "cells: list[dict] = []\nrate: float = 0.5\nname: str = 'a'", CHECK, given) == []
    assert shell.user_ns["cells"] == [{"loss_rate": 0.001}]
    assert shell.user_ns["rate"] == 0.001
    assert shell.user_ns["name"] == "[1]"


def test_an_error_about_parameters_is_one_line_and_another_is_whole(shell):
    start(shell, "rate: float = 0.5", CHECK)
    for code, in_one_line in (("int('a')", True), ("open('/nowhere')", True), ("1 / 0", False)):
        shell.shown.clear()
        shell.run_cell(code, store_history=True)
        assert (len(shell.shown) == 1) is in_one_line, code


def test_any_setting_is_a_parameter_of_one_run(shell):
    cell, check = parameter_cell(NOTEBOOKS[0].with_name("21_run.ipynb"))
    assert start(shell, cell.source, check, {"loss_rate": 0.2, "lossy_layers": "0:2", "learning_rate": "1e-3"}) == []
    config = shell.user_ns["config"]
    assert config == TrainConfig(loss_rate=0.2, lossy_layers="0:2", learning_rate=1e-3, output_dir="output/run")
    assert start(shell, cell.source + "\nmax_steps = 7", check, {"bf16": True}) == []
    assert shell.user_ns["config"] == TrainConfig(max_steps=7, bf16=True, output_dir="output/run")
    assert start(shell, cell.source, check, {"total_steps": 3, "warmup_steps": 0}) == []
    assert shell.user_ns["config"] == PretrainConfig(total_steps=3, warmup_steps=0, output_dir="output/run")


def test_papermill_by_hand_runs_one_run_with_any_settings(tmp_path):
    folder = tmp_path / "run"
    words = [word for name, value in TINY.items() for word in ("-p", name, str(value))]
    words += ["-p", "loss_rate", "0.2", "-y", "{algorithm: ring, lossy_layers: '0:2'}", "-p", "output_dir", str(folder)]
    result = by_hand(REPOSITORY / "notebooks/21_run.ipynb", tmp_path, *words)
    assert result.returncode == 0, result.stderr
    config = read_record(folder)["config"]
    given = {**TINY, "loss_rate": 0.2, "algorithm": "ring", "lossy_layers": "0:2"}
    assert {name: config[name] for name in given} == given
    cells = json.dumps([{**TINY, "loss_rate": 0.3, "output_dir": str(tmp_path / "cell")}])
    result = by_hand(REPOSITORY / "notebooks/20_cells.ipynb", tmp_path, "-p", "cells", cells)
    assert result.returncode == 0, result.stderr
    assert read_record(tmp_path / "cell")["config"]["loss_rate"] == 0.3, "cells are read from text"


@pytest.mark.parametrize(
    "folder", [REPOSITORY, REPOSITORY / "notebooks", Path("/")], ids=["root", "notebooks", "elsewhere"]
)
def test_notebooks_find_the_repositorys_files_from_any_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    found = 0
    for file in NOTEBOOKS:
        cell, _ = parameter_cell(file)
        text = "\n".join(each.source for each in nbformat.read(file, as_version=4).cells if each.cell_type == "code")
        assert "../" not in text, file
        for declared in PythonTranslator.inspect(cell):
            path = declared.default.strip('"')
            if path.startswith(("results/paper", "notebooks/")):
                found += 1
                assert in_repository(path).exists()
                assert f"in_repository({declared.name}" in text or "for each in (" in text, (file, declared.name)
    assert found >= 8
    assert in_repository("/new") == Path("/new"), "what is not there is not looked for elsewhere"
