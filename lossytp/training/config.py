"""The configurations of training, pretraining and evaluation: groups of settings, and how they fit together.

Flags, YAML files and records are flat. Importing this module costs no torch.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import model_validator

from lossytp.network.checks import check_filled
from lossytp.network.lossy_network import CommConfig
from lossytp.parallel.group import Layout, rank_and_world_size
from lossytp.training.combinations import check_blocks, combinations
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
    PretrainCompute,
    PretrainNetwork,
    PretrainOptimizer,
    PretrainOutput,
    PretrainParallelism,
    TextSettings,
)
from lossytp.training.settings import Settings, without_obsolete
from lossytp.training.shapes import SCRATCH, check_model, from_scratch, shape_of
from lossytp.training.task_kinds import Task


class RunSettings(Settings):
    """The settings of one training run, whatever it trains on: the loop, the engine and checkpoints need no others.

    Subclasses add the data, and implement the properties below.
    """

    neutral: ClassVar[tuple[str, ...]] = (
        "output_dir",
        "checkpoint_path",
        "keep_checkpoints",
        "task_folder",
        "timeout_s",
        "checkpoint_steps",
        "statistics",
        "tensorboard",
        "wandb",
    )
    curve_points: ClassVar[int] = 50
    """Training losses in a record: this many, or up to twice as many."""

    model_name: str = "gpt2-nano"
    network: NetworkSettings = NetworkSettings()
    parallelism: ParallelismSettings = ParallelismSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    compute: ComputeSettings = ComputeSettings()
    output: OutputSettings = OutputSettings()

    @property
    @abstractmethod
    def steps(self) -> int:
        """Return the number of optimizer steps."""

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
    def microbatch_threads(self) -> int:
        """Return how many threads compute microbatches at the same time; 0 if one after another."""
        return 0

    @property
    def smallest_rate(self) -> float:
        """Return the learning rate at the end of its decay, as a share of its peak."""
        return 0.0

    @property
    def loses_logits(self) -> bool:
        """Return whether evaluation's gather of vocabulary-parallel logits loses packets."""
        return False

    @property
    def splits_vocabulary(self) -> bool:
        """Return whether tensor-parallel ranks also share the vocabulary, and compute the training loss together."""
        return False

    def comm(self) -> CommConfig:
        """Return how the tensor-parallel ranks exchange messages."""
        return self.network.comm(exact_adjoint=self.parallelism.exact_adjoint)

    def layout(self, rank: int, world_size: int) -> Layout:
        """Return the run's layout over `world_size` processes, with this process's rank.

        Raises:
            ValueError: if the sizes need more or fewer processes.
        """
        ranks, parallelism = self.network.tensor_parallel_size, self.parallelism
        layout = Layout(ranks, parallelism.data_parallel_size, parallelism.pipeline_parallel_size, rank, world_size)
        needed = ranks * parallelism.data_parallel_size * parallelism.pipeline_parallel_size
        several_ranks_a_process = layout.tensor_processes != ranks
        if parallelism.tensor_parallel_layers != "lossytp" and several_ranks_a_process:
            raise ValueError(
                f"implementation = {parallelism.implementation!r} needs a process for each tensor-parallel rank: start "
                f"with torchrun --standalone --nproc_per_node {needed}"
            )
        nodes = self.network.ranks_per_node
        if nodes is not None and several_ranks_a_process and needed > ranks:
            raise ValueError(
                f"ranks_per_node = {nodes} needs a process for each tensor-parallel rank, because "
                "the links of replicas and stages are those of processes: start with torchrun --standalone "
                f"--nproc_per_node {needed}"
            )
        if parallelism.replicated_gradients != "reliable" and several_ranks_a_process and parallelism.fully_sharded:
            raise ValueError(
                f"replicated_gradients = {parallelism.replicated_gradients!r} does not work with fsdp, which would "
                "shard the axis on which a process holds its ranks' copies: choose ddp, or start with torchrun "
                f"--standalone --nproc_per_node {needed}"
            )
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
        found = []
        for name in names:
            then, now = written.get(name), ours.get(name)
            if name not in written:
                found.append(f"no {name}")
            elif isinstance(then, dict) or isinstance(now, dict):
                found.append(f"another {name}")
            else:
                found.append(f"{name} = {then!r}, not {now!r}")
        return "; ".join(found)

    def refuse(self, faults: Iterator[tuple[str, str]]) -> None:
        """Raise ValueError for the first fault: the name of a setting, and the reason with the fix."""
        for name, reason in faults:
            raise ValueError(f"{name} = {self.as_dict()[name]!r} {reason}")

    def check_run(self) -> None:
        """Raise ValueError, with the settings and the fix, if some do not go together or do not suit the model."""
        self.refuse(combinations(self))
        shape = shape_of(self.model_name)
        if shape is not None:
            check_blocks(self, shape.layers)

    def check_warmup(self, steps: str) -> None:
        """Raise ValueError if a chosen `warmup_steps` is above the field `steps`.

        The default may be above: a short trial keeps it, and ends while its learning rate still rises.
        """
        warmup, total = self.changes().get("warmup_steps", 0), getattr(self.optimizer, steps)
        if warmup > total:
            raise ValueError(f"warmup_steps = {warmup} is above {steps} = {total}: give as many or fewer")


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
        self.check_warmup("max_steps")
        check_model(self.model_name, self.network.tensor_parallel_size, self.data.max_length)
        self.refuse(self._faults())
        self.check_run()
        return self

    def _faults(self) -> Iterator[tuple[str, str]]:
        if self.microbatches > self.optimizer.batch_size:
            yield (
                "gradient_accumulation_steps",
                f"is above batch_size = {self.optimizer.batch_size}: give as many or fewer",
            )
        if self.parallelism.implementation in ("custom", "pytorch") and self.parallelism.data_parallel_size == 1:
            yield "implementation", "says whose ddp or fsdp runs, without replicas: give data_parallel_size above 1"

    def definition(self) -> Task:
        """Return the task: its source, texts, labels and metrics."""
        return self.data.definition()

    @property
    def steps(self) -> int:
        return self.optimizer.max_steps

    @property
    def kind(self) -> str:
        return self.definition().kind

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
    neutral: ClassVar[tuple[str, ...]] = (*RunSettings.neutral, "eval_steps", "num_proc", "threads", "prompt")

    model_name: str = "gpt2-nano"
    """Random weights in the shape of gpt2-nano, gpt2-3m, gpt2-micro, gpt2-14m, gpt2 (124 M), gpt2-medium...,
    llama-nano or llama-124m (gated); or a folder or owner/name on the hub, whose weights are trained further."""
    network: PretrainNetwork = PretrainNetwork()
    parallelism: PretrainParallelism = PretrainParallelism()
    data: TextSettings = TextSettings()
    optimizer: PretrainOptimizer = PretrainOptimizer()
    compute: PretrainCompute = PretrainCompute()
    output: PretrainOutput = PretrainOutput()

    @model_validator(mode="after")
    def _check(self) -> Self:
        parallelism, data = self.parallelism, self.data
        replicas = parallelism.data_parallel_size * parallelism.pipeline_parallel_size
        ranks, rest = divmod(rank_and_world_size()[1], replicas)
        if self.network.tensor_parallel_size == 1 and ranks > 1 and not rest:  # as in an earlier study
            self._set("network", tensor_parallel_size=ranks)
        self.refuse(self._token_faults())
        if self.optimizer.tokens_per_step is not None:
            self._set("optimizer", batch_size=self.optimizer.tokens_per_step // data.block_size)
        self.check_warmup("total_steps")
        check_model(self.model_name, self.network.tensor_parallel_size, 0)
        self.refuse(self._text_faults())
        self.check_run()
        self.refuse(self._vocabulary_faults())
        return self

    def _set(self, group: str, **values: Any) -> None:
        """Complete a group while the configuration is made."""
        object.__setattr__(self, group, getattr(self, group).replace(**values))

    def _token_faults(self) -> Iterator[tuple[str, str]]:
        tokens, size, blocks = self.optimizer.tokens_per_step, self.data.block_size, self.optimizer.batch_size
        if tokens is None:
            return
        if tokens % size:
            yield "tokens_per_step", f"is not a multiple of block_size = {size}: give one that is"
        if blocks not in (PretrainOptimizer.defaults()["batch_size"], tokens // size):
            yield "tokens_per_step", f"is {tokens // size} blocks, and batch_size = {blocks}: leave one out"

    def _text_faults(self) -> Iterator[tuple[str, str]]:
        data, optimizer = self.data, self.optimizer
        if data.dataset is not None and data.data_glob != TextSettings.defaults()["data_glob"]:
            yield "dataset", f"and data_glob = {data.data_glob!r} both name the text: leave one out"
        peak = optimizer.learning_rate
        if 0 < peak < optimizer.min_learning_rate and optimizer.schedule != "constant":
            yield "min_learning_rate", f"is above learning_rate = {peak:g}: give at most that, such as {peak / 10:g}"
        shape, scratch = shape_of(self.model_name), from_scratch(self.model_name).endswith(SCRATCH)
        if shape is not None and not scratch and data.block_size > shape.positions:
            yield "block_size", f"is above {self.model_name}'s {shape.positions} positions: give as many or fewer"

    def _vocabulary_faults(self) -> Iterator[tuple[str, str]]:
        network, parallelism = self.network, self.parallelism
        split, ranks = parallelism.enable_loss_parallelism, network.tensor_parallel_size
        if parallelism.deferred_init and ranks == 1 and not parallelism.fully_sharded:
            yield "deferred_init", "needs shards to draw: give tensor_parallel_size above 1, or fsdp with replicas"
        if split and (ranks == 1 or not self.comm().one_stream):
            yield (
                "enable_loss_parallelism",
                "needs ranks with a common stream: give tensor_parallel_size above 1, reliable_gather = True and no "
                "sequence_parallel, or leave it out",
            )
        if parallelism.lossy_logits and (not split or network.algorithm == "sender"):
            yield "lossy_logits", "needs enable_loss_parallelism = True, and an algorithm other than sender: give both"

    @property
    def tokens(self) -> int:
        """Return how many tokens the model is trained on."""
        return self.steps * self.optimizer.batch_size * self.data.block_size

    @property
    def steps(self) -> int:
        return self.optimizer.total_steps

    @property
    def kind(self) -> str:
        return "language modelling"

    @property
    def task(self) -> str:
        return self.data.dataset or path_end(self.data.data_glob) or ""

    @property
    def splits_vocabulary(self) -> bool:
        return self.parallelism.enable_loss_parallelism

    @property
    def loses_logits(self) -> bool:
        return self.parallelism.lossy_logits

    @property
    def microbatches(self) -> int:
        return -(-self.optimizer.batch_size // (self.optimizer.microbatch_size * self.parallelism.data_parallel_size))

    @property
    def microbatch_threads(self) -> int:
        return self.optimizer.threads

    @property
    def smallest_rate(self) -> float:
        rate = self.optimizer.learning_rate
        return self.optimizer.min_learning_rate / rate if rate else 0.0

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
        """Return a training run's configuration with this network and precision; it checks them.

        Raises:
            ValueError: if training would refuse a value, or a combination.
        """
        shared = self.network.as_dict() | self.compute.as_dict()
        data = {
            "model_name": self.model_name,
            "dataset": self.data.dataset or DataSettings.defaults()["dataset"],
            "declaration": self.data.declaration,
            "task_folder": self.data.task_folder if self.data.declaration else None,
            "max_length": self.data.max_length or 1,
        }
        return TrainConfig.from_dict(shared | data)

    def definition(self) -> Task:
        """Return the task: its source, texts, labels and metrics."""
        return self.data.definition()

    def layout(self, rank: int, world_size: int) -> Layout:
        """Return the run's layout over `world_size` processes, with this process's rank.

        Raises:
            ValueError: if the processes do not fit the tensor-parallel ranks.
        """
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
