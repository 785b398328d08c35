"""Configurations of training, evaluation and pretraining. Importing them costs no torch.

Each is made of groups of settings, and its flags are flat: `NetworkSettings` and `ParallelismSettings`, for example,
are base classes of `TrainConfig`. Code that needs one group asks for that group.
"""

from lossytp.training.config.evaluate import EvaluateConfig
from lossytp.training.config.groups import ComputeSettings
from lossytp.training.config.network import NetworkSettings
from lossytp.training.config.pretrain import PretrainConfig
from lossytp.training.config.task import TaskSettings
from lossytp.training.config.train import TrainConfig

__all__ = ["ComputeSettings", "EvaluateConfig", "NetworkSettings", "PretrainConfig", "TaskSettings", "TrainConfig"]
