"""Test that the engine compares its parallel model with the dense one before it trains, without moving the latter."""

import math
import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch

import lossytp as ltp
from lossytp.parallel.group import Layout, rank_and_world_size
from lossytp.parallel.replicas import local
from lossytp.training import engine
from lossytp.training.config import TrainConfig
from lossytp.training.engine import connected_processes
from tests.parallel.conftest import tiny_gpt2


@pytest.mark.parametrize(
    ("precision", "factor", "error"),
    [("highest", 1.001, "1.0e-03"), ("highest", math.nan, "nan"), ("high", 1.1, "1.0e-01")],
)
def test_a_parallel_model_that_computes_something_else_is_refused(monkeypatch, precision, factor, error):
    """A GPU rounds more coarsely in TF32 (precision "high") than the CPU, where the dense model is."""
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    config, dense = TrainConfig(tensor_parallel_size=2, loss_rate=0.5), tiny_gpt2("classifier", dtype=torch.float32)
    network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.5))
    parts = config, dense, network, Layout(2), torch.device("cpu")
    assert engine.Engine(*parts).module.training, "losses are no other function"
    right = engine.Engine._tensor_parallel

    def wrong(self, dense):
        model = right(self, dense)
        model.score.weight = torch.nn.Parameter(factor * model.score.weight)
        return model

    monkeypatch.setattr(engine.Engine, "_tensor_parallel", wrong)
    with pytest.raises(ValueError, match=f"logits differ from the dense model's by {error} of the largest one, above"):
        engine.Engine(*parts)


def nbytes(model: torch.nn.Module) -> int:
    return sum(local(parameter).nbytes for parameter in model.parameters())


PARALLELISMS: dict[str, dict[str, Any]] = {
    "lossytp": {"tensor_parallel_size": 2},
    "dtensor": {"tensor_parallel_size": 2, "implementation": "dtensor"},
    "fsdp": {"tensor_parallel_size": 1, "data_parallel_size": 2, "data_parallel_type": "fsdp"},
    "pipeline": {"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
}


def moved_share(name: str) -> tuple[float, bool]:
    """Return the most bytes moved to this process's device at once, as a share of the dense model's.

    Also whether the dense model is freed.
    """
    config = TrainConfig(loss_rate=0.1, **PARALLELISMS[name])
    layout, moved, move = config.layout(*rank_and_world_size()), {}, torch.nn.Module.to

    def spy(module: torch.nn.Module, *where: Any, **how: Any) -> torch.nn.Module:
        moved[id(module)] = nbytes(module)
        return move(module, *where, **how)

    with connected_processes(config, layout) as network:
        dense = tiny_gpt2("classifier", dtype=torch.float32)
        whole, weight = nbytes(dense), weakref.ref(dense.transformer.h[0].mlp.c_fc.weight)
        with patch.object(torch.nn.Module, "to", spy):
            built = engine.Engine(config, dense, network, layout, torch.device("cpu"))
        assert id(built.module) in moved
        del dense
        return max(moved.values()) / whole, weight() is None


@pytest.mark.parametrize("name", PARALLELISMS)
def test_a_device_receives_its_shard_alone(processes, name):
    for share, freed in processes(2, moved_share, name):
        assert share < 0.75
        assert freed


def test_virtual_ranks_are_moved_once():
    """The dense model stays where it is."""
    config, dense = TrainConfig(tensor_parallel_size=2), tiny_gpt2("classifier", dtype=torch.float32)
    with patch.object(torch.nn.Module, "to", autospec=True, side_effect=lambda module, *_: module) as to:
        built = engine.Engine(config, dense, config.network.build(), Layout(2), torch.device("cpu"))
    assert {id(call.args[0]) for call in to.call_args_list} == {id(built.module)}
