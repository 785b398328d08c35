"""Test that the engine compares its parallel model with the dense one before it trains."""

import math

import pytest
import torch

import lossytp as ltp
from lossytp.parallel.layout import Layout
from lossytp.training import engine
from lossytp.training.config import TrainConfig
from tests.parallel.conftest import tiny_gpt2


@pytest.mark.parametrize(("factor", "error"), [(1.001, "1.0e-03"), (math.nan, "nan")])
def test_a_parallel_model_that_computes_something_else_is_refused(monkeypatch, factor, error):
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
