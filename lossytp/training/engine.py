"""The model laid out over the processes as a configuration says, and what a step needs of it."""

import copy
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from lossytp.network.lossy_network import LossyNetwork
from lossytp.parallel.convert import blocks_of, fuse_gelu_, parallelize
from lossytp.parallel.layout import Layout
from lossytp.parallel.own_streams import stream_distance
from lossytp.parallel.replicas import mean_over_processes
from lossytp.parallel.synchronise import resynchronise_, synchronise_gradients_
from lossytp.training.config import TrainConfig
from lossytp.training.config.train import check_blocks
from lossytp.training.portions import counted, portions

INSTALL_MEGATRON = "pip install megatron-core"


class Engine:
    """Forward and backward passes of `dense`, spread over the processes of `layout`.

    `module` holds this process's parameters; `implementation` says whose tensor-parallel layers run, or "dense".
    ValueError where `config` asks for blocks that `dense` does not have.
    """

    def __init__(
        self,
        config: TrainConfig,
        dense: PreTrainedModel,
        network: LossyNetwork,
        layout: Layout,
        device: torch.device,
    ) -> None:
        check_blocks(config, dense.config.n_layer)
        self.config, self.network, self.layout, self.device = config, network, layout, device
        self.wiring = config.wiring()
        self.implementation = _implementation(config, layout)
        model: Any = self._tensor_parallel(dense)
        original: Any = dense
        rounding = 5e-2 if config.wire_dtype == "bf16" else 1e-4
        check_same_function(original.to(device), model.to(device), network, rounding)
        if config.unfreeze_last_layers is not None:
            freeze_(model, config.unfreeze_last_layers)
        if config.gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
            model.disable_input_require_grads()  # or gradients, and messages, would go on through frozen blocks
        self.shape = dense.config
        self.pipeline = None
        self.module: nn.Module = model
        if config.pipeline_parallel_size > 1:
            from lossytp.parallel.pipeline import Pipeline

            stages = layout.process_group("pp")
            assert stages is not None
            self.pipeline = Pipeline(
                model,
                stages,
                schedule=config.pipeline_schedule,
                num_microbatches=config.pipeline_microbatches,
                device=device,
                exact_adjoint=config.exact_adjoint,
            )
            self.module = self.pipeline.stage
        elif config.data_parallel_size > 1:
            from lossytp.parallel.data_parallel import data_parallel

            assert layout.mesh is not None
            self.module = data_parallel(model, layout.mesh["dp"], config.data_parallel_type)

    def _tensor_parallel(self, dense: PreTrainedModel) -> PreTrainedModel:
        config, layout = self.config, self.layout
        if self.implementation == "dense":  # a rank alone has nobody to all-reduce with
            return fuse_gelu_(copy.deepcopy(dense))
        if self.implementation == "dtensor":
            from lossytp.parallel.dtensor import parallelize_dtensor

            assert layout.mesh is not None
            return parallelize_dtensor(dense, layout.mesh["tp"])
        if self.implementation == "megatron":
            from lossytp.parallel.megatron import parallelize_megatron

            group = layout.process_group("tp")
            assert group is not None
            return parallelize_megatron(dense, group)
        return parallelize(
            dense,
            self.network,
            tensor_parallel_size=config.tensor_parallel_size,
            group=layout.tensor_group(),
            own_copies=config.replicated_gradients != "reliable",
            wiring=self.wiring,
        )

    def forward_backward(self, batch: dict[str, Tensor], scaler: torch.amp.GradScaler) -> float:
        """Gradients of the mean training loss over `batch`, of which this process takes its replica's share.

        Returns the training loss, the mean over replicas.
        """
        self.module.train()
        if self.pipeline is not None:
            with self._autocast():
                loss = self.pipeline.forward_backward(self._to_device(batch))
            return mean_over_processes(None if loss is None else loss.item(), self.network)
        pieces = list(portions(batch, self.config.gradient_accumulation_steps))
        total = 0.0
        for number, (portion, share) in enumerate(pieces, 1):
            with self._averaging_gradients(number == len(pieces)):
                total += self._backward(portion, share, scaler)
        return mean_over_processes(total, self.network)

    def _backward(self, portion: dict[str, Tensor], share: float, scaler: torch.amp.GradScaler) -> float:
        """Add the gradients of a portion that counts `share` of its batch; returns what it adds to the loss."""
        rows, weight = self._share(portion["labels"])
        with self._autocast():
            loss = share * weight * self.module(**self._to_device(portion, rows)).loss
        scaler.scale(loss).backward()
        return float(loss.item())

    def _averaging_gradients(self, last: bool) -> AbstractContextManager:
        """DDP averages a batch's gradients with its last portion, in one message; FSDP each portion's by itself."""
        if isinstance(self.module, DistributedDataParallel) and not last:
            return self.module.no_sync()
        return nullcontext()

    def warm_up(self, batch: dict[str, Tensor], scaler: torch.amp.GradScaler) -> None:
        """Before a resumed run's first step: let DDP put its gradients into the messages of an unbroken run's steps.

        It sends those of its very first step in another way. Nothing is lost or counted here, and nothing learnt.
        """
        if isinstance(self.module, DistributedDataParallel):
            with self.network.reliable():
                self.forward_backward(batch, scaler)
            self.module.zero_grad(set_to_none=True)

    def synchronise(self) -> None:
        """Before an optimiser step: let replicated parameters' gradients be what the configuration says."""
        config = self.config
        each_its_own = self.wiring.own_streams  # of losses, or of what replicas and stages hand on, rank by rank
        each_its_own |= config.data_parallel_size > 1 or config.pipeline_parallel_size > 1
        if config.replicated_gradients != "none" and each_its_own:
            lossy = config.replicated_gradients == "lossy"
            synchronise_gradients_(self.module, self.layout, self.network, lossy=lossy)

    def resynchronise(self, step: int) -> None:
        """After optimiser step `step`: bring drifting copies together where it is time."""
        if self.config.resync_every and step % self.config.resync_every == 0:
            resynchronise_(self.module, self.layout, self.network)

    def stream_distance(self) -> AbstractContextManager[Callable[[], list[float] | None]]:
        """Within it, how far apart the ranks' residual streams are, layer by layer; None where they share one."""
        model = next((module for module in self.module.modules() if hasattr(module, "rank_group")), None)
        if model is None:
            return nullcontext(lambda: None)
        return stream_distance(model)

    def _share(self, labels: Tensor) -> tuple[slice, float]:
        """Which of a batch's examples are this replica's, and what its mean counts in the mean over replicas.

        The counts are 1 where replicas have as many examples each, of generation as many tokens to predict. A replica
        without examples works on one that counts nothing: its gradients are waited for.
        """
        replicas, index, examples = self.layout.data_parallel_size, self.layout.data_index, len(labels)
        first, stop = examples * index // replicas, examples * (index + 1) // replicas
        if first == stop:
            return slice(0, 1), 0.0
        return slice(first, stop), counted(labels[first:stop]) * replicas / counted(labels)

    def _to_device(self, batch: dict[str, Tensor], rows: slice = slice(None)) -> dict[str, Tensor]:
        return {name: tensor[rows].to(self.device) for name, tensor in batch.items()}

    def logits(self, batch: dict[str, Tensor]) -> Tensor | None:
        """Logits (ranks, examples, classes) on the CPU; None on processes that a pipeline's results do not reach.

        Of each rank of this process where ranks have streams of their own, else of one.
        """
        batch = self._to_device(batch)
        self.module.eval()
        with self._autocast(), torch.no_grad():
            if self.pipeline is not None:
                logits = self.pipeline.logits(batch)
                logits = None if logits is None else logits.unsqueeze(0)
            else:
                output = self.module(**batch)
                logits = getattr(output, "rank_logits", output.logits.unsqueeze(0))
        if isinstance(self.module, FSDPModule):
            self.module.reshard()  # or the next pass, training's perhaps, would use what this one gathered
        return None if logits is None else logits.float().cpu()

    def loss(self, batch: dict[str, Tensor]) -> float:
        """The mean training loss over `batch`, without gradients."""
        self.module.eval()
        with self._autocast(), torch.no_grad():
            loss: float = self.module(**self._to_device(batch)).loss.item()
        return loss

    def generate(self, prompts: dict[str, Tensor], *, new_tokens: int, tokenizer: Any, **sampling: Any) -> Tensor:
        """Token ids (B, T + new ones) of the prompts, padded on the left, and what greedy search makes of them.

        `sampling` is handed on to transformers. Where ranks of this project's layers have streams of their own, the
        tokens are the first's.
        """
        self.module.eval()
        model: Any = self.module.module if isinstance(self.module, DistributedDataParallel) else self.module
        with self._autocast(), torch.no_grad():
            ids: Tensor = model.generate(
                **self._to_device(prompts),
                max_new_tokens=new_tokens,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                **{"do_sample": False, "use_cache": True, **sampling},
            )
        if isinstance(self.module, FSDPModule):
            self.module.reshard()
        return ids.cpu()

    def _autocast(self) -> Any:
        if not (self.config.bf16 or self.config.fp16):
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16 if self.config.bf16 else torch.float16)


def check_same_function(
    dense: PreTrainedModel, parallel: PreTrainedModel, network: LossyNetwork, rounding: float = 1e-4
) -> None:
    """Raise ValueError unless `parallel` without losses computes what `dense` does, up to a relative `rounding`."""
    probe = torch.arange(1, 17, device=next(dense.parameters()).device).view(2, 8)
    training = dense.training, parallel.training
    with network.reliable(), torch.no_grad():
        expected, actual = (model.eval()(probe).logits.double() for model in (dense, parallel))
    dense.train(training[0])
    parallel.train(training[1])
    error = (actual - expected).abs().max() / expected.abs().max()
    if not error < rounding:
        raise ValueError(
            f"the parallel model's logits differ from the dense model's by {error:.1e}, relative, and {rounding:g} is "
            "rounding: report this model, or choose another implementation"
        )


def freeze_(model: PreTrainedModel, blocks_trained: int) -> None:
    """Leave only the last blocks, the last norm and the head to be trained; a head tied to the embeddings takes them
    along. ValueError for more blocks than there are."""
    blocks: Any = blocks_of(model)
    if blocks_trained > len(blocks):
        raise ValueError(
            f"unfreeze_last_layers = {blocks_trained} is above the model's {len(blocks)} blocks: give fewer"
        )
    whole: Any = model
    head = whole.score if hasattr(whole, "score") else whole.lm_head
    model.requires_grad_(False)
    for module in (*blocks[len(blocks) - blocks_trained :], whole.transformer.ln_f, head):
        module.requires_grad_(True)


def _implementation(config: TrainConfig, layout: Layout) -> str:
    if config.tensor_parallel_size == 1:
        return "dense"
    if config.implementation == "megatron":
        from lossytp.parallel.megatron import megatron_is_installed

        if not megatron_is_installed():
            if layout.rank == 0:
                print(
                    f"megatron-core is not installed ({INSTALL_MEGATRON}): this project's layers run in its place",
                    file=sys.stderr,
                )
            return "lossytp"
    return config.implementation
