"""Keep finished rows of a tolerance measurement in tolerance.json, so that a stopped measurement can resume."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lossytp.study.statistics import Estimate
from lossytp.tolerance.config import Setup, ToleranceConfig
from lossytp.tolerance.measure import Measurement, Row
from lossytp.training.files import write_atomically
from lossytp.training.inputs import check_same_trace, trace_sha256
from lossytp.training.record import commit, environment

RECORD = "tolerance.json"
OTHER_FOLDER = "give another output_dir, or delete the file"
CHOOSE_ROWS = ("loss_rates", "algorithms", "phases", "repairs")  # settings that choose the rows, and not their values
SAME_NATS = 1e-3  # by which a model's cross-entropy may differ between two processors


def load_rows(config: ToleranceConfig) -> dict[Setup, Row]:
    """Return the rows of an earlier measurement. It may have had other loss rates, algorithms, phases and repairs.

    Raises:
        ValueError: if the file is not a tolerance record, or differs in other settings.
    """
    file = Path(config.output_dir) / RECORD
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        settings, rows = record["config"], [_row(row) for row in record["rows"]]
        float(record["lossless_cross_entropy"])  # must be there for `keep_rows`
        trace = record.get("trace_sha256")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a tolerance record ({error}): move it, or give another output_dir") from error
    ours = {name: value for name, value in _settings(config).items() if name not in CHOOSE_ROWS}
    then = {name: settings.get(name, getattr(ToleranceConfig, name)) for name in ours}  # older records lack some
    differ = [f"{name} = {then[name]!r}, not {value!r}" for name, value in ours.items() if then[name] != value]
    if differ:
        raise ValueError(f"{file} was measured with {'; '.join(differ)}: {OTHER_FOLDER}")
    if trace is not None and rows:
        check_same_trace(config.network(rows[0].setup), trace, str(file), OTHER_FOLDER)
    return {row.setup: row for row in rows}


def keep_rows(measurement: Measurement, done: dict[Setup, Row], drawn: Callable[[Setup, int], None]) -> Iterator[Row]:
    """Yield the measurement's rows, and write the record after each. It keeps all rows that are `done`.

    Args:
        measurement: a model and a text.
        done: from `load_rows`.
        drawn: called after every draw, with its number.

    Raises:
        ValueError: if there are rows that are done, and the model or the text has changed since.
    """
    if done:
        _check_same_inputs(measurement)
    rows = dict(done)
    for row in measurement.rows(done, drawn):
        rows[row.setup] = row
        write_rows(measurement, list(rows.values()), [])
        yield row


def _check_same_inputs(measurement: Measurement) -> None:
    file = Path(measurement.config.output_dir) / RECORD
    record = json.loads(file.read_text(encoding="utf-8"))
    then, ours = record["lossless_cross_entropy"], _text_sha256(measurement)
    if record.get("text_sha256", ours) != ours:
        raise ValueError(f"the text, or what stands before it, has changed since {file} was written: {OTHER_FOLDER}")
    if abs(measurement.lossless - then) > SAME_NATS:
        raise ValueError(
            f"{file} was measured with a cross-entropy of {then:.4f} nats without losses, not "
            f"{measurement.lossless:.4f}: the model has changed; {OTHER_FOLDER}"
        )


def _text_sha256(measurement: Measurement) -> str:
    """Return the hash of the text's tokens."""
    return hashlib.sha256(measurement.blocks_NT.cpu().numpy().astype("<i8").tobytes()).hexdigest()


def keep_advice(measurement: Measurement, advice: list[str]) -> None:
    """Add the advice to the record, and put the measurement's rows in order, after those of earlier ones."""
    rows, ours = load_rows(measurement.config), measurement.config.setups()
    earlier = [row for setup, row in rows.items() if setup not in ours]
    write_rows(measurement, [*earlier, *(rows[setup] for setup in ours if setup in rows)], advice)


def write_rows(measurement: Measurement, rows: list[Row], advice: list[str]) -> None:
    """Write the rows that are measured so far."""
    config = measurement.config
    trace = trace_sha256(config.network(config.setups()[0]))
    record = {
        "config": _settings(config),
        "tensor_parallel_size": measurement.ranks,
        "lossless_cross_entropy": measurement.lossless,
        "text_sha256": _text_sha256(measurement),
        **measurement.first_tokens,
        **({"trace_sha256": trace} if trace else {}),
        "rows": [_as_json(row) for row in rows],
        "advice": advice,
        "commit": commit(),
        "environment": environment(),
    }
    write_atomically(Path(config.output_dir) / RECORD, json.dumps(record, indent=1, allow_nan=False) + "\n")


def _settings(config: ToleranceConfig) -> dict[str, Any]:
    return {name: value for name, value in config.with_text().as_dict().items() if name != "output_dir"}


def _as_json(row: Row) -> dict[str, Any]:
    return {
        **row.setup._asdict(),
        "rise": row.rise.as_json(),
        "collapsed_blocks": row.collapsed,
        "packets_a_draw": row.packets,
        "rises": row.rises,
    }


def _row(values: dict[str, Any]) -> Row:
    setup = Setup(*(values[name] for name in Setup._fields))
    rise = Estimate(**values["rise"])
    return Row(setup, rise, values["collapsed_blocks"], values["packets_a_draw"], values["rises"])
