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

from lossytp.network.counters import Counters
from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.probe.trace_file import ProbeTrace, write_trace
from lossytp.network.udp.network import UdpNetwork
from lossytp.parallel.layout import Layout, rank_and_world_size
from lossytp.parallel.replicas import clip_gradients_, merge_counters, on_rank_zero, replica_drift
from lossytp.training.checkpoint import Checkpoints
from lossytp.training.config import RunSettings
from lossytp.training.connected_processes import connected_processes, this_device
from lossytp.training.engine import Engine
from lossytp.training.exclusive_run import exclusive_run
from lossytp.training.files import saving
from lossytp.training.freed_memory import give_back_freed_memory
from lossytp.training.inputs import finished_record, trace_sha256
from lossytp.training.logs import Logs, check_installed, check_logs
from lossytp.training.objectives import objective_of
from lossytp.training.optimizer import build_optimizer, learning_rate_factor
from lossytp.training.progress import Progress, details, waiting
from lossytp.training.record import describe, write_record
from lossytp.training.resuming import resume, save_checkpoint
from lossytp.training.scoring import mean_over_ranks
from lossytp.training.simulated import simulated_step_seconds

LOSSES = "losses.parquet"  # of a run that really sent its packets
NETWORKS = ("_clean", "_lossy")
FINAL = tuple(  # keys of every task's record, null if the task lacks the metric; a task's other metrics follow
    f"{metric}{network}" for metric in ("score", "accuracy", "cross_entropy") for network in NETWORKS
)


def run(config: RunSettings) -> dict[str, Any]:
    """Train and evaluate as `config` says, write the record, and return it.

    If the record is already there, return it without training. Under torchrun every process calls this; the first
    writes the record, and all return it.

    Args:
        config: a `TrainConfig` fine-tunes, a `PretrainConfig` pretrains.

    Returns:
        The record. Its status is "finished", "stopped early" or "not finite". The last means that the training loss
        or, in pretraining, the validation loss without packet losses was NaN or infinite. Final scores are then null.

    Raises:
        ModuleNotFoundError: if a library to log to is not installed.
        ValueError: if the folder, the data or the model do not allow this run.
    """
    check_installed(config)
    layout = config.layout(*rank_and_world_size())
    with connected_processes(config, layout) as network, exclusive_run(config.output_dir, network):
        return _run(config, layout, network)


def _run(config: RunSettings, layout: Layout, network: LossyNetwork) -> dict[str, Any]:
    done = on_rank_zero(lambda: finished_record(config), network)
    checkpoints = Checkpoints(config, layout, network)
    if done is None:
        checkpoints.check()
        on_rank_zero(lambda: objective_of(config).claim_folder(config), network)
        on_rank_zero(lambda: check_logs(config), network)
        this = Run(config, layout, network, checkpoints)
        try:
            done = record = this.record()
        finally:
            this.engine.close()
        on_rank_zero(lambda: this.objective.leave(record), network)
        if isinstance(network, UdpNetwork):
            trace = network.trace()
            on_rank_zero(lambda: _write_losses(Path(config.output_dir) / LOSSES, trace), network)
        on_rank_zero(lambda: write_record(Path(config.output_dir), record), network)
    if not objective_of(config).keeps_checkpoint and config.keep_checkpoints == 1:
        checkpoints.remove()
    return done


def _write_losses(path: Path, trace: ProbeTrace) -> None:
    with saving(path):
        write_trace(path, trace)


class Run:
    """A run in this process: what it has, and what it has counted so far."""

    def __init__(self, config: RunSettings, layout: Layout, network: LossyNetwork, checkpoints: Checkpoints) -> None:
        self.config, self.layout, self.network, self.checkpoints = config, layout, network, checkpoints
        self.start = time.perf_counter()
        self.trace_sha256 = trace_sha256(config)
        self.objective = objective_of(config)(config)
        self.device = this_device(layout)
        self.engine = Engine(config, self.objective.dense_model(), network, layout, self.device)
        give_back_freed_memory()
        self.optimizer = build_optimizer(
            self.engine.module,
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            betas=config.betas,
        )
        self.scaler = _scaler(self.device, config.fp16)
        self.losses: list[float] = []
        self.evaluations: list[dict] = []
        self.tokens = self.real_tokens = 0
        self.step_seconds: list[float] = []
        self.best, self.since_best = -math.inf, 0
        self.saved_best = -math.inf  # of this output folder; `best` may be of the run that this one goes on from
        self.drift = 0.0  # replica drift after the last step before an evaluation
        self.resumed: list[int] = []  # steps after which the run was resumed
        self.earlier_seconds = 0.0  # total time of processes that were stopped
        self.first_weights: dict[str, str] | None = None  # of another program
        self.layouts: list[dict[str, Any]] = []  # earlier ones, each with the steps after which it ended
        self.earlier_packets = Counters().state_dict()  # at these layouts
        self.numbers: dict[str, Any] = {}  # the last step's, for logs

    @property
    def train_seconds(self) -> float:
        """Return the duration of all steps, without evaluations."""
        return sum(self.step_seconds)

    def record(self) -> dict[str, Any]:
        """Train, and return the record."""
        status = self._train()
        finite = status != "not finite"
        if finite:
            with waiting(f"{self.objective.name}: saving the model"):
                self.objective.save(self.engine)
        step_s = float(np.median(self.step_seconds))
        simulated_s = simulated_step_seconds(self.config, self.engine.shape, self.tokens / len(self.losses), step_s)
        final = self.evaluations[-1] if finite else {}
        every = max(1, len(self.losses) // self.config.curve_points)
        curve = [{"step": step, "loss": loss} for step, loss in enumerate(self.losses, 1) if step % every == 0]
        merge_counters(self.network)
        earlier = Counters()
        earlier.load_state_dict(self.earlier_packets)
        self.network.counters.add_all(earlier)
        return {
            **describe(self.config),
            **({"trace_sha256": self.trace_sha256} if self.trace_sha256 else {}),
            **({"first_weights": self.first_weights} if self.first_weights else {}),
            "status": status,
            "implementation": self.engine.implementation,
            **({"data_parallel_implementation": whose} if (whose := self.config.data_parallel_implementation) else {}),
            "processes": self.layout.world_size,
            "data": {**self.objective.described(), "real_token_share": self.real_tokens / self.tokens},
            "curves": {
                "train_loss": [point if math.isfinite(point["loss"]) else {**point, "loss": None} for point in curve],
                "eval": self.evaluations,
            },
            "final": dict.fromkeys(FINAL) | {name: final[name] for name in final if _is_score(name)},
            "network": {purpose: self.network.summary(purpose) for purpose in ("training", "evaluation")},
            **self.objective.outcome(self.evaluations, simulated_s),
            "timing": {
                "train_seconds": self.train_seconds,
                "step_seconds": step_s,
                "simulated_step_seconds": simulated_s,
                "total_seconds": self.total_seconds(),
                "resumed_behind_steps": self.resumed,
                **({"earlier_layouts": self.layouts} if self.layouts else {}),
                "steps": len(self.losses),
                "tokens_per_second": self.tokens / self.train_seconds,
                "device": str(self.device),
                "threads": self.engine.num_threads,
            },
        }

    def _train(self) -> str:
        config = self.config
        # dropout masks differ between replicas and stages; tensor-parallel ranks share theirs
        other_masks = self.layout.data_index + self.layout.pipeline_index
        torch.manual_seed(config.seed + other_masks)
        resume(self)
        done = len(self.losses)
        shown = self.layout.rank == 0
        self.progress = Progress(config.steps, name=self.objective.name, done=done, shown=shown)
        self.logs = Logs(config, done=done, shown=shown)
        try:
            for step in range(done + 1, config.steps + 1):
                asked = time.perf_counter()
                batch = self.objective.batch()
                self.numbers["train/waiting_seconds"] = time.perf_counter() - asked
                loss = self._timed_step(step, batch)
                position = self.objective.position()
                self.numbers |= {f"train/{name}": number for name, number in position.items()}
                self.progress.show(step, loss, details(self.numbers, position))
                self.logs.write(step, self.numbers)
                if not math.isfinite(loss):
                    return "not finite"
                if step < config.steps:
                    if self._evaluates_at(step) and (ended := self._ends_after_evaluating(step)):
                        return ended
                    if config.checkpoint_steps and step % config.checkpoint_steps == 0:
                        save_checkpoint(self, step)
            if self.objective.keeps_checkpoint and config.steps > done:
                save_checkpoint(self, config.steps)
            self.objective.settle_(self.engine)
            ended = self._ends_after_evaluating(config.steps)
        finally:
            self.progress.close()
            self.logs.close()
        return "not finite" if ended == "not finite" else "finished"

    def _evaluates_at(self, step: int) -> bool:
        every = self.config.eval_steps
        return step == self.config.steps or bool(every and step % every == 0)

    def _compare(self, value: float) -> None:
        """Compare an evaluation with the best so far: count one without improvement, and save a better model."""
        better = value > self.best
        self.best, self.since_best = (value, 0) if better else (self.best, self.since_best + 1)
        if value > self.saved_best:
            self.saved_best = value
            self.objective.improved(self.engine)

    def total_seconds(self) -> float:
        """Return the time of this process and of those that were stopped."""
        return self.earlier_seconds + time.perf_counter() - self.start

    def _timed_step(self, step: int, batch: dict[str, torch.Tensor]) -> float:
        """Make optimizer step `step`, counted from 1, and return the training loss before it."""
        config, started = self.config, time.perf_counter()
        rate = config.learning_rate * learning_rate_factor(
            step - 1,
            schedule=config.schedule,
            warmup_steps=config.warmup_steps,
            total_steps=config.steps,
            smallest=config.smallest_rate,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self._step(batch)
        seconds = time.perf_counter() - started
        if self._evaluates_at(step):  # measured before copies are resynchronised, and not part of the training time
            self.drift = replica_drift(self.engine.module, self.layout, self.network)
        started = time.perf_counter()
        self.engine.resynchronise(step)
        self.step_seconds.append(seconds + time.perf_counter() - started)
        self.losses.append(loss)
        speed = batch["input_ids"].numel() / self.step_seconds[-1]
        self.numbers |= {"train/loss": loss, "train/learning_rate": rate, "train/tokens_per_second": speed}
        self.numbers["train/tokens"] = self.tokens
        return loss

    def _step(self, batch: dict[str, torch.Tensor]) -> float:
        tokens = batch["input_ids"].numel()
        self.tokens += tokens
        self.real_tokens += int(batch["attention_mask"].sum()) if "attention_mask" in batch else tokens
        loss = self.engine.forward_backward(batch, self.scaler)
        self.engine.synchronise()
        if self.config.gradient_clipping is not None:
            self.scaler.unscale_(self.optimizer)
            norm = clip_gradients_(self.engine.module, self.config.gradient_clipping, self.layout, self.network)
            self.numbers["train/gradient_norm"] = norm
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def _ends_after_evaluating(self, step: int) -> str | None:
        """Evaluate, and return the status with which the run ends here; None if it goes on."""
        point = self._evaluate(step)
        clean, lossy = (point[f"{self.objective.score}{network}"] for network in NETWORKS)
        sample = "" if clean is None else self.objective.sample(self.engine)  # a model of NaNs cannot write
        self.progress.evaluated(step, point, sample)
        shown = {**point, "sample": sample}
        self.logs.write(step, {f"eval/{name}": value for name, value in shown.items() if name != "step"})
        if clean is None:
            return "not finite"
        self._compare(-math.inf if lossy is None else self.objective.better(point))
        return "stopped early" if self.objective.patience_ends(self.since_best) else None

    @property
    def _sends(self) -> bool:
        """Return whether ranks send anything. A single rank does not, so it scores the same with and without losses."""
        return self.layout.world_size > 1 or self.layout.tensor_parallel_size > 1

    def _evaluate(self, step: int) -> dict:
        """Evaluate with and without losses. A number that is not finite becomes None."""
        objective, last = self.objective, step == self.config.steps
        told = f"{objective.name}: evaluating after step {step}"
        with waiting(told), self.network.reliable():
            clean = objective.scores(self.engine, last=last)
        point: dict[str, Any] = {"step": step, "seconds": self.train_seconds}
        with waiting(told), self.network.evaluation(step), self.engine.stream_distance() as distance:
            lossy = objective.scores(self.engine, last=last) if self._sends else clean
        distances = distance()
        point["stream_distance"] = distances and [each if math.isfinite(each) else None for each in distances]
        for name, everyones in (("clean", clean), ("lossy", lossy)):
            point |= {f"{metric}_{name}": value for metric, value in mean_over_ranks(everyones).items()}
            headline = [theirs[objective.score] for theirs in everyones]
            point[f"{objective.score}_spread_{name}"] = max(headline) - min(headline)
        point["replica_drift"] = self.drift
        point = {name: None if _is_not_finite(value) else value for name, value in point.items()}
        self.evaluations.append(point)
        return point


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _is_score(name: str) -> bool:
    return name.endswith(NETWORKS) and "_spread_" not in name


def _scaler(device: torch.device, enabled: bool) -> torch.amp.GradScaler:
    if not dist.is_initialized():
        return torch.amp.GradScaler(device.type, enabled=enabled)
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # all processes skip a step, or none does

    return ShardedGradScaler(device.type, enabled=enabled, process_group=dist.group.WORLD)
