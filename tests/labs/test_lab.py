"""Check the flags, the images and the batches that labs share."""

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, Value

from data_parallel import DataParallelConfig
from lab import BackendLabConfig, LabConfig, _batches, load_digits, place
from lossytp.training.command_line import parse
from pipeline import PipelineLabConfig
from tests.labs.dense import SMALL

CPU = torch.device("cpu")
FLAGS = "--epochs 3 --data-dir data --input-dim 1024 --hidden-dim 2048 --num-classes 10"


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOSSYTP_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", [LabConfig, BackendLabConfig, DataParallelConfig, PipelineLabConfig])
@pytest.mark.parametrize("flags", [FLAGS, FLAGS.replace("-dim", "_dim").replace("-dir", "_dir").replace("m-c", "m_c")])
def test_every_lab_takes_the_flags_of_the_earlier_lab(kind, flags):
    config = parse(kind, None, flags.split())
    assert (config.epochs, config.data_dir, config.num_classes) == (3, "data", 10)
    assert (config.input_dim, config.hidden_dim) == (1024, 2048)
    assert parse(kind, None, ["--steps", "5"]).steps == 5


def test_a_lab_without_torchrun_says_how_to_start_it_or_runs_virtual_ranks(monkeypatch):
    with pytest.raises(
        ValueError, match=r"start it with torchrun --standalone --nproc_per_node 2 notebooks/labs/some\.py$"
    ):
        place(LabConfig(), needs_processes="some")
    assert place(LabConfig()).tensor_parallel_size == 2
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert (place(LabConfig()).tensor_parallel_size, place(LabConfig()).rank) == (4, 1)
    assert place(LabConfig(tensor_parallel_size=8)).tensor_parallel_size == 8
    with pytest.raises(ValueError, match=r"tensor_parallel_size = 8 differs from the 4 processes.*--nproc_per_node 8$"):
        place(LabConfig(tensor_parallel_size=8), needs_processes="some")


def test_a_single_rank_has_nothing_to_lose():
    with pytest.raises(ValueError, match=r"^loss_rate = 0.1 has no effect on a single rank"):
        place(LabConfig(tensor_parallel_size=1, loss_rate=0.1))
    assert place(LabConfig(tensor_parallel_size=1)).world_size == 1


def test_the_bundled_digits_are_split_and_scaled():
    digits = load_digits(LabConfig(), CPU)
    assert (digits.name, len(digits.train[1]), len(digits.test[1])) == ("digits", 1437, 360)
    assert digits.train[0].shape == (1437, 64)
    assert (digits.train[0].min(), digits.train[0].max()) == (0, 1)
    larger = load_digits(LabConfig(input_dim=1024, num_classes=3), CPU)
    assert larger.train[0].shape[1] == 1024
    assert set(larger.train[1].tolist()) == {0, 1, 2}
    kept = digits.test[1] < 3
    smaller = torch.nn.functional.avg_pool2d(larger.test[0].view(-1, 1, 32, 32), 4).flatten(1)
    assert (smaller - digits.test[0][kept]).abs().mean() < 0.1, "the same images"


@pytest.mark.parametrize("by", ["data_dir", "LOSSYTP_DATA"])
def test_mnist_is_read_from_a_folder_laid_out_like_the_hub(tmp_path, monkeypatch, by):
    folder = tmp_path / "ylecun" / "mnist" / "mnist"
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (6, 28, 28), dtype=np.uint8)
    features = Features({"image": Image(), "label": Value("int64")})
    for file, chosen in (("train-0", slice(0, 3)), ("train-1", slice(3, 4)), ("test-0", slice(4, 6))):
        rows = {"image": list(pixels[chosen]), "label": list(range(6))[chosen]}
        Dataset.from_dict(rows, features=features).to_parquet(folder / f"{file}.parquet")
    config = LabConfig(data_dir=str(tmp_path)) if by == "data_dir" else LabConfig()
    if by == "LOSSYTP_DATA":
        monkeypatch.setenv("LOSSYTP_DATA", str(tmp_path))
    digits = load_digits(config, CPU)
    assert digits.name == "mnist"
    assert torch.equal((digits.test[0] * 255).round().byte(), torch.tensor(pixels[4:]).flatten(1))
    assert (digits.train[1].tolist(), digits.test[1].tolist()) == ([0, 1, 2, 3], [4, 5])
    assert load_digits(LabConfig(data_dir=str(tmp_path), dataset="digits"), CPU).name == "digits"


@pytest.mark.parametrize("folder", ["empty", "missing"])
def test_a_data_dir_without_mnist_says_that_digits_take_its_place(tmp_path, capsys, folder):
    (tmp_path / "empty").mkdir()
    assert load_digits(LabConfig(data_dir=str(tmp_path / folder)), CPU).name == "digits"
    (told,) = capsys.readouterr().err.splitlines()
    assert folder in told
    assert "handwritten digits" in told
    load_digits(LabConfig(), CPU)
    load_digits(LabConfig(data_dir=str(tmp_path), dataset="digits"), CPU)
    assert capsys.readouterr().err == "", "nobody asked for MNIST"


def test_an_epoch_shows_each_image_at_most_once_in_another_order_than_the_next():
    batches = list(_batches(LabConfig(epochs=2, batch_size=10), 35))
    epochs = torch.cat(batches[:3]).tolist(), torch.cat(batches[3:]).tolist()
    assert len(batches) == 6
    assert [len(set(epoch)) for epoch in epochs] == [30, 30]
    assert epochs[0] != epochs[1]
    assert len(list(_batches(LabConfig(**SMALL), 35))) == SMALL["steps"]
    assert len(next(_batches(LabConfig(steps=10**15), 35))) == 35, "steps take no memory before they are due"
    assert torch.equal(next(_batches(LabConfig(batch_size=50), 35)).sort().values, torch.arange(35))
