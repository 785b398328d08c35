"""Claims about a real pretrained model."""

from collections.abc import Iterator
from typing import Any

from lossytp.study.analysis.real_model import COLLAPSE_NATS, USUAL
from lossytp.study.claims.claim import POINTS, Claim, Results
from lossytp.study.statistics import ONE_POINT


def hadamard_does_not_help_the_real_model(results: Results) -> Claim:
    """Require that Hadamard raises the median block more than no repair does, and its mean is not shown to be lower."""
    numbers: dict[str, float] = {}
    holds = True
    ratios = []
    for rate, by_repair in _real(results):
        hadamard, none = by_repair["hadamard(64)"], by_repair["zero"]
        holds &= hadamard["high"] >= none["low"] and hadamard["median"] > none["median"]
        ratios.append(hadamard["median"] / none["median"])
        numbers |= {f"hadamard at {rate:g}": hadamard["rise"], f"none at {rate:g}": none["rise"]}
    return Claim(holds, numbers | {"least ratio of medians": min(ratios)})


def protection_ends_the_collapse(results: Results) -> Claim:
    """Require that blocks collapse without a repair, and none does with protection, alone or with Hadamard."""
    numbers: dict[str, float] = {}
    holds = True
    for rate, by_repair in _real(results):
        none = by_repair["zero"]
        for repair in ("protect(0.01)", "protect(0.01) + hadamard(64)"):
            holds &= by_repair[repair]["collapsed"] == 0 and by_repair[repair]["rise"] < none["rise"]
        numbers[f"collapsed at {rate:g}"] = none["collapsed"]
    return Claim(holds and min(numbers.values()) > 0, numbers)


def random_protection_is_not_enough(results: Results) -> Claim:
    """Require that, at the highest rate, blocks collapse and rise more if as many packets are protected at random."""
    *_, (_, by_repair) = _real(results)
    control, protected = by_repair["protect(0.01, 'random')"], by_repair["protect(0.01)"]
    numbers = {"collapsed": control["collapsed"], "least rise": control["low"], "protected": protected["high"]}
    return Claim(control["collapsed"] > 0 and control["low"] > protected["high"], numbers)


def single_packets_destroy_blocks(results: Results) -> Claim:
    """Require that the strongest packet, lost alone, collapses every block, and that no usual packet costs 0.1 nats."""
    packet = results["strongest_packet"]
    numbers = {name: packet[name] for name in ("norm", "usual_norm", "least_rise", "usual_rise")}
    return Claim(packet["least_rise"] > COLLAPSE_NATS and packet["usual_rise"] < 0.1, numbers)


def law_predicts_the_real_model(results: Results) -> Claim:
    """Require that predictions from the stream's error are right to a quarter in one phase, and too low in both.

    They must also be closer, at worst, than those from the error relative to the sum.
    """
    new = [row for row in results["real_networks"] if not row["fitted"]]
    one, both = ([row for row in new if row["phase"] == phase] for phase in ("reduce", "both"))
    farthest = {name: max(_times(row, name) for row in one) for name in ("stream_error", "squared_error")}
    costlier = [row["median"] / row["median_by_stream_error"] for row in both]
    numbers = {"networks": len(one), **farthest, "least in both": min(costlier), "most in both": max(costlier)}
    holds = farthest["stream_error"] < min(1.25, farthest["squared_error"]) and min(costlier) > 1.25
    return Claim(len(one) >= 5 and holds, numbers)


def _times(row: dict[str, Any], error: str) -> float:
    """Return by what factor the measured median is off from its prediction."""
    ratio: float = row["median"] / row[f"median_by_{error}"]
    return max(ratio, 1 / ratio)


def training_keeps_the_strong_packets(results: Results) -> Claim:
    """Require that a model trained under loss bears it no better, and that its strongest packet still stands out."""
    gain = results["real_training_gains"]["training under loss"]
    strongest = {row["trained_over"]: row["strongest"] for row in results["real_training"]}
    ratio = strongest["zero"] / strongest["no loss"]
    numbers = {"gain": POINTS * gain["value"], "least gain": POINTS * gain["low"], "ratio of strongest": ratio}
    return Claim(gain["low"] < 0 and gain["value"] < ONE_POINT and ratio > 0.5, numbers)


def protection_must_cover_every_text(results: Results) -> Claim:
    """Require that protecting a tenth of the packets helps in short texts, and protecting a hundredth does not."""
    gains = results["real_training_gains"]
    tenth, hundredth = gains["protecting a tenth"], gains["protecting a hundredth"]
    numbers = {"a tenth": POINTS * tenth["low"], "a hundredth": POINTS * hundredth["value"]}
    return Claim(tenth["low"] > 0 > hundredth["value"], numbers)


def _real(results: Results) -> Iterator[tuple[float, dict[str, dict[str, Any]]]]:
    """Yield each loss rate at which repairs were tried on the real model's usual network, with its rows by repair."""
    rows = [row for row in results["real_model"] if {name: row[name] for name in USUAL} == USUAL]
    for rate in sorted({row["loss_rate"] for row in rows if row["repair"] != "zero"}):
        yield rate, {row["repair"]: row for row in rows if row["loss_rate"] == rate}
