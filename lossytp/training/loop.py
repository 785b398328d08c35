"""One training run, from configuration to record."""

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from lossytp.network.lossy_network import LossyNetwork
from lossytp.parallel.layout import Layout, rank_and_world_size
from lossytp.parallel.own_streams import PerRank
from lossytp.parallel.replicas import agreed, clip_gradients_, merge_counters, replica_drift
from lossytp.training.config import TrainConfig
from lossytp.training.data import Dataset, load_dataset, training_batches
from lossytp.training.engine import Engine
from lossytp.training.metrics import time_to_accuracy
from lossytp.training.models import build_model, load_tokenizer
from lossytp.training.processes import this_device, together
from lossytp.training.progress import Progress
from lossytp.training.record import check_output_folder, describe, write_record
from lossytp.training.scoring import scores

CURVE_POINTS = 200  # training losses kept in a record


def run(config: TrainConfig) -> dict[str, Any]:
    """Train and evaluate as `config` says, write the record, and return it; a finished run is not run again.

    Under torchrun every process runs it, the first writes the record, and all return it.

    The status is "finished", "stopped early", or "not finite": the training loss became NaN or infinite, which
    ends the run, its final figures null.
    """
    layout = config.layout(*rank_and_world_size())
    with together(config, layout) as network:
        return _run(config, layout, network)


def _run(config: TrainConfig, layout: Layout, network: LossyNetwork) -> dict[str, Any]:
    done = agreed(lambda: check_output_folder(config), network)
    if done is not None:
        return done
    record = _Run(config, layout, network).record()
    agreed(lambda: write_record(Path(config.output_dir), record), network)
    return record


class _Run:
    def __init__(self, config: TrainConfig, layout: Layout, network: LossyNetwork) -> None:
        self.config, self.layout, self.network = config, layout, network
        self.start = time.perf_counter()
        self.data: Dataset = load_dataset(
            config.dataset,
            load_tokenizer(config.model_name),
            max_length=config.max_length,
            train_samples=config.max_samples,
            test_samples=config.eval_samples,
        )
        self.device = this_device(layout)
        task = self.data.task
        dense = build_model(
            config.model_name,
            task.kind,
            labels=getattr(task, "labels", ()),
            tokenizer=self.data.tokenizer,
            dropout=config.dropout,
            seed=config.seed,
            tensor_parallel_size=config.tensor_parallel_size,
        )
        dense.config.finetuning_task = config.dataset
        self.engine = Engine(config, dense, network, layout, self.device)
        self.optimizer = build_optimizer(self.engine.module, config)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: learning_rate_at(step, config))
        self.scaler = _scaler(self.device, config.fp16)
        self.losses: list[float] = []
        self.evaluations: list[dict] = []
        self.tokens = self.real_tokens = 0
        self.step_seconds: list[float] = []

    @property
    def train_seconds(self) -> float:
        return sum(self.step_seconds)

    def record(self) -> dict[str, Any]:
        status = self._train()
        final = self.evaluations[-1] if status != "not finite" else {}
        every = max(1, len(self.losses) // CURVE_POINTS)
        curve = [{"step": step, "loss": loss} for step, loss in enumerate(self.losses, 1) if step % every == 0]
        merge_counters(self.network)
        return {
            **describe(self.config),
            "status": status,
            "implementation": self.engine.implementation,
            "processes": self.layout.world_size,
            "data": {
                "sha256": self.data.sha256,
                "train_examples": len(self.data.train),
                "test_examples": len(self.data.test),
                "kind": self.data.task.kind,
                "metric": self.data.task.metrics[0],
                "majority_share": self.data.task.chance(list(self.data.test.references))["score"],
                "subsets": [split for split in ("train", "test") if self.data.task.source.subset(split)],
                "real_token_share": self.real_tokens / self.tokens,
            },
            "curves": {
                "train_loss": [point if math.isfinite(point["loss"]) else {**point, "loss": None} for point in curve],
                "eval": self.evaluations,
            },
            "final": {name: final.get(name) for name in FINAL},
            "network": {purpose: self.network.summary(purpose) for purpose in ("training", "evaluation")},
            "time_to_accuracy": time_to_accuracy(self.evaluations, self.config.target_accuracy),
            "timing": {
                "train_seconds": self.train_seconds,
                "step_seconds": float(np.median(self.step_seconds)),
                "total_seconds": time.perf_counter() - self.start,
                "steps": len(self.losses),
                "tokens_per_second": self.tokens / self.train_seconds,
                "device": str(self.device),
                "threads": torch.get_num_threads(),
            },
        }

    def _train(self) -> str:
        config = self.config
        other_masks = self.layout.data_index + self.layout.pipeline_index  # tensor-parallel ranks share theirs
        torch.manual_seed(config.seed + other_masks)  # dropout's
        batches = training_batches(self.data.train, batch_size=config.batch_size, seed=config.seed)
        best, since_best = -1.0, 0
        progress = Progress(config.max_steps, shown=self.layout.rank == 0)
        for step in range(1, config.max_steps + 1):
            started = time.perf_counter()
            loss = self._step(next(batches))
            self.engine.resynchronise(step)
            self.step_seconds.append(time.perf_counter() - started)
            self.losses.append(loss)
            progress.show(step, loss)
            if not math.isfinite(loss):
                return "not finite"
            if step == config.max_steps or (config.eval_steps and step % config.eval_steps == 0):
                score = self._evaluate(step)["score_lossy"]
                best, since_best = (score, 0) if score > best else (best, since_best + 1)
                if config.patience and since_best >= config.patience and step < config.max_steps:
                    return "stopped early"
        return "finished"

    def _step(self, batch: dict[str, torch.Tensor]) -> float:
        self.tokens += batch["attention_mask"].numel()
        self.real_tokens += int(batch["attention_mask"].sum())
        loss = self.engine.forward_backward(batch, self.scaler)
        self.engine.synchronise()
        if self.config.gradient_clipping is not None:
            self.scaler.unscale_(self.optimizer)
            clip_gradients_(self.engine.module, self.config.gradient_clipping, self.layout, self.network)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        return loss

    def _evaluate(self, step: int) -> dict:
        with self.network.reliable():
            clean = scores(self.engine, self.data)
        point: dict[str, Any] = {"step": step, "seconds": self.train_seconds}
        with self.network.evaluation(step), self.engine.stream_distance() as distance:
            lossy = scores(self.engine, self.data)
        distances = distance()
        point["stream_distance"] = distances and [each if math.isfinite(each) else None for each in distances]
        for name, everyones in (("clean", clean), ("lossy", lossy)):
            for metric in everyones[0]:
                values = [theirs[metric] for theirs in everyones]
                point[f"{metric}_{name}"] = None if None in values else sum(values) / len(values)
            headline = [theirs["score"] for theirs in everyones]
            point[f"score_spread_{name}"] = max(headline) - min(headline)
        point["replica_drift"] = replica_drift(self.engine.module, self.layout, self.network)
        self.evaluations.append(point)
        return point


FINAL = tuple(
    f"{metric}_{network}" for metric in ("score", "accuracy", "cross_entropy") for network in ("clean", "lossy")
)


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, ICLR 2019); weights of linear layers and embeddings decay, all else not."""
    norms = {id(p) for module in model.modules() if _is_norm(module) for p in module.parameters()}
    groups: dict[tuple[bool, Any], list[nn.Parameter]] = {}  # one kernel cannot mix tensors of different meshes
    for name, parameter in model.named_parameters():
        decays = not (name.endswith("bias") or id(parameter) in norms)
        groups.setdefault((decays, getattr(parameter, "device_mesh", None)), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": config.weight_decay if decays else 0.0}
            for (decays, _), parameters in groups.items()
        ],
        lr=config.learning_rate,
    )


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module.template[0] if isinstance(module, PerRank) else module, nn.LayerNorm)


def _scaler(device: torch.device, enabled: bool) -> torch.amp.GradScaler:
    if not dist.is_initialized():
        return torch.amp.GradScaler(device.type, enabled=enabled)
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # all processes skip a step, or none

    return ShardedGradScaler(device.type, enabled=enabled, process_group=dist.group.WORLD)


def learning_rate_at(step: int, config: TrainConfig) -> float:
    """Factor of the peak learning rate at `step`, counted from 0: linear warm-up, then linear decay to zero."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    return (config.max_steps - step) / max(1, config.max_steps - config.warmup_steps)
