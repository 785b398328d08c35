"""Check that a pipeline's stages train as the whole transformer does."""

import pytest

from pipeline import PipelineLabConfig, batch_of, transformer
from tests.labs.dense import dense_losses, refusal, run_lab

pytestmark = pytest.mark.slow

TINY = {"steps": 5, "batch_size": 8, "hidden_dim": 16, "input_dim": 16, "num_layers": 2, "learning_rate": 0.01}
LAB = ("pipeline", "PipelineLabConfig")


@pytest.mark.parametrize("number", [1, 2])
def test_without_losses_all_stages_train_as_the_whole_transformer(processes, tmp_path, number):
    config = PipelineLabConfig(**TINY, output_dir=str(tmp_path))
    expected = dense_losses(config, transformer(config, 16), lambda images: (batch_of(images)["input_ids"],))
    assert len(set(expected)) == TINY["steps"]
    for rank in processes(number, run_lab, *LAB, config.as_dict()):
        assert rank["without_losses"]["losses"] == pytest.approx(expected, rel=1e-5)


def test_activations_and_their_gradients_lose_packets(processes, tmp_path):
    values = {**TINY, "hidden_dim": 64, "loss_rate": 0.2, "output_dir": str(tmp_path)}
    for rank in processes(2, run_lab, *LAB, values):
        assert all(rank["network"]["by_direction"][direction]["lost"] > 0 for direction in ("forward", "backward"))
        assert rank["network"]["by_operation"].keys() == {"send"}


def test_sizes_that_do_not_divide_are_refused(processes):
    messages = {
        "batch_size": (30, "batch_size = 30 cannot be split over 4 microbatches: give a multiple of 4"),
        "hidden_dim": (30, "hidden_dim = 30 cannot be split over 4 heads: give a multiple of 4"),
        "num_layers": (1, "pipeline_parallel_size = 2 is above the model's 1 blocks: give fewer"),
    }
    for name, (value, message) in messages.items():
        assert processes(2, refusal, *LAB, {name: value}) == [message, message]
