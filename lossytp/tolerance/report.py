"""Say what losses cost a model: a slope, its critical packets, the loss rates that it bears, and what repairs leave.

At small loss rates p the rise of cross-entropy is a line, slope * p: to second order it is half the trace of the
Hessian times the error's covariance, and this is proportional to p (Malinovskii et al., "HIGGS", NAACL 2025,
arXiv:2411.17525, show it for quantisation). A critical packet adds its damage times p. Repairs lie on the same line
by the squared error that they leave.
"""

import math
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from lossytp.study.statistics import Estimate, share_interval, t_interval
from lossytp.study.style import COLUMN, estimates, save, set_style
from lossytp.tolerance.config import NO_REPAIR, ToleranceConfig
from lossytp.tolerance.measure import Measured, estimate_of
from lossytp.tolerance.packets import CRITICAL_NATS, STANDS_OUT

BOUNDS = (0.01, 0.1)  # nats a token: nothing that shows, and much
PER_CENT = 0.01
FIGURE = "tolerance"
APART = 1.12  # ratio of the places of the two clouds


class Repaired(NamedTuple):
    """What a repair leaves at the largest loss rate: predicted from its squared error, and measured."""

    repair: str
    predicted: Estimate | None
    measured: Estimate
    packets: float
    delivered: bool


class Report(NamedTuple):
    """One algorithm and phase. Estimates are in nats a token, or nats per unit of loss rate.

    Attributes:
        algorithm, phase: the network.
        lossless: mean cross-entropy without losses, in nats a token.
        rounding: what rounding for sending adds to it; None if nothing is rounded.
        rate: at which the slope was measured.
        slope: with the critical packets delivered.
        checks: at each other rate, the slope there.
        damage: of a critical packet that is lost alone; None if there is none.
        critical: critical packets of a sequence, in messages of several sequences and in messages of one.
        where: layer, module, token and sender of critical packets, and their number, the most frequent first.
        others: the rise of sequences that lost all other packets that stand out; None if there are none.
        unexplained: sequences that packets harm together, but none alone.
        sequences: N.
        repaired: each repair.
    """

    algorithm: str
    phase: str
    lossless: float
    rounding: Estimate | None
    rate: float
    slope: Estimate
    checks: dict[float, Estimate]
    damage: Estimate | None
    critical: tuple[float, float]
    where: list[str]
    others: Estimate | None
    unexplained: int
    sequences: int
    repaired: list[Repaired]

    def slope_with(self, critical: float) -> Estimate:
        """Return the slope if this many critical packets of a sequence are lost like all others."""
        if self.damage is None:
            return self.slope
        damage = times(self.damage, critical)  # independent of the slope
        value, half = self.slope.value + damage.value, math.hypot(self.slope.half_width, damage.half_width)
        return Estimate(value, value - half, value + half)

    def as_json(self) -> dict[str, Any]:
        """Return the report for the record, with the loss rates that cost `BOUNDS`."""
        slopes = self.slopes()
        rates = {f"{bound:g}": {name: budget(bound, each) for name, each in slopes.items()} for bound in BOUNDS}
        return _json(self._asdict() | {"rates": rates})

    def slopes(self) -> dict[str, Estimate]:
        """Return the slope with critical packets delivered, lost, and lost in messages of one sequence."""
        together, alone = (self.slope_with(count) for count in self.critical)
        return {"delivered": self.slope, "lost": together, "lost_alone": alone}


def _json(value: Any) -> Any:
    if isinstance(value, Estimate):
        return value.as_json()
    if isinstance(value, dict):
        return {f"{name:g}" if isinstance(name, float) else name: _json(each) for name, each in value.items()}
    if hasattr(value, "_asdict"):
        return _json(value._asdict())
    return [_json(each) for each in value] if isinstance(value, list | tuple) else value


def times(estimate: Estimate, factor: float) -> Estimate:
    """Return the estimate times a positive factor."""
    return Estimate(*(factor * each for each in estimate))


def budget(nats: float, slope: Estimate) -> Estimate:
    """Return the loss rate that costs some nats: at most 1, which also stands for a slope that may be nil."""
    value, low, high = (min(1.0, nats / each) if each > 0 else 1.0 for each in (slope.value, slope.high, slope.low))
    return Estimate(value, low, high)


def report_of(measured: Measured, config: ToleranceConfig) -> Report:
    """Return the report of what was measured."""
    bare = [row for row in measured.rows if row.setup.repair == NO_REPAIR]
    slopes = {row.setup.loss_rate: times(estimate_of(row.rises, config), 1 / row.setup.loss_rate) for row in bare}
    (rate, slope), *checks = slopes.items()
    packets, damages = [packet for packet, _ in measured.found.critical], [rise for _, rise in measured.found.critical]
    sequences = len(measured.lossless.scores)
    alone = 0.0
    for place in {packet[:2] for packet in packets}:  # the same share of those as strong is critical in other messages
        critical = [packet for packet in packets if packet[:2] == place]
        weakest = min(packet.norm for packet in critical)
        together, single = (
            sum(packet[:2] == place and packet.norm >= weakest for packet in each)
            for each in (measured.lossless.packets, measured.lossless.alone)
        )
        alone += len(critical) * single / together
    repaired, largest = [], measured.rows[-1].setup.loss_rate
    for (*_, repair, at), rises, sent, delivered in measured.rows:
        if at == largest:
            predicted = times(slope, at * measured.errors[repair]) if repair in measured.errors else None
            repaired.append(Repaired(repair, predicted, estimate_of(rises, config), sent, delivered))
    places = [f"layer {each.layer}'s {each.module}, token {each.token}, rank {each.src}" for each in packets]
    return Report(
        measured.algorithm,
        measured.phase,
        float(np.mean(measured.lossless.scores)),
        measured.rounding,
        rate,
        slope,
        dict(checks),
        t_interval(np.array(damages)) if damages else None,
        (len(packets) / sequences, alone / sequences),
        [f"{words}: {count}" for words, count in Counter(places).most_common()],
        t_interval(np.array(measured.found.others)) if measured.found.others else None,
        measured.found.unexplained,
        sequences,
        repaired,
    )


def lines(report: Report, config: ToleranceConfig) -> list[str]:
    """Return the report in words."""
    per_cent, size = times(report.slope, PER_CENT), config.batch_size
    more = Estimate(*(100 * math.expm1(each) for each in per_cent))
    phase = "on the way to a sum" if report.phase == "reduce" else "on both ways"
    found = [
        f"{report.algorithm}, losses {phase}",
        f"  without losses: {report.lossless:.3f} nats a token, perplexity {math.exp(report.lossless):.3g}",
    ]
    if report.rounding is not None:
        found.append(f"  of it, rounding to {config.wire_dtype} costs {_shown(report.rounding)} nats")
    if report.slope.value == 0:
        return [*found, "  no draw lost a packet that shows: give more min_draws, or a network that loses more"]
    condition = ", if the critical packets arrive" if report.damage else ""
    found.append(f"  1 % of loss costs {_shown(per_cent)} nats a token, {_shown(more)} % of perplexity{condition}")
    for rate, slope in report.checks.items():
        ratio, either = slope.value / report.slope.value, _shown(times(slope, PER_CENT))
        apart = abs(slope.value - report.slope.value) > math.hypot(slope.half_width, report.slope.half_width)
        line = "off the line" if apart else "on the line"
        found.append(f"  at {100 * rate:.3g} % loss, each 1 % costs {either} nats, {ratio:.2f} times as much: {line}")
    found += _critical_lines(report, size)
    words = ["critical packets delivered", f"lost, {size} sequences a message", "lost, 1 sequence a message"]
    slopes = [*zip(report.slopes().values(), words, strict=True)] if report.damage else [(report.slope, "")]
    for bound in BOUNDS:
        rates = [(times(budget(bound, slope), 100), condition) for slope, condition in slopes]
        each = [f"{rate.value:.2g} % ({rate.low:.2g} to {rate.high:.2g}) {on}".strip() for rate, on in rates]
        beyond = budget(bound, report.slope).value > max(report.checks, default=report.rate)
        unsure = " (beyond the rates measured)" if beyond else ""
        found.append(f"  {bound:g} nats are lost at {'; '.join(each)}{unsure}")
    return found


def _critical_lines(report: Report, size: int) -> list[str]:
    if report.damage is None:
        most = share_interval(0, report.sequences).high
        found = [f"  no critical packet in {report.sequences} sequences, so at most {most:.0%} of sequences have one"]
    else:
        each = f"each costs its sequence {_shown(report.damage)} nats a token"
        together, alone = report.critical
        found = [
            f"  critical packets: {together:.2f} a sequence with {size} in a message, {alone:.2f} with one; {each}",
            *(f"    {where}" for where in report.where[:MOST_SHOWN]),
        ]
        if len(report.where) > MOST_SHOWN:
            found.append(f"    and {len(report.where) - MOST_SHOWN} more")
    if report.others is not None:
        others = f"all others above {STANDS_OUT:g} times the median norm"
        found.append(f"    {others} cost {report.others.value:.2f} nats together")
    if report.unexplained:
        lose = f"{report.unexplained} sequences lose over {CRITICAL_NATS:g} nats"
        found.append(f"    {lose} through several packets together")
    return found


MOST_SHOWN = 4
TABLE = "  {:{width}} {:>9} {:>17} {:>12}"


def table(report: Report) -> list[str]:
    """Return what each repair leaves, as lines."""
    rate = max(report.checks, default=report.rate)
    width = max(18, *(len(each.repair) + 2 for each in report.repaired))
    found = [TABLE.format(f"repair at {100 * rate:.3g} %", "predicted", "measured (nats)", "packets", width=width)]
    bare = report.repaired[0].packets
    for each in report.repaired:
        predicted = "" if each.predicted is None else f"{each.predicted.value:.3f}"
        value = f"{each.measured.value:z.3f} ± {each.measured.half_width:.3f}"
        more = "" if each is report.repaired[0] else f"{each.packets / bare - 1:+.1%}"
        name = each.repair + ("" if each.delivered else " *")
        found.append(TABLE.format(name, predicted, value, more, width=width))
    if not all(each.delivered for each in report.repaired):
        found.append("  * critical packets are lost as the repair lets them")
    return found


def _shown(estimate: Estimate) -> str:
    if not math.isfinite(estimate.low):
        return f"{estimate.value:.3g}"
    return f"{estimate.value:.3g} ({estimate.low:.3g} to {estimate.high:.3g})"


def draw(measured: Measured, report: Report, title: str, folder: Path, name: str = FIGURE) -> Figure:
    """Write the figure as SVG and PNG, and return it: the line, and a cloud of sequences at each loss rate.

    A second cloud holds the sequences that lost a critical packet, and nothing else.
    """
    set_style()
    figure, ax = plt.subplots(figsize=(COLUMN, 0.75 * COLUMN), layout="constrained")
    bare = [row for row in measured.rows if row.setup.repair == NO_REPAIR]
    first, last = bare[0].setup.loss_rate, bare[-1].setup.loss_rate
    for number, row in enumerate(bare):
        rises_N = np.mean(row.rises, axis=0)
        label = "a sequence" if number == 0 else None
        ax.plot(np.full(len(rises_N), row.setup.loss_rate), rises_N, ".", color="C0", alpha=0.25, ms=4, label=label)
    damages = [rise for _, rise in measured.found.critical]
    if damages:
        ax.plot(
            np.full(len(damages), first / APART),
            damages,
            "x",
            color="C3",
            alpha=0.5,
            ms=3,
            label="lost a critical packet alone",
        )
    slopes = {report.rate: report.slope} | report.checks
    means = [times(slope, rate) for rate, slope in slopes.items()]
    estimates(ax, [rate * APART for rate in slopes], means, 1, label="mean, 95 %")
    line = np.array([first / 3, last * 3])
    label = f"{PER_CENT * report.slope.value:.2g} nats for each 1 %"
    ax.plot(line, report.slope.value * line, color="C0", lw=1, label=label)
    ax.fill_between(line, report.slope.low * line, report.slope.high * line, color="C0", alpha=0.15, linewidth=0)
    if damages:
        expected = report.slope_with(report.critical[0]).value * line
        ax.plot(line, expected, color="C3", lw=1, ls="--", label="expected, critical packets lost")
    for bound in BOUNDS:
        ax.axhline(bound, color="grey", lw=0.6, ls=":")
    ax.set(xscale="log", xlabel="packet loss rate, %", ylabel="rise of cross-entropy (nats)", title=title)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}"))
    ax.set_yscale("symlog", linthresh=BOUNDS[0])
    ax.legend(fontsize=5)
    save(figure, folder, name)
    plt.close(figure)  # a notebook shows what is returned
    return figure
