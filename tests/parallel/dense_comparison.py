"""What every way of sharing activations has in common with the dense model: logits, training loss and gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.parallel.conftest import gradient_error, relative_error
from tests.parallel.rank_by_rank import training_loss
from tests.parallel.sharing_modes import MODES, ON_OWN_STREAMS, by_rank, fresh_gradients

KINDS = ["language model", "classifier"]
every_mode = pytest.mark.parametrize("mode", MODES)
# "shared" is compared in test_convert_equals_dense.py
new_modes = pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "shared"])
every_kind = pytest.mark.parametrize("kind", KINDS)
on_own_streams = pytest.mark.parametrize("mode", ON_OWN_STREAMS)


def logits_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Of each stream: one, or a rank's each."""
    output = model(**batch)
    return getattr(output, "rank_logits", output.logits.unsqueeze(0))


def float64_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean over streams of the training loss; transformers casts a language model's logits to fp32."""
    return torch.stack([training_loss(logits, batch) for logits in logits_of(model, batch)]).mean()


def assert_equals_dense(model: PreTrainedModel, dense: PreTrainedModel, batch: dict[str, Tensor]) -> None:
    """Logits of every rank, training loss, and every gradient of every copy; with the same dropout."""
    torch.manual_seed(5)
    expected = fresh_gradients(dense, float64_loss(dense, batch))
    torch.manual_seed(5)
    found = fresh_gradients(model, float64_loss(model, batch))
    for of_rank in by_rank(model, dense, found):
        assert gradient_error(of_rank, expected) < 1e-12
    torch.manual_seed(6)
    output = dense(**batch)
    torch.manual_seed(6)
    actual = model(**batch)
    each = getattr(actual, "rank_logits", actual.logits.unsqueeze(0))
    assert all(relative_error(logits, output.logits) < 1e-12 for logits in each)
    assert torch.equal(actual.logits, each[0])
    assert abs(actual.loss - output.loss) < 1e-6
