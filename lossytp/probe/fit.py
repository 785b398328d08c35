"""Fit loss processes to a trace, and print the best one in the notations of Linux `tc netem` and `--loss_type`.

python -m lossytp.probe fit output/probe/trace.parquet
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from lossytp.network.traces import Trace
from lossytp.probe.fitting import (
    Family,
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
from lossytp.probe.recorded import first_word_as, flows_of, read
from lossytp.training.command_line import parse
from lossytp.training.settings import Settings

UNLIKELY = 0.05  # a fit with a smaller p-value does not describe the trace
CORRELATED = 0.2  # if flows are correlated more than this, intervals are too narrow
MEASURES = ("loss_rate", "mean_burst_packets")


class FitConfig(Settings):
    """The settings of the command `fit`."""

    trace: str
    """Trace to fit, a .parquet file. The command's first word may give it."""


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


def main(words: list[str]) -> None:
    """Fit the trace, and print the fits."""
    config: FitConfig = parse(FitConfig, __doc__, first_word_as("--trace", words))
    flows = flows_of(read(Path(config.trace)))
    print(*fit_lines(fit_all(flows), config.trace), sep="\n")


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
    yield f"--loss_type \"trace('{trace}')\""
