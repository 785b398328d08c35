"""The configuration of one pretraining run. Importing this module costs no torch."""

from dataclasses import dataclass

from lossytp.network.checks import check_known
from lossytp.training.models import PRESETS
from lossytp.training.settings import Settings


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(Settings):
    """What a pretrained base depends on, and where it goes."""

    model_name: str = "gpt2-nano"
    """The shape: gpt2-nano, gpt2-nano-wide, gpt2-nano-deep or gpt2-micro; weights are drawn from the seed."""
    tokenizer_path: str | None = None
    """A folder with a tokenizer; left out, a vocabulary is made of the text's beginning."""
    checkpoint_path: str | None = None
    """A checkpoint, or a folder whose newest is taken, to go on from; left out, output_dir's if it has one."""
    data_glob: str = "stdlib"
    """Pattern of parquet (column text) or text files; stdlib is the sources of Python's standard library."""
    validation_glob: str | None = None
    """Held-out files; left out, a few of data_glob's documents are held out, of stdlib a few files."""
    streaming: bool = True
    """Shuffle the next few thousand blocks; --no-streaming reads all text first and shuffles all."""
    num_proc: int = 2
    """Threads that work on microbatches side by side, which changes no result."""
    trust_remote_code: bool = False
    """Let a tokenizer run code that came with it."""
    batch_size: int = 64
    """Blocks a step."""
    microbatch_size: int = 4
    """Blocks whose activations are in memory together, for each thread; small ones stay in a CPU's cache."""
    block_size: int = 128
    """Tokens a block."""
    learning_rate: float = 3e-3
    """Peak learning rate of AdamW."""
    min_learning_rate: float = 1e-4
    """Where its cosine decay ends."""
    warmup_steps: int = 100
    """Steps of linear warm-up. At most total_steps, but for the default."""
    total_steps: int = 6200
    """Optimiser steps."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices alone."""
    gradient_clipping: float = 1.0
    """Largest norm of all gradients together."""
    bf16: bool = False
    """Matrix products in bfloat16; helps on GPUs and the few CPUs that have it."""
    eval_steps: int = 500
    """Validate, save a checkpoint and show a sample every so many steps."""
    seed: int = 0
    """Of initial weights and the order of blocks."""
    output_dir: str = "output/pretrain"
    """Folder for the model, its card, checkpoint and pretrain.json."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_known("model_name", self.model_name, PRESETS)
        self.check_at_least_one("num_proc", "batch_size", "microbatch_size", "block_size", "total_steps", "eval_steps")
        self.check_not_negative("learning_rate", "min_learning_rate", "weight_decay", "warmup_steps", "seed")
        self.check_warmup("total_steps")
        self.check_positive("gradient_clipping")
        positions = PRESETS[self.model_name]["n_positions"]
        if not 2 <= self.block_size <= positions:
            raise ValueError(
                f"block_size = {self.block_size} is not from 2 to {self.model_name}'s {positions} positions: give one"
            )
