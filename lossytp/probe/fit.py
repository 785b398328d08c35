"""Fit loss processes to a trace, and print the best one as Linux `tc netem` and as `--loss_type` take it.

python -m lossytp.probe fit output/probe/trace.parquet
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from lossytp.network.fitting import Fit, Goodness, Interval, applicable, fit_family, goodness, intervals
from lossytp.network.fitting.dependence import correlation_between
from lossytp.network.fitting.goodness import num_simulations
from lossytp.network.trace import Trace
from lossytp.probe.recorded import first_word_as, flows_of, read
from lossytp.training.command_line import parse
from lossytp.training.config.settings import Settings

UNLIKELY = 0.05  # p-value below which a fit does not describe the trace
TOGETHER = 0.2  # correlation of two flows above which intervals are too narrow
MEASURES = ("loss_rate", "mean_burst_packets")


@dataclass(frozen=True, kw_only=True)
class FitConfig(Settings):
    """What to fit to."""

    trace: str
    """The trace, a .parquet file; also the first word of the command."""


class Fitted(NamedTuple):
    """The fits of a trace.

    Attributes:
        fits: that of the smallest BIC first.
        intervals: of the first fit's parameters, loss rate and mean burst.
        goodness: of the first fit.
        together: the correlation of the losses of two flows.
    """

    fits: list[Fit]
    intervals: dict[str, Interval]
    goodness: Goodness
    together: float

    @property
    def best(self) -> Fit:
        """Return the fit of the smallest BIC."""
        return self.fits[0]

    @property
    def describes(self) -> bool:
        """Return whether the best fit's bursts and gaps may be those of the trace."""
        return min(self.goodness.bursts.p, self.goodness.gaps.p) >= UNLIKELY


def main(words: list[str]) -> None:
    """Fit, and print what was found."""
    config: FitConfig = parse(FitConfig, __doc__, first_word_as("--trace", words))
    flows = flows_of(read(Path(config.trace)))
    print(*fit_lines(fit_all(flows), config.trace), sep="\n")


def fit_all(flows: Sequence[Trace]) -> Fitted:
    """Fit every family that applies, with a progress bar."""
    families = applicable(flows)
    steps = len(families) + 1 + num_simulations(flows)
    with tqdm(total=steps, leave=False, disable=not sys.stderr.isatty()) as bar:
        fits = []
        for family in families:
            bar.set_description(f"fitting {family.name}")
            fits.append(fit_family(family, flows))
            bar.update()
        fits.sort(key=lambda each: each.bic)
        bar.set_description("intervals")
        found = intervals(fits[0], flows)
        bar.update()
        bar.set_description("goodness of fit")
        return Fitted(fits, found, goodness(fits[0], flows, watch=bar.update), correlation_between(flows))


def fit_lines(fitted: Fitted, trace: str) -> Iterator[str]:
    """Yield the lines of a report of the fits.

    Args:
        fitted: the fits.
        trace: the trace's file.
    """
    best = fitted.best
    yield f"{'family':18} {'parameters':>10} {'BIC above best':>15} {'loss rate':>10} {'mean burst':>11}"
    for fit in fitted.fits:
        rate, burst = fit.process.loss_rate, fit.process.mean_burst_packets
        yield f"{fit.family.name:18} {len(fit.values):10} {fit.bic - best.bic:15.1f} {rate:10.3%} {burst:11.2f}"
    yield ""
    kind = "Clopper and Pearson" if len(best.values) == 1 else "the observed information"
    yield f"chosen: {best.family.name}, with 95 % intervals from {kind}, which take this family for true"
    values = dict(zip(best.family.parameters, best.values, strict=True))
    values |= {name: getattr(best.process, name) for name in MEASURES}
    for name, value in values.items():
        low, high = fitted.intervals[name]
        yield f"  {name:18} {value:.5g} ({low:.5g} to {high:.5g})"
    if fitted.together > TOGETHER:
        yield f"flows lose packets at the same time (correlation {fitted.together:.2f}): these intervals are too narrow"
    yield ""
    for name, law in (("bursts", fitted.goodness.bursts), ("gaps", fitted.goodness.gaps)):
        yield (
            f"{name}: recorded and fitted distribution differ by {law.statistic:.3f} at most (Kolmogorov-Smirnov), "
            f"p = {law.p:.2f} from {fitted.goodness.simulations} simulated recordings"
        )
    if not fitted.describes:
        yield "the fit does not describe the trace: replay the trace itself"
    yield ""
    yield f"tc qdisc add dev DEVICE root netem {best.netem}"
    yield f'--loss_type "{best.loss_type}"'
    yield f"--loss_type \"trace('{trace}')\""
