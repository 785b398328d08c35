"""The trained model as a folder that transformers reads."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedTokenizerBase

from lossytp.parallel.convert import gather
from lossytp.parallel.replicas import agreed
from lossytp.training.engine import Engine


def save_model(engine: Engine, folder: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Save the dense model in `folder`, in place of what is there; all processes take part, the first one writes.

    Where ranks have drifted apart it is the first rank's. A run killed meanwhile leaves it to its resumption.
    """
    module: Any = engine.module
    if isinstance(module, DistributedDataParallel):
        module = module.module
    weights = None
    with engine.network.reliable(), torch.no_grad():
        if isinstance(module, FSDPModule):
            weights = {name: _whole(tensor) for name, tensor in module.state_dict().items()}  # type: ignore[attr-defined]
        elif engine.implementation == "lossytp":
            module = gather(module)

    def write() -> None:
        part = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        module.save_pretrained(part, state_dict=weights)
        if tokenizer is not None:
            tokenizer.save_pretrained(part)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)

    agreed(write, engine.network)


def _whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()
