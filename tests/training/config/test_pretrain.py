import pytest

from lossytp.training.command_line import parse
from lossytp.training.config import PretrainConfig


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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"block_size": 129}, "block_size = 129 is above gpt2-nano's 128 positions: give as many or fewer"),
        ({"model_name": "gpt2"}, "model_name = 'gpt2'"),
        ({"batch_size": 0}, "batch_size = 0 is below 1"),
        ({"learning_rate": -1.0}, "learning_rate = -1.0 is below 0"),
        ({"warmup_steps": 9, "total_steps": 8}, "warmup_steps = 9 is above total_steps = 8: give as many or fewer"),
    ],
)
def test_impossible_values_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        PretrainConfig(**values)
