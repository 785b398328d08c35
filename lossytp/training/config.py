"""Configurations of training, evaluation and pretraining. Importing them costs no torch."""

import json
import math
import os
import re
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Gt, Le, Lt
from tyro.constructors import PrimitiveConstructorSpec

from lossytp.network.checks import check_filled, check_known, check_names, check_probability
from lossytp.network.losses import Bernoulli, GilbertElliott, LossProcess, gilbert_elliott_preset
from lossytp.network.lossy_network import LossyNetwork, Wiring
from lossytp.network.repairs import ZERO, stage_of
from lossytp.network.routes import Wire, check_links_within
from lossytp.network.scope import Scope, layers_named, links_named
from lossytp.network.traces import Replay, loss_process_named
from lossytp.parallel.group import Layout, rank_and_world_size
from lossytp.training.rows import FORMATS
from lossytp.training.shapes import SCRATCH, check_model, from_scratch, shape_of
from lossytp.training.tasks import DECLARATIONS, TASKS, Task, declared_task, read_declaration, task_named

# Bounds of settings, declared at the field, as in `batch_size: Count = 32`.


Count = Annotated[int, Ge(1)]
CountFromZero = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
FASTEST = Le(1e37)  # Adam's first step is ten times its learning rate, in float32
LearningRate = Annotated[NotNegative, FASTEST]


def check_bounds(name: str, value: float, bounds: tuple[Any, ...]) -> None:
    """Raise ValueError, with the value, the bound and the fix, unless `value` is finite and within `bounds`."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} = {value} is not finite: give a finite number")
    shown = f"{name} = {value}"
    for bound in bounds:
        match bound:
            case Ge(least) if value < least:  # type: ignore[operator]
                raise ValueError(f"{shown} is below {least:g}: give {least:g} or more")
            case Gt(least) if value <= least:  # type: ignore[operator]
                raise ValueError(f"{shown} is not above {least:g}: give a larger number, or leave it out")
            case Le(most) if value > most:  # type: ignore[operator]
                raise ValueError(f"{shown} is above {most:g}: give {most:g} or less")
            case Lt(most) if value >= most:  # type: ignore[operator]
                raise ValueError(f"{shown} is not below {most}: give a smaller number")


TYPE_NAMES = {bool: "true or false", dict: "a mapping", type(None): "nothing"}  # in errors
NO_TEXT = re.compile("[\0\ud800-\udfff]")  # a surrogate stands for a byte of an argument that is not UTF-8
MAY_BE_EMPTY = ("repairs",)  # which gain zero

_kinds_of: dict[type, dict[str, "Kind"]] = {}


class Kind(NamedTuple):
    """The values of a field: of these types (and `elements`), one of these choices if any, within these bounds."""

    types: tuple[type, ...] = ()
    choices: tuple[Any, ...] = ()
    bounds: tuple[Any, ...] = ()
    elements: tuple[type, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A frozen, typed configuration.

    Raises:
        ValueError: if a value is of another type than its field, or out of the field's bounds.
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
    """Fields that change no result."""

    def __post_init__(self) -> None:
        kinds = _kinds(type(self))
        for name, kind in kinds.items():
            _check_type(name, getattr(self, name), kind)
        for name, kind in kinds.items():  # 8 and 8.0 are one configuration, with one hash
            value = getattr(self, name)
            if float in kind.types and isinstance(value, int):
                if abs(value) > sys.float_info.max:
                    raise ValueError(f"{name} = {value} is beyond a float's 1.8e308: give a smaller number")
                object.__setattr__(self, name, value := float(value))
            if name == "output_dir" and value is not None:
                object.__setattr__(self, name, _folder(value))
            if kind.bounds and value is not None:
                check_bounds(name, value, kind.bounds)

    def as_dict(self) -> dict[str, Any]:
        """Return field names and values, which JSON can hold."""
        return asdict(self)

    def result_settings(self) -> dict[str, Any]:
        """Return the settings that the result depends on, as records hold them."""
        return self.result_of(self.as_dict())

    @classmethod
    def result_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that the result depends on."""
        return {name: value for name, value in values.items() if name not in cls.neutral}

    @classmethod
    def result_defaults(cls) -> dict[str, Any]:
        """Return the defaults of the settings that the result depends on."""
        return cls.result_of({field.name: field.default for field in fields(cls)})

    def group(self, kind: type["Settings"]) -> dict[str, Any]:
        """Return the names and values of one group of settings."""
        return {field.name: getattr(self, field.name) for field in fields(kind)}

    def changes(self) -> dict[str, Any]:
        """Return the names and values of the fields that differ from their defaults."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the configuration with these names and values.

        Raises:
            ValueError: if a name is unknown; the message suggests the closest one.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"{values!r} is not a configuration: give names with values, such as {{'seed': 1}}")
        cls.check_names(values)
        return cls(**values)

    @classmethod
    def check_names(cls, values: Mapping[str, Any]) -> None:
        """Raise ValueError if a name is not a field."""
        check_names(values, [field.name for field in fields(cls)])

    @classmethod
    def check_type(cls, name: str, value: Any) -> None:
        """Raise ValueError if the value is of another type than the field `name`."""
        _check_type(name, value, _kinds(cls)[name])


def _kinds(cls: type[Settings]) -> dict[str, Kind]:
    """Return the kind of each field. Each class is read only once, since a study makes thousands of configurations."""
    if cls not in _kinds_of:
        hints = get_type_hints(cls, include_extras=True)
        _kinds_of[cls] = {field.name: _kind(hints[field.name]) for field in fields(cls)}
    return _kinds_of[cls]


def _kind(hint: Any) -> Kind:
    """Return the kind of a field with this type hint."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        inner = _kind(arguments[0])
        return inner._replace(bounds=inner.bounds + arguments[1:])
    if origin is Literal:
        return Kind(choices=arguments)
    if origin in (Union, UnionType):
        kinds = [_kind(argument) for argument in arguments]
        return Kind(*(sum(parts, ()) for parts in zip(*kinds, strict=True)))
    return Kind(types=(origin or hint,), elements=arguments)


def _check_type(name: str, value: Any, kind: Kind) -> None:
    """Raise ValueError unless the value fits the field. Values from YAML or a notebook may have any type."""
    if kind.choices:
        if value is not None or type(None) not in kind.types:
            check_known(name, value, kind.choices)
        return
    allowed = kind.types
    matches = isinstance(value, (*allowed, int) if float in allowed else allowed)
    if not matches or (isinstance(value, bool) and bool not in allowed):
        expected = " or ".join(TYPE_NAMES.get(each, each.__name__) for each in allowed)
        raise ValueError(f"{name} = {value!r} is of the wrong type: give {expected}{_example(value, allowed)}")
    if isinstance(value, str) and NO_TEXT.search(value):
        what = "a NUL character" if "\0" in value else "bytes that are not UTF-8"
        raise ValueError(f"{name} = {value!r} holds {what}: give another value")
    if value == "" and name not in MAY_BE_EMPTY:
        raise ValueError(f"{name} = '' is empty: give a value, or leave it out")
    for element in value if kind.elements and isinstance(value, list) else ():
        _check_type(name, element, Kind(types=kind.elements))


def _example(value: object, allowed: tuple[type, ...]) -> str:
    """Return how to write the value with a type that fits, or "" if that is impossible."""
    if int in allowed and isinstance(value, float) and value.is_integer():
        return f", such as {int(value)}"
    if str in allowed and isinstance(value, int | float):
        return f', in YAML within quotes: "{value}"'
    return ""


def _folder(path: str) -> str:
    """Return the path of a folder to write, with a leading ~ replaced by the home folder.

    Raises:
        ValueError: if it is not a path, or the user after ~ has no home folder.
    """
    if path.splitlines() != [path]:
        raise ValueError(f"output_dir = {path!r} has a line break: give the path of a folder")
    if not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError(f"output_dir = {path!r} names a user who has no home folder: write ./{path}, or another path")
    return expanded


# The settings of a lossy network: its loss process, its traffic, and the repair.


ON_UDP = {
    "algorithm": "direct",
    "repair": "zero",
    "reliable_gather": True,
    "sequence_parallel": False,
    "wire_dtype": None,
    "control": None,
}
"""The only values with which packets can really be sent."""


@dataclass(frozen=True, kw_only=True)
class NetworkSettings(Settings):
    """The tensor-parallel ranks, the network between them, and the seed of its losses."""

    tensor_parallel_size: Count = 4
    """Tensor-parallel ranks: spread over the processes under torchrun, otherwise virtual ranks."""
    loss_type: str = "ber"
    """Loss process: ber (Bernoulli), g-e (Gilbert-Elliott) or another of LOSS_PROCESSES: "correlated(shared=0.5)"."""
    loss_rate: float = 0.0
    """Stationary packet loss rate of every link, in [0, 1]."""
    mean_burst_packets: float | None = None
    """Mean run of consecutive losses, for loss types that have one: g-e, correlated."""
    ge_config: str | None = None
    """A Gilbert-Elliott preset by its id, instead of loss_rate and mean_burst_packets."""
    algorithm: str = "direct"
    """Collective algorithm: direct, ring, tree, switch or sender."""
    repair: str = "zero"
    """zero, rescale, rescale_counted, stale, local, fec(n, k), hadamard(block), retransmit(budget), protect(share), or
    several joined by +."""
    reliable_gather: bool = True
    """False also loses packets of sums on their way back. Each rank then has its own residual stream. FSDP's
    all-gathers and a pipeline's sends always lose packets."""
    sequence_parallel: bool = False
    """Reduce-scatter and all-gather around a sharded residual stream; lossytp layers only."""
    wire_dtype: str | None = None
    """Round messages to fp32 or bf16 for sending. If left out, keep their dtype. Lossytp layers only."""
    control: Literal["elements", "noise"] | None = None
    """Instead of packets, lose single elements (elements), or add Gaussian noise of equal squared error (noise)."""
    lossy_direction: str | None = None
    """Lose packets only in forward or backward."""
    lossy_module: str | None = None
    """Lose packets only in attention or mlp."""
    lossy_layers: str | None = None
    """Lose packets only in these transformer layers: first:stop, counted from 0."""
    lossy_phase: str | None = None
    """Lose packets only in the reduce or the gather phase."""
    lossy_links: str | None = None
    """Links that lose packets, such as 0>1,2>3, in every group of ranks; all if left out; -1 is the switch."""
    mtu_bytes: int = 1500
    """Packet size, headers included."""
    transport: Literal["simulated", "udp"] = "simulated"
    """udp really sends the packets, one rank per process; loss_type's losses come on top of the path's. Slow."""
    timeout_s: Annotated[float, Gt(0), Le(1e6)] = 1800.0
    """Seconds that a process waits for the others, at the start and in each exchange."""
    seed: Annotated[int, Ge(0), Lt(2**63)] = 1234
    """Seed of initial weights, data order, dropout and packet losses."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability("loss_rate", self.loss_rate)
        self.wiring()
        self.network()
        if self.transport == "udp":
            for name, needed in ON_UDP.items():
                if getattr(self, name) != needed:
                    raise ValueError(
                        f"{name} = {getattr(self, name)!r} does not work with transport = 'udp', which is built for "
                        f"{needed!r} alone: leave one out"
                    )

    def process(self) -> LossProcess:
        """Return the loss process of every link.

        Raises:
            ValueError: if the settings contradict each other.
        """
        if self.loss_type == "ber":
            for name in ("mean_burst_packets", "ge_config"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} = {getattr(self, name)!r} needs loss_type = 'g-e', not 'ber': change one")
            return Bernoulli(loss_rate=self.loss_rate)
        if self.loss_type != "g-e":
            if self.ge_config is not None:
                raise ValueError(
                    f"ge_config = {self.ge_config!r} needs loss_type = 'g-e', not {self.loss_type!r}: change one"
                )
            return loss_process_named(
                self.loss_type, loss_rate=self.loss_rate, mean_burst_packets=self.mean_burst_packets
            )
        if self.ge_config is not None:
            if self.loss_rate or self.mean_burst_packets is not None:
                raise ValueError(
                    f"ge_config = {self.ge_config!r} sets rate and burst: leave out loss_rate and mean_burst_packets"
                )
            return gilbert_elliott_preset(self.ge_config)
        if self.mean_burst_packets is None:
            raise ValueError("loss_type = 'g-e' needs ge_config, or loss_rate and mean_burst_packets: give one of them")
        return GilbertElliott.from_loss_and_burst(loss_rate=self.loss_rate, mean_burst_packets=self.mean_burst_packets)

    @property
    def process_rate(self) -> float:
        """Return the stationary loss rate of every link, also if a preset or a trace sets it, and not `loss_rate`."""
        return float(f"{self.process().loss_rate:.12g}")  # drops a closed form's last digits

    def check_forward(self) -> None:
        """Raise ValueError if only backward loses packets, so that an evaluation loses none."""
        if self.lossy_direction == "backward":
            raise ValueError("lossy_direction = 'backward' loses nothing in an evaluation: leave it out")

    def wiring(self) -> Wiring:
        """Return how the tensor-parallel ranks exchange messages."""
        return Wiring.named(
            algorithm=self.algorithm,
            repair=self.repair,
            reliable_gather=self.reliable_gather,
            sequence_parallel=self.sequence_parallel,
            wire_dtype=self.wire_dtype,
            control=None if self.control == "elements" else self.control,
        )

    def network(self) -> LossyNetwork:
        """Return a new network with these settings."""
        process = self.process()
        return LossyNetwork(
            process if self.lossy_links is None else dict.fromkeys(links_named(self.lossy_links), process),
            seed=self.seed,
            wire=Wire(mtu_bytes=self.mtu_bytes, elements=1 if self.control == "elements" else None),
            scope=Scope(
                direction=self.lossy_direction,
                module=self.lossy_module,
                layers=None if self.lossy_layers is None else layers_named(self.lossy_layers),
                phase=self.lossy_phase,
            ),
        )


# The settings of parallelism beyond the tensor-parallel ranks: replicas, pipeline stages and implementation.


@dataclass(frozen=True, kw_only=True)
class ParallelismSettings(NetworkSettings):
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

    def layout(self, rank: int, world_size: int) -> Layout:
        """Return the run's layout over `world_size` processes, with this process's rank.

        Raises:
            ValueError: if the sizes need more or fewer processes.
        """
        layout = Layout(
            self.tensor_parallel_size, self.data_parallel_size, self.pipeline_parallel_size, rank, world_size
        )
        if self.tensor_parallel_layers != "lossytp" and layout.tensor_processes != self.tensor_parallel_size:
            needed = self.tensor_parallel_size * self.data_parallel_size * self.pipeline_parallel_size
            raise ValueError(
                f"implementation = {self.implementation!r} needs a process for each tensor-parallel rank: start with "
                f"torchrun --standalone --nproc_per_node {needed}"
            )
        if self.transport == "udp" and (world_size != self.tensor_parallel_size or world_size == 1):
            raise ValueError(
                "transport = 'udp' needs a process for each of 2 or more tensor-parallel ranks, and no others: start "
                f"with torchrun --standalone --nproc_per_node {max(2, self.tensor_parallel_size)}"
            )
        own_copies = self.replicated_gradients != "reliable" and layout.tensor_processes != self.tensor_parallel_size
        if own_copies and self.fully_sharded:
            raise ValueError(
                f"replicated_gradients = {self.replicated_gradients!r} does not work with fsdp, which would shard the "
                "axis on which a process holds its ranks' copies: choose ddp, or start with torchrun --standalone "
                f"--nproc_per_node {self.tensor_parallel_size * self.data_parallel_size}"
            )
        return layout

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
    def loses_logits(self) -> bool:
        """Return whether evaluation's gather of vocabulary-parallel logits loses packets."""
        return False

    @property
    def splits_vocabulary(self) -> bool:
        """Return whether tensor-parallel ranks also share the vocabulary, and compute the training loss together."""
        return False

    @property
    def fully_sharded(self) -> bool:
        """Return whether replicas shard the parameters, and gather them over the lossy network."""
        return self.data_parallel_size > 1 and self.data_parallel_type == "fsdp"

    def wiring(self) -> Wiring:
        """Return how the tensor-parallel ranks exchange messages."""
        return replace(super().wiring(), exact_adjoint=self.exact_adjoint)


# The setting that names a task: one of the project's own, or a file that declares one.


def _from_json(words: list[str]) -> Any:
    try:
        return json.loads(words[0])
    except ValueError as error:
        raise ValueError(f"declaration = {words[0][:60]!r} is not JSON ({error}): give --dataset FILE.yaml") from None


JsonFlag = PrimitiveConstructorSpec(
    nargs=1,
    metavar="JSON",
    instance_from_str=_from_json,
    is_instance=lambda value: isinstance(value, dict),
    str_from_instance=lambda value: [json.dumps(value)],
)


@dataclass(frozen=True, kw_only=True)
class TaskSettings(Settings):
    """The task of a run. The content of a file that declares one is part of the configuration, and so of records."""

    dataset: str | None = None
    """The task: one of TASKS, or a YAML file that declares one of your own. A configuration keeps the task's name."""
    declaration: Annotated[dict, JsonFlag] | None = None
    """What that file declares. Do not give this: --dataset FILE.yaml sets it, and records keep it."""
    task_folder: str | None = None
    """Folder where the declaration's relative paths start, which --dataset FILE.yaml sets too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset is not None and self.declaration is None:
            folder, dataset = self.task_folder, self.dataset
            self._read(Path(dataset).expanduser())
            if folder is not None and (self.declaration is None or folder != self.task_folder):
                raise ValueError(f"task_folder = {folder!r} does not go with dataset = {dataset!r}: leave it out")
        if self.declaration is not None and self.declaration.get("name") != self.dataset:
            raise ValueError(
                f"dataset = {self.dataset!r} does not go with the declaration of {self.declaration.get('name')!r}: "
                "leave declaration out, or give this name"
            )
        if self.dataset is not None:
            self.definition()

    @classmethod
    def result_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that the result depends on. Records without a declaration do not mention it."""
        kept = super().result_of(values)
        return {name: value for name, value in kept.items() if (name, value) != ("declaration", None)}

    def definition(self) -> Task:
        """Return the task: its source, texts, labels and metrics.

        Raises:
            ValueError: if there is none of this name, or its declaration is wrong.
        """
        assert self.dataset is not None
        if self.declaration is None:
            return task_named(self.dataset)
        return declared_task(self.declaration, self.task_folder)

    def _read(self, file: Path) -> None:
        """Replace a file's path by the name, the declaration and the folder that it gives."""
        if file.suffix in DECLARATIONS:
            declaration = read_declaration(file)
            for name, value in (
                ("dataset", declaration["name"]),
                ("declaration", declaration),
                ("task_folder", str(file.parent.absolute())),
            ):
                object.__setattr__(self, name, value)
        elif (plain := str(self.dataset).lower().replace("-", "_")) in TASKS and self.dataset not in TASKS:
            object.__setattr__(self, "dataset", plain)  # ARC-Easy, as earlier studies wrote it
        elif file.suffix in FORMATS and not file.is_file():
            raise ValueError(f"dataset = {self.dataset!r} does not exist: give the path of a file, or a task's name")
        elif file.suffix in FORMATS:
            from lossytp.training.tasks import suggestion  # reading rows takes seconds to import

            raise ValueError(suggestion(file))


# Groups of settings: data, optimizer, precision, evaluation and output.


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


# Refuse settings that do not go together, or that the model cannot have.


def check_combinations(config: "RunSettings") -> None:
    """Raise ValueError, with the settings and the fix, if some of them do not work together."""
    if config.control is not None and config.loss_type != "ber":
        raise ValueError(
            f"control = {config.control!r} does not work with loss_type = {config.loss_type!r}, because controls are "
            "independent from element to element: give loss_type = 'ber'"
        )
    _check_transport(config)
    _check_parallelism(config)
    _check_backend(config)
    _check_replicas(config)
    _check_scope(config)
    _check_training(config)


def _check_transport(config: "RunSettings") -> None:
    """Refuse what cannot really be sent."""
    allowed = {"implementation": "lossytp", "data_parallel_size": 1, "pipeline_parallel_size": 1, "bf16": False}
    for name, needed in (allowed | {"fp16": False}).items() if config.transport == "udp" else ():
        if getattr(config, name) != needed:
            raise ValueError(
                f"{name} = {getattr(config, name)!r} does not work with transport = 'udp', which carries only float32 "
                "of this project's tensor parallelism: leave one out"
            )


def _check_parallelism(config: "RunSettings") -> None:
    """Refuse implementations, pipelines and batch sizes that do not work together."""
    if config.tensor_parallel_layers == "dtensor" and config.tensor_parallel_size > 1:
        if config.data_parallel_size > 1 and config.data_parallel_type == "ddp":
            raise ValueError("implementation = 'dtensor' does not work with ddp, which takes no DTensors: choose fsdp")
        if config.fp16:
            raise ValueError(
                "implementation = 'dtensor' does not work with fp16, because PyTorch's scaler cannot mix DTensors and "
                "tensors: choose bf16"
            )
    if config.pipeline_parallel_size > 1:
        if config.kind != "classification":
            raise ValueError(
                f"dataset = {config.task!r} does not work with a pipeline, which supports classification, "
                f"not {config.kind}: choose a classification task"
            )
        if not config.reliable_gather and not config.sequence_parallel:
            raise ValueError(
                "reliable_gather = False does not work with a pipeline, whose stages hand on one residual stream: "
                "leave one out"
            )
        if config.data_parallel_size > 1:
            raise ValueError(
                "pipeline_parallel_size and data_parallel_size are both above 1, which is not supported: set one to 1"
            )
        if config.fp16:
            raise ValueError(
                "fp16 = True does not work with a pipeline, whose schedule does not scale the training loss: choose "
                "bf16"
            )
        microbatches = config.pipeline_microbatches
        if config.batch_size % microbatches:
            raise ValueError(
                f"batch_size = {config.batch_size} is not a multiple of pipeline_microbatches = {microbatches}: give "
                "one that is"
            )
        if config.pipeline_schedule == "1f1b" and microbatches < config.pipeline_parallel_size:
            raise ValueError(
                f"pipeline_microbatches = {microbatches} is below pipeline_parallel_size = "
                f"{config.pipeline_parallel_size}, which 1f1b needs to keep every stage busy: give as many or more"
            )
    if config.batch_size % config.data_parallel_size:
        raise ValueError(
            f"batch_size = {config.batch_size} is not a multiple of data_parallel_size = {config.data_parallel_size}: "
            "give one that is"
        )


def _check_backend(config: "RunSettings") -> None:
    """Refuse settings that need this project's layers, and repairs that other traffic does not support."""
    own_layers = config.tensor_parallel_layers == "lossytp" and config.tensor_parallel_size > 1
    stages_alone = config.pipeline_parallel_size > 1 and config.tensor_parallel_size == 1
    if not own_layers:
        for name in ("sequence_parallel", "exact_adjoint", "wire_dtype", "lossy_module", "lossy_layers"):
            value = getattr(config, name)
            if value and not (name == "exact_adjoint" and stages_alone):
                raise ValueError(
                    f"{name} = {value!r} needs this project's tensor-parallel layers, which know where a message is "
                    "from: leave it out, or give implementation = 'lossytp' and tensor_parallel_size above 1"
                )
    tensor_parallel_alone = config.data_parallel_size == config.pipeline_parallel_size == 1
    repair = config.wiring().repair
    if config.exact_adjoint and config.pipeline_parallel_size > 1 and repair != ZERO:
        raise ValueError(
            f"exact_adjoint = True works in a pipeline only with repair = 'zero', not {config.repair!r}: give 'zero', "
            "or leave exact_adjoint out"
        )
    for name, asked in {"repair": repair.remembers, "control": config.control == "noise"}.items():
        if asked and not (own_layers and tensor_parallel_alone):
            raise ValueError(
                f"{name} = {getattr(config, name)!r} needs this project's layers, and tensor parallelism alone: "
                "leave it out, or leave out implementation, data_parallel_size and pipeline_parallel_size"
            )
    chooses = stage_of(repair, "select") != ZERO
    algorithm = config.wiring().algorithm
    scattered = algorithm.reduce_scatter(16, (0, 1, 2, 3)) if config.fully_sharded else ()
    carry_one = algorithm.hops_carry_one() and all(len(hop.positions) == 1 for hop in scattered)
    if chooses and not (own_layers and tensor_parallel_alone) and not carry_one:
        raise ValueError(
            f"repair = {config.repair!r} does not work with algorithm = {config.algorithm!r}, whose packets carry sums "
            "that no single process knows: choose direct, or only this project's tensor parallelism"
        )
    fully_sharded = config.fully_sharded
    other_logits = config.tensor_parallel_size > 1 and (fully_sharded or not (own_layers or config.reliable_gather))
    if other_logits and config.kind == "generation":
        raise ValueError(
            f"dataset = {config.task!r}, whose answers are generated, does not work with "
            f"{'fsdp' if fully_sharded else config.tensor_parallel_layers + ' and reliable_gather = False'}: tensor-"
            "parallel ranks with different logits would continue with different tokens; choose another dataset"
        )
    if repair.uses_own_part and (config.pipeline_parallel_size > 1 or fully_sharded):
        raise ValueError(
            "repair = 'local' does not work with a pipeline or fsdp, in whose sends and all-gathers a receiver has no "
            "part of its own: choose another repair"
        )


def _check_scope(config: "RunSettings") -> None:
    """Refuse a scope in which nothing can be lost. Links are known exactly for tensor parallelism alone."""
    if config.exact_adjoint and config.lossy_direction == "backward":
        raise ValueError(
            "exact_adjoint = True has no effect with lossy_direction = 'backward', because forward loses nothing: "
            "leave one out"
        )
    sums_alone = config.pipeline_parallel_size == 1 and not config.fully_sharded
    if sums_alone and config.lossy_phase == "gather" and config.reliable_gather:
        raise ValueError(
            "lossy_phase = 'gather' loses nothing where gathers are reliable: give reliable_gather = False"
        )
    if config.tensor_parallel_layers != "lossytp" or config.data_parallel_size > 1 or config.pipeline_parallel_size > 1:
        _check_other_axes(config)
        return
    if config.tensor_parallel_size == 1 and config.process().loss_rate > 0:
        raise ValueError(
            f"loss_rate = {config.process().loss_rate:g} has no effect on a single rank, which sends nothing: give "
            "tensor_parallel_size above 1, or loss_rate = 0"
        )
    ranks = tuple(range(config.tensor_parallel_size))
    used = config.wiring().lossy_links(ranks, config.lossy_phase)
    process = config.process()
    if isinstance(process, Replay):
        process.check_has(used if config.lossy_links is None else links_named(config.lossy_links))
    if config.lossy_links is not None:
        for src, dst in links_named(config.lossy_links):
            if (src, dst) not in used:
                links = ",".join(f"{src}>{dst}" for src, dst in sorted(used))
                raise ValueError(
                    f"lossy_links names {src}>{dst}, over which {config.algorithm!r} of {len(ranks)} ranks sends "
                    f"nothing that may be lost: choose among {links or 'none'}"
                )


def _check_other_axes(config: "RunSettings") -> None:
    """Refuse links of ranks that do not exist, and a scope that replicas or stages without tensor ranks never reach."""
    axes = config.tensor_parallel_size, config.data_parallel_size, config.pipeline_parallel_size
    if config.lossy_links is not None:
        check_links_within(links_named(config.lossy_links), math.prod(axes))
    match axes:
        case 1, replicas, 1 if replicas > 1 and not config.fully_sharded and config.lossy_direction == "forward":
            raise ValueError(
                "lossy_direction = 'forward' loses nothing with ddp alone, which sums gradients in backward: leave it "
                "out, or choose data_parallel_type = 'fsdp'"
            )
        case 1, 1, stages if stages > 1 and config.lossy_phase == "reduce":
            raise ValueError(
                "lossy_phase = 'reduce' loses nothing in a pipeline alone, which sums nothing: leave it out"
            )


def _check_replicas(config: "RunSettings") -> None:
    """Refuse settings of ranks' own streams and copies if ranks share them."""
    if not config.reliable_gather and config.tensor_parallel_size * config.data_parallel_size == 1:
        raise ValueError(
            "reliable_gather = False has no effect where nothing is summed: give tensor_parallel_size above 1"
        )
    if config.replicated_gradients != "reliable" and config.tensor_parallel_size == 1:
        raise ValueError(
            f"replicated_gradients = {config.replicated_gradients!r} has no effect with tensor_parallel_size = 1, "
            "where no rank holds copies: give more ranks, or leave it out"
        )
    if config.replicated_gradients != "reliable" and (config.reliable_gather or config.sequence_parallel):
        raise ValueError(
            f"replicated_gradients = {config.replicated_gradients!r} has no effect where all ranks share a residual "
            "stream: give reliable_gather = False, or leave it out"
        )
    if config.replicated_gradients == "lossy" and config.wiring().repair.uses_own_part:
        raise ValueError(
            "replicated_gradients = 'lossy' does not work with repair = 'local', which would take a rank's own "
            "gradient for the sum of all: choose another repair"
        )
    if config.resync_every is not None and config.replicated_gradients == "reliable":
        raise ValueError(
            f"resync_every = {config.resync_every} has no effect where copies do not drift: give replicated_gradients "
            "= 'lossy' or 'none', or leave it out"
        )


def _check_training(config: "RunSettings") -> None:
    """Refuse ways of training, and of saving the model, that the layout does not allow."""
    pipeline = config.pipeline_parallel_size > 1
    sharded = config.fully_sharded
    tensor_parallel = config.tensor_parallel_size > 1
    foreign = config.tensor_parallel_layers != "lossytp" and tensor_parallel
    if pipeline and config.microbatches > 1:
        raise ValueError(
            f"gradient_accumulation_steps = {config.microbatches} does not work with a pipeline, whose "
            "microbatches do this already: give pipeline_microbatches"
        )
    if config.gradient_checkpointing and (foreign or sharded):
        raise ValueError(
            "gradient_checkpointing = True does not work with "
            f"{'fsdp' if sharded else config.tensor_parallel_layers}, whose recomputed collectives would lose other "
            "packets: leave it out, or choose ddp and implementation = 'lossytp'"
        )
    if config.unfreeze_last_layers is not None and pipeline:
        raise ValueError(
            f"unfreeze_last_layers = {config.unfreeze_last_layers} does not work with a pipeline, whose first stages "
            "would have nothing to train: leave one out"
        )


def check_blocks(config: "RunSettings", blocks: int) -> None:
    """Raise ValueError if the settings need more blocks than the model has.

    A model on the hub must be loaded before `blocks` is known.
    """
    if config.lossy_layers is not None and layers_named(config.lossy_layers)[1] > blocks:
        raise ValueError(
            f"lossy_layers = {config.lossy_layers!r} is beyond {config.model_name}'s {blocks} blocks: stop at {blocks}"
        )
    if config.pipeline_parallel_size > blocks:
        raise ValueError(
            f"pipeline_parallel_size = {config.pipeline_parallel_size} is above {config.model_name}'s {blocks} blocks: "
            "give fewer"
        )
    trained = config.unfreeze_last_layers
    if trained is None:
        return
    if trained > blocks:
        raise ValueError(f"unfreeze_last_layers = {trained} is above {config.model_name}'s {blocks} blocks: give fewer")
    last = blocks if config.lossy_layers is None else layers_named(config.lossy_layers)[1]
    tensor_parallel_alone = config.tensor_parallel_size > 1 and config.data_parallel_size == 1
    if config.lossy_direction == "backward" and tensor_parallel_alone and last <= blocks - trained:
        raise ValueError(
            f"lossy_direction = 'backward' loses nothing with unfreeze_last_layers = {trained}, because frozen blocks "
            "send nothing in backward: unfreeze more, or leave one out"
        )


# What every training run needs beside its data, in fine-tuning and in pretraining. Importing this costs no torch.


@dataclass(frozen=True, kw_only=True)
class RunSettings(WatchingSettings, OptimisationSettings, ParallelismSettings, ComputeSettings):
    """The settings of one training run, whatever it trains on: the loop, the engine and checkpoints need no others.

    Subclasses add the data, and implement the properties below.
    """

    betas: ClassVar[tuple[float, float]] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    curve_points: ClassVar[int] = 50
    """Training losses in a record: this many, or up to twice as many."""

    model_name: str = "gpt2-nano"

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
    def threads(self) -> int:
        """Return how many threads compute microbatches side by side; 0 if one after another."""
        return 0

    @property
    def smallest_rate(self) -> float:
        """Return the learning rate at the end of its decay, as a share of its peak."""
        return 0.0

    def differences(self, written: dict[str, Any]) -> list[str]:
        """Return the names of the settings that differ from those `written`.

        A subclass leaves out those that may change when a run goes on.
        """
        ours = self.result_settings()
        return [name for name in {**ours, **written} if name not in ours or ours[name] != written.get(name, ...)]

    def compared(self, names: Sequence[str], written: dict[str, Any]) -> str:
        """Return the settings `names` of an earlier run, each beside its value now: "loss_rate = 0.1, not 0.2"."""
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

    def check_run(self) -> None:
        """Raise ValueError, with the settings and the fix, if some do not go together or do not suit the model."""
        check_combinations(self)
        shape = shape_of(self.model_name)
        if shape is not None:
            check_blocks(self, shape.layers)


# The configuration of one fine-tuning run, from the command line, a YAML file or a notebook's parameters.
#
# Names are those of earlier studies' flags, so their command lines run here.


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


# The configuration of one pretraining run.
#
# Names are those of earlier studies' flags, so their command lines run here.


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


# The configuration of an evaluation without training.


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(NetworkSettings, ComputeSettings, TaskSettings):
    """A model, a network, the task or text to evaluate the model on, and the output folder."""

    model_name: str = "gpt2-nano"
    """A folder that training wrote (best or last), or a language model by name."""
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
    output_dir: str = "output/evaluate"
    """Folder for evaluation.json."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.training()
        self.check_forward()

    def training(self) -> TrainConfig:
        """Return a training run's configuration with this network and precision; it checks them.

        Raises:
            ValueError: if training would refuse a value, or a combination.
        """
        return TrainConfig(
            **self.group(NetworkSettings),
            **self.group(ComputeSettings),
            model_name=self.model_name,
            dataset=self.dataset or TrainConfig.dataset,
            declaration=self.declaration,
            task_folder=self.task_folder if self.declaration else None,
            max_length=self.max_length or 1,
        )

    def layout(self, rank: int, world_size: int) -> Layout:
        """Return the run's layout over `world_size` processes, with this process's rank.

        Raises:
            ValueError: if the processes do not fit the tensor-parallel ranks.
        """
        return self.training().layout(rank, world_size)


# Configurations of training, evaluation and pretraining. Importing them costs no torch.
#
# Each is made of groups of settings, and its flags are flat: `NetworkSettings` and `ParallelismSettings`, for example,
# are base classes of `TrainConfig`. Code that needs one group asks for that group.


def settings_class(values: Mapping[str, Any]) -> type[RunSettings]:
    """Return the class of a run's configuration, from its values: pretraining has names that fine-tuning lacks."""
    names = {kind: {field.name for field in fields(kind)} for kind in (TrainConfig, PretrainConfig)}
    return PretrainConfig if values.keys() & (names[PretrainConfig] - names[TrainConfig]) else TrainConfig


def run_settings(cells: Sequence[Mapping[str, Any]], kind: type[RunSettings] | None = None) -> list[RunSettings]:
    """Return the configuration of each cell, of this kind or, if it is None, of fine-tuning or of pretraining.

    Raises:
        ValueError: if `cells` is not a list, or is empty, a name or value is unknown, or two cells share a folder.
    """
    check_filled("cells", cells)
    configs = [(kind or settings_class(cell)).from_dict(cell) for cell in cells]
    by_folder: dict[str, RunSettings] = {}
    for cell, config in zip(cells, configs, strict=True):
        if "output_dir" in cell and by_folder.setdefault(config.output_dir, config) != config:
            raise ValueError(f"output_dir = {config.output_dir!r} is that of several cells: give each its own")
    return configs
