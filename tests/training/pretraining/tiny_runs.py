"""Compare and interrupt short pretraining of a tiny model."""

from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM

from lossytp.training import models, text
from lossytp.training.config import PretrainConfig
from lossytp.training.loop import Run, run

TINY = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 320, "n_positions": 64}
STEPS = 8
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def losses(record):
    return [point["loss"] for point in record["curves"]["train_loss"]]


def validation_losses(record):
    return [(point["step"], point["cross_entropy_clean"]) for point in record["curves"]["eval"]]


def weights(config):
    return AutoModelForCausalLM.from_pretrained(config.output.output_dir).state_dict()


def assert_same(config, record, other, other_record):
    assert losses(record) == losses(other_record)
    assert validation_losses(record) == validation_losses(other_record)
    assert record["final"] == other_record["final"]
    assert record["network"] == other_record["network"]
    mine, theirs = weights(config), weights(other)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def stopped(config, at_step):
    step = Run.train_step

    def stops(self, number, batch):
        if number == at_step:
            raise KeyboardInterrupt
        return step(self, number, batch)

    with patch.object(Run, "train_step", stops), pytest.raises(KeyboardInterrupt):
        run(config)


def on_rank_train(values):
    with patch.dict(models.PRESETS, {"gpt2-nano": TINY}), patch.object(text, "SHUFFLED_BLOCKS", 30):
        return run(PretrainConfig(**values))
