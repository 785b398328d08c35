"""The line of pretraining: a step of `lossytp.pretrain` in one process beside a step of a plain loop."""

import io
import random
import sysconfig
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from lossytp.training.config import PretrainConfig
from lossytp.training.engine import learning_rate_factor
from lossytp.training.loop import Run, run
from lossytp.training.models import MODELS
from tests.bench.measure import Measured, line

ROUNDS, FIRST = 10, 2  # steps, and those that do not count


@line("Pretraining step of gpt2-nano, processor's time", "plain loop")
def pretraining() -> Measured:
    """The text is the standard library's sources. The plain loop has the same weights, batches, AdamW and schedule.

    The loops take turns, one step each, in an order drawn anew each time. A run's step lasts from one batch to the
    next: it includes reading the text, statistics and progress. The plain loop gets its batches for nothing. Seconds
    are those of the processor, for all threads together: a thread that reads ahead costs what it takes.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = PretrainConfig(
            data_glob=sources_as_parquet(Path(folder)),
            tokenizer_path=str(MODELS / "gpt2-nano"),
            threads=1,
            eval_samples=1,
            eval_steps=None,
            checkpoint_steps=None,
            save_model=False,
            output_dir=f"{folder}/run",
            total_steps=ROUNDS,
        )
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            ours_s, plain_s = seconds_of_both(config)
    return Measured(
        {"lossytp.pretrain": ours_s[FIRST:], "plain loop": plain_s[FIRST:]},
        "plain loop",
        {"lossytp.pretrain": "at most 1"},
    )


def seconds_of_both(config: PretrainConfig) -> tuple[list[float], list[float]]:
    """Return the seconds of each step of a run, and those of the plain loop beside it."""
    ours_s: list[float] = []
    plain_s: list[float] = []
    losses: list[tuple[float, float]] = []
    step, left = Run.train_step, [0.0]

    def both(self: Run, number: int, batch: dict[str, Tensor]) -> float:
        between = time.process_time() - left[0]
        if number == 1:
            plain.append(PlainLoop(config, self.objective.dense_model()))

        def by_plain() -> None:
            start = time.process_time()
            theirs.append(plain[0].step(batch["input_ids"]))
            plain_s.append(time.process_time() - start)

        def by_run() -> None:
            start = time.process_time()
            loss.append(step(self, number, batch))
            ours_s.append(time.process_time() - start + between)

        loss: list[float] = []
        theirs: list[float] = []
        for arm in random.sample((by_plain, by_run), 2):
            arm()
        losses.append((loss[0], theirs[0]))
        left[0] = time.process_time()
        return loss[0]

    plain: list[PlainLoop] = []
    with patch.object(Run, "train_step", both):
        run(config)
    apart = max(abs(ours - theirs) / theirs for ours, theirs in losses)
    assert apart < 1e-4, f"the loops train apart: {losses}"
    return ours_s, plain_s


class PlainLoop:
    """The loop that one writes with transformers and PyTorch alone, for `gpt2-nano` and a batch at a time."""

    def __init__(self, config: PretrainConfig, weights: PreTrainedModel) -> None:
        self.model: Any = AutoModelForCausalLM.from_config(weights.config)
        self.model.load_state_dict(weights.state_dict())
        parameters = list(self.model.parameters())
        groups = [
            {"params": [each for each in parameters if each.ndim > 1], "weight_decay": config.optimizer.weight_decay},
            {"params": [each for each in parameters if each.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=config.optimizer.learning_rate, betas=config.optimizer.betas)
        factor = partial(
            learning_rate_factor,
            schedule="cosine",
            warmup_steps=config.optimizer.warmup_steps,
            total_steps=config.optimizer.total_steps,
            smallest=config.optimizer.min_learning_rate / config.optimizer.learning_rate,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        self.largest_norm = config.optimizer.gradient_clipping or float("inf")

    def step(self, blocks: Tensor) -> float:
        self.model.train()
        loss = self.model(input_ids=blocks, labels=blocks, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.largest_norm)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return float(loss.item())


def sources_as_parquet(folder: Path) -> str:
    """Write the standard library's sources into four parquet files, 20 lines a row, and return their pattern."""
    root = Path(sysconfig.get_paths()["stdlib"])
    lines = [line for file in sorted(root.glob("*.py")) for line in file.read_text(encoding="utf-8").splitlines()]
    texts = ["\n".join(lines[first : first + 20]) for first in range(0, len(lines), 20)]
    for shard in range(4):
        pa.parquet.write_table(pa.table({"text": texts[shard::4]}), folder / f"train-{shard}.parquet")
    return str(folder / "train-*.parquet")
