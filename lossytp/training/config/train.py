"""The configuration of one fine-tuning run, from the command line, a YAML file or a notebook's parameters.

Names are those of earlier studies' flags, so their command lines run here. Importing this module costs no torch.
"""

from dataclasses import dataclass

from lossytp.training.config.groups import DataSettings, FineTuningSettings
from lossytp.training.config.run import RunSettings
from lossytp.training.shapes import check_model


@dataclass(frozen=True, kw_only=True)
class TrainConfig(FineTuningSettings, RunSettings, DataSettings):
    """Everything that a training run's result depends on, and its output folder."""

    model_name: str = "gpt2-nano"
    """gpt2-nano or gpt2-micro; gpt2, gpt2-medium, -large, -xl, distilgpt2 or owner/name on the hub; or a folder. The
    suffix -scratch gives random weights; gpt2-nano-wide and -deep exist only with it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_warmup("max_steps")
        check_model(self.model_name, self.tensor_parallel_size, self.max_length)
        if self.gradient_accumulation_steps > self.batch_size:
            raise ValueError(
                f"gradient_accumulation_steps = {self.gradient_accumulation_steps} is above batch_size = "
                f"{self.batch_size}: give as many or fewer"
            )
        if self.implementation in ("custom", "pytorch") and self.data_parallel_size == 1:
            raise ValueError(
                f"implementation = {self.implementation!r} says whose ddp or fsdp runs, but there are no replicas: "
                "give data_parallel_size above 1, or lossytp, dtensor or megatron"
            )
        self.check_run()

    @property
    def steps(self) -> int:
        return self.max_steps

    @property
    def kind(self) -> str:
        return self.definition().kind

    @property
    def task(self) -> str:
        return self.dataset

    @property
    def microbatches(self) -> int:
        return self.gradient_accumulation_steps
