"""The configurations of training, pretraining and evaluation: groups of settings, and how they fit together.

Flags, YAML files and records are flat. Importing this module costs no torch.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import model_validator

from lossytp.network.checks import check_filled, refuse_if, shown
from lossytp.network.lossy_network import CommConfig
from lossytp.network.repairs import ZERO
from lossytp.network.routes import check_links_within
from lossytp.parallel.group import Layout, check_nodes, rank_and_world_size
from lossytp.training.groups import (
    ComputeSettings,
    DataSettings,
    EvaluationData,
    EvaluationOutput,
    FineTuningOutput,
    FineTuningSettings,
    NetworkSettings,
    OptimizerSettings,
    OutputSettings,
    ParallelismSettings,
    PretrainNetwork,
    PretrainOptimizer,
    PretrainOutput,
    PretrainParallelism,
    TextSettings,
)
from lossytp.training.settings import Settings, without_obsolete
from lossytp.training.shapes import SCRATCH, check_model, from_scratch, shape_of

Faults = Iterator[tuple[str, str]]  # the name of a setting, why it does not work, and the fix
WHERE = ("output_dir", "checkpoint_path", "keep_checkpoints", "task_folder")
MEANWHILE = ("timeout_s", "checkpoint_steps", "statistics", "tensorboard", "wandb")
PLACES = ("lossy_module", "lossy_layers", "lossy_positions")
ONLY_OWN_LAYERS = ("sequence_parallel", "exact_adjoint", "masked_backward", "wire_dtype", *PLACES)


class RunSettings(Settings):
    """The settings of one training run, whatever it trains on: the loop, the engine and checkpoints need no others.

    Subclasses add the data, and implement the properties below.
    """

    neutral: ClassVar[tuple[str, ...]] = (*WHERE, *MEANWHILE)
    curve_points: ClassVar[int] = 50
    """Training losses in a record: this many, or up to twice as many."""
    steps_name: ClassVar[str] = "max_steps"
    """The setting with the number of optimizer steps."""

    model_name: str = "gpt2-nano"
    network: NetworkSettings = NetworkSettings()
    parallelism: ParallelismSettings = ParallelismSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    compute: ComputeSettings = ComputeSettings()
    output: OutputSettings = OutputSettings()

    @property
    @abstractmethod
    def kind(self) -> str:
        """Return the kind of task, such as "classification"."""

    @property
    @abstractmethod
    def task(self) -> str:
        """Return what the run trains on, as messages and tables name it."""

    @property
    @abstractmethod
    def microbatches(self) -> int:
        """Return into how many microbatches a batch is split."""

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps."""
        return getattr(self.optimizer, self.steps_name)

    def comm(self) -> CommConfig:
        """Return how the tensor-parallel ranks exchange messages."""
        parallelism = self.parallelism
        return self.network.comm(exact_adjoint=parallelism.exact_adjoint, masked_backward=parallelism.masked_backward)

    def layout(self, rank: int, world_size: int) -> Layout:
        """Return the layout over `world_size` processes, with this process's rank; refuse too few or too many."""
        ranks, parallelism = self.network.tensor_parallel_size, self.parallelism
        layout = Layout(ranks, parallelism.data_parallel_size, parallelism.pipeline_parallel_size, rank, world_size)
        needed = self.num_ranks
        needs = {
            "implementation": parallelism.tensor_parallel_layers != "lossytp",
            # links of replicas and stages are those of processes
            "ranks_per_node": self.network.ranks_per_node is not None and needed > ranks,
            # fsdp would shard the axis on which a process holds its ranks' copies
            "replicated_gradients": parallelism.replicated_gradients != "reliable" and parallelism.fully_sharded,
        }
        for name, is_needed in needs.items():
            alone = is_needed and layout.tensor_processes != ranks
            fault = f"needs a process for each rank: start with torchrun --standalone --nproc_per_node {needed}"
            refuse_if(alone, name, self.as_dict()[name], fault)
        return layout

    def differences(self, written: Mapping[str, Any]) -> list[str]:
        """Return the names of the settings that differ from those `written`.

        A subclass leaves out those that may change when a run goes on.
        """
        ours, written = self.result_settings(), without_obsolete(written)
        return [name for name in {**ours, **written} if name not in ours or ours[name] != written.get(name, ...)]

    def compared(self, names: Sequence[str], written: Mapping[str, Any]) -> str:
        """Return the settings `names` of an earlier run with their values now: "loss_rate = 0.1, not 0.2"."""
        ours = self.result_settings()
        pairs = {name: f"{shown(written[name])}, not {shown(ours.get(name))}" for name in names if name in written}
        return "; ".join(f"{name} = {pairs[name]}" if name in pairs else f"no {name}" for name in names)

    def refuse(self, faults: Faults) -> None:
        """Raise ValueError for the first fault."""
        for name, reason in faults:
            raise ValueError(f"{name} = {self.as_dict()[name]!r} {reason}")

    def faults(self) -> Faults:
        """Yield each combination that would fail late, or have no effect."""
        warmup = self.changes().get("warmup_steps", 0)  # a short trial keeps the default, which may be above its steps
        if warmup > self.steps:
            yield "warmup_steps", f"is above {self.steps_name} = {self.steps}: give as many or fewer"
        if self.compute.bf16 and self.compute.fp16:
            yield "fp16", "and bf16 are both given: choose one"
        yield from self._faults_of_layouts()
        yield from self._faults_of_losses()

    def _faults_of_layouts(self) -> Faults:
        network, parallelism, optimizer = self.network, self.parallelism, self.optimizer
        ranks, replicas, stages = self._sizes
        batch, microbatches = optimizer.batch_size, parallelism.pipeline_microbatches
        if parallelism.tensor_parallel_layers == "dtensor" and ranks > 1:
            if replicas > 1 and not parallelism.fully_sharded:
                yield "implementation", "does not work with ddp, which takes no DTensors: choose fsdp"
            if self.compute.fp16:
                yield "fp16", "needs PyTorch's scaler, which cannot mix DTensors and tensors: choose bf16"
        if batch % replicas:
            yield "batch_size", f"is not a multiple of data_parallel_size = {replicas}: give one that is"
        if optimizer.gradient_checkpointing and (parallelism.fully_sharded or not (self._own_layers or ranks == 1)):
            yield "gradient_checkpointing", "would lose other packets when it recomputes: choose ddp, lossytp's layers"
        if stages == 1:
            return
        if self.kind != "classification":
            yield "dataset", f"is {self.kind}, and a pipeline supports classification alone: choose such a task"
        if self.comm().own_streams:
            yield "reliable_gather", "does not work with a pipeline, whose stages share a stream: leave one out"
        if replicas > 1:
            yield "pipeline_parallel_size", "does not work with data_parallel_size above 1: set one to 1"
        if self.compute.fp16:
            yield "fp16", "does not work with a pipeline, which scales no training loss: choose bf16"
        if batch % microbatches:
            yield "batch_size", f"is not a multiple of pipeline_microbatches = {microbatches}: give one that is"
        if self.microbatches > 1:
            yield "gradient_accumulation_steps", "does not work with a pipeline: give pipeline_microbatches instead"
        if optimizer.unfreeze_last_layers is not None:
            yield "unfreeze_last_layers", "leaves a pipeline's first stages nothing to train: leave one out"
        if network.lossy_positions is not None:
            yield "lossy_positions", "does not work in a pipeline, whose stages do not know positions: leave one out"
        if parallelism.exact_adjoint and self.comm().repair != ZERO:
            fault = f"works in a pipeline only with repair = 'zero', not {network.repair!r}: leave it out"
            yield "exact_adjoint", fault

    def _faults_of_losses(self) -> Faults:
        network, parallelism, values = self.network, self.parallelism, self.as_dict()
        ranks, replicas, stages = self._sizes
        own_layers, world, repair = self._own_layers, ranks * replicas * stages, self.comm().repair
        if network.control is not None and network.loss_type != "ber":
            yield "control", "loses each element on its own: leave out loss_type, or control"
        for name in ONLY_OWN_LAYERS:
            between_stages = name == "exact_adjoint" and stages > 1 and ranks == 1
            if values[name] and not own_layers and not between_stages:
                fix = "leave out implementation, or leave this out"
                yield name, f"needs this project's layers over several ranks: {fix}"
        for name, asked in {"repair": repair.remembers, "control": network.control == "noise"}.items():
            if asked and not (own_layers and world == ranks):
                yield name, "needs this project's layers, and tensor parallelism alone: leave this out, or the others"
        if repair.uses_own_part and (stages > 1 or parallelism.fully_sharded):
            yield "repair", "needs a part of the receiver's own, which pipelines and fsdp do not have: choose another"
        own_logits = parallelism.fully_sharded or not (own_layers or network.reliable_gather)
        if ranks > 1 and self.kind == "generation" and own_logits:
            yield "dataset", "generates answers, but ranks have different logits: choose lossytp's layers without fsdp"
        if world == 1 and network.process().loss_rate > 0:
            yield "loss_rate", "has no effect on one rank, which sends nothing: give tensor_parallel_size above 1"
        if ranks * replicas == 1 and not network.reliable_gather:
            yield "reliable_gather", "has no effect where nothing is summed: give tensor_parallel_size above 1"
        if parallelism.replicated_gradients != "reliable" and (ranks == 1 or not self.comm().own_streams):
            yield "replicated_gradients", "has no effect on one residual stream: give reliable_gather = False"
        if parallelism.replicated_gradients == "lossy" and repair.uses_own_part:
            yield "replicated_gradients", "with repair = 'local' would take a rank's gradient for the sum: change one"
        built = network.build()
        check_nodes(built, self.comm(), world)
        check_links_within(built.named_links, world)

    @property
    def num_ranks(self) -> int:
        """Return the product of the three parallel sizes."""
        return math.prod(self._sizes)

    @property
    def _sizes(self) -> tuple[int, int, int]:  # ranks, replicas, stages
        parallelism = self.parallelism
        return self.network.tensor_parallel_size, parallelism.data_parallel_size, parallelism.pipeline_parallel_size

    @property
    def _own_layers(self) -> bool:
        return self.parallelism.tensor_parallel_layers == "lossytp" and self.network.tensor_parallel_size > 1


class TrainConfig(RunSettings):
    """Everything that a fine-tuning run's result depends on, and its output folder."""

    model_name: str = "gpt2-nano"
    """gpt2-nano or gpt2-micro; gpt2, gpt2-medium, -large, -xl, distilgpt2 or owner/name on the hub; or a folder. The
    suffix -scratch gives random weights; gpt2-nano-wide and -deep exist only with it."""
    data: DataSettings = DataSettings()
    optimizer: FineTuningSettings = FineTuningSettings()
    output: FineTuningOutput = FineTuningOutput()

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_model(self.model_name, self.network.tensor_parallel_size, self.data.max_length)
        self.refuse(self.faults())
        return self

    def faults(self) -> Faults:
        batch, values = self.optimizer.batch_size, self.as_dict()
        for name in ("patience", "target_accuracy"):
            if values[name] is not None and self.output.eval_steps is None:
                yield name, "needs several evaluations: give eval_steps, such as 20, too"
        if self.microbatches > batch:
            yield "gradient_accumulation_steps", f"is above batch_size = {batch}: give as many or fewer"
        if self.parallelism.implementation in ("custom", "pytorch") and self.parallelism.data_parallel_size == 1:
            yield "implementation", "says whose ddp or fsdp runs, without replicas: give data_parallel_size above 1"
        yield from super().faults()

    @property
    def kind(self) -> str:
        return self.data.definition().kind

    @property
    def task(self) -> str:
        return self.data.dataset

    @property
    def microbatches(self) -> int:
        return self.optimizer.gradient_accumulation_steps


PATHS = ("data_glob", "validation_glob", "tokenizer_path")


class PretrainConfig(RunSettings):
    """Everything that a pretrained model depends on, and its output folder."""

    curve_points: ClassVar[int] = 200
    steps_name: ClassVar[str] = "total_steps"
    neutral: ClassVar[tuple[str, ...]] = (*RunSettings.neutral, "eval_steps", "num_proc", "threads", "prompt")

    model_name: str = "gpt2-nano"
    """Random weights in the shape of gpt2-nano, gpt2-3m, gpt2-micro, gpt2-14m, gpt2 (124 M), gpt2-medium...,
    llama-nano or llama-124m (gated); or a folder or owner/name on the hub, whose weights are trained further."""
    network: PretrainNetwork = PretrainNetwork()
    parallelism: PretrainParallelism = PretrainParallelism()
    data: TextSettings = TextSettings()
    optimizer: PretrainOptimizer = PretrainOptimizer()
    output: PretrainOutput = PretrainOutput()

    @model_validator(mode="after")
    def _check(self) -> Self:
        replicas = self.parallelism.data_parallel_size * self.parallelism.pipeline_parallel_size
        ranks, rest = divmod(rank_and_world_size()[1], replicas)
        if self.network.tensor_parallel_size == 1 and ranks > 1 and not rest:  # as in an earlier study
            self._set("network", tensor_parallel_size=ranks)
        tokens, size, blocks = self.optimizer.tokens_per_step, self.data.block_size, self.optimizer.batch_size
        if tokens is not None:
            wrong = tokens % size or blocks not in (PretrainOptimizer.defaults()["batch_size"], tokens // size)
            fault = f"is not batch_size = {blocks} blocks of {size}: give a multiple of these, and no batch_size"
            refuse_if(wrong, "tokens_per_step", tokens, fault)
            self._set("optimizer", batch_size=tokens // size)
        check_model(self.model_name, self.network.tensor_parallel_size, 0)
        self.refuse(self.faults())
        return self

    def _set(self, group: str, **values: Any) -> None:
        object.__setattr__(self, group, getattr(self, group).replace(**values))

    def faults(self) -> Faults:
        data, optimizer, parallelism = self.data, self.optimizer, self.parallelism
        peak, ranks = optimizer.learning_rate, self.network.tensor_parallel_size
        if data.dataset is not None and data.data_glob != TextSettings.defaults()["data_glob"]:
            yield "dataset", f"and data_glob = {data.data_glob!r} both name the text: leave one out"
        if 0 < peak < optimizer.min_learning_rate and optimizer.schedule != "constant":
            yield "min_learning_rate", f"is above learning_rate = {peak:g}: give at most that, such as {peak / 10:g}"
        shape, scratch = shape_of(self.model_name), from_scratch(self.model_name).endswith(SCRATCH)
        if shape is not None and not scratch and data.block_size > shape.positions:
            yield "block_size", f"is above {self.model_name}'s {shape.positions} positions: give as many or fewer"
        yield from super().faults()
        if parallelism.deferred_init and ranks == 1 and not parallelism.fully_sharded:
            yield "deferred_init", "needs shards to draw: give tensor_parallel_size above 1, or fsdp with replicas"
        split = parallelism.enable_loss_parallelism
        if split and (ranks == 1 or not self.comm().one_stream):
            fix = "tensor_parallel_size above 1, reliable_gather = True and no sequence_parallel"
            yield "enable_loss_parallelism", f"needs ranks with a common stream: give {fix}, or leave it out"
        if parallelism.lossy_logits and (not split or self.network.algorithm == "sender"):
            yield "lossy_logits", "needs enable_loss_parallelism = True, and an algorithm other than sender: give both"

    @property
    def tokens(self) -> int:
        """Return how many tokens the model is trained on."""
        return self.steps * self.optimizer.batch_size * self.data.block_size

    @property
    def kind(self) -> str:
        return "language modelling"

    @property
    def task(self) -> str:
        return self.data.dataset or path_end(self.data.data_glob) or ""

    @property
    def microbatches(self) -> int:
        return -(-self.optimizer.batch_size // (self.optimizer.microbatch_size * self.parallelism.data_parallel_size))

    def differences(self, written: Mapping[str, Any]) -> list[str]:
        """Return the names of settings that differ from `written`. More `total_steps` go on, and do not differ."""
        names = super().differences(written)
        return [name for name in names if name != "total_steps" or written[name] > self.steps]

    def result_settings(self) -> dict[str, Any]:
        """Return the settings that the result depends on, paths without the parts that differ between machines."""
        settings = super().result_settings()
        return settings | {name: path_end(settings[name]) for name in PATHS}


def path_end(pattern: str | None) -> str | None:
    """Return the last four parts of a path."""
    return pattern and "/".join(Path(pattern).parts[-4:])


class EvaluateConfig(Settings):
    """A model, a network, the task or text to evaluate the model on, and the output folder."""

    neutral: ClassVar[tuple[str, ...]] = RunSettings.neutral

    model_name: str = "gpt2-nano"
    """A folder that training wrote (best or last), or a language model by name."""
    network: NetworkSettings = NetworkSettings()
    data: EvaluationData = EvaluationData()
    compute: ComputeSettings = ComputeSettings()
    output: EvaluationOutput = EvaluationOutput()

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.training()
        self.network.check_forward()
        return self

    def training(self) -> TrainConfig:
        """Return a training run's configuration with this network and precision; it checks them."""
        data = {
            "model_name": self.model_name,
            "dataset": self.data.dataset or DataSettings.defaults()["dataset"],
            "declaration": self.data.declaration,
            "task_folder": self.data.task_folder if self.data.declaration else None,
            "max_length": self.data.max_length or 1,
        }
        return TrainConfig.from_dict(self.network.as_dict() | self.compute.as_dict() | data)

    def layout(self, rank: int, world_size: int) -> Layout:
        """Return the layout over `world_size` processes, with this process's rank."""
        return self.training().layout(rank, world_size)


def settings_class(values: Mapping[str, Any]) -> type[RunSettings]:
    """Return the class of a run's configuration, from its values: pretraining has names that fine-tuning lacks."""
    only = set(PretrainConfig.known()) - set(TrainConfig.known())
    return PretrainConfig if isinstance(values, Mapping) and values.keys() & only else TrainConfig


def run_settings(cells: Sequence[Mapping[str, Any]], kind: type[RunSettings] | None = None) -> list[RunSettings]:
    """Return the configuration of each cell, of this kind or, if it is None, of fine-tuning or of pretraining.

    Raises:
        ValueError: if `cells` is not a list, or is empty, a name or value is unknown, or two cells share a folder.
    """
    check_filled("cells", cells)
    configs = [(kind or settings_class(cell)).from_dict(cell) for cell in cells]
    by_folder: dict[str, RunSettings] = {}
    for cell, config in zip(cells, configs, strict=True):
        folder = config.output.output_dir
        if "output_dir" in cell and by_folder.setdefault(folder, config) != config:
            raise ValueError(f"output_dir = {folder!r} is that of several cells: give each its own")
    return configs
