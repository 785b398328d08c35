"""The commands that measure a network's packet losses, fit loss processes to them, and say what they would cost."""

import inspect
import itertools
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator
from tqdm import tqdm

from lossyprobe.fitting import (
    Fit,
    Goodness,
    Interval,
    applicable,
    correlation_between,
    fit,
    goodness,
    intervals,
    num_simulations,
)
from lossyprobe.importing import import_trace
from lossyprobe.likelihood import Family
from lossyprobe.measure import Limits, caveats, loss_rate, measure, serve, summary_lines
from lossyprobe.trace_file import ProbeTrace, read_trace, write_trace
from lossyprobe.wire import PATIENCE_S, PORT, Plan
from lossytp.network.checks import printable
from lossytp.network.traces import Trace
from lossytp.tolerance.config import ToleranceConfig
from lossytp.training.command_line import parse
from lossytp.training.files import check_writable, saving
from lossytp.training.models import check_there
from lossytp.training.settings import Count, Positive, Settings

UNLIKELY = 0.05  # a fit with a smaller p-value does not describe the trace
CORRELATED = 0.2  # if flows are correlated more than this, intervals are too narrow
MEASURES = ("loss_rate", "mean_burst_packets")
MOST_FLOWS = 8  # more flows than this are summarised together


class ReceiveConfig(Settings):
    """The settings of the command `receive`."""

    host: str = "127.0.0.1"
    """Address of this machine to listen on; 0.0.0.0 listens on all."""
    port: Annotated[int, Field(ge=1, lt=2**16)] = PORT
    """TCP and UDP port to listen on."""
    max_mbits: Positive = 100.0
    """Refuse measurements that send faster than this in one direction."""
    max_packets: Count = Limits().max_packets
    """Refuse measurements that send more packets than this in one direction, because they take more memory."""
    measurements: Count | None = None
    """Exit after this many measurements. If left out, wait until Ctrl-C."""
    patience_s: Positive = PATIENCE_S
    """End a measurement early if its partner is silent for this many seconds."""
    output_dir: str | None = None
    """Folder for traces of the packets received. If left out, only the sender writes a trace."""


def receive(words: list[str]) -> None:
    """Wait for measurements that other machines start with `python -m lossyprobe send`.

    python -m lossyprobe receive                   # accept this machine only
    python -m lossyprobe receive --host 10.0.0.2   # accept every machine that reaches this address

    Stop it when you have finished measuring. It only answers, and never sends more bytes than it has received.
    """
    config: ReceiveConfig = _parsed(receive, ReceiveConfig, words)
    if config.output_dir is not None:
        check_writable(config.output_dir)
    limits = Limits(config.max_mbits, config.max_packets)
    measurements = serve(config.host, config.port, limits=limits, patience_s=config.patience_s, say=say)
    for trace, ended_early in islice(measurements, config.measurements):
        _report_measurement(trace, ended_early, config.output_dir)


def say(line: str) -> None:
    """Print a line on stderr at once."""
    print(line, file=sys.stderr, flush=True)


def _report_measurement(trace: ProbeTrace, ended_early: str, folder: str | None) -> None:
    """Print what a measurement found, and write its trace."""
    print(*summary_lines(trace), sep="\n", flush=True)
    if ended_early:
        say(f"the measurement ended early because {ended_early}: the summary covers what is known")
    if folder is not None:
        print(f"see {write_new_trace(Path(folder), trace)}", flush=True)


class SendConfig(Settings):
    """The settings of the command `send`."""

    host: str = "127.0.0.1"
    """Name or IPv4 address of the receiving machine. The command's first word may give it."""
    port: Annotated[int, Field(ge=1, lt=2**16)] = PORT
    """TCP and UDP port of the receiver."""
    packets: Count = 10_000
    """Number of packets to send in each flow."""
    flows: Count = 1
    """Number of flows to send at once, each from its own port, as a rank sends to its peers."""
    packet_bytes: Count = 1500
    """Bytes per packet, including the headers of IP (20), UDP (8) and this program (16)."""
    rate: Positive = 1000.0
    """Packets per second in each flow."""
    burst_packets: Count = 1
    """Packets to send back to back, as collectives do. The mean rate does not change."""
    both_directions: bool = False
    """Let the receiver send as many packets back at the same time."""
    max_mbits: Positive = 100.0
    """Refuse to send faster than this over all flows. Raise it if the network has room for more."""
    patience_s: Positive = PATIENCE_S
    """End the measurement early if the receiver is silent for this many seconds."""
    output_dir: str = "output/probe"
    """Folder for the trace, whose name is the date and time."""

    @model_validator(mode="after")
    def _check_send(self) -> Self:
        self.plan().check_rate(self.max_mbits)
        return self

    def plan(self) -> Plan:
        """Return the plan of the measurement."""
        return Plan(
            packets=self.packets,
            flows=self.flows,
            packet_bytes=self.packet_bytes,
            rate_packets_per_s=self.rate,
            burst_packets=self.burst_packets,
            both_directions=self.both_directions,
        )


def send(words: list[str]) -> None:
    """Send numbered packets to a machine that runs `python -m lossyprobe receive`, and report which were lost.

    python -m lossyprobe send                                       # to this machine itself
    python -m lossyprobe send 10.0.0.2 --packets 200000 --flows 3 --both_directions
    """
    config: SendConfig = _parsed(send, SendConfig, words, "--host")
    existed = Path(config.output_dir).exists()
    check_writable(config.output_dir)
    plan = config.plan()
    with tqdm(total=plan.flows * plan.packets, unit="packet", leave=False, disable=not sys.stderr.isatty()) as bar:

        def show(sent: int, arrived: int) -> None:
            bar.set_postfix(missing=sent - arrived, refresh=False)
            bar.update(sent - bar.n)

        try:
            trace, ended_early = measure(plan, config.host, config.port, patience_s=config.patience_s, watch=show)
        except BaseException:
            if not existed:
                with suppress(OSError):  # if it holds something
                    Path(config.output_dir).rmdir()
            raise
    _report_measurement(trace, ended_early, config.output_dir)


def write_new_trace(folder: Path, trace: ProbeTrace) -> Path:
    """Write a trace to a new file, named by the date and time, and return its path.

    Raises:
        ValueError: if the file cannot be written.
    """
    name = f"trace_{time.strftime('%Y%m%d_%H%M%S')}"
    for again in itertools.count(1):
        path = folder / (f"{name}.parquet" if again == 1 else f"{name}_{again}.parquet")
        with saving(path), suppress(FileExistsError):
            folder.mkdir(parents=True, exist_ok=True)
            with path.open("xb"):  # fails if the other end has just made it
                break
    try:
        with saving(path):
            write_trace(path, trace)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


class FitConfig(Settings):
    """The settings of the command `fit`."""

    trace: str
    """Trace to fit, a .parquet file. The command's first word may give it."""


def fit_trace(words: list[str]) -> None:
    """Fit loss processes to a trace, and print the best one in the notations of Linux `tc netem` and `--loss_type`.

    python -m lossyprobe fit output/probe/trace.parquet
    """
    config: FitConfig = _parsed(fit_trace, FitConfig, words, "--trace")
    trace = read(Path(config.trace))
    print(*fit_lines(fit_all(flows_of(trace)), config.trace), *caveats(trace), sep="\n")


def read(path: Path) -> ProbeTrace:
    """Return the trace in a Parquet file, without flows that have no packets.

    Raises:
        ValueError: if the file does not exist, is of another kind, or holds no packets.
    """
    if path.is_file() and path.suffix != ".parquet":
        raise ValueError(f"trace {path} is not a .parquet file: convert it with python -m lossyprobe import {path}")
    trace = read_trace(path)
    flows = {number: flow for number, flow in trace.flows.items() if flow.num_packets}
    if not flows:
        raise ValueError(f"trace {path} holds no packets: measure again")
    return replace(trace, flows=flows)


def flows_of(trace: ProbeTrace) -> list[Trace]:
    """Return the losses of each flow."""
    return [flow.losses() for _, flow in sorted(trace.flows.items())]


class Fitted(NamedTuple):
    """The fits of a trace.

    Attributes:
        fits: all fits, the one with the smallest BIC first.
        intervals: intervals of the best fit's parameters, loss rate and mean burst.
        goodness: how well the best fit describes the trace.
        flow_correlation: correlation between the losses of two flows.
    """

    fits: list[Fit]
    intervals: dict[str, Interval]
    goodness: Goodness
    flow_correlation: float

    @property
    def best(self) -> Fit:
        """Return the fit with the smallest BIC."""
        return self.fits[0]

    @property
    def describes(self) -> bool:
        """Return whether the best fit could produce the trace's bursts and gaps."""
        return min(self.goodness.bursts.p, self.goodness.gaps.p) >= UNLIKELY


def fit_all(flows: Sequence[Trace]) -> Fitted:
    """Fit every applicable family, with a progress bar."""
    families = applicable(flows)
    steps = len(families) + 1 + num_simulations(flows)
    with tqdm(total=steps, leave=False, disable=not sys.stderr.isatty()) as bar:

        def shown() -> Iterator[Family]:
            for family in families:
                bar.set_description(f"fitting {family.name}")
                yield family
                bar.update()

        fits = fit(flows, shown())
        bar.set_description("intervals")
        found = intervals(fits[0], flows)
        bar.update()
        bar.set_description("goodness of fit")
        return Fitted(fits, found, goodness(fits[0], flows, watch=bar.update), correlation_between(flows))


def fit_lines(fitted: Fitted, trace: str) -> Iterator[str]:
    """Yield the lines of a report on the fits of a trace file."""
    best = fitted.best
    yield f"{'family':18} {'parameters':>10} {'BIC above best':>15} {'loss rate':>10} {'mean burst':>11}"
    for each in fitted.fits:
        rate, burst = each.process.loss_rate, each.process.mean_burst_packets
        yield f"{each.family.name:18} {len(each.values):10} {each.bic - best.bic:15.1f} {rate:10.3%} {burst:11.2f}"
    yield ""
    kind = "Clopper and Pearson" if len(best.values) == 1 else "the observed information"
    yield f"chosen: {best.family.name}; the 95 % intervals, by {kind}, assume that this family is the true one"
    values = dict(zip(best.family.parameters, best.values, strict=True))
    values |= {name: getattr(best.process, name) for name in MEASURES}
    for name, value in values.items():
        low, high = fitted.intervals[name]
        yield f"  {name:18} {value:.5g} ({low:.5g} to {high:.5g})"
    if fitted.flow_correlation > CORRELATED:
        yield (
            f"flows lose packets at the same time (correlation {fitted.flow_correlation:.2f}): these intervals are too "
            "narrow"
        )
    yield ""
    for name, law in (("bursts", fitted.goodness.bursts), ("gaps", fitted.goodness.gaps)):
        yield (
            f"{name}: the recorded and the fitted distribution differ by at most {law.statistic:.3f} "
            f"(Kolmogorov-Smirnov); p = {law.p:.2f}, from {fitted.goodness.simulations} simulated recordings"
        )
    if not fitted.describes:
        yield "the fit does not describe the trace: replay the trace itself"
    yield ""
    yield f"tc qdisc add dev DEVICE root netem {best.netem}"
    yield f'--loss_type "{best.loss_type}"'
    replayed = f"trace({trace!r})"
    yield "--loss_type " + (shlex.quote(replayed) if '"' in replayed else f'"{replayed}"')


class ReportConfig(Settings):
    """The settings of the command `report`."""

    trace: str
    """Trace to report on, a .parquet file. The command's first word may give it."""
    model_name: str = "gpt2-nano"
    """Language model: a name such as smollm2-135m, a folder, or a .gguf file."""
    text: str | None = None
    """Text to score: a pattern of files, stdlib or wikitext-2, as in lossytp.tolerance."""
    tensor_parallel_size: Annotated[int, Field(ge=2)] | None = None
    """Number of tensor-parallel ranks, at least 2. If left out, the first of 4, 3 and 2 that divides the model."""
    algorithms: str = "direct"
    """Collective algorithms, separated by commas: direct, ring, tree, switch, sender."""
    phases: str = "reduce"
    """Where packets are lost, separated by commas: reduce (on the way to the sum), both (also on the way back)."""
    repairs: str = "hadamard(64),protect(0.1),retransmit(2)"
    """Repairs to try, separated by commas."""
    block_size: Annotated[int, Field(ge=2)] | None = None
    """Tokens of a sequence, as in lossytp.tolerance."""
    blocks: Annotated[int, Field(ge=2)] | None = None
    """Number of sequences, as in lossytp.tolerance."""
    results_dir: str | None = None
    """Folder with the study's results. If left out, this repository's."""
    output_dir: str | None = None
    """Folder for the tolerance measurement. If left out, a folder under output/report named after the trace."""

    @model_validator(mode="after")
    def _check_report(self) -> Self:
        if 0 < read(Path(self.trace)).all_lost().mean() < 1:  # else nothing is measured
            self.tolerance()
        return self

    def tolerance(self) -> ToleranceConfig:
        """Return the settings that measure the model over the trace."""
        return ToleranceConfig(
            model_name=self.model_name,
            text=self.text,
            tensor_parallel_size=self.tensor_parallel_size,
            algorithms=self.algorithms,
            phases=self.phases,
            repairs=self.repairs,
            loss_type=f"trace({self.trace!r})",
            block_size=self.block_size,
            blocks=self.blocks,
            output_dir=self.output_dir or f"output/report/{Path(self.trace).stem}",
        )


def report(words: list[str]) -> None:
    """Report on a measured network: its losses, the process that fits them, and what they cost your model.

    python -m lossyprobe report output/probe/trace.parquet
    python -m lossyprobe report trace.parquet --model_name smollm2-135m --algorithms direct,ring --phases both

    Your model runs over the replayed trace, without training, as in `python -m lossytp.tolerance`.
    """
    config: ReportConfig = _parsed(report, ReportConfig, words, "--trace")
    check_there(config.model_name)
    if config.results_dir is not None:
        from lossyprobe.expected_cost import comparable_runs

        comparable_runs(Path(config.results_dir))  # refuses a wrong folder before anything is measured
    trace = read(Path(config.trace))
    print("MEASURED", *measured_lines(trace), sep="\n", flush=True)
    print("\nFIT", *fit_lines(fit_all(flows_of(trace)), config.trace), sep="\n", flush=True)
    replayed = Trace.from_indicators(trace.all_lost())
    if replayed.loss_rate in (0, 1):
        which = "No packets were" if replayed.loss_rate == 0 else "Every packet was"
        print(f"\n{which} lost, so there is no cost to estimate.")
        return

    from lossytp.tolerance.__main__ import measure_and_print  # torch takes seconds to import

    print("\nYOUR MODEL OVER THIS TRACE, WITHOUT TRAINING", flush=True)
    measure_and_print(config.tolerance())
    print("\nTHE STUDY", *study_lines(config.results_dir, replayed.loss_rate, replayed.mean_burst_packets), sep="\n")


def measured_lines(trace: ProbeTrace) -> Iterator[str]:
    """Yield a summary of each flow, or of all flows together if there are many."""
    if len(trace.flows) <= MOST_FLOWS:
        yield from summary_lines(trace)
        return
    lost = trace.all_lost()
    rate, low, high = loss_rate(lost)
    yield f"{len(trace.flows)} flows, {len(lost)} packets"
    yield f"lost {int(lost.sum())}: {rate:.3%} (95 % interval {low:.3%} to {high:.3%})"
    if correlation_between(flows_of(trace)) > CORRELATED:
        yield "flows lose packets at the same time: this interval is too narrow"
    yield from caveats(trace)


def study_lines(results_dir: str | None, loss_rate: float, mean_burst_packets: float) -> Iterator[str]:
    """Yield what such losses cost in the study's training and evaluation runs.

    Args:
        results_dir: folder with the study's results; this repository's if None.
        loss_rate: loss rate of every link.
        mean_burst_packets: mean run of consecutive losses.
    """
    from lossyprobe.expected_cost import RESULTS, TABLE, comparable_runs, expected_costs, side_by_side

    folder = Path(results_dir) if results_dir is not None else RESULTS
    if results_dir is None and not (folder / TABLE).is_file():
        yield "this installation lacks the study's results: give a checkout's folder results/paper as --results_dir"
        return
    costs = expected_costs(comparable_runs(folder), loss_rate=loss_rate, mean_burst_packets=mean_burst_packets)
    yield (
        f"A loss rate of {loss_rate:.3g} in bursts of {mean_burst_packets:.3g} packets cost the study's small GPT-2, "
        "fine-tuned over 4 ranks,"
    )
    yield "this many points of test accuracy. The table also gives the loss rate that costs one point."
    yield "Intervals are 95 %, over seeds. ? marks an extrapolation from another loss rate or burst length."
    yield "For your model and task, every number is an extrapolation."
    yield side_by_side(costs).to_string(index=False)


class ImportConfig(Settings):
    """The settings of the command `import`."""

    file: str
    """File to read. The command's first word may give it."""
    column: str | None = None
    """Column of a table that holds the losses. If left out, lost, received, success or the like, or else the only
    column of zeros and ones."""
    where: str | None = None
    """NAME=VALUE: read only those rows of a table whose column NAME has this value."""
    ones: Literal["lost", "arrived"] | None = None
    """What a 1 stands for. If left out, arrived in a column named received, success or the like, else lost."""
    output: str | None = None
    """Trace to write. If left out, the file's name with the ending .parquet, in the current folder."""


def import_losses(words: list[str]) -> None:
    """Turn losses that another program recorded into a trace.

    python -m lossyprobe import losses.txt                                  # zeros and ones, 1 for a lost packet
    python -m lossyprobe import log.csv --column state --ones arrived --where link=uplink --output uplink.parquet

    It also reads .npy arrays, .parquet tables, tables with one flow per row (whose packets are a string of zeros and
    ones), and text compressed with gzip.
    """
    config: ImportConfig = _parsed(import_losses, ImportConfig, words, "--file")
    file = Path(config.file)
    output = Path(f"{Path(file.name.removesuffix('.gz')).stem}.parquet" if config.output is None else config.output)
    if output.suffix != ".parquet":
        raise ValueError(f"output = {config.output!r} does not end in .parquet: give {output.stem}.parquet")
    if output.exists() and output.samefile(file):
        raise ValueError(f"output = {str(output)!r} is the file to read: give --output {output.stem}_trace.parquet")
    if output.exists() and config.output is None:
        try:
            read_trace(output)
        except ValueError:
            fault = f"output = {str(output)!r} exists, and is no readable trace"
            raise ValueError(f"{fault}: give --output {output.stem}_trace.parquet") from None
    trace = import_trace(file, column=config.column, where=config.where, ones=config.ones)
    with saving(output):
        write_trace(output, trace)
    lost, source = trace.all_lost(), printable(trace.source)
    print(f"{source}: {len(trace.flows)} flows, {len(lost)} packets, {int(lost.sum())} lost; see {output}")
    for line in caveats(trace):
        print(line)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "receive": receive,
    "send": send,
    "fit": fit_trace,
    "report": report,
    "import": import_losses,
}


def _parsed(command: Callable, kind: type[Settings], words: list[str], first: str | None = None) -> Any:
    """Return the settings in a command's words, of which the first may be the value of the flag `first`."""
    if first is not None and words and not words[0].startswith("-"):
        words = [first, *words]
    return parse(kind, inspect.getdoc(command), words)
