"""Which settings of a run do not go together, or do not suit its model. Importing this module costs no torch."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lossytp.network.repairs import ZERO, ProtectFirst, stage_of
from lossytp.network.routes import check_links_within
from lossytp.network.scope import links_named
from lossytp.parallel.group import check_nodes

if TYPE_CHECKING:
    from lossytp.training.config import RunSettings


def combinations(config: "RunSettings") -> Iterator[tuple[str, str]]:
    """Yield each combination that does not work: the name of a setting, why, and the fix."""
    yield from _pipeline_faults(config)
    yield from _backend_faults(config)
    yield from _scope_faults(config)
    yield from _training_faults(config)


def _pipeline_faults(config: "RunSettings") -> Iterator[tuple[str, str]]:
    network, parallelism, batch = config.network, config.parallelism, config.optimizer.batch_size
    replicas, stages = parallelism.data_parallel_size, parallelism.pipeline_parallel_size
    if network.control is not None and network.loss_type != "ber":
        yield "control", "loses each element on its own: leave out loss_type, or control"
    if parallelism.tensor_parallel_layers == "dtensor" and network.tensor_parallel_size > 1:
        if replicas > 1 and not parallelism.fully_sharded:
            yield "implementation", "does not work with ddp, which takes no DTensors: choose fsdp"
        if config.compute.fp16:
            yield "fp16", "needs PyTorch's scaler, which cannot mix DTensors and tensors: choose bf16"
    if batch % replicas:
        yield "batch_size", f"is not a multiple of data_parallel_size = {replicas}: give one that is"
    if stages == 1:
        return
    if config.kind != "classification":
        yield "dataset", f"is {config.kind}, and a pipeline supports classification alone: choose such a task"
    if not network.reliable_gather and not network.sequence_parallel:
        yield "reliable_gather", "does not work with a pipeline, whose stages share one residual stream: leave one out"
    if replicas > 1:
        yield "pipeline_parallel_size", "and data_parallel_size are both above 1, which is not supported: set one to 1"
    if config.compute.fp16:
        yield "fp16", "does not work with a pipeline, which scales no training loss: choose bf16"
    microbatches = parallelism.pipeline_microbatches
    if batch % microbatches:
        yield "batch_size", f"is not a multiple of pipeline_microbatches = {microbatches}: give one that is"
    if parallelism.pipeline_schedule == "1f1b" and microbatches < stages:
        yield "pipeline_microbatches", f"is below pipeline_parallel_size = {stages}, which 1f1b needs: give more"


def _backend_faults(config: "RunSettings") -> Iterator[tuple[str, str]]:
    """Yield what needs this project's layers, and repairs that other traffic does not support."""
    network, parallelism, values = config.network, config.parallelism, config.as_dict()
    sharded, pipeline = parallelism.fully_sharded, parallelism.pipeline_parallel_size > 1
    ranks, layers = network.tensor_parallel_size, parallelism.tensor_parallel_layers
    own_layers, alone = layers == "lossytp" and ranks > 1, parallelism.data_parallel_size == 1 and not pipeline
    comm, adjoint = config.comm(), parallelism.exact_adjoint
    repair, algorithm = comm.repair, comm.algorithm
    for name in ("sequence_parallel", "exact_adjoint", "wire_dtype", "lossy_module", "lossy_layers", "lossy_positions"):
        between_stages = name == "exact_adjoint" and pipeline and ranks == 1
        if values[name] and not own_layers and not between_stages:
            yield name, "needs this project's layers over several ranks: leave out implementation, or leave this out"
    positions = network.build().scope.positions
    length = values.get("max_length") or values.get("block_size")
    if isinstance(positions, tuple) and length and positions[0] >= length:
        yield "lossy_positions", f"begins after the last of {length} tokens: begin below {length}"
    if network.lossy_positions is not None and pipeline:
        yield "lossy_positions", "does not work in a pipeline, whose stages do not know positions: leave one out"
    if adjoint and pipeline and repair != ZERO:
        yield "exact_adjoint", f"works in a pipeline only with repair = 'zero', not {network.repair!r}: leave one out"
    for name, asked in {"repair": repair.remembers, "control": network.control == "noise"}.items():
        if asked and not (own_layers and alone):
            yield name, "needs this project's layers, and tensor parallelism alone: leave this out, or the others"
    scattered = algorithm.reduce_scatter(16, (0, 1, 2, 3)) if sharded else ()
    carry_one = algorithm.hops_carry_one() and all(len(hop.positions) == 1 for hop in scattered)
    if isinstance(stage_of(repair, "select"), ProtectFirst) and not (own_layers and alone):
        yield "repair", "needs positions, which only this project's layers know: leave out replicas and stages"
    if stage_of(repair, "select") != ZERO and not (own_layers and alone) and not carry_one:
        yield "repair", f"needs packets of one rank each, but {network.algorithm!r} sends sums: choose direct"
    if ranks > 1 and config.kind == "generation" and (sharded or not (own_layers or network.reliable_gather)):
        yield "dataset", "generates answers, but ranks have different logits: choose lossytp's layers without fsdp"
    if repair.uses_own_part and (pipeline or sharded):
        yield "repair", "needs a part of the receiver's own, which pipelines and fsdp do not have: choose another"


def _scope_faults(config: "RunSettings") -> Iterator[tuple[str, str]]:
    """Yield scopes in which nothing can be lost. Links are known exactly for tensor parallelism alone."""
    network, parallelism = config.network, config.parallelism
    ranks, replicas = network.tensor_parallel_size, parallelism.data_parallel_size
    stages, sharded = parallelism.pipeline_parallel_size, parallelism.fully_sharded
    if parallelism.exact_adjoint and network.lossy_direction == "backward":
        yield "exact_adjoint", "has no effect with lossy_direction = 'backward': leave one out"
    if stages == 1 and not sharded and network.lossy_phase == "gather" and network.reliable_gather:
        yield "lossy_phase", "loses nothing where gathers are reliable: give reliable_gather = False"
    named = None if network.lossy_links is None else links_named(network.lossy_links)
    built = network.build()
    check_nodes(built, config.comm(), math.prod((ranks, replicas, stages)))
    if parallelism.tensor_parallel_layers != "lossytp" or replicas > 1 or stages > 1:
        if named is not None:
            check_links_within(named, math.prod((ranks, replicas, stages)))
        if ranks == stages == 1 and replicas > 1 and not sharded and network.lossy_direction == "forward":
            yield "lossy_direction", "loses nothing with ddp alone, which sums gradients: leave it out, or choose fsdp"
        if ranks == replicas == 1 and stages > 1 and network.lossy_phase == "reduce":
            yield "lossy_phase", "loses nothing in a pipeline alone, which sums nothing: leave it out"
        return
    process = network.process()
    if ranks == 1 and process.loss_rate > 0:
        yield "loss_rate", "has no effect on one rank, which sends nothing: give tensor_parallel_size above 1"
    sent = config.comm().lossy_links(tuple(range(ranks)), network.lossy_phase)
    used = {link for link in sent if not built.within_node(*link)}
    if any(link not in used for link in named or ()):
        links = ",".join(f"{src}>{dst}" for src, dst in sorted(used)) or "none"
        yield "lossy_links", f"names a link on which {network.algorithm!r} loses nothing: choose among {links}"


def _training_faults(config: "RunSettings") -> Iterator[tuple[str, str]]:
    """Yield settings of ranks' own streams and copies without effect, and ways of training that do not work."""
    network, parallelism, optimizer = config.network, config.parallelism, config.optimizer
    ranks, pipeline = network.tensor_parallel_size, parallelism.pipeline_parallel_size > 1
    gradients, layers = parallelism.replicated_gradients, parallelism.tensor_parallel_layers
    if not network.reliable_gather and ranks * parallelism.data_parallel_size == 1:
        yield "reliable_gather", "has no effect where nothing is summed: give tensor_parallel_size above 1"
    if gradients != "reliable" and (ranks == 1 or network.reliable_gather or network.sequence_parallel):
        yield "replicated_gradients", "has no effect on one residual stream: give reliable_gather = False, or no value"
    if gradients == "lossy" and config.comm().repair.uses_own_part:
        yield "replicated_gradients", "with repair = 'local' would take a rank's own gradient for the sum: change one"
    if parallelism.resync_every is not None and gradients == "reliable":
        yield "resync_every", "has no effect where copies do not drift: give replicated_gradients, or leave it out"
    if pipeline and config.microbatches > 1:
        yield "gradient_accumulation_steps", "does not work with a pipeline: give pipeline_microbatches instead"
    if optimizer.gradient_checkpointing and (parallelism.fully_sharded or (layers != "lossytp" and ranks > 1)):
        yield "gradient_checkpointing", "would lose other packets when it recomputes: choose ddp, lossytp's layers"
    if optimizer.unfreeze_last_layers is not None and pipeline:
        yield "unfreeze_last_layers", "leaves a pipeline's first stages nothing to train: leave one out"


def check_blocks(config: "RunSettings", blocks: int) -> None:
    """Raise ValueError if the settings need more blocks than the model has.

    A model on the hub must be loaded before `blocks` is known.
    """
    config.refuse(_needs_more_than(config, blocks))


def _needs_more_than(config: "RunSettings", blocks: int) -> Iterator[tuple[str, str]]:
    network, trained = config.network, config.optimizer.unfreeze_last_layers
    layers = network.build().scope.layers
    last = blocks if layers is None else layers[1]
    has = f"is above {config.model_name}'s {blocks} blocks: give"
    if last > blocks:
        yield "lossy_layers", f"{has} {blocks} as the last"
    if config.parallelism.pipeline_parallel_size > blocks:
        yield "pipeline_parallel_size", f"{has} fewer"
    if trained is None:
        return
    if trained > blocks:
        yield "unfreeze_last_layers", f"{has} fewer"
    alone = network.tensor_parallel_size > 1 and config.parallelism.data_parallel_size == 1
    if alone and last <= blocks - trained and network.lossy_direction == "backward":
        yield "lossy_direction", f"loses nothing in frozen blocks: give unfreeze_last_layers above {trained}"
