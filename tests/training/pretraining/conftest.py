"""Provide made-up documents, and short pretraining of a tiny model on a few hundred others."""

import pyarrow as pa
import pyarrow.parquet
import pytest

from lossytp.training import corpus, models, progress
from lossytp.training import text as blocks
from lossytp.training.config import PretrainConfig
from tests.training.pretraining.documents import document, write
from tests.training.pretraining.tiny_runs import NUMBERS, STEPS, TINY


@pytest.fixture
def pretrain(tmp_path, monkeypatch):
    """Return a function that makes the configuration of a short run in the output folder `folder`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(models.PRESETS, "gpt2-nano", TINY)
    monkeypatch.setattr(blocks, "SHUFFLED_BLOCKS", 30)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    data = tmp_path / "data"
    data.mkdir()
    for split, first, last in (("train-0", 0, 200), ("train-1", 200, 300), ("validation-0", 1000, 1020)):
        texts = [" ".join(NUMBERS[int(digit)] for digit in str(number**3)) for number in range(first, last)]
        pa.parquet.write_table(pa.table({"text": texts}), data / f"{split}.parquet")

    def config(folder="run", **values):
        defaults = {
            "data_glob": str(data / "train-*.parquet"),
            "validation_glob": str(data / "validation-*.parquet"),
            "output_dir": str(tmp_path / folder),
            "batch_size": 8,
            "microbatch_size": 2,
            "block_size": 16,
            "learning_rate": 1e-2,
            "warmup_steps": 2,
            "total_steps": STEPS,
            "eval_steps": 3,
            "checkpoint_steps": 3,
        }
        return PretrainConfig(**{**defaults, **values})

    return config


@pytest.fixture
def documents(tmp_path, monkeypatch):
    """Return a folder of 40 documents in two parquet files and one in a text file; 5 are read at once."""
    monkeypatch.setattr(corpus, "DOCUMENTS_AT_ONCE", 5)
    write(tmp_path / "a-0.parquet", [document(i) for i in range(23)])
    write(tmp_path / "a-1.parquet", [document(i) if i != 30 else None for i in range(23, 40)])
    (tmp_path / "b.txt").write_text("läst\n", encoding="utf-8")
    return tmp_path
