"""Groups of settings: data, optimizer, precision, evaluation and output."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le, Lt

from lossytp.network.checks import check_probability
from lossytp.training.config.bounds import Count, CountFromZero, LearningRate, NotNegative
from lossytp.training.config.settings import Settings
from lossytp.training.config.task import TaskSettings


@dataclass(frozen=True, kw_only=True)
class ComputeSettings(Settings):
    """The precision, and the test examples to evaluate on."""

    eval_samples: Count | None = None
    """Test examples to evaluate on; all if left out."""
    bf16: bool = False
    """Compute matrix products in bfloat16. Tensor parallelism then sends bfloat16; other traffic stays float32."""
    fp16: bool = False
    """Compute matrix products in float16, and scale the training loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bf16 and self.fp16:
            raise ValueError("bf16 and fp16 are both True: choose one")


@dataclass(frozen=True, kw_only=True)
class DataSettings(TaskSettings):
    """The task and its examples."""

    dataset: str = "docstrings"
    """The task: docstrings (which library is a text from?), which needs no data; another of TASKS: sst2, mnli...; or a
    YAML file that declares one of your own."""
    max_length: Count = 64
    """Largest number of tokens of an example, or of a prompt and its answer together. The record has the share of
    truncated examples."""
    max_samples: CountFromZero | None = None
    """Number of training examples to use; all if left out, or 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_samples == 0:  # as in earlier studies
            object.__setattr__(self, "max_samples", None)


@dataclass(frozen=True, kw_only=True)
class AdamWSettings(Settings):
    """AdamW and its warm-up, for fine-tuning and pretraining."""

    learning_rate: LearningRate = 1e-3
    """Peak learning rate of AdamW."""
    warmup_steps: CountFromZero = 20
    """Steps of linear warm-up. A value above the number of steps is refused, unless it is the default."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay, applied to matrices only."""
    gradient_clipping: NotNegative | None = None
    """Largest norm of all gradients together. If left out, there is no limit; 0 and None mean the same."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gradient_clipping == 0:
            object.__setattr__(self, "gradient_clipping", None)

    def check_warmup(self, steps: str) -> None:
        """Raise ValueError if a chosen `warmup_steps` is above the field `steps`.

        The default may be above: a short trial keeps it, and ends while its learning rate still rises.
        """
        warmup, total = self.changes().get("warmup_steps", 0), getattr(self, steps)
        if warmup > total:
            raise ValueError(f"warmup_steps = {warmup} is above {steps} = {total}: give as many or fewer")


@dataclass(frozen=True, kw_only=True)
class OptimisationSettings(AdamWSettings):
    """The optimizer's steps."""

    batch_size: Count = 32
    """Examples per step, over all replicas."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate falls after the warm-up; constant keeps it."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Dropout of embeddings, attention and residuals. Heads in different processes share their attention masks."""
    gradient_checkpointing: bool = False
    """Recompute each block's activations in backward, with the packet losses of the first pass."""
    unfreeze_last_layers: CountFromZero | None = None
    """Train only this many last blocks, the last norm and the head; 0 trains only the norm and the head."""


@dataclass(frozen=True, kw_only=True)
class WatchingSettings(Settings):
    """When a run is evaluated, and what it saves."""

    eval_steps: Count | None = None
    """Steps between evaluations; if left out, evaluate only at the end."""
    checkpoint_steps: Count | None = 200
    """Steps between checkpoints of the unfinished run; the same command resumes from the last one."""
    checkpoint_path: str | None = None
    """A checkpoint to resume from, or a folder whose newest checkpoint counts. If the folder is new or empty, the run
    starts anew and writes its checkpoints there. A .pth file of another program gives the weights alone. If left out,
    the run resumes from the newest checkpoint in output_dir, if there is one."""
    keep_checkpoints: Count = 1
    """Number of checkpoints to keep, the newest ones. If it is above 1, they stay after fine-tuning has finished."""
    save_model: bool = False
    """Save the model with the best lossy evaluation and the last model, in float32, in the folders best and last."""
    statistics: bool = False
    """Write the numbers of each step and evaluation into output_dir/statistics.jsonl, while the run goes on."""
    tensorboard: bool = False
    """Write curves for TensorBoard into output_dir/tensorboard."""
    wandb: bool = False
    """Write curves to Weights and Biases (the extra wandb); WANDB_MODE=offline keeps them in output_dir."""
    link_gbits: Annotated[float, Ge(1e-6), Le(1e6)] | None = None
    """Gbit/s of a simulated link, for time to accuracy; null where training/simulated.py cannot compute it."""
    round_trip_us: Annotated[float, Ge(0), Le(1e9)] = 100.0
    """Round trip of the simulated link (link_gbits), in microseconds."""
    output_dir: str = "output"
    """Folder for record.json."""


@dataclass(frozen=True, kw_only=True)
class FineTuningSettings(WatchingSettings):
    """The steps of fine-tuning, and the scores that it waits for."""

    max_steps: Count = 600
    """Optimizer steps."""
    gradient_accumulation_steps: Count = 1
    """Number of microbatches accumulated per optimizer step. Without packet losses it changes results
    only by rounding; with them, its smaller messages lose other packets."""
    patience: Count | None = None
    """Stop after this many evaluations in a row without a better score over the lossy network."""
    target_accuracy: float | None = None
    """Record when the score over the lossy network first reaches this in two evaluations in a row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_accuracy is not None:
            check_probability("target_accuracy", self.target_accuracy)
        for name in ("patience", "target_accuracy"):
            if getattr(self, name) is not None and self.eval_steps is None:
                raise ValueError(
                    f"{name} = {getattr(self, name)} needs several evaluations: give eval_steps, such as 20, too"
                )
