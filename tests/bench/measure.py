"""Time arms in turns, and keep what a line measured.

Times alone mean little on a shared machine. The arms of a line take turns, in an order drawn anew each round. A ratio
is the median over rounds of the ratios of each round, between its quartiles.
"""

import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import logging

from lossytp.training.files import write_atomically
from lossytp.training.record import environment

REPEATS = 7
Arms = dict[str, Callable[[], object]]


class NotHere(Exception):
    """What a line needs is not on this machine. The message says how to get it."""


class Measured(NamedTuple):
    """What each arm took in each round, and the arm, or each arm's, that it is divided by."""

    seconds: dict[str, list[float]]
    base: str | dict[str, str]
    targets: dict[str, str]


class Line(NamedTuple):
    """A line of the table."""

    what: str
    against: str
    measure: Callable[[], Measured]


LINES: dict[str, Line] = {}


def line(what: str, against: str) -> Callable[[Callable[[], Measured]], Callable[[], Measured]]:
    """Return a decorator that adds a measurement to `LINES` by its function's name."""

    def add(measure: Callable[[], Measured]) -> Callable[[], Measured]:
        LINES[measure.__name__] = Line(what, against, measure)
        return measure

    return add


def one_thread() -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()


def in_turns(arms: Arms, repeats: int = REPEATS, barrier: Callable[[], object] | None = None) -> dict[str, list[float]]:
    """Return each arm's seconds in each round, after a round that does not count.

    They are the processor's: on a shared machine they vary less than a clock's, and an arm has one thread. Processes
    that take turns together draw the same orders, pass a `barrier`, and go by the clock from one barrier to the next.
    """
    clock = time.perf_counter if barrier else time.process_time
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for count in range(repeats + 1):
        for name in random.Random(count).sample(sorted(arms), len(arms)):
            if barrier:
                barrier()
            start = clock()
            arms[name]()
            if barrier:
                barrier()
            if count:
                seconds[name].append(clock() - start)
    return seconds


def record_of(name: str, measured: Measured) -> dict:
    """Return the record of a line."""
    arms, bases = {}, {}
    for arm, seconds in measured.seconds.items():
        arms[arm] = {"median": statistics.median(seconds), "least": min(seconds), "repeats": len(seconds)}
        base = measured.base if isinstance(measured.base, str) else measured.base.get(arm, arm)
        bases[arm] = base
    ratios = {}
    for arm, base in bases.items():
        if arm != base:
            each = [a / b for a, b in zip(measured.seconds[arm], measured.seconds[base], strict=True)]
            low, middle, high = statistics.quantiles(each, n=4) if len(each) > 1 else each * 3
            ratios[arm] = {"ratio": middle, "quartiles": [low, high], "target": measured.targets.get(arm)}
    line = LINES[name]
    return {"line": line.what, "against": line.against, "ratios": ratios, "arms": arms} | where()


def where() -> dict:
    """Return the commit of the code and of its measurement, with "+" if one has changes, and the environment."""

    def git(*words: str) -> str:
        words = (*words, "--", "lossytp", "tests/bench")
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()

    return {"commit": git("log", "-1", "--format=%H") + "+" * bool(git("status", "--porcelain"))} | {
        "environment": environment()
    }


def is_recorded(file: Path) -> bool:
    """Return whether the line has a record of this code, with no changes, and this machine."""
    try:
        record, here = json.loads(file.read_text(encoding="utf-8")), where()
    except (OSError, ValueError):
        return False
    return not here["commit"].endswith("+") and all(record.get(key) == value for key, value in here.items())


def write(file: Path, record: dict) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(record, indent=1) + "\n")
