"""The core of the library, and each command, import with only the packages that pyproject.toml lists for them."""

import os
import re
import subprocess
import tomllib
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTALLED = {distribution.name for distribution in metadata.distributions()}
PARALLELIZE = """
import torch, transformers, lossytp as ltp
config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=4, vocab_size=50, n_positions=16)
model = transformers.GPT2LMHeadModel(config)
network = ltp.LossyNetwork(ltp.GilbertElliott.from_loss_and_burst(loss_rate=0.1, mean_burst_packets=8), seed=0)
model = ltp.parallelize(model, network, tensor_parallel_size=4)
tokens = torch.arange(16)[None]
model(input_ids=tokens, labels=tokens).loss.backward()
print(network.report().to_string())
"""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(requirements: list[str]) -> set[str]:
    """Return the names of the distributions that these requirements install."""
    found: set[tuple[str, str]] = set()
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        requirement, _ = waiting.pop()
        for extra in requirement.extras or {""}:
            name = canonical(requirement.name)
            if (name, extra) in found:
                continue
            found.add((name, extra))
            if name == "lossytp":
                more = PROJECT["optional-dependencies"][extra]
            else:
                try:
                    more = metadata.requires(name) or []
                except metadata.PackageNotFoundError:  # for another platform, or optional
                    continue
            for text in more:
                below = Requirement(text)
                if below.marker is None or below.marker.evaluate({"extra": extra}):
                    waiting.append((below, ""))
    return {name for name, _ in found}


@pytest.fixture
def run_with(tmp_path_factory):
    """Return a function that runs Python, which sees, of all installed packages, the core's and an extra's alone."""

    def run(extra: str | None, *words: str) -> subprocess.CompletedProcess:
        kept = needed(PROJECT["dependencies"] + (PROJECT["optional-dependencies"][extra] if extra else []))
        hidden = set()
        for distribution in metadata.distributions():
            if canonical(distribution.name) not in kept:
                hidden |= {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}
        for name in kept & INSTALLED:  # a namespace, such as google, may be in several distributions
            hidden -= {file.parts[0] for file in metadata.files(name) or ()}
        assert {"_pytest", "mypy"} <= hidden, "a control: these must not be seen"
        home = tmp_path_factory.mktemp("environment")
        venv.create(home)
        (packages,) = (home / "lib").glob("python*/site-packages")
        for entry in Path(pytest.__file__).parents[1].iterdir():
            if entry.name not in hidden:
                (packages / entry.name).symlink_to(entry)
        command = [home / "bin" / "python", *words]
        return subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)

    return run


def test_parallelize_runs_with_the_core_alone(run_with):
    done = run_with(None, "-c", PARALLELIZE)
    assert done.returncode == 0, done.stderr
    assert "lost" in done.stdout


@pytest.mark.parametrize(
    ("extra", "module"),
    [("train", f"lossytp.{name}") for name in ("train", "pretrain", "evaluate", "tolerance", "run")]
    + [("train", "notebooks/labs/tensor_parallel_manual.py"), ("harness", "lossytp.harness"), ("probe", "lossyprobe")]
    + [("study", "lossytp.study.run"), ("study", "lossytp.study.grid")],
)
def test_a_command_starts_with_its_extra_alone(run_with, extra, module):
    done = run_with(extra, *([ROOT / module] if module.endswith(".py") else ["-m", module]), "--help")
    assert done.returncode == 0, done.stderr


def test_training_runs_with_its_extra_alone(run_with, tmp_path):
    short = ["--max_steps", "2", "--max_samples", "100", "--eval_samples", "20", "--output_dir", str(tmp_path)]
    done = run_with("train", "-m", "lossytp.train", *short)
    assert done.returncode == 0, done.stderr
