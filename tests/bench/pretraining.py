"""Tokens/s of `lossytp.pretrain` in one process beside a plain loop, and what it costs to stream the text.

`python -m tests.bench.pretraining` prints these ratios alone. Seconds are those of the processor, for all threads
together: on a shared machine they vary less than a clock's, and a thread that reads ahead costs what it takes.
"""

import json
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, logging

from lossytp.training import engine as connected_processes
from lossytp.training import text as packing
from lossytp.training.config import PretrainConfig
from lossytp.training.engine import learning_rate_factor
from lossytp.training.loop import Run, run
from lossytp.training.models import MODELS
from lossytp.training.objectives import Pretraining

ROUNDS, FIRST = 20, 2  # steps, and those that do not count
PORTIONS, STEPS_A_PORTION, BATCH = 12, 8, 16  # a portion holds more tokens than the rows that are read at once


def pretraining_ratios() -> dict:
    """Return both measurements. The text is the standard library's sources, in parquet files."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        pattern = sources_as_parquet(Path(folder))
        return {
            "to_plain_loop": speed_ratio(pattern, folder),
            "streaming": streaming_cost(pattern, folder),
            "kept_memory": memory_ratio(pattern, folder),
        }


def configured(pattern: str, folder: str, **values: Any) -> PretrainConfig:
    """Return the configuration of a run of `gpt2-nano` on one thread, without evaluations on the way."""
    return PretrainConfig(
        data_glob=pattern,
        tokenizer_path=str(MODELS / "gpt2-nano"),
        threads=1,
        eval_samples=1,
        eval_steps=None,
        checkpoint_steps=None,
        save_model=False,
        output_dir=f"{folder}/{len(values)}",
        **values,
    )


def speed_ratio(pattern: str, folder: str) -> dict:
    """Tokens/s of a run over those of a plain loop with the same weights, batches, optimizer, clipping and schedule.

    The loops take turns, one step each, in an order drawn anew each time. A run's step lasts from one batch to the
    next: it includes reading the text, statistics and progress. The plain loop gets its batches for nothing.
    """
    config = configured(pattern, folder, total_steps=ROUNDS)
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
    ratios = [theirs / ours for ours, theirs in zip(ours_s[FIRST:], plain_s[FIRST:], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    tokens = config.optimizer.batch_size * config.data.block_size
    return {
        "tokens_per_second": tokens / statistics.median(ours_s[FIRST:]),
        "tokens_per_second_of_plain_loop": tokens / statistics.median(plain_s[FIRST:]),
        "ratio": middle,
        "quartiles": [low, high],
        "largest_relative_difference_of_losses": apart,
        "target": "at least 1",
    }


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


def streaming_cost(pattern: str, folder: str) -> dict:
    """What streaming the text adds to a step, against the same blocks in memory, and how long steps wait for it.

    Portions of the text take turns: one is streamed while the thread reads the next one, and its blocks are then used
    again while nothing is read. Waits are seconds of a clock.
    """
    config = configured(pattern, folder, total_steps=PORTIONS * 2 * STEPS_A_PORTION, batch_size=BATCH, warmup_steps=1)
    batch = Pretraining.batch
    kept: list[dict[str, Tensor]] = []
    starts: list[tuple[float, float]] = []  # by the processor, and by a clock
    waits: list[float] = []

    def in_turns(self: Pretraining) -> dict[str, Tensor]:
        starts.append((time.process_time(), time.perf_counter()))
        place = (len(starts) - 1) % (2 * STEPS_A_PORTION)
        if place >= STEPS_A_PORTION:
            return kept[place - STEPS_A_PORTION]
        if place == 0:
            kept.clear()
        kept.append(batch(self))
        waits.append(time.perf_counter() - starts[-1][1])
        return kept[-1]

    with (
        patch.object(Pretraining, "batch", in_turns),
        patch.object(packing, "SHUFFLED_BLOCKS", STEPS_A_PORTION * BATCH),
    ):
        run(config)
    portions = list(pairwise(starts[::STEPS_A_PORTION]))[2:]  # nothing was read ahead of the first
    seconds = [after[0] - before[0] for before, after in portions]
    step_s = statistics.median(after[1] - before[1] for before, after in portions) / STEPS_A_PORTION
    low, middle, high = statistics.quantiles([a / b for a, b in zip(seconds[::2], seconds[1::2], strict=False)], n=4)
    later = waits[STEPS_A_PORTION:]
    return {
        "ratio": middle,
        "quartiles": [low, high],
        "target": "at most 1.05",
        "longest_wait_to_step": max(later) / step_s,
        "mean_wait_to_step": statistics.mean(later) / step_s,
        "target_of_waits": "under 0.05",
    }


def memory_ratio(pattern: str, folder: str) -> dict:
    """Seconds of a step over losses in both phases that keeps freed memory, over those of one that returns it.

    What malloc was told stays so, so each arm is a process of its own. The processes take turns.
    """
    seconds: dict[str, list[float]] = {"kept": [], "returned": []}
    for _ in range(3):
        for how, found in random.sample(list(seconds.items()), 2):
            command = [sys.executable, "-m", "tests.bench.pretraining", how, pattern, folder]
            found.append(float(subprocess.run(command, capture_output=True, check=True).stdout.split()[-1]))
    kept, returned = (statistics.median(found) for found in seconds.values())
    return {"kept_s": kept, "returned_s": returned, "ratio": kept / returned, "target": "under 0.85"}


def seconds_of_a_step(how: str, pattern: str, folder: str) -> float:
    """Return the processor's seconds of the fastest of five steps, with memory kept or returned."""
    both: dict[str, Any] = {"tensor_parallel_size": 4, "loss_rate": 0.1, "reliable_gather": False}
    config = configured(pattern, f"{folder}/{how}", total_steps=6, warmup_steps=1, microbatch_size=8, **both)
    step, seconds = Run.train_step, []

    def timed(self: Run, number: int, batch: dict[str, Tensor]) -> float:
        start = time.process_time()
        loss = step(self, number, batch)
        seconds.append(time.process_time() - start)
        return loss

    keep = connected_processes.keep_freed_memory if how == "kept" else lambda: None
    with (
        patch.object(Run, "train_step", timed),
        patch.object(connected_processes, "keep_freed_memory", keep),
        tempfile.TemporaryDirectory() as output,
    ):
        run(config.replace(output_dir=output))
    return min(seconds[1:])


def sources_as_parquet(folder: Path) -> str:
    """Write the standard library's sources into four parquet files, 20 lines a row, and return their pattern."""
    root = Path(sysconfig.get_paths()["stdlib"])
    lines = [line for file in sorted(root.glob("*.py")) for line in file.read_text(encoding="utf-8").splitlines()]
    texts = ["\n".join(lines[first : first + 20]) for first in range(0, len(lines), 20)]
    for shard in range(4):
        pa.parquet.write_table(pa.table({"text": texts[shard::4]}), folder / f"train-{shard}.parquet")
    return str(folder / "train-*.parquet")


if __name__ == "__main__":
    logging.set_verbosity_error()
    if len(sys.argv) > 1:
        torch.set_num_threads(1)
        print(seconds_of_a_step(*sys.argv[1:]))
    else:
        print(json.dumps(pretraining_ratios(), indent=2))
