"""The configuration of one pretraining run. Importing this module costs no torch.

Names are those of earlier studies' flags, so their command lines run here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge

from lossytp.parallel.layout import rank_and_world_size
from lossytp.training.config.bounds import Count, CountFromZero, LearningRate, NotNegative
from lossytp.training.config.run import RunSettings
from lossytp.training.config.settings import Settings
from lossytp.training.shapes import SCRATCH, check_model, from_scratch, shape_of

PATHS = ("data_glob", "validation_glob", "tokenizer_path")


@dataclass(frozen=True, kw_only=True)
class TextSettings(Settings):
    """The text, and how it is cut into blocks."""

    tokenizer_path: str | None = None
    """A folder with a tokenizer; if left out, the model's, or a vocabulary made from the text's beginning."""
    dataset: str | None = None
    """Text of the hub, or of LOSSYTP_DATA, in place of data_glob: shakespeare, openwebtext, or owner/name."""
    data_glob: str = "stdlib"
    """Pattern of text files, or of parquet, csv or json files with a column text; stdlib is the sources of Python's
    standard library."""
    validation_glob: str | None = None
    """Held-out files; if left out, some of the documents are held out, or some of stdlib's files, or the end of a
    single file."""
    streaming: bool = True
    """Shuffle the next million tokens; --no-streaming reads all text first and shuffles all."""
    trust_remote_code: bool = False
    """Let a tokenizer run code that came with it."""
    block_size: Annotated[int, Ge(2)] = 128
    """Tokens a block."""


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(RunSettings, TextSettings):
    """Everything that a pretrained model depends on, and its output folder."""

    betas: ClassVar[tuple[float, float]] = (0.9, 0.95)  # Brown et al., NeurIPS 2020, appendix B
    curve_points: ClassVar[int] = 200
    neutral: ClassVar[tuple[str, ...]] = (*Settings.neutral, "eval_steps", "num_proc", "threads", "prompt")

    model_name: str = "gpt2-nano"
    """Random weights in the shape of gpt2-nano, gpt2-3m, gpt2-micro, gpt2-14m, gpt2 (124 M), gpt2-medium...,
    llama-nano or llama-124m (gated); or a folder or owner/name on the hub, whose weights are trained further."""
    num_proc: Count | None = None
    """Processes that turn training text into tokens, for each process of the run; if left out, that process itself."""
    threads: Count = 2
    """Threads that compute microbatches side by side in a single process; it changes no result."""
    batch_size: Count = 64
    """Blocks a step, over all replicas."""
    tokens_per_step: Count | None = None
    """Tokens a step, over all replicas, in place of batch_size; a multiple of block_size, such as 524288."""
    microbatch_size: Count = 4
    """Blocks that a replica computes at once; few blocks stay in a CPU's cache."""
    implementation: Literal["custom", "pytorch"] = "pytorch"
    """Whose DDP and FSDP: this project's or PyTorch's."""
    deferred_init: bool = False
    """Draw the weights layer by layer where they are sharded, so that no process holds the whole model."""
    enable_loss_parallelism: bool = False
    """Split the vocabulary over the tensor-parallel ranks, which then compute the training loss together."""
    lossy_logits: bool = False
    """With enable_loss_parallelism, evaluation's gather of logits loses packets, too. Ranks then score differently, and
    records have the spread."""
    tensor_parallel_size: Count = 1
    """Tensor-parallel ranks; spread over the processes under torchrun, else virtual. Under torchrun, 1 means a rank for
    each process of a replica."""
    schedule: Literal["linear", "cosine", "constant"] = "cosine"
    """How the learning rate falls to min_learning_rate after the warm-up; constant keeps it."""
    learning_rate: LearningRate = 3e-3
    """Peak learning rate of AdamW."""
    min_learning_rate: LearningRate = 1e-4
    """Learning rate at the end of its decay."""
    warmup_steps: CountFromZero = 100
    """Steps of linear warm-up. A value above total_steps is refused, unless it is the default."""
    total_steps: Count = 6200
    """Optimizer steps."""
    weight_decay: NotNegative = 0.1
    """Decoupled weight decay, of matrices only."""
    gradient_clipping: NotNegative | None = 1.0
    """Largest norm of all gradients together; 0 or none for no limit."""
    eval_samples: Count | None = None
    """Held-out blocks to validate on; if left out, 512 during the run, and a million tokens at its end."""
    eval_steps: Count | None = 500
    """Steps between validations, each with a text sample."""
    checkpoint_steps: Count | None = 500
    """Steps between checkpoints; the same command resumes from the last one."""
    statistics: bool = True
    """Write the numbers of each step and evaluation into output_dir/statistics.jsonl, while the run goes on."""
    prompt: str = "The"
    """A text that the model continues at each validation."""
    save_model: bool = True
    """Save the model, in bfloat16, its tokenizer and its card in output_dir."""
    seed: CountFromZero = 0
    """Seed of initial weights, the order of blocks and packet losses."""
    output_dir: str = "output/pretrain"
    """Folder for record.json, the model and its checkpoints."""

    @property
    def tokens(self) -> int:
        """Return how many tokens the model is trained on."""
        return self.total_steps * self.batch_size * self.block_size

    def __post_init__(self) -> None:
        super().__post_init__()
        ranks, rest = divmod(rank_and_world_size()[1], self.data_parallel_size * self.pipeline_parallel_size)
        if self.tensor_parallel_size == 1 and ranks > 1 and not rest:  # as in an earlier study; the checks need it
            object.__setattr__(self, "tensor_parallel_size", ranks)
        self.check_warmup("total_steps")
        if self.dataset is not None and self.data_glob != PretrainConfig.data_glob:
            raise ValueError(
                f"dataset = {self.dataset!r} and data_glob = {self.data_glob!r} both name the text: leave one out"
            )
        self._check_tokens()
        if 0 < self.learning_rate < self.min_learning_rate and self.schedule != "constant":
            raise ValueError(
                f"min_learning_rate = {self.min_learning_rate:g} is above learning_rate = {self.learning_rate:g}: give "
                f"at most that, such as {self.learning_rate / 10:g}"
            )
        shape, scratch = shape_of(self.model_name), from_scratch(self.model_name).endswith(SCRATCH)
        if shape is not None and not scratch and self.block_size > shape.positions:
            raise ValueError(
                f"block_size = {self.block_size} is above {self.model_name}'s {shape.positions} positions: give as "
                "many or fewer"
            )
        check_model(self.model_name, self.tensor_parallel_size, 0)
        self.check_run()
        if self.deferred_init and self.tensor_parallel_size == 1 and not self.fully_sharded:
            raise ValueError(
                "deferred_init = True needs shards to draw: give tensor_parallel_size above 1, or data_parallel_type = "
                "'fsdp' with data_parallel_size above 1, or leave it out"
            )
        if self.enable_loss_parallelism and (self.tensor_parallel_size == 1 or not self.wiring().one_stream):
            raise ValueError(
                "enable_loss_parallelism = True needs tensor-parallel ranks with a common stream: give "
                "tensor_parallel_size above 1, reliable_gather = True and no sequence_parallel, or leave it out"
            )

        if self.lossy_logits and (not self.enable_loss_parallelism or self.algorithm == "sender"):
            raise ValueError(
                "lossy_logits = True needs enable_loss_parallelism = True, and an algorithm other than sender, whose "
                "gathers are reliable: give both, or leave it out"
            )

    def _check_tokens(self) -> None:
        """Raise ValueError if `tokens_per_step` does not fit; else set `batch_size` from it."""
        tokens, defaults = self.tokens_per_step, PretrainConfig.batch_size
        if tokens is None:
            return
        blocks = tokens // self.block_size
        if tokens % self.block_size:
            raise ValueError(
                f"tokens_per_step = {tokens} is not a multiple of block_size = {self.block_size}: give one that is"
            )
        if self.batch_size not in (defaults, blocks):
            raise ValueError(
                f"tokens_per_step = {tokens} is {blocks} blocks, and batch_size = {self.batch_size}: leave one out"
            )
        object.__setattr__(self, "batch_size", blocks)

    @property
    def steps(self) -> int:
        return self.total_steps

    @property
    def kind(self) -> str:
        return "language modelling"

    @property
    def task(self) -> str:
        return self.dataset or path_end(self.data_glob) or ""

    @property
    def splits_vocabulary(self) -> bool:
        return self.enable_loss_parallelism

    @property
    def loses_logits(self) -> bool:
        return self.lossy_logits

    @property
    def microbatches(self) -> int:
        return -(-self.batch_size // (self.microbatch_size * self.data_parallel_size))

    @property
    def smallest_rate(self) -> float:
        return self.min_learning_rate / self.learning_rate if self.learning_rate else 0.0

    def differences(self, written: dict[str, Any]) -> list[str]:
        """Return the names of settings that differ from `written`. More `total_steps` go on, and do not differ."""
        names = super().differences(written)
        return [name for name in names if name != "total_steps" or written[name] > self.total_steps]

    def result_settings(self) -> dict[str, Any]:
        """Return the settings that the result depends on, paths without the parts that differ between machines."""
        settings = super().result_settings()
        return settings | {name: path_end(settings[name]) for name in PATHS}


def path_end(pattern: str | None) -> str | None:
    """Return the last four parts of a path."""
    return pattern and "/".join(Path(pattern).parts[-4:])
