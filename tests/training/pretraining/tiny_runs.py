"""Compare and interrupt short pretraining of a tiny model."""

from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM

from lossytp.training.pretraining import run as pretraining
from lossytp.training.pretraining.run import run

TINY = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 320, "n_positions": 64}
STEPS = 8
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def losses(statistics):
    return [point["loss"] for point in statistics["curves"]["train_loss"]]


def validation_losses(statistics):
    return [(point["step"], point["validation_loss"]) for point in statistics["curves"]["eval"]]


def weights(config):
    return AutoModelForCausalLM.from_pretrained(config.output_dir).state_dict()


def assert_same(config, statistics, other, other_statistics):
    """Assert that losses and weights are equal to the last bit."""
    assert losses(statistics) == losses(other_statistics)
    assert validation_losses(statistics) == validation_losses(other_statistics)
    assert statistics["validation_loss"] == other_statistics["validation_loss"]
    mine, theirs = weights(config), weights(other)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def stopped(config, at_step):
    """Run, and interrupt the run before a step."""
    step = pretraining._Pretraining._step

    def stops(self, number, pool):
        if number == at_step:
            raise KeyboardInterrupt
        return step(self, number, pool)

    with patch.object(pretraining._Pretraining, "_step", stops), pytest.raises(KeyboardInterrupt):
        run(config)
