"""Pretrain a model: next-token prediction on packed blocks of text, in one process.

A few Python threads, each with one torch thread, compute microbatches in parallel. With small models this is faster
than torch's own threads, which wait for each other at every kernel. Gradients are added in order, so the number of
threads changes no result.
"""

import json
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from lossytp.parallel.convert import fuse_gelu_
from lossytp.parallel.layout import rank_and_world_size
from lossytp.training.config import PretrainConfig
from lossytp.training.exclusive_run import exclusive_run
from lossytp.training.files import saving
from lossytp.training.models import build_language_model
from lossytp.training.optimizer import build_optimizer, learning_rate_factor
from lossytp.training.pretraining.corpus import PackedBlocks, all_blocks
from lossytp.training.pretraining.folder import (
    STATISTICS,
    checkpoint_of,
    claim_files_of,
    data_sha256,
    described,
    finished,
    path_end,
    save_checkpoint,
    tokenizer_for,
    training_text,
    validation_text,
)
from lossytp.training.pretraining.model_card import model_card
from lossytp.training.pretraining.trigram import trigram_perplexity
from lossytp.training.record import commit, environment, write_atomically

VALIDATION_BLOCKS = 512  # during training; at the end, all blocks
TRIGRAM_TOKENS = 2**26
SECONDS_BETWEEN_LINES = 30.0
BETAS = (0.9, 0.95)  # Brown et al., NeurIPS 2020, appendix B
PROMPT = "The "


def run(config: PretrainConfig) -> dict[str, Any]:
    """Pretrain, save the model with its tokenizer and card, and return the content of pretrain.json.

    A stopped run resumes from its last checkpoint and reaches the same model. A finished run is not repeated.

    Raises:
        ValueError: if the folder, the text or a checkpoint does not allow this run, there are several processes, or the
            training loss is not finite.
    """
    check_single_process()
    folder = Path(config.output_dir)
    with exclusive_run(config.output_dir), torch.random.fork_rng():
        done = finished(config, folder)
        if done is not None:
            return done
        state = checkpoint_of(config)
        claim_files_of(config, folder)
        return _Pretraining(config, tokenizer_for(config, folder), state).run(folder)


def check_single_process() -> None:
    """Raise ValueError if torchrun started several processes."""
    processes = rank_and_world_size()[1]
    if processes > 1:
        raise ValueError(
            f"lossytp.pretrain runs in one process, not {processes}: start it with python -m lossytp.pretrain"
        )


class _Pretraining:
    def __init__(self, config: PretrainConfig, tokenizer: PreTrainedTokenizerFast, state: dict | None) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.threads = 1 if self.device.type == "cuda" else config.num_proc
        model: Any = build_language_model(config.model_name, tokenizer, seed=config.seed)
        fuse_gelu_(model)
        self.model = model.to(self.device)
        self.parameters = list(self.model.parameters())
        self.optimizer = build_optimizer(
            self.model, learning_rate=config.learning_rate, weight_decay=config.weight_decay, betas=BETAS
        )
        self.data_sha256 = data_sha256(config)
        text = training_text(config)
        self.blocks = PackedBlocks(
            text, tokenizer, block_size=config.block_size, seed=config.seed, streaming=config.streaming
        )
        self.validation = all_blocks(
            validation_text(config),
            tokenizer,
            block_size=config.block_size,
        )
        self.losses: list[float] = []
        self.evaluations: list[dict[str, float]] = []
        self.seconds = 0.0
        if state is not None:
            self._restore(state)

    def _restore(self, state: dict) -> None:
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self._check_optimizer()
            self.blocks.load_state_dict(state["blocks"])
        except (RuntimeError, KeyError, TypeError, AttributeError, IndexError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"the checkpoint in {self.config.checkpoint_path or self.config.output_dir} does not belong to this "
                f"run ({reason}): delete it to start over"
            ) from error
        self.losses, self.evaluations, self.seconds = state["losses"], state["evaluations"], state["seconds"]

    def _check_optimizer(self) -> None:
        """Raise KeyError or RuntimeError if AdamW's averages do not fit the parameters; AdamW checks only in a step."""
        for number, parameter in enumerate(self.parameters):
            for name in ("exp_avg", "exp_avg_sq"):
                shape = self.optimizer.state[parameter][name].shape
                if shape != parameter.shape:
                    raise RuntimeError(f"{name} of parameter {number} has shape {tuple(shape)}")

    def run(self, folder: Path) -> dict[str, Any]:
        config = self.config
        threads = torch.get_num_threads()
        bar = tqdm(
            total=config.total_steps,
            initial=len(self.losses),
            desc="pretraining",
            unit="step",
            disable=not sys.stderr.isatty(),
        )
        spoken = time.monotonic()
        try:
            with ThreadPoolExecutor(self.threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                for step in range(len(self.losses) + 1, config.total_steps + 1):
                    started = time.perf_counter()
                    self.losses.append(self._step(step, pool))
                    self.seconds += time.perf_counter() - started
                    if not math.isfinite(self.losses[-1]):
                        raise ValueError(
                            f"the training loss is not finite at step {step}: lower learning_rate = "
                            f"{config.learning_rate:g}"
                        )
                    bar.update()
                    if bar.disable and time.monotonic() - spoken > SECONDS_BETWEEN_LINES:
                        spoken = time.monotonic()
                        print(self._progress(step), file=sys.stderr, flush=True)
                    if step % config.eval_steps == 0 or step == config.total_steps:
                        loss = self._validation_loss(self.validation[:VALIDATION_BLOCKS], pool)
                        self.evaluations.append({"step": step, "validation_loss": loss, "seconds": self.seconds})
                        tqdm.write(f"{self._progress(step)}, {self._sample()!r}", file=sys.stderr)
                        self._save_checkpoint(folder)
                return self._export(folder, pool)
        finally:
            bar.close()
            torch.set_num_threads(threads)

    def _step(self, step: int, pool: ThreadPoolExecutor) -> float:
        config = self.config
        rate = config.learning_rate * learning_rate_factor(
            step - 1,
            schedule="cosine",
            warmup_steps=config.warmup_steps,
            total_steps=config.total_steps,
            smallest=min(1.0, config.min_learning_rate / config.learning_rate) if config.learning_rate else 0.0,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        parts = self.blocks.batch(config.batch_size).to(self.device).split(config.microbatch_size)
        total = 0.0
        for part, (loss, gradients) in zip(parts, pool.map(self._gradients, parts), strict=True):
            share = len(part) / config.batch_size
            total += loss * share
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                if parameter.grad is None:
                    parameter.grad = gradient * share
                else:
                    parameter.grad.add_(gradient, alpha=share)
        torch.nn.utils.clip_grad_norm_(self.parameters, config.gradient_clipping)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def _gradients(self, blocks: Tensor) -> tuple[float, tuple[Tensor, ...]]:
        loss = self._loss(blocks)
        return loss.item(), torch.autograd.grad(loss, self.parameters)

    def _loss(self, blocks: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16) if self.config.bf16 else nullcontext():
            loss: Tensor = self.model(blocks, labels=blocks).loss
        return loss

    def _validation_loss(self, blocks: Tensor, pool: ThreadPoolExecutor) -> float:
        def total(part: Tensor) -> float:
            with torch.no_grad():
                return self._loss(part.to(self.device)).item() * len(part)

        return sum(pool.map(total, blocks.split(self.config.microbatch_size))) / len(blocks)

    def _progress(self, step: int) -> str:
        position = self.blocks.position
        tokens = step * self.config.batch_size * self.config.block_size
        text = (
            f"pretraining: step {step} of {self.config.total_steps}, loss {self.losses[-1]:.3f}, {tokens:,} tokens, "
            f"learning rate {self.optimizer.param_groups[0]['lr']:.2e}, pass {position.epoch}, file {position.shard}, "
            f"document {position.row}"
        )
        if self.evaluations and self.evaluations[-1]["step"] == step:
            text += f", validation loss {self.evaluations[-1]['validation_loss']:.4f}"
        return text

    def _sample(self) -> str:
        prompt = self.tokenizer(PROMPT.strip(), return_tensors="pt").to(self.device)
        with torch.random.fork_rng():
            torch.manual_seed(self.config.seed)
            ids = self.model.generate(
                input_ids=prompt["input_ids"],
                attention_mask=prompt["attention_mask"],
                max_new_tokens=40,
                do_sample=True,
                top_k=50,
                use_cache=True,
                pad_token_id=self.tokenizer.pad_token_id,
            )
        return str(self.tokenizer.decode(ids[0]))

    def _save_checkpoint(self, folder: Path) -> None:
        state = {
            "config": self.config.as_dict(),
            "data_sha256": self.data_sha256,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "blocks": self.blocks.state_dict(),
            "losses": self.losses,
            "evaluations": self.evaluations,
            "seconds": self.seconds,
        }
        save_checkpoint(folder, state)

    def _export(self, folder: Path, pool: ThreadPoolExecutor) -> dict[str, Any]:
        """Save the model in bfloat16 for transformers, its tokenizer, card and statistics; return the statistics."""
        config = self.config
        self.model.to(torch.bfloat16).to(torch.float32)
        print("pretraining: validating on all held-out text", file=sys.stderr, flush=True)
        validation_loss = self._validation_loss(self.validation, pool)
        every = max(1, len(self.losses) // 200)
        statistics = {
            "config": described(config),
            "data": path_end(config.data_glob),
            "data_sha256": self.data_sha256,
            "parameters": sum(parameter.numel() for parameter in self.parameters),
            "vocabulary": len(self.tokenizer),
            "tokens": config.total_steps * config.batch_size * config.block_size,
            "steps": config.total_steps,
            "passes": self.blocks.position.epoch + 1,
            "validation_loss": validation_loss,
            "perplexity": math.exp(validation_loss),
            **self._trigram(),
            "validation_tokens": self.validation.numel(),
            "commit": commit(),
            "environment": environment(),
            "train_seconds": self.seconds,
            "threads": self.threads,
            "device": str(self.device),
            "curves": {
                "train_loss": [{"step": s, "loss": loss} for s, loss in enumerate(self.losses, 1) if s % every == 0],
                "eval": self.evaluations,
            },
        }
        exported: Any = build_language_model(config.model_name, self.tokenizer, seed=config.seed)
        exported.load_state_dict(self.model.state_dict())
        with saving(folder):
            exported.to(torch.bfloat16).save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
        write_atomically(folder / "README.md", model_card(statistics))
        write_atomically(folder / STATISTICS, json.dumps(statistics, indent=1, allow_nan=False) + "\n")
        return statistics

    def _trigram(self) -> dict[str, Any]:
        """Compute the perplexity of a trigram model of the training text, at most its first `TRIGRAM_TOKENS` tokens."""
        blocks = PackedBlocks(
            self.blocks.text, self.tokenizer, block_size=self.config.block_size, seed=self.config.seed
        ).in_order()
        number = min(TRIGRAM_TOKENS, self.config.total_steps * self.config.batch_size * self.config.block_size)
        train = np.concatenate(list(islice(blocks, number // self.config.block_size)))
        held_out = self.validation.numpy().ravel()
        return {
            "trigram_perplexity": trigram_perplexity(train, held_out, len(self.tokenizer)),
            "trigram_tokens": len(train),
        }
