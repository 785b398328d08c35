"""Train a model: one run, from configuration to record, in fine-tuning and in pretraining.

An `Objective` says what the run trains on and how it is scored. The engine lays the model out over the processes.
"""

import errno
import fcntl
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.scope import Counters
from lossytp.network.traces import Replay, Trace
from lossytp.parallel.group import Layout, rank_and_world_size
from lossytp.parallel.places import places
from lossytp.parallel.replicas import clip_gradients_, merge_counters, on_rank_zero, replica_drift
from lossytp.training.checkpoint import (
    STATE,
    Checkpoints,
    Found,
    TrainingState,
    counted,
    first_weights,
    home,
    load_weights_,
    of_another_layout,
    read_,
)
from lossytp.training.config import NetworkSettings, RunSettings
from lossytp.training.engine import (
    Engine,
    build_optimizer,
    connected_processes,
    give_back_freed_memory,
    learning_rate_factor,
    this_device,
)
from lossytp.training.files import check_writable, remove_parts
from lossytp.training.logs import Logs, check_installed, check_logs
from lossytp.training.objectives import mean_over_ranks, objective_of
from lossytp.training.progress import Progress, details, waiting
from lossytp.training.record import RECORD, check_output_folder, describe, simulated_step_seconds, write_record

# Check the files that a run's result depends on, besides its configuration: its data, and a trace of packet losses.


def trace_sha256(config: NetworkSettings) -> str | None:
    """Return the hash of the recorded losses that the configuration replays; None if it replays none."""
    process = config.network.process()
    if isinstance(process, Replay):
        links = "".join(f"{link} {_sha256(trace)}\n" for link, trace in process.links)
        return hashlib.sha256(links.encode()).hexdigest()
    return _sha256(process) if isinstance(process, Trace) else None


def _sha256(trace: Trace) -> str:
    lost = np.asarray(trace.lost, dtype="<i8").tobytes()
    return hashlib.sha256(f"{trace.num_packets} ".encode() + lost).hexdigest()


def finished_record(config: RunSettings) -> dict[str, Any] | None:
    """Return the record of the same configuration and files, or None if the run is not yet done.

    A hash is not compared if an older record lacks it, or if the data is not on this machine.

    Raises:
        ValueError: if the folder holds the record of another configuration or of other files.
    """
    record = check_output_folder(config)
    if record is None:
        return None
    where = f"{config.output.output_dir}/{RECORD}"
    fix = f"put the old file back, give another output_dir, or delete {where} to run again"
    if record.get("trace_sha256") is not None:
        check_same_trace(config, record["trace_sha256"], where, fix)
    check_same_weights(config, record.get("first_weights"), where)
    data = record.get("data")
    if isinstance(data, dict) and data.get("sha256") is not None:
        try:
            now = objective_of(config).data_sha256(config)
        except ValueError:  # committed records are also read on machines without their data
            return record
        check_same_data(config, data["sha256"], now, where, fix)
    return record


def check_same_weights(config: RunSettings, then: dict[str, str] | None, where: str) -> None:
    """Raise ValueError if `checkpoint_path` names other weights than the run of `where` began from."""
    file = first_weights(home(config), config.output.checkpoint_path)
    if file is None:
        return
    with file.open("rb") as opened:
        now = hashlib.file_digest(opened, "sha256").hexdigest()
    if now != (then or {}).get("sha256"):
        raise ValueError(
            f"{where} is of a run that did not begin from {file}: name the file that it began from, leave "
            "checkpoint_path out, or give another output_dir"
        )


def check_same_trace(config: NetworkSettings, then: str | None, where: str, fix: str) -> None:
    """Raise ValueError if the trace's hash is no longer `then`, its value when `where` was written."""
    if trace_sha256(config) != then:
        raise ValueError(f"the file of {config.network.loss_type} has changed since {where} was written: {fix}")


def check_same_data(config: RunSettings, then: str, now: str, where: str, fix: str) -> None:
    """Raise ValueError if the data's hash `now` differs from `then`, its value when `where` was written."""
    if now != then:
        raise ValueError(f"the data of {config.task} has changed since {where} was written: {fix}")


# Save a run's state in checkpoints, and go on from it, at this layout or at another.


COUNTS = ("tokens", "real_tokens", "best", "saved_best", "since_best", "drift", "earlier_seconds", "earlier_packets")
KEPT = (
    "losses",
    "evaluations",
    "step_seconds",
    "resumed",
    "layouts",
    "first_weights",
    *COUNTS,
)  # attributes that checkpoints save as JSON


def training_state(run: "Run") -> TrainingState:
    """Return what checkpoints hold of the model, the optimizer and the network."""
    engine = run.engine
    held = places(engine.module, run.layout)
    return TrainingState(engine.module, held, run.optimizer, run.scaler, run.network)


def save_checkpoint(run: "Run", step: int) -> None:
    """Save the state after a step."""
    plain = {name: getattr(run, name) for name in KEPT}
    plain |= {"data": run.objective.sha256, "trace": run.trace_sha256, "earlier_seconds": run.total_seconds()}
    state = training_state(run)
    own = {**state.own(), "position": run.objective.state_dict(), "plain": json.dumps(plain)}
    with waiting(f"saving the state after step {step}"):
        run.checkpoints.save(step, state.tensors(), own)


def resume(run: "Run") -> None:
    """Restore the last checkpoint, if there is one."""
    found = run.checkpoints.find()
    if found is None:
        _take_weights(run)
        return
    states = run.checkpoints.own_states(found, (*STATE, "position", "plain"), (*KEPT, "data", "trace"))
    plain = json.loads(states[0]["plain"])
    start_over = run.checkpoints.to_start_over(found.folder)
    fix = f"put the old file back, or {start_over}"
    check_same_data(run.config, plain["data"], run.objective.sha256, str(found.folder), fix)
    check_same_trace(run.config, plain["trace"], str(found.folder), fix)
    own_folder = run.checkpoints.is_own(found.folder)  # not that of another run, from which this one begins
    if own_folder:
        check_same_weights(run.config, plain["first_weights"], str(found.folder))
    run.engine.warm_up(run.objective.batch, run.scaler)
    try:
        run.objective.load_state_dict(states[0]["position"], len(plain["losses"]))
        own = states[0] if found.layout == run.checkpoints.layout else _moved(run, found, states, plain)
        state = training_state(run)
        state.begin_moments_(own["steps"])
        read_(found.folder, state.tensors(run.checkpoints.known(found)))
        state.restore_own_(own)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a state that another program wrote can raise anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{found.folder} does not belong to this run ({reason}): {start_over}") from error
    for name in KEPT:
        setattr(run, name, plain[name])
    if not own_folder:
        run.saved_best = -math.inf
    run.resumed.append(len(run.losses))


def _take_weights(run: "Run") -> None:
    """Start from the weights that another program saved, if `checkpoint_path` names a file of them."""
    file = run.checkpoints.weights_file()
    if file is None:
        return
    load_weights_(training_state(run).places, file)
    with file.open("rb") as opened:
        run.first_weights = {"file": file.name, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}
    if run.layout.rank == 0:
        print(f"{file} gives the weights; the optimizer, the data and the steps begin anew", file=sys.stderr)


def _moved(run: "Run", found: Found, states: list[dict[str, Any]], plain: dict[str, Any]) -> dict[str, Any]:
    """Return this process's own state after a change of layout.

    Add the change to `plain`, and print it.
    """
    packets = counted(states)
    earlier = Counters()
    earlier.load_state_dict(plain["earlier_packets"])
    packets.add_all(earlier)
    plain["earlier_packets"] = packets.state_dict()
    plain["layouts"].append({"steps": found.step, **found.layout})
    if run.layout.rank == 0:
        print(
            f"{found.folder} is of another layout ({run.checkpoints.changes(found)}). Links that are in both keep "
            "their states, and others start afresh. Replicas start from the first one's weights.",
            file=sys.stderr,
        )
    here = run.layout.data_index, run.layout.pipeline_index
    earlier_places = [found.place(rank) for rank in range(found.processes)]
    like = [rank for rank, place in enumerate(earlier_places) if (place.data_index, place.pipeline_index) == here]
    same_ranks = earlier_places[0].tensor_parallel_size == run.layout.tensor_parallel_size
    return of_another_layout(states, like[0] if like else None, same_ranks=same_ranks)


# Allow one run at a time in a folder: two would overwrite each other's checkpoints and record.


LOCK = ".lossytp.lock"
WRITTEN = (
    "record.json",
    "evaluation.json",
    "README.md",
    "wandb_id",
    "probe",
    "losses.parquet",
    "statistics.jsonl",
    "tolerance.json",
)


@contextmanager
def exclusive_run(output_dir: str, network: LossyNetwork | None = None) -> Iterator[None]:
    """Keep other runs out of the folder within the block. First delete partial files that killed runs left there.

    The lock is a hidden file in the folder. The operating system releases it when its process ends, even if killed.

    Args:
        output_dir: the folder; it is made if missing.
        network: connects the processes of the run, of which the first holds the lock. If None, this process holds it.

    Raises:
        ValueError: if another run is using the folder, or the folder cannot be written.
    """
    held: list[int] = []

    def take() -> None:
        check_writable(output_dir)
        handle = _lock(output_dir)
        held.append(handle)
        remove_parts(Path(output_dir), WRITTEN)

    if network is None:
        take()
    else:
        on_rank_zero(take, network)
    try:
        yield
    finally:
        for handle in held:
            (Path(output_dir) / LOCK).unlink(missing_ok=True)  # before others can take it
            os.close(handle)


def _lock(output_dir: str) -> int:
    """Return the open file that holds the lock.

    Raises:
        ValueError: if another process holds it, or the file cannot be opened.
    """
    path = Path(output_dir) / LOCK
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise ValueError(
                f"output_dir = {output_dir!r} cannot be locked ({error.strerror}): give another folder"
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(handle)
                raise ValueError(
                    f"output_dir = {output_dir!r} is in use by another run: wait until it ends, or give another folder"
                ) from None
            print(  # some network file systems have no locks
                f"output_dir = {output_dir!r} is on a file system without locks ({error.strerror}): do not start a "
                "second run in it",
                file=sys.stderr,
            )
            return handle
        if _is_at(path, handle):
            return handle
        os.close(handle)  # the run that held the lock has just deleted this file


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


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
    with connected_processes(config, layout) as network, exclusive_run(config.output.output_dir, network):
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
        on_rank_zero(lambda: write_record(Path(config.output.output_dir), record), network)
    if not objective_of(config).keeps_checkpoint and config.output.keep_checkpoints == 1:
        checkpoints.remove()
    return done


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
            learning_rate=config.optimizer.learning_rate,
            weight_decay=config.optimizer.weight_decay,
            betas=config.optimizer.betas,
        )
        self.scaler = _scaler(self.device, config.compute.fp16)
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
            **(
                {"data_parallel_implementation": whose}
                if (whose := self.config.parallelism.data_parallel_implementation)
                else {}
            ),
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
        torch.manual_seed(config.network.seed + other_masks)
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
                    if config.output.checkpoint_steps and step % config.output.checkpoint_steps == 0:
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
        every = self.config.output.eval_steps
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
        rate = config.optimizer.learning_rate * learning_rate_factor(
            step - 1,
            schedule=config.optimizer.schedule,
            warmup_steps=config.optimizer.warmup_steps,
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
        if self.config.optimizer.gradient_clipping is not None:
            self.scaler.unscale_(self.optimizer)
            norm = clip_gradients_(
                self.engine.module, self.config.optimizer.gradient_clipping, self.layout, self.network
            )
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
