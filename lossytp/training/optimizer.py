"""Build AdamW, and compute learning rates that warm up and decay."""

import math
from typing import Any

import torch
from torch import nn

from lossytp.parallel.own_streams import PerRank


def build_optimizer(
    model: nn.Module, *, learning_rate: float, weight_decay: float, betas: tuple[float, float] = (0.9, 0.999)
) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov and Hutter, ICLR 2019) over all parameters that are not frozen.

    Weight decay applies to the weights of linear layers and embeddings, not to biases and norms.
    """
    norms = {id(p) for module in model.modules() if is_norm(module) for p in module.parameters(recurse=False)}
    groups: dict[tuple[bool, Any], list[nn.Parameter]] = {}  # one kernel cannot mix tensors of different meshes
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = not (name.endswith("bias") or id(parameter) in norms)
            groups.setdefault((decays, getattr(parameter, "device_mesh", None)), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": weight_decay if decays else 0.0}
            for (decays, _), parameters in groups.items()
        ],
        lr=learning_rate,
        betas=betas,
    )


def is_norm(module: nn.Module) -> bool:
    """Return whether the module is a LayerNorm, a LlamaRMSNorm or another class that is named so."""
    return "Norm" in type(module.template[0] if isinstance(module, PerRank) else module).__name__


def learning_rate_factor(
    step: int, *, schedule: str, warmup_steps: int, total_steps: int, smallest: float = 0.0
) -> float:
    """Return the learning rate at `step` as a share of its peak: linear warm-up, then decay to `smallest`.

    Args:
        step: counted from 0.
        schedule: "linear", "cosine" (Loshchilov and Hutter, ICLR 2017, without restarts) or "constant".
        warmup_steps: steps of warm-up.
        total_steps: steps of the whole run.
        smallest: the share at the end of the decay.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    share = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    remaining = 1 - share if schedule == "linear" else (1 + math.cos(math.pi * share)) / 2
    return smallest + (1 - smallest) * remaining
