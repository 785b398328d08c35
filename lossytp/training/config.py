"""The configuration of one training run, from the command line, a YAML file or a notebook's parameters.

Names are those of earlier studies' flags, so their command lines run here. Importing this module costs no torch.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lossytp.network.bernoulli import Bernoulli
from lossytp.network.checks import check_known, check_probability
from lossytp.network.gilbert_elliott import GilbertElliott
from lossytp.network.loss_processes import loss_process_named
from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.packets import Wire
from lossytp.network.presets import gilbert_elliott_preset
from lossytp.network.process import LossProcess
from lossytp.network.scope import Scope, layers_named, links_named
from lossytp.parallel.layout import Layout
from lossytp.parallel.wiring import Wiring
from lossytp.training.combinations import check_combinations
from lossytp.training.models import check_model
from lossytp.training.tasks import TASKS

POSITIVE = (
    "batch_size",
    "max_length",
    "max_samples",
    "eval_samples",
    "max_steps",
    "eval_steps",
    "resync_every",
    "patience",
    "data_parallel_size",
    "pipeline_parallel_size",
    "pipeline_microbatches",
    "gradient_accumulation_steps",
    "checkpoint_steps",
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that a training run's result depends on, and where it goes."""

    model_name: str = "gpt2-nano"
    """A preset: gpt2-nano or gpt2-micro, from random weights."""
    dataset: str = "docstrings"
    """The task: docstrings (which library is it from?)."""
    tensor_parallel_size: int = 4
    """Tensor-parallel ranks; under torchrun spread over the processes, else virtual."""
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
    loss_type: str = "ber"
    """Loss process: ber (Bernoulli), g-e (Gilbert-Elliott) or another of LOSS_PROCESSES: "correlated(shared=0.5)"."""
    loss_rate: float = 0.0
    """Stationary packet loss rate of every link, in [0, 1]."""
    mean_burst_packets: float | None = None
    """Mean run of consecutive losses; Gilbert-Elliott only."""
    ge_config: str | None = None
    """A Gilbert-Elliott preset by its id, in place of loss_rate and mean_burst_packets."""
    algorithm: str = "direct"
    """Collective algorithm: direct, ring, tree, switch or sender."""
    repair: str = "zero"
    """About losses: zero, rescale, rescale_counted, stale, local, fec(n, k), hadamard(block) or retransmit(budget)."""
    reliable_gather: bool = True
    """False loses packets of sums on their way back too: each rank then computes on a residual stream of its own.
    All-gathers of FSDP's and pipelines' sends lose packets always."""
    sequence_parallel: bool = False
    """Reduce-scatter and all-gather around a residual stream in shards; lossytp layers only."""
    replicated_gradients: Literal["reliable", "lossy", "none"] = "reliable"
    """How ranks with streams of their own average the gradients of what all of them hold; none lets copies drift."""
    resync_every: int | None = None
    """Set drifting copies to their mean every so many steps."""
    exact_adjoint: bool = False
    """Backward knows what forward lost (an ablation: no sender does); lossytp layers only."""
    wire_dtype: str | None = None
    """Messages are rounded to this for sending, fp32 or bf16; their own dtype when left out; lossytp layers only."""
    control: str | None = None
    """In place of packet loss: elements (independent ones are lost) or noise (Gaussian, of equal squared error)."""
    lossy_direction: str | None = None
    """Lose packets in forward or backward only."""
    lossy_module: str | None = None
    """Lose packets in attention or mlp only."""
    lossy_layers: str | None = None
    """Lose packets in these transformer layers only: first:stop, counted from 0; in YAML within quotes."""
    lossy_phase: str | None = None
    """Lose packets in the reduce or the gather phase only."""
    lossy_links: str | None = None
    """Links that lose packets, as in 0>1,2>3; all when left out; -1 is the switch."""
    mtu_bytes: int = 1500
    """Packet size, headers included."""
    batch_size: int = 32
    """Examples a step, over all replicas."""
    max_length: int = 64
    """Tokens an example is cut to."""
    max_samples: int | None = None
    """Training examples to keep; all when left out."""
    eval_samples: int | None = None
    """Test examples to evaluate on; all when left out."""
    max_steps: int = 600
    """Optimiser steps."""
    eval_steps: int | None = None
    """Evaluate every so many steps; only at the end when left out."""
    patience: int | None = None
    """Stop after so many evaluations in a row without a better lossy accuracy."""
    target_accuracy: float | None = None
    """Record the steps and seconds until lossy accuracy reaches this and holds it at the next evaluation."""
    learning_rate: float = 1e-3
    """Peak learning rate of AdamW."""
    warmup_steps: int = 20
    """Steps of linear warm-up; `schedule` follows."""
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
    """Speed of a simulated link, Gbit/s: time to accuracy is then told in seconds on such links too."""
    round_trip_us: float = 100.0
    """Round trip of that link, in microseconds."""
    bf16: bool = False
    """Matrix products, and so what tensor parallelism puts on the wire, in bfloat16; other traffic stays float32."""
    fp16: bool = False
    """The same in float16, with the training loss scaled."""
    seed: int = 1234
    """Of initial weights, data order, dropout and packet losses."""
    output_dir: str = "output"
    """Folder for record.json."""

    def __post_init__(self) -> None:
        _check_types(self)
        for field in fields(self):  # 8 and 8.0 are one configuration, with one hash
            value = getattr(self, field.name)
            if isinstance(value, int) and "float" in str(field.type):
                object.__setattr__(self, field.name, float(value))
        if self.seed >= 2**63:
            raise ValueError(f"seed = {self.seed} is above 2**63 - 1: give a smaller one")
        check_known("dataset", self.dataset, TASKS)
        check_model(self.model_name, self.tensor_parallel_size, self.max_length)
        for name in ("loss_rate", "dropout", "target_accuracy"):
            if getattr(self, name) is not None:
                check_probability(name, getattr(self, name))
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value} is below 1: give a positive number")
        if self.gradient_clipping is not None and not self.gradient_clipping > 0:
            raise ValueError(f"gradient_clipping = {self.gradient_clipping} is not above 0: leave it out for no limit")
        for name in ("learning_rate", "weight_decay", "warmup_steps", "seed"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} = {value} is negative or not finite: give 0 or more")
        _check_training(self)
        if self.bf16 and self.fp16:
            raise ValueError("bf16 = fp16 = True: choose one of them")
        if self.control is not None:
            check_known("control", self.control, ("elements", "noise"))
        self.wiring()
        self.network()
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

    def process(self) -> LossProcess:
        """The loss process of every link; ValueError where the settings contradict each other."""
        if self.loss_type == "ber":
            for name in ("mean_burst_packets", "ge_config"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} = {getattr(self, name)!r} needs loss_type = 'g-e', not 'ber'")
            return Bernoulli(loss_rate=self.loss_rate)
        if self.loss_type != "g-e":
            if self.ge_config is not None:
                raise ValueError(f"ge_config = {self.ge_config!r} needs loss_type = 'g-e', not {self.loss_type!r}")
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

    def wiring(self) -> Wiring:
        """How the tensor-parallel ranks exchange messages."""
        return Wiring(
            algorithm=self.algorithm,
            repair=self.repair,
            reliable_gather=self.reliable_gather,
            sequence_parallel=self.sequence_parallel,
            exact_adjoint=self.exact_adjoint,
            wire_dtype=self.wire_dtype,
            control=None if self.control == "elements" else self.control,
        )

    def network(self) -> LossyNetwork:
        """A network of such links, none of whose packets was sent yet."""
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

    def as_dict(self) -> dict[str, Any]:
        """Field names and values, JSON-ready."""
        return asdict(self)

    def changes(self) -> dict[str, Any]:
        """Names and values of the fields that are not at their default."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainConfig":
        """From names and values; ValueError names an unknown one and the closest that there is."""
        cls.check_names(values)
        return cls(**values)

    @classmethod
    def check_names(cls, values: Mapping[str, Any]) -> None:
        """Raise ValueError for a name that is no field."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
                raise ValueError(f"unknown parameter {name!r}: {hint}")


def _check_training(config: TrainConfig) -> None:
    if config.unfreeze_last_layers is not None and config.unfreeze_last_layers < 0:
        raise ValueError(f"unfreeze_last_layers = {config.unfreeze_last_layers} is negative: give 0 or more")
    if config.gradient_accumulation_steps > config.batch_size:
        raise ValueError(
            f"gradient_accumulation_steps = {config.gradient_accumulation_steps} is above batch_size = "
            f"{config.batch_size}: give as many or fewer"
        )
    if config.link_gbits is not None and not (math.isfinite(config.link_gbits) and config.link_gbits > 0):
        raise ValueError(f"link_gbits = {config.link_gbits} is not above 0 and finite: leave it out for no link")
    if not (math.isfinite(config.round_trip_us) and config.round_trip_us >= 0):
        raise ValueError(f"round_trip_us = {config.round_trip_us} is negative or not finite: give 0 or more")


def _check_types(config: TrainConfig) -> None:
    """Values from YAML or a notebook carry no types: refuse what is not of its field's."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if get_origin(hint) is Literal:
            check_known(name, value, get_args(hint))
            continue
        allowed = get_args(hint) or (hint,)
        matches = isinstance(value, (*allowed, int) if float in allowed else allowed)
        if not matches or (isinstance(value, bool) and bool not in allowed):
            expected = " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in allowed)
            raise ValueError(f"{name} = {value!r} is of the wrong type: give {expected}")
