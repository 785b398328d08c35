"""What a saved model remembers of its fine-tuning, in its config.json: the task, its declaration, and the length."""

from dataclasses import replace
from typing import Any

from lossytp.training.config import EvaluateConfig, TrainConfig


def finetuned_on(config: TrainConfig) -> dict[str, Any]:
    """Return the entries of a model's config.json that say what it is fine-tuned on."""
    entries: dict[str, Any] = {"finetuning_task": config.dataset, "finetuning_max_length": config.max_length}
    if config.declaration is not None:
        entries |= {"finetuning_declaration": config.declaration, "finetuning_folder": config.task_folder}
    return entries


def with_its_task(config: EvaluateConfig, model_config: Any) -> EvaluateConfig:
    """Return the configuration with the task that the model was fine-tuned on, unless it names a task already.

    Raises:
        ValueError: if the model's task is unknown, or its declaration is wrong.
    """
    if config.dataset is not None:
        return config
    return replace(
        config,
        dataset=getattr(model_config, "finetuning_task", None),
        declaration=getattr(model_config, "finetuning_declaration", None),
        task_folder=getattr(model_config, "finetuning_folder", None),
    )
