"""Install a wheel into an environment without the repository, and run the commands in an empty folder."""

import json
import os
import random
import subprocess
import sys
import venv
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
ELSEWHERE = ("PYTHONPATH", "LOSSYTP_DATA")  # would show the repository, or data, to the commands
TRAIN = ["train", "--max_steps", "2", "--max_samples", "200", "--eval_samples", "20"]
TOLERANCE = ["--blocks", "2", "--block_size", "32", "--repairs", "zero"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a function that runs a module of the installed package in an empty folder, within another Git checkout."""
    source, home = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("home")
    for name in ("pyproject.toml", "README.md", "LICENSE", "models"):
        (source / name).symlink_to(ROOT / name)
    for name in ("lossytp", "lossyprobe"):
        copytree(ROOT / name, source / name, symlinks=True, ignore=ignore_patterns("__pycache__"))
    pip, offline = [sys.executable, "-m", "pip"], ["--no-deps", "--no-index", "--no-build-isolation", "--quiet"]
    subprocess.run([*pip, "wheel", *offline, "--wheel-dir", home, source], check=True)

    venv.create(home / "venv")
    python = home / "venv" / "bin" / "python"
    subprocess.run([*pip, "--python", python, "install", *offline, *home.glob("*.whl")], check=True)
    (packages,) = (home / "venv" / "lib").glob("python*/site-packages")
    (packages / "third_party.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    identity = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    for words in (["init"], [*identity, "commit", "--allow-empty", "--message=theirs"]):
        subprocess.run(["git", *words, "--quiet"], cwd=home, check=True)
    empty = home / "empty"
    empty.mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}

    def run(*words):
        return subprocess.run(
            [python, *words], cwd=empty, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
        )

    run.packages, run.folder = packages, empty
    return run


@pytest.mark.slow
def test_a_wheel_brings_the_small_model_and_no_other(installed):
    where = installed("-c", "import lossytp; print(lossytp.__file__)").stdout.strip()
    assert where == str(installed.packages / "lossytp" / "__init__.py"), "the editable installation is not seen"
    models = installed.packages / "lossytp" / "models"
    assert [folder.name for folder in models.iterdir()] == ["gpt2-nano"]
    assert sum(file.stat().st_size for file in models.rglob("*")) < 4e6


def test_a_wheel_brings_the_tasks_of_the_harness(installed):
    names = {file.name for file in (ROOT / "lossytp" / "harness_tasks").iterdir() if file.is_file()}
    brought = {file.name for file in (installed.packages / "lossytp" / "harness_tasks").iterdir()}
    assert {"last_word.yaml", "sst2_prompt.yaml"} < names <= brought


@pytest.mark.parametrize("model", [[], ["--model_name", "gpt2-nano-scratch"]], ids=["default", "scratch"])
def test_training_runs_and_claims_no_commit_of_the_checkout_around_it(installed, model):
    done = installed("-m", f"lossytp.{TRAIN[0]}", *TRAIN[1:], *model, "--output_dir", f"out{len(model)}")
    assert done.returncode == 0, done.stderr
    record = json.loads((installed.folder / f"out{len(model)}" / "record.json").read_text())
    assert record["commit"] is None


def test_a_model_that_a_wheel_lacks_is_one_line_that_says_where_it_is(installed):
    done = installed("-m", f"lossytp.{TRAIN[0]}", *TRAIN[1:], "--model_name", "gpt2-micro")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "a checkout's models/gpt2-micro" in done.stderr


def test_a_report_lacks_only_the_comparison_with_the_study(installed):
    numbers = random.Random(1)
    (installed.folder / "losses.txt").write_text("".join("01"[numbers.random() < 0.05] for _ in range(2000)))
    assert installed("-m", "lossyprobe", "import", "losses.txt").returncode == 0
    done = installed("-m", "lossyprobe", "report", "losses.parquet", *TOLERANCE)
    assert done.returncode == 0, done.stderr
    assert "1 % of loss costs" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("this installation lacks the study's results: give ")
