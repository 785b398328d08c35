"""Measure the rise of a language model's cross-entropy over lossy networks, without training.

The same blocks of text are scored without losses and with each draw of losses. A row's estimate is the mean over draws,
with Student's interval. Draws stop once this is narrow, so intervals of few draws are a little too narrow; equal
`min_draws` and `max_draws` avoid this. Shapes: N blocks, T tokens per block, S draws.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure

from lossytp.network.checks import check_at_most
from lossytp.parallel.convert import parallelize
from lossytp.study.statistics import Estimate, share_interval, t_interval
from lossytp.study.style import COLUMN, estimates, save, set_style
from lossytp.tolerance import COLLAPSE_NATS
from lossytp.tolerance.config import NO_REPAIR, NetworksConfig, Setup, ToleranceConfig, first_size
from lossytp.training.corpus import corpus
from lossytp.training.files import write_atomically
from lossytp.training.models import GENERATION, answers, check_tokenizer, first_token_names, load_model, load_tokenizer
from lossytp.training.progress import waiting
from lossytp.training.record import check_same_trace, commit, environment, trace_sha256
from lossytp.training.shapes import Shape, check_positions
from lossytp.training.text import all_blocks, losses_by_block

ENOUGH = 0.2  # of the rise: a half-width at which a row is done
BLOCK_SIZE, TOKENS = 512, 2048  # of the text, if not given
HARMLESS = 0.01  # nats: below this, losses need no repair


class Row(NamedTuple):
    """One row of the table.

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


def language_model(config: NetworksConfig) -> tuple[Any, Any, int]:
    """Return the tokenizer, the dense model, on a GPU if there is one, and the number of tensor-parallel ranks.

    Raises:
        ValueError: if the model is not a language model, or does not fit the tensor-parallel size.
    """
    tokenizer = load_tokenizer(config.model_name)
    dense: Any = load_model(config.model_name).eval()
    if not answers(dense, GENERATION):
        raise ValueError(f"model_name = {config.model_name!r} is not a language model: give one")
    check_tokenizer(f"model_name = {config.model_name!r}", tokenizer, dense.config.vocab_size)
    sizes = Shape.read(lambda setting: getattr(dense.config, setting, None))
    dense.to("cuda" if torch.cuda.is_available() else "cpu")
    return tokenizer, dense, config.tensor_parallel_size or first_size(config.model_name, sizes)


class Measurement:
    """A model and a text, and `lossless`, their mean cross-entropy without losses.

    Raises:
        ValueError: if the model is not a language model, does not fit the tensor-parallel size or the block size, or
        if the text has too few blocks.
    """

    def __init__(self, config: ToleranceConfig) -> None:
        self.config = config
        tokenizer, self.dense, self.ranks = language_model(config)
        self.device, shape = self.dense.device, self.dense.config
        positions = shape.max_position_embeddings
        block_size = config.prompt_tokens if config.decode else config.block_size or min(BLOCK_SIZE, positions)
        longest = block_size + config.new_tokens if config.decode else block_size
        check_positions(
            config.model_name,
            positions,
            longest,
            setting="prompt_tokens + new_tokens" if config.decode else "block_size",
        )
        self.first_tokens = first_token_names(tokenizer)
        name, asked = ("prompts", config.prompts) if config.decode else ("blocks", config.blocks)
        with waiting(f"{config.model_name}: reading the text"):
            text = corpus(config.files(), split="validation")
            wanted = asked or max(1, TOKENS // block_size)
            blocks_NT = all_blocks(text, tokenizer, block_size=block_size, at_most=wanted)
            if asked is not None:
                check_at_most(name, asked, len(blocks_NT), f"no more than the text has, of {block_size} tokens")
            self.blocks_NT = blocks_NT.to(self.device)

    @cached_property
    def lossless_N(self) -> np.ndarray:
        with waiting(f"{self.config.model_name}: scoring the text without losses"):
            return self._score(self.dense)

    @property
    def lossless(self) -> float:
        return float(self.lossless_N.mean())

    def rows(self, done: dict[Setup, Row], drawn: Callable[[Setup, int], None]) -> Iterator[Row]:
        """Yield the rows. A repair is measured only where losses without one cost something.

        Args:
            done: rows that were measured before.
            drawn: called after every draw, with its number.
        """
        harmless = set()
        for setup in self.config.setups():
            if setup._replace(repair=NO_REPAIR) in harmless:
                continue
            with waiting(f"{setup.algorithm}, {setup.phase}, {setup.repair} at {setup.loss_rate:.3g}: scoring"):
                row = done.get(setup) or self._row(setup, drawn)
            if setup.repair == NO_REPAIR and row.rise.high < HARMLESS:
                harmless.add(setup)
            yield row

    def _row(self, setup: Setup, drawn: Callable[[Setup, int], None]) -> Row:
        config = self.config
        settings = config.network(setup)
        network = settings.build()
        model: Any = parallelize(self.dense, network, tensor_parallel_size=self.ranks, comm=settings.comm())
        rises_SN: list[np.ndarray] = []
        while len(rises_SN) < config.max_draws:
            with network.evaluation(len(rises_SN)):
                rises_SN.append(self._score(model) - self.lossless_N)
            drawn(setup, len(rises_SN))
            rise = t_interval(np.mean(rises_SN, axis=1))
            half = rise.high - rise.value
            if len(rises_SN) >= config.min_draws and half <= max(config.precision, ENOUGH * abs(rise.value)):
                break
        sent = float(network.summary("evaluation")["packets"]) / len(rises_SN)
        collapsed = float((np.array(rises_SN) > COLLAPSE_NATS).mean())
        return Row(setup, rise, collapsed, sent, [each.tolist() for each in rises_SN])

    def _score(self, model: Any) -> np.ndarray:
        """Return each block's mean cross-entropy of a token given the earlier ones (N,)."""
        on = self.device.type
        autocast = torch.autocast(on, dtype=torch.bfloat16) if self.config.bf16 else nullcontext()
        with autocast:
            return losses_by_block(model, self.blocks_NT).mean(1)


# Keep finished rows of a tolerance measurement in tolerance.json, so that a stopped measurement can resume.


RECORD = "tolerance.json"
OTHER_FOLDER = "give another output_dir, or delete the file"
CHOOSE_ROWS = (
    "loss_rates",
    "algorithms",
    "phases",
    "repairs",
    "prefills",
)  # settings that choose the rows, and not their values
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
    check_same_settings(config, settings, file)
    if trace is not None and rows:
        check_same_trace(config.network(rows[0].setup), trace, str(file), OTHER_FOLDER)
    return {row.setup: row for row in rows}


def check_same_settings(config: ToleranceConfig, settings: dict[str, Any], file: Path) -> None:
    """Raise ValueError if a record's settings differ from ours in more than the choice of rows."""
    ours = {name: value for name, value in settings_of(config).items() if name not in CHOOSE_ROWS}
    then = {name: settings.get(name, ToleranceConfig.defaults()[name]) for name in ours}  # older records lack some
    differ = [f"{name} = {then[name]!r}, not {value!r}" for name, value in ours.items() if then[name] != value]
    if differ:
        raise ValueError(f"{file} was measured with {'; '.join(differ)}: {OTHER_FOLDER}")


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
        "config": settings_of(config),
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


def settings_of(config: ToleranceConfig) -> dict[str, Any]:
    """Return the settings of a record."""
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


# Say in words what a tolerance measurement means: the rates that a model bears, and the cheapest repair that holds.


LARGE = 0.1  # nats a token


def advice(rows: Sequence[Row]) -> list[str]:
    """Return sentences about the rows. The model bears a rate if the rise's whole interval is below the bound.

    A few blocks cannot show that collapses are rare. Where a repair holds, or none is needed, and no block collapsed,
    the sentence bounds the share of blocks that may collapse.
    """
    lines = []
    for network in dict.fromkeys(row.setup[:2] for row in rows):
        mine = [row for row in rows if row.setup[:2] == network]
        where = f"{network[0]}, losses in {'the reduce phase' if network[1] == 'reduce' else 'both phases'}"
        lines += [f"{where}: {_borne(mine, bound)}" for bound in (HARMLESS, LARGE)]
        for rate in dict.fromkeys(row.setup.loss_rate for row in mine):
            lines.append(f"{where}, {rate:.3g}: {_cheapest([row for row in mine if row.setup.loss_rate == rate])}")
    return lines


def _borne(rows: Sequence[Row], bound: float) -> str:
    """Return the largest rate up to which no rate costs `bound` nats without a repair."""
    borne = None
    for row in sorted((row for row in rows if row.setup.repair == NO_REPAIR), key=lambda row: row.setup.loss_rate):
        if row.rise.high >= bound:
            break
        borne = row.setup.loss_rate
    if borne is None:
        return f"no measured loss rate costs under {bound} nats without a repair"
    return f"up to a loss rate of {borne:.3g}, losses cost under {bound} nats without a repair"


def _cheapest(rows: Sequence[Row]) -> str:
    """Return the repair with the fewest packets among those that keep the rise under `LARGE`."""
    holds = [row for row in rows if row.rise.high < LARGE]
    if not holds:
        best = min(rows, key=lambda row: row.rise.value)
        return (
            f"no measured repair holds the rise under {LARGE} nats; {_repair(best)} comes closest "
            f"({best.rise.value:.3g})"
        )
    bare = next(row for row in rows if row.setup.repair == NO_REPAIR)
    if bare in holds:
        return f"no repair is needed ({bare.rise.value:.3g} nats){_unseen(bare)}"
    cheapest = min(holds, key=lambda row: (row.packets, row.rise.value))
    more = cheapest.packets / bare.packets - 1
    return (
        f"{_repair(cheapest)} holds ({cheapest.rise.value:.3g} nats, with {more:.1%} more packets){_unseen(cheapest)}"
    )


def _unseen(row: Row) -> str:
    """Return a bound on the share of blocks that may collapse, if none did."""
    blocks = sum(map(len, row.rises))
    if row.collapsed:
        return ""
    return f"; none of {blocks} blocks collapsed, but up to {share_interval(0, blocks).high:.0%} of blocks may"


def _repair(row: Row) -> str:
    return "leaving lost packets out" if row.setup.repair == NO_REPAIR else row.setup.repair


# Draw the rise of cross-entropy against the loss rate, or by repair if there is only one rate.


FIGURE = "tolerance"
APART = 1.04  # ratio of the positions of two repairs at one rate


def draw(rows: list[Row], title: str, folder: Path) -> Figure:
    """Write tolerance.svg and tolerance.png, and return the figure: rises with their intervals.

    Each repair has a curve over the loss rates, or a line if there is only one rate, as for a trace.
    """
    set_style()
    rates = {row.setup.loss_rate for row in rows}
    if len(rates) == 1:
        figure = _by_repair(rows)
        figure.suptitle(f"{title}, packet loss rate {rates.pop():.3g}")
    else:
        figure = _against_rate(rows)
        figure.axes[0].set_title(title)
    save(figure, folder, FIGURE)
    plt.close(figure)  # a notebook shows what is returned
    return figure


def _against_rate(rows: list[Row]) -> Figure:
    figure, ax = plt.subplots(figsize=(COLUMN, 0.75 * COLUMN), layout="constrained")
    curves = dict.fromkeys(row.setup[:3] for row in rows)
    for number, curve in enumerate(curves):
        mine = sorted((row for row in rows if row.setup[:3] == curve), key=lambda row: row.setup.loss_rate)
        rates = [row.setup.loss_rate * APART**number for row in mine]
        estimates(ax, rates, [row.rise for row in mine], number, label=_curve(curve, curves), linestyle="-")
    for bound in (HARMLESS, LARGE):
        ax.axhline(bound, color="grey", lw=0.6, ls=":")
    ax.set(xscale="log", xlabel="packet loss rate", ylabel="rise of cross-entropy (nats)")
    ax.set_yscale("symlog", linthresh=HARMLESS)
    ax.legend()
    return figure


def _by_repair(rows: list[Row]) -> Figure:
    figure, ax = plt.subplots(figsize=(COLUMN, 0.8 + 0.2 * len(rows)), layout="constrained")
    curves = dict.fromkeys(row.setup[:3] for row in rows)
    places = range(len(rows))
    estimates(ax, places, [row.rise for row in rows], 0, across=True)
    ax.axvline(0, color="0.45", lw=1, zorder=0)
    ax.set_yticks(places, [_curve(row.setup[:3], curves) for row in rows])
    ax.invert_yaxis()
    ax.set_xlabel("rise (nats)")  # short: long repairs leave little room
    return figure


def _curve(curve: tuple[str, ...], curves: Iterable[tuple[str, ...]]) -> str:
    """Return a curve's repair, with algorithm and phase if the curves have several."""
    return ", ".join(curve) if len({each[:2] for each in curves}) > 1 else curve[2]
