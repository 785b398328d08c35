"""Configurations of training, evaluation and pretraining. Importing them costs no torch.

Each is made of groups of settings, and its flags are flat: `NetworkSettings` and `ParallelismSettings`, for example,
are base classes of `TrainConfig`. Code that needs one group asks for that group.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

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
    "settings_class",
]


def settings_class(values: Mapping[str, Any]) -> type[RunSettings]:
    """Return the class of a run's configuration, from its values: pretraining has names that fine-tuning lacks."""
    names = {kind: {field.name for field in fields(kind)} for kind in (TrainConfig, PretrainConfig)}
    return PretrainConfig if values.keys() & (names[PretrainConfig] - names[TrainConfig]) else TrainConfig
