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
        ValueError: if the model's task is unknown, its declaration is wrong, or a `task_folder` has none to go with.
    """
    if config.dataset is not None:
        return config
    declaration = getattr(model_config, "finetuning_declaration", None)
    if config.task_folder is not None and declaration is None:
        raise ValueError(
            f"task_folder = {config.task_folder!r} is for a task that a YAML file declares, and {config.model_name} was"
            " fine-tuned on none: leave it out"
        )
    return replace(
        config,
        dataset=getattr(model_config, "finetuning_task", None),
        declaration=declaration,
        task_folder=config.task_folder or getattr(model_config, "finetuning_folder", None),
    )
