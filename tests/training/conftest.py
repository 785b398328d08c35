"""Provide a tiny task, so that tests of the loop need not prepare the thousands of docstrings of the embedded one.

Also a folder that the tests of a module share, and the record of a dense run there.
"""

from pathlib import Path
from typing import Any

import pytest

from lossytp.training import tasks
from lossytp.training.config import TrainConfig
from tests.training.parallel_runs import train

WORDS = {0: "alpha beta gamma", 1: "delta epsilon zeta"}


TRAIN = [{"text": f"{WORDS[i % 2]} number {i}", "label": i % 2} for i in range(64)]
TEST = [{"text": f"{WORDS[i % 2]} other {i}", "label": i % 2} for i in range(30)]


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Return a function that makes configurations of the toy task; data is cached below tmp_path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(
        tasks.TASKS,
        "toy",
        tasks.Classification(
            source=tasks.Table(train=TRAIN, test=TEST), body="{text}", labels=("first", "second"), targets=(0.9, 2.0)
        ),
    )

    def config(**values):
        defaults = {"model_name": "gpt2-nano-scratch", "dataset": "toy", "max_steps": 6, "batch_size": 8, "seed": 0}
        return TrainConfig(**{**defaults, "output_dir": str(tmp_path / "run"), **values})

    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that the tests of a module share, for records and the task's data."""
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def dense(folder: Path) -> dict[str, Any]:
    return train(folder, {})
