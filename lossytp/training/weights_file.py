"""Read the weights that another program saved with `torch.save`, such as the `.pth` files of an earlier study.

They replace the model's initial weights. The optimizer, the data and the learning rate begin anew, because their layout
differs from program to program.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lossytp.parallel.dense_boxes import Place

SUFFIXES = (".pth", ".pt")
ENTRIES = ("model", "model_state_dict", "state_dict", "module")  # under which programs keep weights beside other things
PREFIXES = ("module.", "_orig_mod.")  # of wrapped and of compiled models


def load_weights_(places: Iterable[Place], file: Path) -> None:
    """Fill this process's parameters with those of a dense model in a file.

    Raises:
        ValueError: if the file cannot be read without running code, or lacks a parameter, or has one of another shape.
    """
    weights = _weights(file)
    with torch.no_grad():
        for place in places:
            for box in place.boxes(place.parameter):
                if box.name not in weights:
                    raise ValueError(f"{file} lacks {box.name}: give the weights of the same model")
                tensor = weights[box.name]
                if tuple(tensor.shape) != tuple(box.shape):
                    raise ValueError(
                        f"{file} has {box.name} of shape {tuple(tensor.shape)}, and the model has {tuple(box.shape)}: "
                        "give the weights of the same model, whole"
                    )
                if not tensor.isfinite().all():
                    raise ValueError(f"{file} holds NaN or infinity in {box.name}: give finite weights")
                box.view.copy_(tensor[box.slices])


def _weights(file: Path) -> dict[str, Tensor]:
    try:
        content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{file} is not a file of tensors alone: give one that torch.save wrote, or leave checkpoint_path out"
        ) from error
    found = [content, *(content[name] for name in ENTRIES if name in content)] if isinstance(content, Mapping) else []
    weights = next((each for each in found if _is_state_dict(each)), None)
    if weights is None:
        raise ValueError(
            f"{file} holds no weights, at its top level or under {', '.join(ENTRIES)}: give another checkpoint_path"
        )
    for prefix in PREFIXES:
        weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return dict(weights)


def _is_state_dict(content: Any) -> bool:
    return isinstance(content, Mapping) and bool(content) and all(isinstance(each, Tensor) for each in content.values())
