"""What parameters cannot be combined, refused with the reason."""

from typing import TYPE_CHECKING

from lossytp.network.repairs import ZERO
from lossytp.network.scope import layers_named, links_named
from lossytp.training.models import shape_of
from lossytp.training.tasks import task_named

if TYPE_CHECKING:
    from lossytp.training.config import TrainConfig
    from lossytp.training.evaluate_config import EvaluateConfig


def check_combinations(config: "TrainConfig | EvaluateConfig") -> None:
    """Raise ValueError for parameters each of which is fine, but not with the others."""
    _check_parallelism(config)
    _check_backend(config)
    _check_replicas(config)
    _check_scope(config)
    _check_training(config)
    shape = shape_of(config.model_name)
    if shape is not None:
        check_blocks(config, shape.layers)
    if config.control is not None and config.loss_type != "ber":
        raise ValueError(
            f"control = {config.control!r} with loss_type = {config.loss_type!r}: what is lost, or added, is "
            "independent; give loss_type = 'ber'"
        )


def _check_parallelism(config: "TrainConfig | EvaluateConfig") -> None:
    """Refuse, with the reason, what cannot be combined."""
    if config.implementation == "megatron" and (config.bf16 or config.fp16):
        raise ValueError(
            "implementation = 'megatron' with bf16 or fp16: its layers do not know autocast, leave them out"
        )
    if config.implementation == "dtensor" and config.tensor_parallel_size > 1:
        if config.data_parallel_size > 1 and config.data_parallel_type == "ddp":
            raise ValueError("implementation = 'dtensor' under ddp, which takes no DTensors: choose fsdp")
        if config.fp16:
            raise ValueError(
                "implementation = 'dtensor' with fp16: PyTorch's scaler mixes no DTensors with tensors, choose bf16"
            )
    if config.pipeline_parallel_size > 1:
        kind = task_named(config.dataset or "docstrings").kind
        if kind != "classification":
            raise ValueError(
                f"dataset = {config.dataset!r} with a pipeline, which knows classification, not {kind}: choose another"
            )
        if not config.reliable_gather and not config.sequence_parallel:
            raise ValueError(
                "reliable_gather = False with a pipeline, whose stages hand on one residual stream: leave one out"
            )
        if config.data_parallel_size > 1:
            raise ValueError(
                "pipeline_parallel_size and data_parallel_size are both above 1, which is not built: choose one"
            )
        if config.fp16:
            raise ValueError("fp16 = True with a pipeline: its schedule scales no training loss, choose bf16")
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


def _check_backend(config: "TrainConfig | EvaluateConfig") -> None:
    """Refuse what only this project's layers know how to do to others, and what they do alone to other traffic."""
    own_layers = config.implementation == "lossytp" and config.tensor_parallel_size > 1
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
            f"exact_adjoint = True with a pipeline and repair = {config.repair!r}: between stages it is built for "
            "repair = 'zero'"
        )
    for name, asked in {"repair": repair.remembers, "control": config.control == "noise"}.items():
        if asked and not (own_layers and tensor_parallel_alone):
            raise ValueError(
                f"{name} = {getattr(config, name)!r} needs tensor parallelism alone, by this project's layers: leave "
                "it out, or implementation, data_parallel_size and pipeline_parallel_size"
            )
    fully_sharded = _fully_sharded(config)
    if config.tensor_parallel_size > 1 and (fully_sharded or not (own_layers or config.reliable_gather)):
        kind = task_named(config.dataset or "docstrings").kind
        if kind == "generation":
            raise ValueError(
                f"dataset = {config.dataset!r}, whose answers are generated, with "
                f"{'fsdp' if fully_sharded else config.implementation + ' and reliable_gather = False'}: tensor-"
                "parallel ranks that compute other logits would go on with other tokens; choose another dataset"
            )
    if repair.uses_own_part and (config.pipeline_parallel_size > 1 or fully_sharded):
        raise ValueError(
            "repair = 'local' with a pipeline or fsdp, in whose sends and all-gathers a receiver has no part of its "
            "own: choose another repair"
        )


def _check_scope(config: "TrainConfig | EvaluateConfig") -> None:
    """Refuse a scope in which nothing could be lost, where tensor parallelism is all there is."""
    if config.exact_adjoint and config.lossy_direction == "backward":
        raise ValueError("exact_adjoint = True with lossy_direction = 'backward': forward loses nothing to know of")
    sums_alone = config.pipeline_parallel_size == 1 and not _fully_sharded(config)
    if sums_alone and config.lossy_phase == "gather" and config.reliable_gather:
        raise ValueError("lossy_phase = 'gather' where gathers are reliable: give reliable_gather = False")
    if config.implementation != "lossytp" or config.data_parallel_size > 1 or config.pipeline_parallel_size > 1:
        return
    if config.tensor_parallel_size == 1 and config.process().loss_rate > 0:
        raise ValueError(
            f"loss_rate = {config.process().loss_rate:g} on one rank alone, which sends nothing: give "
            "tensor_parallel_size above 1, or loss_rate = 0"
        )
    if config.lossy_links is not None:
        ranks = tuple(range(config.tensor_parallel_size))
        reduce, gather = config.wiring().algorithm.pair(config.sequence_parallel)
        lossy = {"reduce": reduce} | ({} if config.reliable_gather else {"gather": gather})
        phases = [routes for phase, routes in lossy.items() if config.lossy_phase in (None, phase)]
        used = {(hop.src, hop.dst) for routes in phases for hop in routes(len(ranks) ** 2, ranks)}
        for src, dst in links_named(config.lossy_links):
            if (src, dst) not in used:
                links = ",".join(f"{src}>{dst}" for src, dst in sorted(used))
                raise ValueError(
                    f"lossy_links names {src}>{dst}, over which {config.algorithm!r} of {len(ranks)} ranks sends "
                    f"nothing that may be lost: choose among {links or 'none'}"
                )


def _check_replicas(config: "TrainConfig | EvaluateConfig") -> None:
    if not config.reliable_gather and config.tensor_parallel_size * config.data_parallel_size == 1:
        raise ValueError("reliable_gather = False where nothing is summed: give tensor_parallel_size above 1")
    if config.replicated_gradients != "reliable" and config.tensor_parallel_size == 1:
        raise ValueError(
            f"replicated_gradients = {config.replicated_gradients!r} with tensor_parallel_size = 1, where no rank "
            "holds copies: give more ranks, or leave it out"
        )
    if config.replicated_gradients != "reliable" and (config.reliable_gather or config.sequence_parallel):
        raise ValueError(
            f"replicated_gradients = {config.replicated_gradients!r} where all ranks share a residual stream: give "
            "reliable_gather = False, or leave it out"
        )
    if config.replicated_gradients == "lossy" and config.wiring().repair.uses_own_part:
        raise ValueError(
            "replicated_gradients = 'lossy' with repair = 'local', by which a rank's own gradient would stand for the "
            "sum of all: choose another repair"
        )
    if config.resync_every is not None and config.replicated_gradients == "reliable":
        raise ValueError(
            f"resync_every = {config.resync_every} where copies do not drift: give replicated_gradients = 'lossy' or "
            "'none', or leave it out"
        )


def _check_training(config: "TrainConfig | EvaluateConfig") -> None:
    """Refuse ways of training, and of keeping the model, that a layout cannot do."""
    pipeline = config.pipeline_parallel_size > 1
    sharded = _fully_sharded(config)
    tensor_parallel = config.tensor_parallel_size > 1
    foreign = config.implementation != "lossytp" and tensor_parallel
    if pipeline and config.gradient_accumulation_steps > 1:
        raise ValueError(
            f"gradient_accumulation_steps = {config.gradient_accumulation_steps} with a pipeline, whose microbatches "
            "do this already: give pipeline_microbatches"
        )
    if config.gradient_checkpointing and (foreign or sharded):
        raise ValueError(
            f"gradient_checkpointing = True with {'fsdp' if sharded else config.implementation}, whose recomputed "
            "collectives would lose other packets: leave it out, or choose ddp and implementation = 'lossytp'"
        )
    if config.save_model and (foreign or pipeline or (sharded and tensor_parallel)):
        raise ValueError(
            "save_model = True with dtensor, megatron, a pipeline or fsdp over tensor-parallel ranks, from which the "
            "dense model cannot be gathered: leave it out"
        )
    if config.unfreeze_last_layers is not None and pipeline:
        raise ValueError(
            f"unfreeze_last_layers = {config.unfreeze_last_layers} with a pipeline, whose first stages would have "
            "nothing to train: leave one out"
        )


def check_blocks(config: "TrainConfig | EvaluateConfig", blocks: int) -> None:
    """Raise ValueError for what a model of so many blocks cannot do; of one on the hub these are known late."""
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
            f"lossy_direction = 'backward' with unfreeze_last_layers = {trained}: in frozen blocks nothing is sent in "
            "backward; unfreeze more, or leave one out"
        )


def _fully_sharded(config: "TrainConfig | EvaluateConfig") -> bool:
    """Whether replicas hold shards of the parameters, which are then gathered over the lossy network."""
    return config.data_parallel_size > 1 and config.data_parallel_type == "fsdp"
