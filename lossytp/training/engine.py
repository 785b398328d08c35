"""The model, laid out over the processes as configured, with the passes that a training step needs."""

import copy
import ctypes
import math
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

import lossytp
from lossytp.network.checks import refuse_if
from lossytp.network.lossy_network import LossyNetwork
from lossytp.parallel.backend import init_process_group, wrapped_backend
from lossytp.parallel.collectives import collective_of
from lossytp.parallel.convert import fuse_gelu_, parallelize
from lossytp.parallel.data_parallel import BucketedDDP, FlatFSDP, data_parallel
from lossytp.parallel.group import Layout
from lossytp.parallel.own_streams import PerRank, stream_distance
from lossytp.parallel.plans import blocks_of
from lossytp.parallel.replicas import gathered, mean_over_processes, resynchronise_, synchronise_gradients_
from lossytp.parallel.vocabulary import IGNORED, split_vocabulary_
from lossytp.training.config import EvaluateConfig, RunSettings
from lossytp.training.groups import NetworkSettings, PretrainParallelism
from lossytp.training.record import commit


def build_optimizer(
    model: nn.Module, *, learning_rate: float, weight_decay: float, betas: tuple[float, float] = (0.9, 0.999)
) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov and Hutter, ICLR 2019) over all parameters that are not frozen.

    Weight decay applies to the weights of linear layers and embeddings, not to biases and norms.
    """
    norms = {id(p) for module in model.modules() if is_norm(module) for p in module.parameters(recurse=False)}
    groups: dict[tuple[bool, Any], list[nn.Parameter]] = {}  # one kernel cannot mix tensors of different meshes
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = not (name.endswith("bias") or id(parameter) in norms)
            groups.setdefault((decays, getattr(parameter, "device_mesh", None)), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": weight_decay if decays else 0.0}
            for (decays, _), parameters in groups.items()
        ],
        lr=learning_rate,
        betas=betas,
    )


def is_norm(module: nn.Module) -> bool:
    """Return whether the module is a LayerNorm, a LlamaRMSNorm or another class that is named so."""
    return "Norm" in type(module.template[0] if isinstance(module, PerRank) else module).__name__


def learning_rate_factor(
    step: int, *, schedule: str, warmup_steps: int, total_steps: int, smallest: float = 0.0
) -> float:
    """Return the learning rate at `step`, counted from 0, as a share of its peak: warm-up, then decay to `smallest`.

    The schedule is "linear", "cosine" (Loshchilov and Hutter, ICLR 2017, without restarts) or "constant".
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    share = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    remaining = 1 - share if schedule == "linear" else (1 + math.cos(math.pi * share)) / 2
    return smallest + (1 - smallest) * remaining


def microbatches(batch: dict[str, Tensor], number: int) -> Iterator[tuple[dict[str, Tensor], float]]:
    """Split a batch into `number` microbatches of nearly equal size; fewer if there are fewer examples.

    Yield each with the weight of its mean training loss in the batch's; weights add up to 1.
    """
    if number == 1:
        yield batch, 1.0
        return
    examples, whole = len(batch["labels"]), loss_terms(batch["labels"])
    number = min(number, examples)
    for index in range(number):
        rows = slice(examples * index // number, examples * (index + 1) // number)
        microbatch = {name: tensor[rows] for name, tensor in batch.items()}
        yield microbatch, loss_terms(microbatch["labels"]) / whole


def loss_terms(labels: Tensor) -> int:
    """Return how many terms a mean training loss has: examples, or predicted tokens for labels (examples, tokens)."""
    return len(labels) if labels.ndim == 1 else int((labels[:, 1:] != IGNORED).sum())


class SideBySide(ThreadPoolExecutor):
    """A few threads, each with one torch thread, that compute microbatches of one model.

    With small models this is faster than torch's own threads, which wait for each other at every kernel. Gradients are
    added in the order of the microbatches, so the number of threads changes no result.
    """

    def __init__(self, threads: int) -> None:
        self._torch_threads = torch.get_num_threads()
        super().__init__(threads, initializer=torch.set_num_threads, initargs=(1,))

    def accumulate_(
        self, loss: Callable[[Any], Tensor], parts: list[tuple[Any, float]], parameters: list[nn.Parameter]
    ) -> list[float]:
        """Add the weighted gradients of all parts to the parameters, and return each part's loss without its weight."""

        def gradients(part: tuple[Any, float]) -> tuple[float, tuple[Tensor, ...]]:
            value = loss(part[0])
            return value.item(), torch.autograd.grad(value, parameters)

        values = []
        for (_, weight), (value, of_part) in zip(parts, self.map(gradients, parts), strict=True):
            values.append(value)
            for parameter, gradient in zip(parameters, of_part, strict=True):
                if parameter.grad is None:
                    parameter.grad = gradient * weight
                else:
                    parameter.grad.add_(gradient, alpha=weight)
        return values

    def close(self) -> None:
        """End the threads, and restore torch's number of threads, which they changed."""
        self.shutdown()
        torch.set_num_threads(self._torch_threads)


def check_same_function(
    dense: PreTrainedModel, parallel: PreTrainedModel, network: LossyNetwork, rounding: float = 1e-4
) -> None:
    """Raise ValueError unless `parallel` on its device computes without losses what `dense` does, up to `rounding`."""
    probe = torch.arange(1, 17).view(2, 8)
    training = dense.training, parallel.training
    collective = collective_of(parallel)
    with network.reliable(), torch.no_grad(), collective.exact() if collective else nullcontext():
        expected, actual = (
            model.eval()(probe.to(next(model.parameters()).device)).logits.cpu().double() for model in (dense, parallel)
        )
    dense.train(training[0])
    parallel.train(training[1])
    error = (actual - expected).abs().max() / expected.abs().max()
    if not error < rounding:
        what = f"parallel logits differ from the dense model's by {error:.1e} of the largest one, above {rounding:g}"
        raise ValueError(f"{what}: report this model, or choose another implementation")


def freeze_(model: PreTrainedModel, blocks_trained: int) -> None:
    """Train only the last blocks, the last norm and the head. A head that is tied to the embeddings trains them too."""
    blocks: Any = blocks_of(model)
    whole: Any = model
    head = whole.score if hasattr(whole, "score") else whole.lm_head
    fault = f"is above the model's {len(blocks)} blocks: give fewer"
    refuse_if(blocks_trained > len(blocks), "unfreeze_last_layers", blocks_trained, fault)
    model.requires_grad_(False)
    within = {module for block in blocks for module in block.modules()}
    norms = [module for module in model.base_model.modules() if is_norm(module) and module not in within]
    for module in (*blocks[len(blocks) - blocks_trained :], *norms, head):
        module.requires_grad_(True)


WRAPPERS = (DistributedDataParallel, BucketedDDP, FlatFSDP)  # hold the model as `module`


class Engine:
    """Forward and backward passes of `dense`, spread over the processes of `layout`. Call `close` after the last pass.

    `module` holds this process's parameters. `implementation` names whose tensor-parallel layers run, or is "dense".
    """

    def __init__(
        self, config: RunSettings, dense: PreTrainedModel, network: LossyNetwork, layout: Layout, device: torch.device
    ) -> None:
        self.config, self.network, self.layout, self.device = config, network, layout, device
        self.comm = config.comm()
        self.implementation = _implementation(config, layout)
        model: Any = self._tensor_parallel(dense)
        coarse = torch.get_float32_matmul_precision() != "highest"
        alone = self.implementation == "dense"  # computes without messages, so it is compared where it is
        if not any(parameter.is_meta for parameter in dense.parameters()):  # else there is no dense model
            # `dense` itself does not go to the device, which may have room for a shard alone
            check_same_function(dense, model if alone else model.to(device), network, 5e-2 if coarse else 1e-4)
        if config.optimizer.unfreeze_last_layers is not None:
            freeze_(model, config.optimizer.unfreeze_last_layers)
        if config.optimizer.gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
            model.disable_input_require_grads()  # gradients and messages stop at frozen blocks
        self.shape = dense.config
        self._dense_class: Any = type(dense)
        self.pipeline = None
        self.module: nn.Module = model
        parallelism = config.parallelism
        if parallelism.pipeline_parallel_size > 1:
            from lossytp.parallel.pipeline import Pipeline

            stages = layout.process_group("pp")
            assert stages is not None
            self.pipeline = Pipeline(
                model,
                stages,
                schedule=parallelism.pipeline_schedule,
                num_microbatches=parallelism.pipeline_microbatches,
                device=device,
                exact_adjoint=parallelism.exact_adjoint,
            )
            self.module = self.pipeline.stage
        elif parallelism.data_parallel_size > 1:
            assert layout.mesh is not None
            custom = parallelism.data_parallel_implementation == "custom"
            with device:  # where FSDP shards a block after the other, drawn or moved there
                model = model if parallelism.fully_sharded else model.to(device)
                self.module = data_parallel(model, layout.mesh["dp"], parallelism.data_parallel_type, custom=custom)
        self.module.to(device)
        alone = alone and layout.world_size == 1 and config.optimizer.dropout == 0 and not config.compute.fp16
        threads = getattr(config.optimizer, "threads", 0) if alone and device.type == "cpu" else 0
        self._threads = SideBySide(threads) if threads else None
        self.num_threads = threads or torch.get_num_threads()  # of this process

    def dense_model(self, weights: dict[str, Tensor]) -> PreTrainedModel:
        """Return the dense model with these weights, by the parameters' names, on the CPU."""
        with torch.random.fork_rng(), torch.no_grad():  # the constructor draws weights
            dense: PreTrainedModel = self._dense_class(self.shape)
            for name, parameter in dense.named_parameters():
                parameter.copy_(weights[name])
        return dense

    def close(self) -> None:
        """End this engine's threads."""
        if self._threads is not None:
            self._threads.close()

    def _tensor_parallel(self, dense: PreTrainedModel) -> PreTrainedModel:
        config, layout = self.config, self.layout
        if self.implementation == "dense":  # a single rank needs no all-reduce
            deferred = next(dense.parameters()).is_meta
            return fuse_gelu_(dense if deferred else copy.deepcopy(dense))
        if self.implementation == "dtensor":
            from lossytp.parallel.others import parallelize_dtensor

            assert layout.mesh is not None
            return parallelize_dtensor(dense, layout.mesh["tp"])
        if self.implementation == "megatron":
            from lossytp.parallel.others import parallelize_megatron

            group = layout.process_group("tp")
            assert group is not None
            return parallelize_megatron(dense, group)
        parallel = parallelize(
            dense,
            self.network,
            tensor_parallel_size=config.network.tensor_parallel_size,
            group=layout.tensor_group(),
            own_copies=config.parallelism.replicated_gradients != "reliable",
            comm=self.comm,
        )
        if isinstance(config.parallelism, PretrainParallelism) and config.parallelism.enable_loss_parallelism:
            split_vocabulary_(parallel, lossy_gather=config.parallelism.lossy_logits)
        return parallel

    def forward_backward(self, batch: dict[str, Tensor], scaler: torch.amp.GradScaler) -> float:
        """Compute the gradients of the training loss over this process's share of `batch`; return its mean."""
        self.module.train()
        if self.pipeline is not None:
            with self._autocast():
                loss = self.pipeline.forward_backward(self._to_device(batch))
            return mean_over_processes(None if loss is None else loss.item(), self.network)
        parts = list(microbatches(batch, self.config.microbatches))
        if self._threads is not None:
            trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
            losses = self._threads.accumulate_(self._loss, parts, trained)
            return sum(loss * share for loss, (_, share) in zip(losses, parts, strict=True))
        total = 0.0
        for number, (microbatch, share) in enumerate(parts, 1):
            rows, weight = self._share(microbatch["labels"])
            module: Any = self.module
            # DDP averages a batch's gradients in one message, FSDP each microbatch's
            early = number < len(parts) and isinstance(module, DistributedDataParallel | BucketedDDP)
            with module.no_sync() if early else nullcontext():
                loss = share * weight * self._loss(microbatch, rows)
                scaler.scale(loss).backward()
            total += float(loss.item())
        return mean_over_processes(total, self.network)

    def _loss(self, batch: dict[str, Tensor], rows: slice = slice(None)) -> Tensor:
        with self._autocast():
            loss: Tensor = self.module(**self._to_device(batch, rows)).loss
        return loss

    def warm_up(self, next_batch: Callable[[], dict[str, Tensor]], scaler: torch.amp.GradScaler) -> None:
        """Let DDP build the buckets that an unbroken run has, before a resumed run's first step.

        DDP groups its very first step's gradients differently. This step loses, counts and learns nothing; other models
        need none, and take no batch.
        """
        if isinstance(self.module, DistributedDataParallel):
            with self.network.reliable():
                self.forward_backward(next_batch(), scaler)
            self.module.zero_grad(set_to_none=True)

    def synchronise(self) -> None:
        """Synchronise, before an optimizer step, the gradients of replicated parameters as configured."""
        parallelism = self.config.parallelism
        several = max(parallelism.data_parallel_size, parallelism.pipeline_parallel_size) > 1
        # else each rank has the same losses and the same data
        if parallelism.replicated_gradients != "none" and (self.comm.own_streams or several):
            lossy = parallelism.replicated_gradients == "lossy"
            synchronise_gradients_(self.module, self.layout, self.network, lossy=lossy)

    def resynchronise(self, step: int) -> None:
        """Set drifting copies to their mean after optimizer step `step`, if it is time."""
        if self.config.parallelism.resync_every and step % self.config.parallelism.resync_every == 0:
            resynchronise_(self.module, self.layout, self.network)

    def stream_distance(self) -> AbstractContextManager[Callable[[], list[float] | None]]:
        """Measure within the block how far apart the ranks' residual streams are, by layer; None if they share one."""
        model: Any = next((module for module in self.module.modules() if hasattr(module, "rank_group")), None)
        return nullcontext(lambda: None) if model is None else stream_distance(model)

    def _share(self, labels: Tensor) -> tuple[slice, float]:
        """Return this replica's examples of a batch, and the weight of its mean in the mean over replicas.

        A replica without examples computes one with weight 0, because the others wait for its gradients.
        """
        replicas, index, examples = self.layout.data_parallel_size, self.layout.data_index, len(labels)
        first, stop = examples * index // replicas, examples * (index + 1) // replicas
        if first == stop:
            return slice(0, 1), 0.0
        return slice(first, stop), loss_terms(labels[first:stop]) * replicas / loss_terms(labels)

    def _to_device(self, batch: dict[str, Tensor], rows: slice = slice(None)) -> dict[str, Tensor]:
        return {name: tensor[rows].to(self.device) for name, tensor in batch.items()}

    def logits(self, batch: dict[str, Tensor]) -> Tensor | None:
        """Return the logits (ranks, examples, classes) on the CPU; None if a pipeline's results are elsewhere.

        Ranks that share a stream have a single row.
        """
        batch = self._to_device(batch)
        with self._inference():
            if self.pipeline is not None:
                logits = self.pipeline.logits(batch)
                logits = None if logits is None else logits.unsqueeze(0)
            else:
                output = self.module(**batch)
                logits = getattr(output, "rank_logits", output.logits.unsqueeze(0))
        return None if logits is None else logits.float().cpu()

    def cross_entropies(self, batches: Iterable[dict[str, Tensor]]) -> list[float]:
        """Return the mean cross-entropy of the next token over blocks of text: `input_ids` and `labels` (B, T).

        There is one mean for each tensor-parallel rank with a stream, or logits, of its own; else one for each
        tensor-parallel process, all equal.
        """
        totals, blocks = torch.zeros(1, dtype=torch.float64), 0
        for examples, losses in (map if self._threads is None else self._threads.map)(self._losses, batches):
            totals = totals + examples * losses
            blocks += examples
        everyones = torch.stack(gathered(totals / blocks, self.network))  # (processes, streams)
        per_replica = everyones.view(self.layout.data_parallel_size, -1)  # (replicas, ranks)
        return per_replica.mean(0).tolist()

    def _losses(self, batch: dict[str, Tensor]) -> tuple[int, Tensor]:
        """Return the number of examples in a batch, and this replica's part of the loss of each stream (L,)."""
        rows, weight = self._share(batch["labels"])
        here = self._to_device(batch, rows)
        with self._inference():
            output = self.module(**here)
        if not hasattr(output, "rank_logits"):
            return len(batch["labels"]), weight * output.loss.double().cpu().view(1)
        targets = here["labels"][:, 1:].flatten()
        each = [F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets) for logits in output.rank_logits]
        return len(batch["labels"]), weight * torch.stack(each).double().cpu()

    def generate(self, prompts: dict[str, Tensor], *, new_tokens: int, tokenizer: Any, **sampling: Any) -> Tensor:
        """Return token ids (B, T + new ones) of the prompts, padded on the left, and their greedy continuations.

        `sampling` goes to transformers. If ranks have streams of their own, the tokens are the first rank's.
        """
        model: Any = self.module.module if isinstance(self.module, WRAPPERS) else self.module
        with self._inference():
            ids: Tensor = model.generate(
                **self._to_device(prompts),
                max_new_tokens=new_tokens,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                **{"do_sample": False, "use_cache": True, **sampling},
            )
        return ids.cpu()

    @contextmanager
    def _inference(self) -> Iterator[None]:
        self.module.eval()
        with self._autocast(), torch.no_grad():
            yield
        if isinstance(self.module, FSDPModule):
            self.module.reshard()  # the next pass must not use what this one gathered

    def _autocast(self) -> Any:
        if not (self.config.compute.bf16 or self.config.compute.fp16):
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16 if self.config.compute.bf16 else torch.float16)


def _implementation(config: RunSettings, layout: Layout) -> str:
    layers = config.parallelism.tensor_parallel_layers if config.network.tensor_parallel_size > 1 else "dense"
    if layers == "megatron":
        from lossytp.parallel.others import megatron_is_installed

        if not megatron_is_installed():
            if layout.rank == 0:
                what = "megatron-core is not installed (pip install megatron-core)"
                print(f"{what}: this project's layers run in its place", file=sys.stderr)
            return "lossytp"
    return layers


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # in malloc.h


def keep_freed_memory() -> None:
    """Let glibc's malloc keep what is freed until the process ends. Other C libraries are left alone.

    It would give blocks above 32 MiB, such as logits, back to the kernel, and each new one costs a page fault for every
    4 KiB: a third of the time of pretraining over losses.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)  # bytes at the heap's end before they go back
        mallopt(M_TOP_PAD, 2**26)  # bytes by which the heap grows at once


def give_back_freed_memory() -> None:
    """Give back to the kernel what is free now, such as a dense model's memory after sharding."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def connected_processes(
    config: NetworkSettings | RunSettings | EvaluateConfig, layout: Layout
) -> Iterator[LossyNetwork]:
    """Initialise the process group if there are several processes; yield the configured network.

    Raises:
        ValueError: if MASTER_ADDR names no machine, or the processes do not meet, or their settings differ.
    """
    keep_freed_memory()
    settings = config if isinstance(config, NetworkSettings) else config.network
    network = settings.build()
    if layout.world_size == 1:
        yield network
        return
    versions = {"commit": commit(), "lossytp": lossytp.__version__, "torch": torch.__version__}
    init_process_group(
        network,
        wraps="auto",
        timeout_s=settings.timeout_s,
        compared={"kind of run": type(config).__name__.removesuffix("Config").lower(), **config.as_dict(), **versions},
        algorithm=settings.algorithm,
        repair=settings.repair,
        reliable_gather=settings.reliable_gather,
    )
    if layout.rank == 0:
        why = ", because some share a GPU, which NCCL refuses" if torch.cuda.is_available() else ""
        over = "nccl" if wrapped_backend() == "nccl" else f"gloo{why}"
        print(f"{layout.world_size} processes send over {over}", file=sys.stderr, flush=True)
    try:
        yield network
    finally:
        dist.destroy_process_group()
