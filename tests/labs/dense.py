"""Run labs, and the dense models that they spread over ranks."""

import importlib
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab import LabConfig, _batches, load_digits

SMALL: dict[str, Any] = {"steps": 6, "batch_size": 16, "hidden_dim": 64}


def run_lab(name: str, kind: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the lab's result."""
    module = importlib.import_module(name)
    return module.run(getattr(module, kind)(**values))


def refusal(name: str, kind: str, values: dict[str, Any], variables: dict[str, str] | None = None) -> str:
    """Return the message of the ValueError that the lab raises, with these variables of the environment."""
    os.environ.update(variables or {})
    with pytest.raises(ValueError, match=": ") as error:  # the fix follows a colon
        run_lab(name, kind, values)
    return str(error.value)


def dense_losses(config: LabConfig, model: nn.Module, inputs: Any = lambda images: (images,)) -> list[float]:
    """Train the dense model in this process on `inputs(images)`; return its training losses."""
    images, labels = load_digits(config, torch.device("cpu")).train
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate)
    losses = []
    for batch in _batches(config, len(labels)):
        optimizer.zero_grad()
        logits = model(*inputs(images[batch]))
        loss: Tensor = F.cross_entropy(getattr(logits, "logits", logits), labels[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
