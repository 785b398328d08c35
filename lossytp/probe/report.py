"""Say what a measured network would cost: its losses, their law, your model over them, and the study's networks.

python -m lossytp.probe report output/probe/trace.parquet
python -m lossytp.probe report trace.parquet --model_name smollm2-135m --algorithms direct,ring --phases both

The trace itself is replayed under your model, without training, as in `python -m lossytp.tolerance`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge

from lossytp.network.probe.summary import loss_rate, summary_lines
from lossytp.network.probe.trace_file import ProbeTrace
from lossytp.network.trace import Trace
from lossytp.probe.fit import fit_all, fit_lines
from lossytp.probe.recorded import first_word_as, flows_of, read
from lossytp.tolerance.config import ToleranceConfig
from lossytp.training.command_line import parse
from lossytp.training.config.bounds import Count
from lossytp.training.config.settings import Settings
from lossytp.training.models import check_there

MOST_FLOWS = 8  # that are listed one by one


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Settings):
    """A trace, and the model to try it on."""

    trace: str
    """The trace, a .parquet file; also the first word of the command."""
    model_name: str = "gpt2-nano"
    """A language model: a name such as smollm2-135m, a folder, or a .gguf file."""
    text: str | None = None
    """Text files by pattern, stdlib, or wikitext-2, as in lossytp.tolerance."""
    tensor_parallel_size: Count | None = None
    """Tensor-parallel ranks. If left out, the first of 4, 3 and 2 that divides the model."""
    algorithms: str = "direct"
    """Collective algorithms, separated by commas: direct, ring, tree, switch, sender."""
    phases: str = "reduce"
    """Where packets are lost, separated by commas: reduce (on the way to the sum), both (also on the way back)."""
    repairs: str = "hadamard(64),protect(0.01) + hadamard(64),retransmit(1)"
    """Repairs to try, separated by commas."""
    block_size: Annotated[int, Ge(2)] | None = None
    """Tokens a block of text, as in lossytp.tolerance."""
    blocks: Count | None = None
    """Blocks of text, as in lossytp.tolerance."""
    results_dir: str | None = None
    """The study's results; those of this repository if left out."""
    output_dir: str | None = None
    """Folder for the tolerance measurement; output/report and the trace's name if left out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        read(Path(self.trace))
        self.tolerance()

    def tolerance(self) -> ToleranceConfig:
        """Return the measurement of the model over the trace."""
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
    trace = read(Path(config.trace))
    print("MEASURED", *measured_lines(trace), sep="\n", flush=True)
    print("\nFIT", *fit_lines(fit_all(flows_of(trace)), config.trace), sep="\n", flush=True)
    replayed = Trace.from_indicators(trace.all_lost())
    if not replayed.loss_rate:
        print("\nNo packet was lost: there is nothing to bear.")
        return

    from lossytp.tolerance.__main__ import measure_and_print  # torch takes seconds to import

    print("\nYOUR MODEL OVER THIS TRACE, WITHOUT TRAINING", flush=True)
    measure_and_print(config.tolerance())
    print("\nTHE STUDY", *study_lines(config.results_dir, replayed.loss_rate, replayed.mean_burst_packets), sep="\n")


def measured_lines(trace: ProbeTrace) -> Iterator[str]:
    """Yield what was measured, flow by flow, or all together if there are many."""
    if len(trace.flows) <= MOST_FLOWS:
        yield from summary_lines(trace)
        return
    lost = trace.all_lost()
    rate, low, high = loss_rate(lost)
    yield f"{len(trace.flows)} flows, {len(lost)} packets"
    yield f"lost {int(lost.sum())}: {rate:.3%} (95 % interval {low:.3%} to {high:.3%})"


def study_lines(results_dir: str | None, loss_rate: float, mean_burst_packets: float) -> Iterator[str]:
    """Yield what such losses cost in training and evaluation, by the study's runs.

    Args:
        results_dir: the study's results; those of this repository if None.
        loss_rate: of every link.
        mean_burst_packets: the mean run of consecutive losses.
    """
    from lossytp.study.analysis.expected_cost import RESULTS, comparable_runs, expected_costs, side_by_side

    folder = Path(results_dir) if results_dir is not None else RESULTS
    if results_dir is None and not folder.is_dir():
        yield "its results are not here: give the folder that has experiment_summary.csv as --results_dir"
        return
    costs = expected_costs(comparable_runs(folder), loss_rate=loss_rate, mean_burst_packets=mean_burst_packets)
    yield (
        f"points of test accuracy that a loss rate of {loss_rate:.3g} in bursts of {mean_burst_packets:.3g} packets "
        "costs a small GPT-2 of the study,"
    )
    yield "fine-tuned with 4 ranks, and the loss rate that costs one point; 95 % intervals over seeds."
    yield "?: an extrapolation, from another loss rate or burst length. For your model and task all are extrapolations."
    yield side_by_side(costs).to_string(index=False)
