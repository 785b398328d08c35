"""Test training of the last blocks alone."""

import pytest
import torch

from lossytp.training.loop import run
from lossytp.training.models import build_model, load_tokenizer
from tests.training.parallel_runs import weights

OWN_STREAMS = {"tensor_parallel_size": 2, "reliable_gather": False}
OWN_COPIES = OWN_STREAMS | {"replicated_gradients": "none"}


@pytest.mark.parametrize(("trained", "values"), [(0, {}), (1, {}), (2, OWN_STREAMS), (1, OWN_COPIES)], ids=str)
def test_only_the_last_blocks_norm_and_head_are_trained(toy, tmp_path, trained, values):
    values = {"loss_rate": 0.1, "save_model": True, **values}
    record = run(toy(unfreeze_last_layers=trained, **values))
    name = "gpt2-nano-scratch"
    settings = {"labels": ("first", "second"), "tokenizer": load_tokenizer(name), "dropout": 0.0, "seed": 0}
    dense = build_model(name, "classification", **settings)
    last = weights(tmp_path / "run" / "last")
    changed = {name for name, before in dense.state_dict().items() if not torch.equal(before, last[name])}
    expected = [f"transformer.h.{block}." for block in range(4 - trained, 4)] + ["transformer.ln_f.", "score."]
    assert changed == {name for name in last if name.startswith(tuple(expected))}
    whole = run(toy(output_dir=str(tmp_path / "whole"), **values))
    directions = [each["network"]["training"]["by_direction"] for each in (record, whole)]
    assert directions[0]["forward"]["packets"] == directions[1]["forward"]["packets"]
    frozen = directions[0].get("backward", {"packets": 0})["packets"]
    assert frozen == directions[1]["backward"]["packets"] * trained / 4
