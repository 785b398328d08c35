"""One training run, from configuration to record."""

import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.packets import Wire
from lossytp.parallel.convert import parallelize
from lossytp.training.config import TrainConfig
from lossytp.training.data import PAD_ID, Dataset, Split, evaluation_batches, load_dataset, training_batches
from lossytp.training.metrics import Classification, time_to_accuracy
from lossytp.training.models import build_classifier
from lossytp.training.progress import Progress
from lossytp.training.record import check_output_folder, describe, write_record

EVALUATION_BATCH = 64
CURVE_POINTS = 200  # training losses kept in a record


def run(config: TrainConfig) -> dict[str, Any]:
    """Train and evaluate as `config` says, write the record, and return it; a finished run is not run again.

    The status is "finished", "stopped early", or "not finite": the training loss became NaN or infinite, which
    ends the run, its final figures null.
    """
    done = check_output_folder(config)
    if done is not None:
        return done
    record = _Run(config).record()
    write_record(Path(config.output_dir), record)
    return record


class _Run:
    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.start = time.perf_counter()
        self.data: Dataset = load_dataset(
            config.dataset, train_samples=config.max_samples, test_samples=config.eval_samples
        )
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dense = build_classifier(
            config.model_name,
            labels=self.data.labels,
            pad_token_id=PAD_ID,
            dropout=config.dropout,
            seed=config.seed,
        )
        self.network = LossyNetwork(config.process(), seed=config.seed, wire=Wire(mtu_bytes=config.mtu_bytes))
        parallel: Any = parallelize(
            dense,
            self.network,
            tensor_parallel_size=config.tensor_parallel_size,
            algorithm=config.algorithm,
            repair=config.repair,
        )
        self.model = parallel.to(self.device)
        self.optimizer = build_optimizer(self.model, config)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: learning_rate_at(step, config))
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.fp16)
        self.losses: list[float] = []
        self.evaluations: list[dict] = []
        self.tokens = self.real_tokens = 0
        self.train_seconds = 0.0

    def record(self) -> dict[str, Any]:
        status = self._train()
        final = self.evaluations[-1] if status != "not finite" else {}
        every = max(1, len(self.losses) // CURVE_POINTS)
        curve = [{"step": step, "loss": loss} for step, loss in enumerate(self.losses, 1) if step % every == 0]
        labels = np.bincount(self.data.test.labels, minlength=len(self.data.labels))
        return {
            **describe(self.config),
            "status": status,
            "data": {
                "sha256": self.data.sha256,
                "train_examples": len(self.data.train),
                "test_examples": len(self.data.test),
                "majority_share": float(labels.max() / labels.sum()),
                "real_token_share": self.real_tokens / self.tokens,
            },
            "curves": {
                "train_loss": [point if math.isfinite(point["loss"]) else {**point, "loss": None} for point in curve],
                "eval": self.evaluations,
            },
            "final": {name: final.get(name) for name in FINAL},
            "network": {purpose: self.network.counters.summary(purpose) for purpose in ("training", "evaluation")},
            "time_to_accuracy": time_to_accuracy(self.evaluations, self.config.target_accuracy),
            "timing": {
                "train_seconds": self.train_seconds,
                "total_seconds": time.perf_counter() - self.start,
                "steps": len(self.losses),
                "tokens_per_second": self.tokens / self.train_seconds,
                "device": str(self.device),
                "threads": torch.get_num_threads(),
            },
        }

    def _train(self) -> str:
        config = self.config
        torch.manual_seed(config.seed)  # dropout's masks
        batches = training_batches(
            self.data.train, batch_size=config.batch_size, max_length=config.max_length, seed=config.seed
        )
        best, since_best = -1.0, 0
        progress = Progress(config.max_steps)
        for step in range(1, config.max_steps + 1):
            started = time.perf_counter()
            loss = self._step(next(batches))
            self.train_seconds += time.perf_counter() - started
            self.losses.append(loss)
            progress.show(step, loss)
            if not math.isfinite(loss):
                return "not finite"
            if step == config.max_steps or (config.eval_steps and step % config.eval_steps == 0):
                accuracy = self._evaluate(step)["accuracy_lossy"]
                best, since_best = (accuracy, 0) if accuracy > best else (best, since_best + 1)
                if config.patience and since_best >= config.patience and step < config.max_steps:
                    return "stopped early"
        return "finished"

    def _step(self, batch: dict[str, torch.Tensor]) -> float:
        self.model.train()
        self.tokens += batch["attention_mask"].numel()
        self.real_tokens += int(batch["attention_mask"].sum())
        with self._autocast():
            loss = self.model(**{name: tensor.to(self.device) for name, tensor in batch.items()}).loss
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        return loss.item()

    def _autocast(self) -> Any:
        if not (self.config.bf16 or self.config.fp16):
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16 if self.config.bf16 else torch.float16)

    def _evaluate(self, step: int) -> dict:
        with self.network.reliable():
            clean = self._score(self.data.test)
        with self.network.evaluation(step):
            lossy = self._score(self.data.test)
        point: dict[str, Any] = {"step": step, "seconds": self.train_seconds}
        point |= {f"{name}_clean": value for name, value in clean.items()}
        point |= {f"{name}_lossy": value for name, value in lossy.items()}
        self.evaluations.append(point)
        return point

    @torch.no_grad()
    def _score(self, split: Split) -> dict[str, float | None]:
        self.model.eval()
        logits, labels = [], []
        for batch in evaluation_batches(split, batch_size=EVALUATION_BATCH, max_length=self.config.max_length):
            labels.append(batch.pop("labels"))
            with self._autocast():
                output = self.model(**{name: tensor.to(self.device) for name, tensor in batch.items()})
            logits.append(output.logits.float().cpu())
        metric = Classification(keep_in_memory=True)
        return metric.compute(predictions=torch.cat(logits).numpy(), references=torch.cat(labels).numpy())


FINAL = ("accuracy_clean", "accuracy_lossy", "cross_entropy_clean", "cross_entropy_lossy")


def build_optimizer(model: PreTrainedModel, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, ICLR 2019); weights of linear layers and embeddings decay, all else not."""
    norms = {id(p) for module in model.modules() if isinstance(module, nn.LayerNorm) for p in module.parameters()}
    decay: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (plain if name.endswith("bias") or id(parameter) in norms else decay).append(parameter)
    groups = [{"params": decay, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate)


def learning_rate_at(step: int, config: TrainConfig) -> float:
    """Factor of the peak learning rate at `step`, counted from 0: linear warm-up, then linear decay to zero."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    return (config.max_steps - step) / max(1, config.max_steps - config.warmup_steps)
