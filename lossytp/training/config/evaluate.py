"""The configuration of an evaluation without training. Importing this module costs no torch."""

from dataclasses import dataclass

from lossytp.parallel.layout import Layout
from lossytp.training.config.bounds import Count
from lossytp.training.config.groups import ComputeSettings
from lossytp.training.config.network import NetworkSettings
from lossytp.training.config.task import TaskSettings
from lossytp.training.config.train import TrainConfig


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(NetworkSettings, ComputeSettings, TaskSettings):
    """A model, a network, the task or text to evaluate the model on, and the output folder."""

    model_name: str = "gpt2-nano"
    """A folder that training wrote (best or last), or a language model by name."""
    dataset: str | None = None
    """The task to score, or a YAML file that declares one; if left out, the one that the model was fine-tuned on."""
    data_glob: str | None = None
    """Text files for a language model's perplexity, or stdlib: the sources of Python's standard library."""
    prompt: str | None = None
    """A text for a language model to continue."""
    max_length: Count | None = None
    """Largest number of tokens of an example or a block of text. If left out, that of the model's fine-tuning, or
    else 64, or the model's positions if these are fewer."""
    new_tokens: Count = 40
    """Tokens of the continuation."""
    output_dir: str = "output/evaluate"
    """Folder for evaluation.json."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.training()
        self.check_forward()

    def training(self) -> TrainConfig:
        """Return a training run's configuration with this network and precision; it checks them.

        Raises:
            ValueError: if training would refuse a value, or a combination.
        """
        return TrainConfig(
            **self.group(NetworkSettings),
            **self.group(ComputeSettings),
            model_name=self.model_name,
            dataset=self.dataset or TrainConfig.dataset,
            declaration=self.declaration,
            task_folder=self.task_folder if self.declaration else None,
            max_length=self.max_length or 1,
        )

    def layout(self, rank: int, world_size: int) -> Layout:
        """Return the run's layout over `world_size` processes, with this process's rank.

        Raises:
            ValueError: if the processes do not fit the tensor-parallel ranks.
        """
        return self.training().layout(rank, world_size)
