"""The configuration of one pretraining run. Importing this module costs no torch."""

from dataclasses import dataclass

from lossytp.network.checks import check_known
from lossytp.training.config.bounds import Count, CountFromZero, NotNegative, Positive
from lossytp.training.config.groups import AdamWSettings
from lossytp.training.models import PRESETS


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(AdamWSettings):
    """What a pretrained base depends on, and its output folder."""

    model_name: str = "gpt2-nano"
    """The shape: gpt2-nano, gpt2-nano-wide, gpt2-nano-deep or gpt2-micro; the seed draws the weights."""
    tokenizer_path: str | None = None
    """A folder with a tokenizer; if left out, a vocabulary is made from the text's beginning."""
    checkpoint_path: str | None = None
    """A checkpoint to resume from, or a folder, whose newest checkpoint counts; if left out, output_dir's if any."""
    data_glob: str = "stdlib"
    """Pattern of parquet (column text) or text files; stdlib is the sources of Python's standard library."""
    validation_glob: str | None = None
    """Held-out files; if left out, some of data_glob's documents are held out, or some of stdlib's files."""
    streaming: bool = True
    """Shuffle the next few thousand blocks; --no-streaming reads all text first and shuffles all."""
    num_proc: Count = 2
    """Threads that compute microbatches in parallel; it changes no result."""
    trust_remote_code: bool = False
    """Let a tokenizer run code that came with it."""
    batch_size: Count = 64
    """Blocks a step."""
    microbatch_size: Count = 4
    """Blocks in memory at once for each thread; few blocks stay in a CPU's cache."""
    block_size: int = 128
    """Tokens a block."""
    learning_rate: NotNegative = 3e-3
    """Peak learning rate of AdamW."""
    min_learning_rate: NotNegative = 1e-4
    """Learning rate at the end of its cosine decay."""
    warmup_steps: CountFromZero = 100
    """Steps of linear warm-up. At most total_steps, but for the default."""
    total_steps: Count = 6200
    """Optimiser steps."""
    weight_decay: NotNegative = 0.1
    """Decoupled weight decay, of matrices only."""
    gradient_clipping: Positive = 1.0
    """Largest norm of all gradients together."""
    bf16: bool = False
    """Compute matrix products in bfloat16; it helps on GPUs and the few CPUs that have it."""
    eval_steps: Count = 500
    """Steps between validations, each with a checkpoint and a sample."""
    seed: CountFromZero = 0
    """Of initial weights and the order of blocks."""
    output_dir: str = "output/pretrain"
    """Folder for the model, its card, checkpoint and pretrain.json."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_known("model_name", self.model_name, PRESETS)
        self.check_warmup("total_steps")
        positions = PRESETS[self.model_name]["n_positions"]
        if not 2 <= self.block_size <= positions:
            raise ValueError(
                f"block_size = {self.block_size} is not from 2 to {self.model_name}'s {positions} positions: give a "
                "number in between"
            )
