"""Report on a measured network: its losses, the process that fits them, and what they cost your model and the study's.

python -m lossytp.probe report output/probe/trace.parquet
python -m lossytp.probe report trace.parquet --model_name smollm2-135m --algorithms direct,ring --phases both

Your model runs over the replayed trace, without training, as in `python -m lossytp.tolerance`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from lossytp.network.traces import ProbeTrace, Trace
from lossytp.probe.fit import fit_all, fit_lines
from lossytp.probe.measure import caveats, loss_rate, summary_lines
from lossytp.probe.recorded import first_word_as, flows_of, read
from lossytp.tolerance.config import ToleranceConfig
from lossytp.training.command_line import parse
from lossytp.training.models import check_there
from lossytp.training.settings import Count, Settings

MOST_FLOWS = 8  # more flows than this are summarised together


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
    repairs: str = "hadamard(64),protect(0.1) + hadamard(64),protect(0.1) + retransmit(1)"
    """Repairs to try, separated by commas."""
    block_size: Annotated[int, Field(ge=2)] | None = None
    """Tokens per block of text, as in lossytp.tolerance."""
    blocks: Count | None = None
    """Number of blocks of text, as in lossytp.tolerance."""
    results_dir: str | None = None
    """Folder with the study's results. If left out, this repository's."""
    output_dir: str | None = None
    """Folder for the tolerance measurement. If left out, a folder under output/report named after the trace."""

    @model_validator(mode="after")
    def _check_report(self) -> Self:
        if not read(Path(self.trace)).all_lost().all():
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


def main(words: list[str]) -> None:
    """Print the report."""
    config: ReportConfig = parse(ReportConfig, __doc__, first_word_as("--trace", words))
    check_there(config.model_name)
    if config.results_dir is not None:
        from lossytp.probe.expected_cost import comparable_runs

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
    yield from caveats(trace)


def study_lines(results_dir: str | None, loss_rate: float, mean_burst_packets: float) -> Iterator[str]:
    """Yield what such losses cost in the study's training and evaluation runs.

    Args:
        results_dir: folder with the study's results; this repository's if None.
        loss_rate: loss rate of every link.
        mean_burst_packets: mean run of consecutive losses.
    """
    from lossytp.probe.expected_cost import RESULTS, TABLE, comparable_runs, expected_costs, side_by_side

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
