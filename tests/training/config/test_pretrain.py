import pytest

from lossytp.training.command_line import parse
from lossytp.training.config import PretrainConfig, TrainConfig, run_settings
from lossytp.training.models import MODELS

NANO = str(MODELS / "gpt2-nano")


def test_the_earlier_studys_command_line():
    words = "--tokenizer-path tok --checkpoint-path last --data-glob data/*.parquet --batch-size 6 --block-size 64"
    words += " --learning-rate 6e-4 --min-learning-rate 6e-5 --warmup-steps 10 --total-steps 250 --weight-decay 0.1"
    words += " --no-streaming --num-proc 4 --trust-remote-code"
    expected = {
        "tokenizer_path": "tok",
        "checkpoint_path": "last",
        "data_glob": "data/*.parquet",
        "batch_size": 6,
        "block_size": 64,
        "learning_rate": 6e-4,
        "min_learning_rate": 6e-5,
        "warmup_steps": 10,
        "total_steps": 250,
        "streaming": False,
        "num_proc": 4,
        "trust_remote_code": True,
    }
    assert parse(PretrainConfig, None, words.split()).changes() == expected
    assert (
        parse(PretrainConfig, None, words.replace("-", "_").replace("__", "--").replace("e_", "e-").split()).changes()
        == expected
    )


@pytest.mark.parametrize("off", ["0", "0.0", "none", "None"])
def test_clipping_can_be_off(off):
    for words in (["--gradient_clipping", off], [f"--gradient-clipping={off}"]):
        assert parse(PretrainConfig, None, words) == PretrainConfig(gradient_clipping=None)
    assert parse(PretrainConfig, None, ["--eval_steps", "none"]).eval_steps is None
    assert TrainConfig(gradient_clipping=0) == TrainConfig()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"block_size": 1}, "block_size = 1 is below 2: give 2 or more"),
        ({"block_size": 0, "tokens_per_step": 64}, "block_size = 0 is below 2: give 2 or more"),
        (
            {"model_name": NANO, "block_size": 129},
            "block_size = 129 is above .*gpt2-nano's 128 positions",
        ),
        ({"model_name": "gpt5"}, "model_name = 'gpt5'"),
        ({"model_name": ""}, "model_name = '' is empty"),
        ({"min_learning_rate": 1e38}, r"min_learning_rate = 1e\+38 is above 1e\+37"),
        ({"model_name": "a folder"}, "model_name = 'a folder' is unknown: choose one of gpt2-nano"),
        ({"model_name": "a" * 600}, "model_name = 'aaa.* is unknown: choose one of gpt2-nano"),
        (
            {"dataset": "shakespeare", "data_glob": "*.txt"},
            r"dataset = 'shakespeare' and data_glob = '\*.txt' both name",
        ),
        ({"tokens_per_step": 1000}, "tokens_per_step = 1000 is not a multiple of block_size = 128: give one that is"),
        ({"tokens_per_step": 1280, "batch_size": 9}, "tokens_per_step = 1280 is 10 blocks, and batch_size = 9: leave"),
        ({"data_parallel_size": 3}, "batch_size = 64 is not a multiple of data_parallel_size = 3"),
        ({"pipeline_parallel_size": 2}, "a pipeline, which supports classification, not language modelling"),
        ({"loss_rate": 0.1}, "loss_rate = 0.1 has no effect on a single rank"),
        (
            {"learning_rate": 5e-5},
            "min_learning_rate = 0.0001 is above learning_rate = 5e-05: give at most that, such as 5e-06",
        ),
        ({"batch_size": 0}, "batch_size = 0 is below 1"),
        ({"learning_rate": -1.0}, "learning_rate = -1.0 is below 0"),
        ({"warmup_steps": 9, "total_steps": 8}, "warmup_steps = 9 is above total_steps = 8: give as many or fewer"),
    ],
)
def test_impossible_values_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        PretrainConfig(**values)


def test_shapes_from_scratch_take_blocks_of_up_to_4096_tokens():
    for name in ("gpt2-nano", "gpt2-nano-scratch", "gpt2", "llama-nano", "llama-124m"):
        assert PretrainConfig(model_name=name, block_size=4096, tensor_parallel_size=2).microbatches == 16


def test_a_budget_of_tokens_is_that_many_blocks():
    config = PretrainConfig(model_name="gpt2", block_size=1024, tokens_per_step=524288, microbatch_size=8)
    assert (config.optimizer.batch_size, config.microbatches) == (512, 64)
    assert PretrainConfig(**config.as_dict()) == config
    shared = PretrainConfig(**{**config.as_dict(), "data_parallel_size": 4})
    assert shared.microbatches == 16


def test_cells_are_of_pretraining_if_they_name_what_it_alone_has():
    cells = run_settings([{"max_steps": 3}, {"total_steps": 3}, {"loss_rate": 0.1}])
    assert [type(each) for each in cells] == [TrainConfig, PretrainConfig, TrainConfig]
    with pytest.raises(ValueError, match="max_steps"):
        run_settings([{"total_steps": 3, "max_steps": 3}])
    with pytest.raises(ValueError, match=r"cells = \[\] is not a list of at least one"):
        run_settings([])


@pytest.fixture
def over(monkeypatch):
    """Return `over(processes, **values)`, which makes the configuration in one of so many processes."""

    def make(processes, **values):
        place = {"RANK": "0", "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        return PretrainConfig(**values)

    return make


def test_without_a_number_of_ranks_each_process_that_replicas_leave_is_one(over):
    for values, processes, ranks in (
        ({}, 1, 1),
        ({}, 2, 2),
        ({"loss_rate": 0.1}, 2, 2),
        ({"loss_rate": 0.1, "tensor_parallel_size": 1}, 2, 2),
        ({"enable_loss_parallelism": True, "lossy_logits": True, "loss_rate": 0.1}, 2, 2),
        ({"reliable_gather": False, "loss_rate": 0.1}, 2, 2),
        ({"deferred_init": True}, 2, 2),
        ({"sequence_parallel": True}, 2, 2),
        ({"data_parallel_size": 2}, 2, 1),
        ({"data_parallel_size": 2}, 4, 2),
        ({"data_parallel_size": 2, "lossy_links": "2>3", "lossy_direction": "forward", "loss_rate": 0.1}, 4, 2),
        ({"tensor_parallel_size": 4}, 2, 4),
    ):
        config = over(processes, **values)
        assert config.network.tensor_parallel_size == ranks
        config.layout(0, processes)
        assert PretrainConfig.from_dict(config.as_dict()) == config


@pytest.mark.parametrize(
    ("processes", "values", "message"),
    [
        (3, {}, "tensor_parallel_size = 3 does not divide the model's 8 heads"),
        (1, {"loss_rate": 0.1}, "loss_rate = 0.1 has no effect on a single rank"),
        (2, {"data_parallel_size": 2, "lossy_links": "2>3", "loss_rate": 0.1}, "link 2>3 names rank 3"),
        (2, {"data_parallel_size": 2, "lossy_direction": "forward", "loss_rate": 0.1}, "lossy_direction = 'forward'"),
        (2, {"lossy_links": "2>3", "loss_rate": 0.1}, "lossy_links names 2>3"),
    ],
)
def test_the_checks_know_the_ranks(over, processes, values, message):
    with pytest.raises(ValueError, match=message):
        over(processes, **values)
