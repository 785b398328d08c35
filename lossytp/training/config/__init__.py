"""Configurations of training, evaluation and pretraining. Importing them costs no torch.

Each is made of groups of settings, and its flags are flat: `NetworkSettings` and `ParallelismSettings`, for example,
are base classes of `TrainConfig`. Code that needs one group asks for that group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from lossytp.network.checks import check_filled
from lossytp.training.config.evaluate import EvaluateConfig
from lossytp.training.config.groups import ComputeSettings
from lossytp.training.config.network import NetworkSettings
from lossytp.training.config.pretrain import PretrainConfig
from lossytp.training.config.run import RunSettings
from lossytp.training.config.task import TaskSettings
from lossytp.training.config.train import TrainConfig

__all__ = [
    "ComputeSettings",
    "EvaluateConfig",
    "NetworkSettings",
    "PretrainConfig",
    "RunSettings",
    "TaskSettings",
    "TrainConfig",
    "run_settings",
    "settings_class",
]


def settings_class(values: Mapping[str, Any]) -> type[RunSettings]:
    """Return the class of a run's configuration, from its values: pretraining has names that fine-tuning lacks."""
    names = {kind: {field.name for field in fields(kind)} for kind in (TrainConfig, PretrainConfig)}
    return PretrainConfig if values.keys() & (names[PretrainConfig] - names[TrainConfig]) else TrainConfig


def run_settings(cells: Sequence[Mapping[str, Any]], kind: type[RunSettings] | None = None) -> list[RunSettings]:
    """Return the configuration of each cell, of this kind or, if it is None, of fine-tuning or of pretraining.

    Raises:
        ValueError: if `cells` is not a list, or is empty, a name or value is unknown, or two cells share a folder.
    """
    check_filled("cells", cells)
    configs = [(kind or settings_class(cell)).from_dict(cell) for cell in cells]
    by_folder: dict[str, RunSettings] = {}
    for cell, config in zip(cells, configs, strict=True):
        if "output_dir" in cell and by_folder.setdefault(config.output_dir, config) != config:
            raise ValueError(f"output_dir = {config.output_dir!r} is that of several cells: give each its own")
    return configs
