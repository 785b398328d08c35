"""Train a model: one run, from configuration to record, in fine-tuning and in pretraining.

An `Objective` says what the run trains on and how it is scored. The engine lays the model out over the processes.
"""

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lossytp.network.lossy_network import LossyNetwork
from lossytp.parallel.backend import this_device
from lossytp.parallel.group import Layout, rank_and_world_size
from lossytp.parallel.replicas import clip_gradients_, merge_counters, on_rank_zero, replica_drift
from lossytp.training import checkpoint
from lossytp.training.checkpoint import Checkpoints, History
from lossytp.training.config import RunSettings
from lossytp.training.engine import (
    Engine,
    build_optimizer,
    connected_processes,
    give_back_freed_memory,
    learning_rate_factor,
)
from lossytp.training.folder import open_run
from lossytp.training.logs import Logs, check_installed
from lossytp.training.objectives import mean_over_ranks, objective_of
from lossytp.training.progress import Progress, details, waiting
from lossytp.training.record import describe, trace_sha256, write_record

NETWORKS = ("_clean", "_lossy")
FINAL = tuple(  # keys of every task's record, null if the task lacks the metric; a task's other metrics follow
    f"{metric}{network}" for metric in ("score", "accuracy", "cross_entropy") for network in NETWORKS
)


def run(config: RunSettings) -> dict[str, Any]:
    """Train and evaluate as `config` says, write the record, and return it.

    If the record is already there, return it without training. Under torchrun every process calls this; the first
    writes the record, and all return it. A `TrainConfig` fine-tunes, a `PretrainConfig` pretrains.

    Returns:
        The record. Its status is "finished", "stopped early" or "not finite". The last means that the training loss
        or, in pretraining, the validation loss without packet losses was NaN or infinite. Final scores are then null.

    Raises:
        ValueError: if the folder, the data or the model do not allow this run.
    """
    check_installed(config)
    layout = config.layout(*rank_and_world_size())
    with connected_processes(config, layout) as network, open_run(config, layout, network) as (record, checkpoints):
        if record is None:
            record = Run(config, layout, network, checkpoints).record()
        if not objective_of(config).keeps_checkpoint and config.output.keep_checkpoints == 1:
            checkpoints.remove()
    return record


class Run:
    """A run in this process: what it has, and what it has counted so far."""

    def __init__(self, config: RunSettings, layout: Layout, network: LossyNetwork, checkpoints: Checkpoints) -> None:
        self.config, self.layout, self.network, self.checkpoints = config, layout, network, checkpoints
        self.start = time.perf_counter()
        self.trace_sha256 = trace_sha256(config.network)
        self.objective = objective_of(config)(config)
        self.device = this_device(layout.rank)
        self.engine = Engine(config, self.objective.dense_model(), network, layout, self.device)
        give_back_freed_memory()
        self.optimizer = build_optimizer(
            self.engine.module,
            learning_rate=config.optimizer.learning_rate,
            weight_decay=config.optimizer.weight_decay,
            betas=config.optimizer.betas,
        )
        self.scaler = _scaler(self.device, config.compute.fp16)
        self.history = History()
        self.numbers: dict[str, Any] = {}  # the last step's, for logs

    def record(self) -> dict[str, Any]:
        """Train, save the model, and write the record."""
        try:
            status = self.train()
            if status != "not finite":
                with waiting(f"{self.objective.name}: saving the model"):
                    self.objective.save(self.engine)
        finally:
            self.engine.close()
        merge_counters(self.network)
        self.network.counters.add_all(checkpoint.counters_of(self.history.earlier_packets))
        record = self._described(status)
        on_rank_zero(lambda: self.objective.leave(record), self.network)
        on_rank_zero(lambda: write_record(Path(self.config.output.output_dir), record), self.network)
        return record

    def train(self) -> str:
        """Train from the beginning, or from the last checkpoint, to the end, and return how it ended."""
        config, rank = self.config, self.layout.rank
        # dropout masks differ between replicas and stages; tensor-parallel ranks share theirs
        torch.manual_seed(config.network.seed + self.layout.data_index + self.layout.pipeline_index)
        checkpoint.resume(self)
        done = len(self.history.losses)
        self.progress = Progress(config.steps, name=self.objective.name, done=done, shown=rank == 0)
        self.logs = Logs(config, done=done, shown=rank == 0)
        try:
            for step in range(done + 1, config.steps + 1):
                asked = time.perf_counter()
                batch = self.objective.batch()
                self.numbers["train/waiting_seconds"] = time.perf_counter() - asked
                loss = self.train_step(step, batch)
                self._log(step, loss)
                if not math.isfinite(loss):
                    return "not finite"
                if step < config.steps:
                    if self._evaluates_at(step) and (ended := self._ends_after_evaluating(step)):
                        return ended
                    if config.output.checkpoint_steps and step % config.output.checkpoint_steps == 0:
                        checkpoint.save(self, step)
            if self.objective.keeps_checkpoint and config.steps > done:
                checkpoint.save(self, config.steps)
            self.objective.round_weights_(self.engine)
            return "not finite" if self._ends_after_evaluating(config.steps) == "not finite" else "finished"
        finally:
            self.progress.close()
            self.logs.close()

    def train_step(self, step: int, batch: dict[str, Tensor]) -> float:
        """Make optimizer step `step`, counted from 1, and return the training loss before it."""
        settings, history, engine = self.config.optimizer, self.history, self.engine
        started, rate = time.perf_counter(), self._learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = engine.forward_backward(batch, self.scaler)
        engine.synchronise()
        if settings.gradient_clipping is not None:
            self.scaler.unscale_(self.optimizer)
            norm = clip_gradients_(engine.module, settings.gradient_clipping, self.layout, self.network)
            self.numbers["train/gradient_norm"] = norm
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - started
        if self._evaluates_at(step):  # measured before copies are resynchronised, and not part of the training time
            history.drift = replica_drift(engine.module, self.layout, self.network)
        started = time.perf_counter()
        engine.resynchronise(step)
        seconds += time.perf_counter() - started
        tokens = batch["input_ids"].numel()
        history.losses.append(loss)
        history.step_seconds.append(seconds)
        history.tokens += tokens
        history.real_tokens += int(batch["attention_mask"].sum()) if "attention_mask" in batch else tokens
        self.numbers |= {"train/loss": loss, "train/learning_rate": rate, "train/tokens_per_second": tokens / seconds}
        return loss

    def _learning_rate(self, step: int) -> float:
        settings = self.config.optimizer
        peak, least = settings.learning_rate, getattr(settings, "min_learning_rate", 0.0)
        return peak * learning_rate_factor(
            step - 1,
            schedule=settings.schedule,
            warmup_steps=settings.warmup_steps,
            total_steps=self.config.steps,
            smallest=least / peak if peak else 0.0,
        )

    def _log(self, step: int, loss: float) -> None:
        position = self.objective.position()
        self.numbers["train/tokens"] = self.history.tokens
        self.numbers |= {f"train/{name}": number for name, number in position.items()}
        self.progress.show(step, loss, details(self.numbers, position))
        self.logs.write(step, self.numbers)

    def _evaluates_at(self, step: int) -> bool:
        every = self.config.output.eval_steps
        return step == self.config.steps or bool(every and step % every == 0)

    def _ends_after_evaluating(self, step: int) -> str | None:
        """Evaluate, and save a better model; return the status with which the run ends here, or None if it goes on."""
        objective, history = self.objective, self.history
        point = self._evaluate(step)
        history.evaluations.append(point)
        clean, lossy = (point[f"{objective.score}{network}"] for network in NETWORKS)
        sample = "" if clean is None else objective.sample(self.engine)  # a model of NaNs cannot write
        self.progress.evaluated(step, point, sample)
        shown = {**point, "sample": sample}
        self.logs.write(step, {f"eval/{name}": value for name, value in shown.items() if name != "step"})
        if clean is None:
            return "not finite"
        value = -math.inf if lossy is None else objective.better(point)
        better = value > history.best
        history.best, history.since_best = (value, 0) if better else (history.best, history.since_best + 1)
        if value > history.saved_best:
            history.saved_best = value
            objective.improved(self.engine)
        return "stopped early" if objective.patience_ends(history.since_best) else None

    def _evaluate(self, step: int) -> dict[str, Any]:
        """Evaluate with and without losses. A number that is not finite becomes None."""
        objective, last = self.objective, step == self.config.steps
        # a single rank sends nothing, so it scores the same with and without losses
        sends = self.layout.world_size > 1 or self.layout.tensor_parallel_size > 1
        what = f"{objective.name}: evaluating after step {step}"
        with waiting(what), self.network.reliable():
            clean = objective.scores(self.engine, last=last)
        point: dict[str, Any] = {"step": step, "seconds": sum(self.history.step_seconds)}
        with waiting(what), self.network.evaluation(step), self.engine.stream_distance() as distance:
            lossy = objective.scores(self.engine, last=last) if sends else clean
        distances = distance()
        point["stream_distance"] = distances and [each if math.isfinite(each) else None for each in distances]
        for name, everyones in (("clean", clean), ("lossy", lossy)):
            point |= {f"{metric}_{name}": value for metric, value in mean_over_ranks(everyones).items()}
            headline = [theirs[objective.score] for theirs in everyones]
            point[f"{objective.score}_spread_{name}"] = max(headline) - min(headline)
        point["replica_drift"] = self.history.drift
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in point.items()
        }

    def total_seconds(self) -> float:
        """Return the time of this process and of those that were stopped."""
        return self.history.earlier_seconds + time.perf_counter() - self.start

    def _described(self, status: str) -> dict[str, Any]:
        """Return the record."""
        config, history = self.config, self.history
        final = history.evaluations[-1] if status != "not finite" else {}
        scores = {name: final[name] for name in final if name.endswith(NETWORKS) and "_spread_" not in name}
        train_seconds, every = sum(history.step_seconds), max(1, len(history.losses) // config.curve_points)
        known = {
            "trace_sha256": self.trace_sha256,
            "first_weights": history.first_weights,
            "status": status,
            "implementation": self.engine.implementation,
            "data_parallel_implementation": config.parallelism.data_parallel_implementation,
        }
        curve = [
            {"step": step, "loss": loss if math.isfinite(loss) else None}
            for step, loss in enumerate(history.losses, 1)
            if step % every == 0
        ]
        return {
            **describe(config),
            **{name: value for name, value in known.items() if value},
            "processes": self.layout.world_size,
            "data": {**self.objective.described(), "real_token_share": history.real_tokens / history.tokens},
            "curves": {"train_loss": curve, "eval": history.evaluations},
            "final": dict.fromkeys(FINAL) | scores,
            "network": {purpose: self.network.summary(purpose) for purpose in ("training", "evaluation")},
            **self.objective.outcome(history.evaluations),
            "timing": {
                "train_seconds": train_seconds,
                "step_seconds": float(np.median(history.step_seconds)),
                "total_seconds": self.total_seconds(),
                "resumed_behind_steps": history.resumed,
                **({"earlier_layouts": history.layouts} if history.layouts else {}),
                "steps": len(history.losses),
                "tokens_per_second": history.tokens / train_seconds,
                "device": str(self.device),
                "threads": self.engine.num_threads,
            },
        }


def _scaler(device: torch.device, enabled: bool) -> torch.amp.GradScaler:
    if not dist.is_initialized():
        return torch.amp.GradScaler(device.type, enabled=enabled)
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # all processes skip a step, or none does

    return ShardedGradScaler(device.type, enabled=enabled, process_group=dist.group.WORLD)
