"""Measure the rise of a language model's cross-entropy row by row, as the study's published records were.

`python -m paper.inference --model_name gpt2-nano --text stdlib --loss_rates 0.1` scores blocks of text, each a message
of its own, without losses and with each draw of losses. All packets may be lost, also critical ones, so a row's
interval is wide if some collapse. `lossytp.tolerance` tells these apart.

A row's estimate is the mean over draws, with Student's interval. Draws stop once this is narrow, so intervals of few
draws are a little too narrow; equal `min_draws` and `max_draws` avoid this. Shapes: N blocks, S draws.
"""

import hashlib
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from pydantic import Field

from lossytp.study.statistics import Estimate, t_interval
from lossytp.tolerance import COLLAPSE_NATS
from lossytp.tolerance.config import NO_REPAIR, OTHER_FOLDER, Setup, ToleranceConfig
from lossytp.tolerance.measure import RECORD, SAME_NATS, check_same_settings, settings_of
from lossytp.tolerance.measure import Measurement as Text
from lossytp.training.command_line import parse, run_as_command
from lossytp.training.files import write_atomically
from lossytp.training.folder import exclusive_run
from lossytp.training.progress import waiting
from lossytp.training.record import check_same_trace, commit, environment, trace_sha256
from lossytp.training.settings import Count, Positive

ENOUGH = 0.2  # of the rise: a half-width at which a row is done
HARMLESS = 0.01  # nats: below this, losses need no repair


class InferenceConfig(ToleranceConfig):
    """A model, a text, and the networks and repairs to try: one row for each."""

    DEFAULT_RATES: ClassVar[str] = "0.001,0.01,0.03,0.1"
    NEEDS_LOSSES: ClassVar[bool] = False

    repairs: str = "zero,hadamard(64),protect(0.1) + hadamard(64),protect(0.1) + retransmit(1)"
    """Repairs, separated by commas. zero, which repairs nothing, is always measured too."""
    blocks: Count | None = None
    """Number of blocks, from the text's beginning. If left out, as many as have 2,048 tokens together."""
    batch_size: Count = 1
    """Blocks of one message."""
    min_draws: Annotated[int, Field(ge=2)] = 3
    """Smallest number of draws of losses for each row; their seeds follow from `seed`."""
    precision: Positive = 0.005
    """A row is done once its 95 % interval has this half-width, in nats, or a fifth of the rise."""
    output_dir: str = "output/inference"
    """Folder for tolerance.json."""


class Row(NamedTuple):
    """One row of the record.

    Attributes:
        setup: the network and the repair.
        rise: rise of the cross-entropy, in nats a token.
        collapsed: the share of blocks whose cross-entropy rose by more than `COLLAPSE_NATS`.
        packets: packets sent in a draw, including those that the repair adds.
        rises: every draw's rise on every block (S, N).
    """

    setup: Setup
    rise: Estimate
    collapsed: float
    packets: float
    rises: list[list[float]]

    def as_json(self) -> dict[str, Any]:
        """Return the row as the record has it."""
        return {
            **self.setup._asdict(),
            "rise": self.rise.as_json(),
            "collapsed_blocks": self.collapsed,
            "packets_a_draw": self.packets,
            "rises": self.rises,
        }

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Row":
        """Return the row of a record."""
        setup = Setup(*(values[name] for name in Setup._fields))
        rise = Estimate(**values["rise"])
        return cls(setup, rise, values["collapsed_blocks"], values["packets_a_draw"], values["rises"])


class Measurement(Text):
    """A model and a text of N blocks, by default of 512 tokens, or of all the model's positions."""

    BLOCK_SIZE, TOKENS = 512, 2048
    config: InferenceConfig

    @cached_property
    def lossless_N(self) -> np.ndarray:
        """Return each block's mean cross-entropy without losses."""
        with waiting(f"{self.config.model_name}: scoring the text without losses"):
            return self._scores(self.dense)

    def rows(self, done: dict[Setup, Row]) -> Iterator[Row]:
        """Yield the rows. A repair is measured only where losses without one cost something.

        Args:
            done: rows that were measured before.
        """
        harmless = set()
        for setup in self.config.setups():
            if setup._replace(repair=NO_REPAIR) in harmless:
                continue
            with waiting(f"{setup.algorithm}, {setup.phase}, {setup.repair} at {setup.loss_rate:.3g}: scoring"):
                row = done.get(setup) or self._row(setup)
            if setup.repair == NO_REPAIR and row.rise.high < HARMLESS:
                harmless.add(setup)
            yield row

    def _row(self, setup: Setup) -> Row:
        config = self.config
        model, network = self.over(config.network(setup))
        rises_SN: list[np.ndarray] = []
        while len(rises_SN) < config.max_draws:
            with network.evaluation(len(rises_SN)):
                rises_SN.append(self._scores(model) - self.lossless_N)
            rise = t_interval(np.mean(rises_SN, axis=1))
            half = rise.high - rise.value
            if len(rises_SN) >= config.min_draws and half <= max(config.precision, ENOUGH * abs(rise.value)):
                break
        sent = float(network.summary("evaluation")["packets"]) / len(rises_SN)
        collapsed = float((np.array(rises_SN) > COLLAPSE_NATS).mean())
        return Row(setup, rise, collapsed, sent, [each.tolist() for each in rises_SN])

    def _scores(self, model: Any) -> np.ndarray:
        return np.concatenate([self.score(model, ids_BT) for ids_BT in self.messages])


def load_rows(config: InferenceConfig) -> dict[Setup, Row]:
    """Return the rows of an earlier measurement. It may have had other loss rates, algorithms, phases and repairs.

    Raises:
        ValueError: if the file is not such a record, or differs in other settings.
    """
    file = Path(config.output_dir) / RECORD
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        settings, rows = record["config"], [Row.of(row) for row in record["rows"]]
        float(record["lossless_cross_entropy"])  # must be there for `measured`
        trace = record.get("trace_sha256")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a tolerance record ({error}): move it, or give another output_dir") from error
    check_same_settings(config, settings, file)
    if trace is not None and rows:
        check_same_trace(config.network(rows[0].setup), trace, str(file), OTHER_FOLDER)
    return {row.setup: row for row in rows}


def measured(config: InferenceConfig) -> list[Row]:
    """Measure the rows of a configuration, and return all rows of its record, which is written after each.

    Raises:
        ValueError: if there are rows in the record, and the model or the text has changed since.
    """
    with exclusive_run(config.output_dir):
        rows = load_rows(config)
        measurement = Measurement(config)
        if rows:
            _check_same_inputs(measurement)
        for row in measurement.rows(dict(rows)):
            rows[row.setup] = row
            _write(measurement, list(rows.values()))
        ours = config.setups()
        earlier = [row for setup, row in rows.items() if setup not in ours]
        ordered = [*earlier, *(rows[setup] for setup in ours if setup in rows)]
        _write(measurement, ordered)
    return ordered


def _check_same_inputs(measurement: Measurement) -> None:
    file = Path(measurement.config.output_dir) / RECORD
    record = json.loads(file.read_text(encoding="utf-8"))
    then, now, ours = record["lossless_cross_entropy"], float(measurement.lossless_N.mean()), _sha256(measurement)
    if record.get("text_sha256", ours) != ours:
        raise ValueError(f"the text, or what stands before it, has changed since {file} was written: {OTHER_FOLDER}")
    if abs(now - then) > SAME_NATS:
        raise ValueError(
            f"{file} was measured with a cross-entropy of {then:.4f} nats without losses, not {now:.4f}: the model has "
            f"changed; {OTHER_FOLDER}"
        )


def _sha256(measurement: Measurement) -> str:
    """Return the hash of the text's tokens."""
    return hashlib.sha256(measurement.blocks_NT.cpu().numpy().astype("<i8").tobytes()).hexdigest()


def _write(measurement: Measurement, rows: list[Row]) -> None:
    config = measurement.config
    trace = trace_sha256(config.network(config.setups()[0]))
    record = {
        "config": settings_of(config),
        "tensor_parallel_size": measurement.ranks,
        "lossless_cross_entropy": float(measurement.lossless_N.mean()),
        "text_sha256": _sha256(measurement),
        **measurement.first_tokens,
        **({"trace_sha256": trace} if trace else {}),
        "rows": [row.as_json() for row in rows],
        "commit": commit(),
        "environment": environment(),
    }
    write_atomically(Path(config.output_dir) / RECORD, json.dumps(record, indent=1, allow_nan=False) + "\n")


def main() -> None:
    """Measure as the command line says."""
    for row in measured(parse(InferenceConfig, __doc__)):
        print(*row.setup, f"{row.rise.value:.4f} ± {row.rise.half_width:.4f}", f"{row.collapsed:.0%}")


if __name__ == "__main__":
    run_as_command(main)
