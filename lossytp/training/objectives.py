"""Choose a configuration's objective."""

from typing import Any

from lossytp.training.config import PretrainConfig, RunSettings, TrainConfig
from lossytp.training.finetuning import FineTuning
from lossytp.training.objective import Objective
from lossytp.training.pretraining.objective import Pretraining

OBJECTIVES: dict[type[RunSettings], type[Objective[Any]]] = {TrainConfig: FineTuning, PretrainConfig: Pretraining}


def objective_of(config: RunSettings) -> type[Objective[Any]]:
    """Return the class of the run's objective."""
    return OBJECTIVES[type(config)]
