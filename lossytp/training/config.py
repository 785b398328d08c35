"""The configuration of one training run, from the command line, a YAML file or a notebook's parameters.

Names are those of earlier studies' flags, so their command lines run here. Importing this module costs no torch.
"""

from dataclasses import dataclass, replace
from typing import Literal

from lossytp.network.checks import check_probability
from lossytp.parallel.layout import Layout
from lossytp.parallel.wiring import Wiring
from lossytp.training.combinations import check_combinations
from lossytp.training.models import check_model
from lossytp.training.network_config import NetworkConfig
from lossytp.training.tasks import task_named


@dataclass(frozen=True, kw_only=True)
class TrainConfig(NetworkConfig):
    """Everything that a training run's result depends on, and where it goes."""

    model_name: str = "gpt2-nano"
    """gpt2-nano, gpt2-micro; gpt2, gpt2-medium, -large, -xl, distilgpt2 or owner/name on the hub; a folder. With
    -scratch behind it: from random weights, which gpt2-nano-wide and -deep always need."""
    dataset: str = "docstrings"
    """The task: docstrings (which library is it from?), on every machine; or another of TASKS: sst2, mnli..."""
    implementation: Literal["lossytp", "dtensor", "megatron"] = "lossytp"
    """Whose layers: this project's, PyTorch's or Megatron-core's; the last two need a process a rank."""
    data_parallel_size: int = 1
    """Replicas that share each batch; needs torchrun."""
    data_parallel_type: Literal["ddp", "fsdp"] = "ddp"
    """Whole replicas, or parameters sharded over them."""
    pipeline_parallel_size: int = 1
    """Pipeline stages; needs torchrun."""
    pipeline_schedule: Literal["gpipe", "1f1b"] = "gpipe"
    """In what order a pipeline works off its microbatches."""
    pipeline_microbatches: int = 4
    """Into how many a batch is cut for a pipeline."""
    replicated_gradients: Literal["reliable", "lossy", "none"] = "reliable"
    """How ranks with streams of their own average the gradients of what all of them hold; none lets copies drift."""
    resync_every: int | None = None
    """Set drifting copies to their mean every so many steps."""
    exact_adjoint: bool = False
    """Backward knows what forward lost: in lossytp layers an ablation (no sender does), between a pipeline's stages,
    where the receiver knows, a repair; in both where there are both."""
    batch_size: int = 32
    """Examples a step, over all replicas."""
    max_length: int = 64
    """Tokens an example is cut to, a prompt together with its answer; the record says how many were cut."""
    max_samples: int | None = None
    """Training examples to keep; all when left out, or 0."""
    max_steps: int = 600
    """Optimiser steps."""
    eval_steps: int | None = None
    """Evaluate every so many steps; only at the end when left out."""
    patience: int | None = None
    """Stop after so many evaluations in a row without a better score over the lossy network."""
    target_accuracy: float | None = None
    """Record when the score over the lossy network reaches this and holds it at the next evaluation."""
    learning_rate: float = 1e-3
    """Peak learning rate of AdamW."""
    warmup_steps: int = 20
    """Steps of linear warm-up; `schedule` follows. At most max_steps, but for the default."""
    weight_decay: float = 0.01
    """Decoupled weight decay, on matrices alone."""
    gradient_clipping: float | None = None
    """Largest norm of all gradients together; unlimited when left out."""
    dropout: float = 0.0
    """Of embeddings, attention and residuals; heads in different processes share their attention masks."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate goes on behind the warm-up: down to zero, but for constant."""
    gradient_accumulation_steps: int = 1
    """Into how many portions a step's batch is cut, worked on one after another; what is learnt stays the same."""
    gradient_checkpointing: bool = False
    """Recompute a block's activations in backward, with the packet losses of the first pass."""
    unfreeze_last_layers: int | None = None
    """Train only so many blocks, the last ones, with the last norm and the head; 0 for these alone."""
    checkpoint_steps: int | None = 200
    """Save the state of the unfinished run every so many steps; the same command then goes on from there."""
    save_model: bool = False
    """Keep the model that was best in an evaluation with losses, and the last one, as folders best and last."""
    tensorboard: bool = False
    """Write curves for TensorBoard into the folder tensorboard of output_dir."""
    wandb: bool = False
    """Write curves to Weights and Biases (the extra wandb); WANDB_MODE=offline keeps them in output_dir."""
    link_gbits: float | None = None
    """Gbit/s of a simulated link, to tell time to accuracy on it; null for what training/simulated.py cannot time."""
    round_trip_us: float = 100.0
    """Round trip of that link, in microseconds."""
    output_dir: str = "output"
    """Folder for record.json."""

    def __post_init__(self) -> None:
        super().__post_init__()
        task_named(self.dataset)
        check_model(self.model_name, self.tensor_parallel_size, self.max_length)
        if self.target_accuracy is not None:
            check_probability("target_accuracy", self.target_accuracy)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout = {self.dropout:g} is not in [0, 1): give the share to drop, such as 0.1")
        if self.max_samples == 0:  # as in earlier studies
            object.__setattr__(self, "max_samples", None)
        self.check_at_least_one("batch_size", "max_length", "max_samples", "max_steps", "eval_steps")
        self.check_at_least_one("resync_every", "patience")
        self.check_at_least_one("data_parallel_size", "pipeline_parallel_size", "pipeline_microbatches")
        self.check_not_negative("learning_rate", "weight_decay", "warmup_steps")
        self.check_warmup("max_steps")
        self.check_positive("gradient_clipping")
        self.check_at_least_one("gradient_accumulation_steps", "checkpoint_steps")
        _check_training(self)
        check_combinations(self)

    def layout(self, rank: int, world_size: int) -> Layout:
        """This process's place among `world_size`; ValueError where they are too few or too many for the sizes."""
        layout = Layout(
            self.tensor_parallel_size, self.data_parallel_size, self.pipeline_parallel_size, rank, world_size
        )
        if self.implementation != "lossytp" and layout.tensor_processes != self.tensor_parallel_size:
            needed = self.tensor_parallel_size * self.data_parallel_size * self.pipeline_parallel_size
            raise ValueError(
                f"implementation = {self.implementation!r} needs a process for each tensor-parallel rank: start with "
                f"torchrun --standalone --nproc_per_node {needed}"
            )
        own_copies = self.replicated_gradients != "reliable" and layout.tensor_processes != self.tensor_parallel_size
        if own_copies and self.data_parallel_size > 1 and self.data_parallel_type == "fsdp":
            raise ValueError(
                f"replicated_gradients = {self.replicated_gradients!r} with fsdp, which would shard the axis on which "
                f"a process holds its ranks' copies: choose ddp, or start with torchrun --standalone --nproc_per_node "
                f"{self.tensor_parallel_size * self.data_parallel_size}"
            )
        return layout

    def wiring(self) -> Wiring:
        """How the tensor-parallel ranks exchange messages."""
        return replace(super().wiring(), exact_adjoint=self.exact_adjoint)


def _check_training(config: TrainConfig) -> None:
    for name in ("patience", "target_accuracy"):
        if getattr(config, name) is not None and config.eval_steps is None:
            raise ValueError(
                f"{name} = {getattr(config, name)} needs several evaluations: give eval_steps, such as 20, too"
            )
    if config.unfreeze_last_layers is not None and config.unfreeze_last_layers < 0:
        raise ValueError(f"unfreeze_last_layers = {config.unfreeze_last_layers} is negative: give 0 or more")
    if config.gradient_accumulation_steps > config.batch_size:
        raise ValueError(
            f"gradient_accumulation_steps = {config.gradient_accumulation_steps} is above batch_size = "
            f"{config.batch_size}: give as many or fewer"
        )
    for name, least, most in (("link_gbits", 1e-6, 1e6), ("round_trip_us", 0.0, 1e9)):
        value = getattr(config, name)
        if value is not None and not least <= value <= most:
            raise ValueError(f"{name} = {value:g} is not from {least:g} to {most:g}: give such a number")
