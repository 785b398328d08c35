"""The recipes of CONTRIBUTING.md and of the guides that it links: each is extracted, run and used."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lossytp as ltp
from lossytp.network import ALGORITHMS, LOSS_PROCESSES, REPAIRS, Bernoulli, LossyNetwork, Wire
from lossytp.study.grid import load_experiment
from lossytp.training.config import TrainConfig
from lossytp.training.loop import run
from lossytp.training.tasks import TASKS

ROOT = Path(__file__).parents[1]
RECIPES = {
    "every_nth": "docs/howto/loss_process.md",
    "star": "docs/howto/repair.md",
    "twice": "docs/howto/repair.md",
    "answers": "docs/howto/task.md",
    "notebook: ": "CONTRIBUTING.md",
}


def code(word: str) -> str:
    """Return the last block of Python or YAML that has this word."""
    text = (ROOT / RECIPES[word]).read_text(encoding="utf-8")
    return [block for block in re.findall(r"^```(?:python|yaml)\n(.*?)^```$", text, re.M | re.S) if word in block][-1]


@pytest.fixture
def follow(monkeypatch):
    """Return a function that runs a recipe; what it registers goes with the test."""
    for registry in (LOSS_PROCESSES, ALGORITHMS, REPAIRS, TASKS):
        for name in ("every_nth", "star", "twice", "answers"):
            monkeypatch.setitem(registry, name, None)
            del registry[name]
    return lambda word: exec(code(word), {"__name__": "recipe"})


def test_a_loss_process(follow):
    follow("every_nth")
    assert TrainConfig(loss_type="every_nth(20)").network.process().loss_rate == pytest.approx(0.05, abs=1e-4)


def test_an_algorithm(follow):
    follow("star")
    x_RN = torch.ones(3, 40)
    network = LossyNetwork({(1, 0): Bernoulli(loss_rate=1.0)}, wire=Wire(elements=10))
    assert ltp.all_reduce(x_RN, network, algorithm="star").tolist() == [[2.0] * 40] * 3


def test_a_repair(follow):
    follow("twice")
    network = LossyNetwork(Bernoulli(loss_rate=0.5), wire=Wire(elements=1))
    lacks_N = ltp.all_reduce(torch.ones(2, 20_000), network, repair="twice")[0] < 2
    assert lacks_N.double().mean() == pytest.approx(0.25, abs=0.02)
    assert TrainConfig(repair="twice").comm().repair.name == "twice"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["every_nth", "twice"])
def test_a_command_that_imports_a_recipe_knows_its_name(tmp_path, name):
    (tmp_path / f"{name}.py").write_text(code(name))
    (line,) = re.findall(rf"^python (-c .import {name}, .*)$", (ROOT / RECIPES[name]).read_text(), re.MULTILINE)
    words = [*shlex.split(line), "--model_name", "gpt2-nano-scratch", "--eval_samples", "8", "--max_length", "16"]
    words[words.index("--max_steps") + 1] = "1"
    subprocess.run([sys.executable, *words], cwd=tmp_path, check=True, timeout=300)
    record = json.loads((tmp_path / "output" / name / "record.json").read_text())
    assert name in record["config"]["loss_type"] + record["config"]["repair"]


def test_a_task(follow, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    follow("answers")
    model = {"model_name": "gpt2-nano-scratch", "max_length": 16}
    record = run(TrainConfig(dataset="answers", max_steps=2, warmup_steps=0, output_dir=str(tmp_path / "run"), **model))
    assert record["data"]["metric"] == "accuracy"


def test_an_experiment(tmp_path):
    file = tmp_path / "experiments" / "mine.yaml"
    file.parent.mkdir()
    (tmp_path / "20_cells.ipynb").touch()
    file.write_text(code("notebook: "))
    experiment = load_experiment(file, "smoke", tmp_path / "results")
    assert [(cell.arm, cell.config.network.algorithm, cell.config.network.loss_rate) for cell in experiment.cells] == [
        ("no loss", "direct", 0.0),
        ("ring", "ring", 0.1),
    ]
