"""The configuration of an evaluation without training. Importing this module costs no torch."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from lossytp.parallel.layout import Layout
from lossytp.training.combinations import check_combinations
from lossytp.training.models import check_model
from lossytp.training.network_config import NetworkConfig
from lossytp.training.tasks import task_named


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(NetworkConfig):
    """What a model answers over a network, and where the answers go."""

    model_name: str = "gpt2-nano"
    """A folder that training wrote (best or last), or a language model by name."""
    dataset: str | None = None
    """The task to score; left out, the one that the model was fine-tuned on, if it was."""
    data_glob: str | None = None
    """Text files for a language model's perplexity, or stdlib: the sources of Python's standard library."""
    prompt: str | None = None
    """A text for a language model to go on from."""
    max_length: int | None = None
    """Tokens an example, or a block of text, is cut to; left out, as in its fine-tuning, else 64 or all it reads."""
    new_tokens: int = 40
    """Tokens it goes on for."""
    output_dir: str = "output/evaluate"
    """Folder for evaluation.json."""

    # what only training varies; `check_combinations` and `Engine` read it of both
    implementation: ClassVar[str] = "lossytp"
    data_parallel_size: ClassVar[int] = 1
    data_parallel_type: ClassVar[Literal["ddp"]] = "ddp"
    pipeline_parallel_size: ClassVar[int] = 1
    pipeline_schedule: ClassVar[Literal["gpipe"]] = "gpipe"
    pipeline_microbatches: ClassVar[int] = 1
    replicated_gradients: ClassVar[str] = "reliable"
    resync_every: ClassVar[None] = None
    exact_adjoint: ClassVar[bool] = False
    gradient_checkpointing: ClassVar[bool] = False
    gradient_accumulation_steps: ClassVar[int] = 1
    unfreeze_last_layers: ClassVar[None] = None
    save_model: ClassVar[bool] = False
    batch_size: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least_one("new_tokens", "max_length")
        if self.dataset is not None:
            task_named(self.dataset)
        check_model(self.model_name, self.tensor_parallel_size, self.max_length or 1)
        check_combinations(self)
        if self.lossy_direction == "backward":
            raise ValueError("lossy_direction = 'backward' where nothing is sent backward: leave it out")

    def layout(self, rank: int, world_size: int) -> Layout:
        """This process's place among `world_size`; ValueError where they do not fit the tensor-parallel ranks."""
        return Layout(self.tensor_parallel_size, 1, 1, rank, world_size)
