"""Refuse settings that do not go together, or that the model cannot have. Importing this module costs no torch."""

import math
from typing import TYPE_CHECKING

from lossytp.network.links import check_links_within
from lossytp.network.repairs import ZERO
from lossytp.network.repairs.chain import stage_of
from lossytp.network.replay import Replay
from lossytp.network.scope import layers_named, links_named

if TYPE_CHECKING:
    from lossytp.training.config.run import RunSettings


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
