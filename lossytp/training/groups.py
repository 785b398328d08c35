"""The groups of a run's settings, as in `config.network.loss_rate`: names, types, bounds, defaults and help texts.

Names are those of earlier studies' flags. Importing this module costs no torch.
"""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from lossytp.network.checks import refuse_if
from lossytp.network.losses import LossProcess, gilbert_elliott_preset
from lossytp.network.lossy_network import CommConfig, LossyNetwork
from lossytp.network.routes import Wire
from lossytp.network.scope import Scope, links_named, range_named
from lossytp.network.traces import loss_process_named
from lossytp.training.settings import (
    Count,
    CountFromZero,
    Folder,
    LearningRate,
    NotNegative,
    Seed,
    Settings,
    Share,
    none_if_zero,
)
from lossytp.training.task_kinds import Task
from lossytp.training.tasks import DECLARATIONS, TASKS, declared_task, read_declaration, task_named


class NetworkSettings(Settings):
    """The tensor-parallel ranks, the network between them, and the seed of its losses."""

    tensor_parallel_size: Count = 4
    """Tensor-parallel ranks: spread over the processes under torchrun, otherwise virtual ranks."""
    loss_type: str = "ber"
    """Loss process: ber (Bernoulli), g-e (Gilbert-Elliott) or another of LOSS_PROCESSES: "correlated(shared=0.5)"."""
    loss_rate: Share = 0.0
    """Stationary packet loss rate of every link, in [0, 1]."""
    mean_burst_packets: float | None = None
    """Mean run of consecutive losses, for loss types that have one: g-e, correlated."""
    ge_config: str | None = None
    """A Gilbert-Elliott preset by its id, instead of loss_rate and mean_burst_packets."""
    algorithm: str = "direct"
    """Collective algorithm: direct, ring, tree, switch or sender."""
    repair: str = "zero"
    """zero, rescale, rescale_counted, stale, local, fec(n, k), hadamard(block), retransmit(budget), protect(share),
    protect_first(positions), protect_layers(first, last), or several joined by +."""
    reliable_gather: bool = True
    """False also loses packets of sums on their way back. Each rank then has its own residual stream. FSDP's
    all-gathers and a pipeline's sends always lose packets."""
    sequence_parallel: bool = False
    """Reduce-scatter and all-gather around a sharded residual stream; lossytp layers only."""
    wire_dtype: str | None = None
    """Round messages to fp32, bf16, int8, fp8 or int4 for sending, the last three in blocks of 32 elements with a
    scale. If left out, keep their dtype. Lossytp layers only."""
    control: Literal["elements", "noise"] | None = None
    """Instead of packets, lose single elements (elements), or add Gaussian noise of equal squared error (noise)."""
    lossy_direction: str | None = None
    """Lose packets only in forward or backward."""
    lossy_module: str | None = None
    """Lose packets only in attention or mlp."""
    lossy_layers: str | None = None
    """Lose packets only in these transformer layers: first:stop, counted from 0."""
    lossy_positions: str | None = None
    """Lose only packets that hold tokens at these positions of their sequences: first:stop, counted from 0."""
    lossy_phase: str | None = None
    """Lose packets only in the reduce or the gather phase."""
    lossy_links: str | None = None
    """Links that lose packets, such as 0>1,2>3, in every group of ranks; all if left out; -1 is the switch."""
    ranks_per_node: Count | None = None
    """Links between ranks of one node (global rank // this number) are reliable, others lose packets. The switch is
    outside of all nodes."""
    mtu_bytes: int = 1500
    """Packet size, headers included."""
    timeout_s: Annotated[float, Field(gt=0, le=1e6)] = 1800.0
    """Seconds that a process waits for the others, at the start and in each exchange."""
    seed: Seed = 1234
    """Seed of initial weights, data order, dropout and packet losses."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.comm().check_fits(self.build().wire)
        return self

    def process(self) -> LossProcess:
        """Return the loss process of every link."""
        if self.ge_config is None:
            named = {"loss_rate": self.loss_rate, "mean_burst_packets": self.mean_burst_packets}
            return loss_process_named(self.loss_type, **named)
        given = self.loss_type != "g-e" or self.loss_rate or self.mean_burst_packets is not None
        fault = "sets rate and burst of loss_type = 'g-e': give that, and leave out loss_rate and mean_burst_packets"
        refuse_if(given, "ge_config", self.ge_config, fault)
        return gilbert_elliott_preset(self.ge_config)

    @property
    def process_rate(self) -> float:
        """Return the stationary loss rate of every link, also if a preset or a trace sets it, and not `loss_rate`."""
        return float(f"{self.process().loss_rate:.12g}")  # drops a closed form's last digits

    def check_forward(self) -> None:
        """Raise ValueError if only backward loses packets, so that an evaluation loses none."""
        if self.lossy_direction == "backward":
            raise ValueError("lossy_direction = 'backward' loses nothing in an evaluation: leave it out")

    def comm(self, **of_backward: Any) -> CommConfig:
        """Return how the tensor-parallel ranks exchange messages."""
        control = None if self.control == "elements" else self.control
        names = ("algorithm", "repair", "reliable_gather", "sequence_parallel", "wire_dtype")
        settings = {name: getattr(self, name) for name in names}
        return CommConfig.named(**settings, control=control, **of_backward)

    def build(self, kind: type[LossyNetwork] = LossyNetwork) -> LossyNetwork:
        """Return a new network of this kind with these settings."""
        process = self.process()
        layers, positions = (range_named(name, getattr(self, name)) for name in ("lossy_layers", "lossy_positions"))
        return kind(
            process if self.lossy_links is None else dict.fromkeys(links_named(self.lossy_links), process),
            seed=self.seed,
            wire=Wire(mtu_bytes=self.mtu_bytes, elements=1 if self.control == "elements" else None),
            scope=Scope(
                direction=self.lossy_direction,
                module=self.lossy_module,
                layers=layers,
                phase=self.lossy_phase,
                positions=positions,
            ),
            ranks_per_node=self.ranks_per_node,
        )


class BackendNetwork(NetworkSettings):
    """The network of PyTorch's own messages. The backend `lossy` does not know the layers that they serve."""

    elsewhere: ClassVar[str] = ""
    """What else to do, for messages."""

    @model_validator(mode="after")
    def _check_backend(self) -> Self:
        repair, values = self.comm().repair, self.as_dict()
        names = ("wire_dtype", "lossy_module", "lossy_layers", "lossy_positions")
        asked = {name: values[name] is not None for name in names} | {"control": self.control == "noise"}
        asked["repair"] = repair.remembers or repair.knows_model
        for name, is_asked in asked.items():
            fault = f"works only in this project's layers: leave it out{self.elsewhere}"
            refuse_if(is_asked, name, values[name], fault)
        return self


class ParallelismSettings(Settings):
    """The layout of a training run over ranks, and how replicated parameters stay equal."""

    implementation: Literal["lossytp", "dtensor", "megatron", "custom", "pytorch"] = "lossytp"
    """Tensor-parallel layers of this project, of PyTorch (dtensor) or of Megatron-core; the last two need a process for
    each rank. Or whose DDP and FSDP: custom for this project's, pytorch for PyTorch's, which is the default."""
    data_parallel_size: Count = 1
    """Replicas that share each batch; needs torchrun."""
    data_parallel_type: Literal["ddp", "fsdp"] = "ddp"
    """Replicate the parameters, or shard them over the replicas."""
    pipeline_parallel_size: Count = 1
    """Pipeline stages; needs torchrun."""
    pipeline_schedule: Literal["gpipe", "1f1b"] = "gpipe"
    """Order in which a pipeline runs its microbatches."""
    pipeline_microbatches: Count = 4
    """Microbatches of a batch in a pipeline."""
    replicated_gradients: Literal["reliable", "lossy", "none"] = "reliable"
    """How ranks with their own streams average the gradients of replicated parameters; none lets copies drift."""
    resync_every: Count | None = None
    """Steps between resynchronisations, which set drifting copies to their mean."""
    exact_adjoint: bool = False
    """Let backward use what forward lost. In lossytp layers this is an ablation, since no sender knows what was lost.
    Between pipeline stages it is a repair, since the receiver knows. A run that has both uses it in both."""

    masked_backward: bool = False
    """Let ranks with their own streams (reliable_gather false) give no gradient to what they did not receive of a sum.
    It costs no message. Without it training over losses in both phases fails; `sequence_parallel` costs less."""

    @property
    def tensor_parallel_layers(self) -> str:
        """Return whose tensor-parallel layers run."""
        return "lossytp" if self.implementation in ("custom", "pytorch") else self.implementation

    @property
    def data_parallel_implementation(self) -> str | None:
        """Return whose DDP or FSDP replicas run, "custom" or "pytorch"; None without replicas."""
        if self.data_parallel_size == 1:
            return None
        return "custom" if self.implementation == "custom" else "pytorch"

    @property
    def fully_sharded(self) -> bool:
        """Return whether replicas shard the parameters, and gather them over the lossy network."""
        return self.data_parallel_size > 1 and self.data_parallel_type == "fsdp"


class TaskSettings(Settings):
    """The task of a run. The content of a file that declares one is part of the configuration, and so of records."""

    dataset: str | None = None
    """The task: one of TASKS, or a YAML file that declares one of your own. A configuration keeps the task's name."""
    declaration: dict | None = None
    """What that file declares. Do not give this: --dataset FILE.yaml sets it, and records keep it."""
    task_folder: str | None = None
    """Folder where the declaration's relative paths start, which --dataset FILE.yaml sets too."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Replace a declaration's path by the name, the declaration and the folder that it gives."""
        dataset = values.get("dataset", cls.model_fields["dataset"].default)
        if not isinstance(dataset, str) or values.get("declaration") is not None:
            return values
        file, plain, read = Path(dataset).expanduser(), dataset.lower().replace("-", "_"), dict[str, Any]()
        if file.suffix in DECLARATIONS:
            read = {"declaration": read_declaration(file), "task_folder": str(file.parent.absolute())}
            read["dataset"] = read["declaration"]["name"]
        elif plain in TASKS:
            read = {"dataset": plain}  # ARC-Easy, as earlier studies wrote it
        if values.get("task_folder") not in (None, read.get("task_folder")):
            folder = values["task_folder"]
            raise ValueError(f"task_folder = {folder!r} does not go with dataset = {dataset!r}: leave it out")
        return values | read

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.declaration is not None and self.declaration.get("name") != self.dataset:
            whose = f"does not go with the declaration of {self.declaration.get('name')!r}: leave declaration out"
            raise ValueError(f"dataset = {self.dataset!r} {whose}, or give this name")
        if self.dataset is not None:
            self.definition()
        return self

    def definition(self) -> Task:
        """Return the task: its source, texts, labels and metrics."""
        assert self.dataset is not None
        if self.declaration is None:
            return task_named(self.dataset)
        return declared_task(self.declaration, self.task_folder)


class DataSettings(TaskSettings):
    """The task and its examples."""

    dataset: str = "docstrings"
    """The task: docstrings (which library is a text from?), which needs no data; another of TASKS: sst2, mnli...; or a
    YAML file that declares one of your own."""
    max_length: Count = 64
    """Largest number of tokens of an example, or of a prompt and its answer together. The record has the share of
    truncated examples."""
    max_samples: Annotated[CountFromZero | None, none_if_zero] = None
    """Number of training examples to use; all if left out, or 0."""


class ComputeSettings(Settings):
    """The precision, and the examples to evaluate on."""

    eval_samples: Count | None = None
    """Test examples to evaluate on, all if left out; in pretraining held-out blocks, 512 during the run and a million
    tokens at its end if left out."""
    bf16: bool = False
    """Compute matrix products in bfloat16. Tensor parallelism then sends bfloat16; other traffic stays float32."""
    fp16: bool = False
    """Compute matrix products in float16, and scale the training loss."""


class OptimizerSettings(Settings):
    """AdamW, its schedule, and what a step computes."""

    betas: ClassVar[tuple[float, float]] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""

    learning_rate: LearningRate = 1e-3
    """Peak learning rate of AdamW."""
    warmup_steps: CountFromZero = 20
    """Steps of linear warm-up. A value above the number of steps is refused, unless it is the default."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay, applied to matrices only."""
    gradient_clipping: Annotated[NotNegative | None, none_if_zero] = None
    """Largest norm of all gradients together. If left out, there is no limit; 0 and None mean the same."""

    batch_size: Count = 32
    """Examples per step, over all replicas."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate falls after the warm-up; constant keeps it."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of embeddings, attention and residuals. Heads in different processes share their attention masks."""
    gradient_checkpointing: bool = False
    """Recompute each block's activations in backward, with the packet losses of the first pass."""
    unfreeze_last_layers: CountFromZero | None = None
    """Train only this many last blocks, the last norm and the head; 0 trains only the norm and the head."""


class FineTuningSettings(OptimizerSettings):
    """The steps of fine-tuning."""

    max_steps: Count = 600
    """Optimizer steps."""
    gradient_accumulation_steps: Count = 1
    """Number of microbatches accumulated per optimizer step. Without packet losses it changes results
    only by rounding; with them, its smaller messages lose other packets."""


class OutputSettings(Settings):
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
    output_dir: Folder = "output"
    """Folder for record.json."""


class FineTuningOutput(OutputSettings):
    """When fine-tuning is evaluated, the scores that it waits for, and what it saves."""

    patience: Count | None = None
    """Stop after this many evaluations in a row without a better score over the lossy network."""
    target_accuracy: Share | None = None
    """Record when the score over the lossy network first reaches this in two evaluations in a row."""


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
    block_size: Annotated[int, Field(ge=2)] = 128
    """Tokens a block."""
    prompt: str = "The"
    """A text that the model continues at each validation."""
    num_proc: Count | None = None
    """Processes that turn training text into tokens, for each process of the run; if left out, that process itself."""


class PretrainNetwork(NetworkSettings):
    """The network of pretraining."""

    tensor_parallel_size: Count = 1
    """Tensor-parallel ranks; spread over the processes under torchrun, else virtual. Under torchrun, 1 means a rank for
    each process of a replica."""
    seed: Seed = 0
    """Seed of initial weights, the order of blocks and packet losses."""


class PretrainParallelism(ParallelismSettings):
    """The layout of pretraining."""

    implementation: Literal["custom", "pytorch"] = "pytorch"
    """Whose DDP and FSDP: this project's or PyTorch's."""
    deferred_init: bool = False
    """Draw the weights layer by layer where they are sharded, so that no process holds the whole model."""
    enable_loss_parallelism: bool = False
    """Split the vocabulary over the tensor-parallel ranks, which then compute the training loss together."""
    lossy_logits: bool = False
    """With enable_loss_parallelism, evaluation's gather of logits loses packets, too. Ranks then score differently, and
    records have the spread."""


class PretrainOptimizer(OptimizerSettings):
    """AdamW, its schedule and the steps of pretraining."""

    betas: ClassVar[tuple[float, float]] = (0.9, 0.95)  # Brown et al., NeurIPS 2020, appendix B

    batch_size: Count = 64
    """Blocks a step, over all replicas."""
    tokens_per_step: Count | None = None
    """Tokens a step, over all replicas, in place of batch_size; a multiple of block_size, such as 524288."""
    microbatch_size: Count = 4
    """Blocks that a replica computes at once; few blocks stay in a CPU's cache."""
    threads: Count = 2
    """Threads that compute microbatches at the same time in a single process; it changes no result."""
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
    gradient_clipping: Annotated[NotNegative | None, none_if_zero] = 1.0
    """Largest norm of all gradients together; 0 or none for no limit."""


class PretrainOutput(OutputSettings):
    """When pretraining is validated, and what it saves."""

    eval_steps: Count | None = 500
    """Steps between validations, each with a text sample."""
    checkpoint_steps: Count | None = 500
    """Steps between checkpoints; the same command resumes from the last one."""
    statistics: bool = True
    """Write the numbers of each step and evaluation into output_dir/statistics.jsonl, while the run goes on."""
    save_model: bool = True
    """Save the model, in bfloat16, its tokenizer and its card in output_dir."""
    output_dir: Folder = "output/pretrain"
    """Folder for record.json, the model and its checkpoints."""


class EvaluationData(TaskSettings):
    """The task or text to evaluate a model on."""

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


class EvaluationOutput(Settings):
    """Where an evaluation is written."""

    output_dir: Folder = "output/evaluate"
    """Folder for evaluation.json."""
